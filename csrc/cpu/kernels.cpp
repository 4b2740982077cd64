// The hot loops, compiled once per instruction level (FASTACCUM_ISA = baseline, avx2, avx512).
//
// A driver walks chunks -> strands -> one pass per strand. Narrow types are widened into a strand-sized
// scratch in L1, so every loop below is plain float or double arithmetic that the compiler vectorises.
// No std:: templates with out-of-line bodies here: a function compiled with AVX-512 must never be the
// copy that the linker keeps for everyone.
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../adam.h"
#include "../dtype.h"
#include "../finish.h"
#include "../norm.h"
#include "../sgd.h"
#include "core.h"

#if defined(__AVX512F__)
#define FASTACCUM_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FASTACCUM_VECTOR_BYTES 32
#else
#define FASTACCUM_VECTOR_BYTES 16
#endif

#define FASTACCUM_NAME_(x) #x
#define FASTACCUM_NAME(x) FASTACCUM_NAME_(x)

namespace fastaccum::cpu::FASTACCUM_ISA {
namespace {

//---------------------------------------------------------------------------------------- widening

template <typename real>
struct Native;
template <>
struct Native<float> {
  static constexpr DType dtype = DType::kFloat32;
};
template <>
struct Native<double> {
  static constexpr DType dtype = DType::kFloat64;
};

template <typename real, typename T>
inline void widen_strand(const T* source, real* out, int n) {
  int i = 0;
#if defined(__F16C__)
  if constexpr (sizeof(real) == 4 && std::is_same_v<T, float16>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
    }
  }
#endif
  for (; i < n; ++i) out[i] = static_cast<real>(widen(source[i]));
}

#if defined(__AVX512F__)
// narrow(float, bfloat16*) for 16 values. GCC 12 warns of its own header where shifts and conversions
// have no mask; a full one costs nothing.
inline __m256i narrow_to_bfloat16(const float* source) {
  constexpr __mmask16 kAll = 0xffff;
  const __m512i bits = _mm512_loadu_si512(source);
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
  return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, chosen, 16));
}
#elif defined(__AVX2__)
// narrow(float, bfloat16*) for 8 values, left in the low half of each 32-bit lane.
inline __m256i narrow_to_bfloat16(const float* source) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_add_epi32(bits, bias);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
#endif

template <typename real, typename T>
inline void narrow_strand(const real* source, T* out, int n) {
  int i = 0;
#if defined(__AVX512F__)
  // Half the instructions of the way below: AdamW of bfloat16 takes 12 % less.
  if constexpr (sizeof(real) == 4 && std::is_same_v<T, bfloat16>) {
    for (; i + 16 <= n; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), narrow_to_bfloat16(source + i));
  }
#elif defined(__AVX2__)
  // The compiler's own packing of 32 to 16 bits takes twice as long.
  if constexpr (sizeof(real) == 4 && std::is_same_v<T, bfloat16>) {
    for (; i + 16 <= n; i += 16) {
      const __m256i packed =
          _mm256_packus_epi32(narrow_to_bfloat16(source + i), narrow_to_bfloat16(source + i + 8));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permute4x64_epi64(packed, 0b11011000));
    }
  }
#endif
#if defined(__F16C__)
  if constexpr (sizeof(real) == 4 && std::is_same_v<T, float16>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
    }
  }
#endif
  for (; i < n; ++i) narrow(source[i], out + i);
}

// Where element `at` of `base` is.
inline const void* element(const void* base, DType dtype, std::int64_t at) {
  return static_cast<const char*>(base) + at * size_of(dtype);
}
inline void* element(void* base, DType dtype, std::int64_t at) {
  return static_cast<char*>(base) + at * size_of(dtype);
}

// A strand of any dtype read as `real`: in place when it is `real` already, else through scratch.
template <typename real>
inline const real* read_strand(const void* source, DType dtype, real* scratch, int n) {
  if (dtype == Native<real>::dtype) return static_cast<const real*>(source);
  switch (dtype) {
    case DType::kFloat32:
      widen_strand(static_cast<const float*>(source), scratch, n);
      break;
    case DType::kBFloat16:
      widen_strand(static_cast<const bfloat16*>(source), scratch, n);
      break;
    case DType::kFloat16:
      widen_strand(static_cast<const float16*>(source), scratch, n);
      break;
    case DType::kFloat64:
      widen_strand(static_cast<const double*>(source), scratch, n);
      break;
  }
  return scratch;
}

// The same for a strand that will be written back by write_strand().
template <typename real>
inline real* open_strand(void* target, DType dtype, real* scratch, int n) {
  return const_cast<real*>(read_strand<real>(target, dtype, scratch, n));
}

template <typename real>
inline void write_strand(const real* values, void* target, DType dtype, int n) {
  if (values == target) return;
  switch (dtype) {
    case DType::kFloat32:
      narrow_strand(values, static_cast<float*>(target), n);
      break;
    case DType::kBFloat16:
      narrow_strand(values, static_cast<bfloat16*>(target), n);
      break;
    case DType::kFloat16:
      narrow_strand(values, static_cast<float16*>(target), n);
      break;
    case DType::kFloat64:
      narrow_strand(values, static_cast<double*>(target), n);
      break;
  }
}

// Writes a full strand around the caches. A plain store first reads the line that it is about to
// overwrite: 4 bytes per float that a buffer larger than the caches pays for nothing.
inline void stream_strand(const void* values, void* target, std::int64_t bytes) {
#if defined(__x86_64__)
  const char* from = static_cast<const char*>(values);
  char* to = static_cast<char*>(target);
  for (std::int64_t i = 0; i < bytes; i += FASTACCUM_VECTOR_BYTES) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
  }
#else
  std::memcpy(target, values, static_cast<std::size_t>(bytes));
#endif
}

// Streamed stores are weakly ordered: other threads may look only after this.
inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

//------------------------------------------------------------------------------------- strand sums

typedef double vec_double __attribute__((vector_size(FASTACCUM_VECTOR_BYTES)));
constexpr int kWidth = FASTACCUM_VECTOR_BYTES / 8;
constexpr int kBlock = 8 * kWidth < kLanes ? 8 * kWidth : kLanes;  // lanes summed at once: 8 registers

template <typename real>
inline vec_double load_double(const real* x) {
  if constexpr (sizeof(real) == 8) {
    vec_double wide;
    std::memcpy(&wide, x, sizeof wide);
    return wide;
  } else {
    typedef float vec_float __attribute__((vector_size(FASTACCUM_VECTOR_BYTES / 2)));
    vec_float narrow_values;
    std::memcpy(&narrow_values, x, sizeof narrow_values);
    return __builtin_convertvector(narrow_values, vec_double);
  }
}

// Every other element of a and b together, from the first or the second on.
template <int kFirst>
inline vec_double alternate(vec_double a, vec_double b) {
  typedef long long vec_index __attribute__((vector_size(FASTACCUM_VECTOR_BYTES)));
  vec_index index;
  for (int i = 0; i < kWidth; ++i) index[i] = kFirst + 2 * i;
#if defined(__clang__)
  vec_double picked;
  for (int i = 0; i < kWidth; ++i) picked[i] = index[i] < kWidth ? a[index[i]] : b[index[i] - kWidth];
  return picked;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// The adjacent fold of 32 lanes of sums in vectors: even and odd elements apart, then added.
template <int kVectors>
inline double fold_sums(const vec_double* sums) {
  if constexpr (kVectors == 1) {
    double last[kWidth];
    std::memcpy(last, sums, sizeof last);
    return fold<Norm::kTwo, kWidth>(last);
  } else {
    vec_double halves[kVectors / 2];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors / 2; ++j) {
      const vec_double a = sums[2 * j], b = sums[2 * j + 1];
      halves[j] = alternate<0>(a, b) + alternate<1>(a, b);
    }
    return fold_sums<kVectors / 2>(halves);
  }
}

// Sum of squares or of magnitudes of one full strand: down the rows of a lane, then across the lanes.
template <Norm kNorm, typename real>
inline double sum_strand(const real* x) {
  vec_double all[kLanes / kWidth];
  for (int first = 0; first < kLanes; first += kBlock) {
    vec_double sums[kBlock / kWidth] = {};
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int j = 0; j < kBlock / kWidth; ++j) {
        const vec_double d = load_double(x + row * kLanes + first + j * kWidth);
        if constexpr (kNorm == Norm::kTwo) {
          sums[j] += d * d;
        } else {
          sums[j] += d < 0 ? -d : d;
        }
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kBlock / kWidth; ++j) all[first / kWidth + j] = sums[j];
  }
  return fold_sums<kLanes / kWidth>(all);
}

// One strand's S: n < kStrand counts the missing elements as +0.
template <Norm kNorm, typename real>
inline double reduce_strand(const real* x, int n, const NormSpec& spec) {
  if constexpr (kNorm == Norm::kTwo || kNorm == Norm::kOne) {
    if (n == kStrand) return sum_strand<kNorm>(x);
  }
  double lanes[kLanes];
  const Contribution<kNorm> contribution{spec.power, spec.scale};
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 0.0;
  for (int i = 0; i < n; ++i) {
    double& lane = lanes[i % kLanes];
    lane = Contribution<kNorm>::join(lane, contribution.of(static_cast<double>(x[i])));
  }
  return fold<kNorm, kLanes>(lanes);
}

template <typename real>
inline double reduce_strand(const real* x, int n, const NormSpec& spec) {
  switch (spec.norm) {
    case Norm::kTwo:
      return reduce_strand<Norm::kTwo>(x, n, spec);
    case Norm::kOne:
      return reduce_strand<Norm::kOne>(x, n, spec);
    case Norm::kInf:
      return reduce_strand<Norm::kInf>(x, n, spec);
    case Norm::kPower:
      return reduce_strand<Norm::kPower>(x, n, spec);
  }
  return 0.0;
}

template <typename real>
inline bool any_nonfinite(const real* x, int n) {
  int bad = 0;
  for (int i = 0; i < n; ++i) bad |= !(x[i] - x[i] == 0);
  return bad != 0;
}

// Collects a chunk's strands into its partial.
struct ChunkSum {
  double strands[kStrandsPerChunk] = {};
  bool bad = false;

  template <typename real>
  inline void add(int strand, const real* x, int n, const NormSpec& spec) {
    const double sum = reduce_strand(x, n, spec);
    strands[strand] = sum;
    // A sum over float32 (or narrower) data is not finite only if an element is not; float64's may
    // also overflow, so look again.
    if (!(sum - sum == 0)) bad = bad || any_nonfinite(x, n);
  }
  inline void store(std::int64_t chunk, double* partials, double* nonfinite, Norm norm) {
    partials[chunk] = norm == Norm::kInf ? fold<Norm::kInf, kStrandsPerChunk>(strands)
                                         : fold<Norm::kTwo, kStrandsPerChunk>(strands);
    nonfinite[chunk] = bad ? 1.0 : 0.0;
  }
};

//------------------------------------------------------------------------------------ prefetching

inline void prefetch_strand(const void* data, DType dtype) {
  const char* at = static_cast<const char*>(data);
  for (std::int64_t i = 0; i < kStrand * size_of(dtype); i += 64) __builtin_prefetch(at + i);
}

// Asks for the strand after next of `data`, which holds `left` elements from here on. Memory is not kept
// busy by itself while a strand in L1 is being summed, and the hardware's prefetcher stops at every page,
// which is every second strand of float32: the norm of 0.5 GB took 42 ms without this, 30 with it.
inline void prefetch(const void* data, DType dtype, std::int64_t left) {
  if (left >= 3 * kStrand) prefetch_strand(element(data, dtype, 2 * kStrand), dtype);
}

// The first strand of the segment that comes next: with many small tensors every strand is a new stream,
// which no prefetcher has seen.
inline void prefetch_first(const void* data, DType dtype, std::int64_t numel) {
  if (data != nullptr && numel >= kStrand) prefetch_strand(data, dtype);
}

//----------------------------------------------------------------------------- walking the segments

// First entry of a table (sorted by offset) that ends after `position`.
template <typename Entry>
inline std::int64_t first_at(const Entry* table, std::int64_t n, std::int64_t position) {
  std::int64_t low = 0, high = n;
  while (low < high) {
    const std::int64_t mid = low + (high - low) / 2;
    if (table[mid].at.offset + table[mid].at.numel > position) {
      high = mid;
    } else {
      low = mid + 1;
    }
  }
  return low;
}

// Calls body(entry, chunk, strand in the chunk, first element in the entry, count) for every strand
// with elements in chunks [begin, end), and end_chunk(chunk) after each chunk; next(entry) before
// the last strand of the entry in front of it.
template <typename Entry, typename Next, typename Body, typename EndChunk>
inline void walk(const Entry* table, std::int64_t n, std::int64_t begin, std::int64_t end, Next next,
                 Body body, EndChunk end_chunk) {
  std::int64_t k = first_at(table, n, begin * kChunk);
  for (std::int64_t chunk = begin; chunk < end; ++chunk) {
    for (int strand = 0; strand < kStrandsPerChunk; ++strand) {
      const std::int64_t position = chunk * kChunk + strand * kStrand;
      while (k < n && table[k].at.offset + table[k].at.numel <= position) ++k;
      if (k == n) break;
      if (position < table[k].at.offset) continue;
      const std::int64_t from = position - table[k].at.offset;
      const std::int64_t left = table[k].at.numel - from;
      if (left <= kStrand && k + 1 < n) next(table[k + 1]);
      body(table[k], chunk, strand, from, static_cast<int>(left < kStrand ? left : kStrand));
    }
    end_chunk(chunk);
  }
}

//------------------------------------------------------------------------------------------ gather

template <typename real>
inline void gather_chunks(const GatherArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) real acc_scratch[kStrand], kept_scratch[kStrand], fresh_scratch[kStrand];
  const real weight = static_cast<real>(args.weight);
  const real kept_weight = static_cast<real>(args.kept_weight);
  ChunkSum sum;
  const auto body = [&](const GatherSegment& s, std::int64_t, int strand, std::int64_t from, int n) {
    const real* fresh = nullptr;
    if (s.fresh != nullptr)
      fresh = read_strand<real>(element(s.fresh, s.fresh_dtype, from), s.fresh_dtype, fresh_scratch, n);
    void* target = element(args.buffer, args.buffer_dtype, s.at.offset + from);
    if (args.partials != nullptr) {
      const std::int64_t left = s.at.numel - from;
      if (s.fresh != nullptr) prefetch(element(s.fresh, s.fresh_dtype, from), s.fresh_dtype, left);
      if (s.present) prefetch(target, args.buffer_dtype, left);
      if (!s.present && s.kept != nullptr) prefetch(element(s.kept, s.kept_dtype, from), s.kept_dtype, left);
    }
    const bool native = args.buffer_dtype == Native<real>::dtype;
    const bool stream = args.stream && native && !s.present && n == kStrand;
    real* acc = native && !stream ? static_cast<real*>(target) : acc_scratch;
    if (s.present) {
      if (acc == acc_scratch) open_strand<real>(target, args.buffer_dtype, acc_scratch, n);
      if (fresh != nullptr) {
#pragma GCC ivdep
        for (int i = 0; i < n; ++i) acc[i] = acc[i] + weighted(fresh[i], weight);
      }
    } else if (s.kept != nullptr) {
      const real* kept =
          read_strand<real>(element(s.kept, s.kept_dtype, from), s.kept_dtype, kept_scratch, n);
      if (fresh != nullptr) {
#pragma GCC ivdep
        for (int i = 0; i < n; ++i) acc[i] = weighted(kept[i], kept_weight) + weighted(fresh[i], weight);
      } else {
#pragma GCC ivdep
        for (int i = 0; i < n; ++i) acc[i] = weighted(kept[i], kept_weight);
      }
    } else if (fresh != nullptr) {
#pragma GCC ivdep
      for (int i = 0; i < n; ++i) acc[i] = weighted(fresh[i], weight);
    } else {
      return;  // no gradient in this window: whatever the buffer holds does not count
    }
    if (stream) {
      stream_strand(acc, target, kStrand * static_cast<std::int64_t>(sizeof(real)));
    } else if (fresh != nullptr || !s.present) {
      write_strand(acc, target, args.buffer_dtype, n);
      // The norm is that of what was stored, so a narrow buffer's rounding is in it.
      if (acc == acc_scratch && args.partials != nullptr)
        open_strand<real>(target, args.buffer_dtype, acc_scratch, n);
    }
    if (args.partials != nullptr) sum.add(strand, acc, n, args.spec);
  };
  const auto next = [&](const GatherSegment& s) {
    prefetch_first(s.fresh, s.fresh_dtype, s.at.numel);
    if (!s.present) prefetch_first(s.kept, s.kept_dtype, s.at.numel);
  };
  walk(args.segments, args.n_segments, begin, end, next, body, [&](std::int64_t chunk) {
    if (args.partials != nullptr) sum.store(chunk, args.partials, args.nonfinite, args.spec.norm);
    sum = ChunkSum{};
  });
  if (args.stream) end_stream();
}

void gather(const GatherArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.buffer_dtype == DType::kFloat64) {
    gather_chunks<double>(args, begin, end);
  } else {
    gather_chunks<float>(args, begin, end);
  }
}

//-------------------------------------------------------------------------------------------- norm

void norm(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  alignas(64) float scratch[kStrand];
  ChunkSum sum;
  const auto body = [&](const NormSegment& s, std::int64_t, int strand, std::int64_t from, int n) {
    const void* data = element(s.data, s.dtype, from);
    prefetch(data, s.dtype, s.at.numel - from);
    if (s.dtype == DType::kFloat64) {
      sum.add(strand, static_cast<const double*>(data), n, args.spec);
    } else {
      sum.add(strand, read_strand<float>(data, s.dtype, scratch, n), n, args.spec);
    }
  };
  const auto next = [](const NormSegment& s) { prefetch_first(s.data, s.dtype, s.at.numel); };
  walk(args.segments, args.n_segments, begin, end, next, body, [&](std::int64_t chunk) {
    sum.store(chunk, args.partials, args.nonfinite, args.spec.norm);
    sum = ChunkSum{};
  });
}

//------------------------------------------------------------------------------------------- scale

template <typename real>
inline void scale_strand(const ScaleSegment& s, double max_value, std::int64_t from, int n) {
  alignas(64) real in_scratch[kStrand], out_scratch[kStrand];
  const real factor = static_cast<real>(s.factor);
  const real high = static_cast<real>(max_value);
  void* target = element(s.target, s.target_dtype, from);
  const real* in = read_strand<real>(element(s.source, s.source_dtype, from), s.source_dtype, in_scratch, n);
  real* out = s.target_dtype == Native<real>::dtype ? static_cast<real*>(target) : out_scratch;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const real x = in[i] * factor;
    out[i] = x > high ? high : (x < -high ? -high : x);
  }
  write_strand(out, target, s.target_dtype, n);
}

void scale(const ScaleArgs& args, std::int64_t begin, std::int64_t end) {
  const auto body = [&](const ScaleSegment& s, std::int64_t, int, std::int64_t from, int n) {
    if (s.source == s.target && s.factor == 1.0 && args.max_value > 1.7976931348623157e308) return;
    if (s.source_dtype == DType::kFloat64 || s.target_dtype == DType::kFloat64) {
      scale_strand<double>(s, args.max_value, from, n);
    } else {
      scale_strand<float>(s, args.max_value, from, n);
    }
  };
  const auto next = [](const ScaleSegment& s) { prefetch_first(s.source, s.source_dtype, s.at.numel); };
  walk(args.segments, args.n_segments, begin, end, next, body, [](std::int64_t) {});
}

//----------------------------------------------------------------------------------------- updates

inline void prefetch_update(const UpdateSegment& s) {
  prefetch_first(s.grad, s.grad_dtype, s.at.numel);
  prefetch_first(s.param, s.param_dtype, s.at.numel);
  for (int j = 0; j < kMaxStates; ++j) prefetch_first(s.states[j], s.state_dtypes[j], s.at.numel);
}

inline bool wants_double(const UpdateSegment& s) {
  return s.param_dtype == DType::kFloat64 || s.grad_dtype == DType::kFloat64;
}

// The parameter as it was stored, in the copy's dtype.
template <typename real>
inline void write_copy(const UpdateSegment& s, std::int64_t from, void* param_at, int n) {
  if (s.copy == nullptr) return;
  alignas(64) real scratch[kStrand];
  const real* stored = read_strand<real>(param_at, s.param_dtype, scratch, n);
  write_strand(stored, element(s.copy, s.copy_dtype, from), s.copy_dtype, n);
}

template <typename real, int kFlags>
inline void adam_strand(const UpdateSegment& s, std::int64_t from, int n) {
  constexpr bool kAmsgradOn = (kFlags & kAdamAmsgrad) != 0;
  alignas(64) real scratch[4][kStrand];
  alignas(64) real unused[kStrand];
  const auto update = adam_of<real, kFlags>(hypers_of(s.hyper), s.scalars, s.factor);
  void* at[3];
  real* state[3] = {unused, unused, unused};
  for (int j = 0; j < (kAmsgradOn ? 3 : 2); ++j) {
    at[j] = element(s.states[j], s.state_dtypes[j], from);
    state[j] = open_strand<real>(at[j], s.state_dtypes[j], scratch[j], n);
  }
  void* param_at = element(s.param, s.param_dtype, from);
  real* param = open_strand<real>(param_at, s.param_dtype, scratch[3], n);
  alignas(64) real grad_scratch[kStrand];
  const real* __restrict grad =
      read_strand<real>(element(s.grad, s.grad_dtype, from), s.grad_dtype, grad_scratch, n);
  real* __restrict p = param;
  real* __restrict exp_avg = state[0];
  real* __restrict exp_avg_sq = state[1];
  real* __restrict max_exp_avg_sq = state[2];
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    real new_p = p[i], m = exp_avg[i], v = exp_avg_sq[i];
    real largest = kAmsgradOn ? max_exp_avg_sq[i] : real(0);
    update(grad[i], new_p, m, v, largest);
    p[i] = new_p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if constexpr (kAmsgradOn) max_exp_avg_sq[i] = largest;
  }
  write_strand(param, param_at, s.param_dtype, n);
  write_copy<real>(s, from, param_at, n);
  for (int j = 0; j < (kAmsgradOn ? 3 : 2); ++j) write_strand(state[j], at[j], s.state_dtypes[j], n);
}

template <typename real>
inline void adam_strand(const UpdateSegment& s, std::int64_t from, int n) {
  switch (adam_flags(hypers_of(s.hyper))) {
    case kAdamCoupled | kAdamAmsgrad:
      return adam_strand<real, kAdamCoupled | kAdamAmsgrad>(s, from, n);
    case kAdamCoupled:
      return adam_strand<real, kAdamCoupled>(s, from, n);
    case kAdamAmsgrad:
      return adam_strand<real, kAdamAmsgrad>(s, from, n);
    default:
      return adam_strand<real, 0>(s, from, n);
  }
}

void adam(const UpdateArgs& args, std::int64_t begin, std::int64_t end) {
  const auto body = [](const UpdateSegment& s, std::int64_t, int, std::int64_t from, int n) {
    if (wants_double(s)) {
      adam_strand<double>(s, from, n);
    } else {
      adam_strand<float>(s, from, n);
    }
  };
  walk(args.segments, args.n_segments, begin, end, prefetch_update, body, [](std::int64_t) {});
}

template <typename real, int kFlags>
inline void sgd_strand(const UpdateSegment& s, std::int64_t from, int n) {
  constexpr bool kMomentumOn = (kFlags & kSgdMomentum) != 0;
  alignas(64) real scratch[3][kStrand];
  const auto update = sgd_of<real, kFlags>(hypers_of(s.hyper), s.scalars, s.factor);
  void* param_at = element(s.param, s.param_dtype, from);
  real* param = open_strand<real>(param_at, s.param_dtype, scratch[0], n);
  void* buffer_at = nullptr;
  real* buffer = scratch[1];
  if constexpr (kMomentumOn) {
    buffer_at = element(s.states[0], s.state_dtypes[0], from);
    buffer = open_strand<real>(buffer_at, s.state_dtypes[0], scratch[1], n);
  }
  const real* __restrict grad =
      read_strand<real>(element(s.grad, s.grad_dtype, from), s.grad_dtype, scratch[2], n);
  real* __restrict p = param;
  real* __restrict b = buffer;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    real new_p = p[i];
    real new_b = kMomentumOn ? b[i] : real(0);
    update(grad[i], new_p, new_b);
    p[i] = new_p;
    if constexpr (kMomentumOn) b[i] = new_b;
  }
  write_strand(param, param_at, s.param_dtype, n);
  write_copy<real>(s, from, param_at, n);
  if constexpr (kMomentumOn) write_strand(buffer, buffer_at, s.state_dtypes[0], n);
}

template <typename real>
inline void sgd_strand(const UpdateSegment& s, std::int64_t from, int n) {
  switch (sgd_flags(hypers_of(s.hyper))) {
    case kSgdMomentum:
      return sgd_strand<real, kSgdMomentum>(s, from, n);
    case kSgdMomentum | kSgdDecay:
      return sgd_strand<real, kSgdMomentum | kSgdDecay>(s, from, n);
    case kSgdMomentum | kSgdNesterov:
      return sgd_strand<real, kSgdMomentum | kSgdNesterov>(s, from, n);
    case kSgdMomentum | kSgdNesterov | kSgdDecay:
      return sgd_strand<real, kSgdMomentum | kSgdNesterov | kSgdDecay>(s, from, n);
    case kSgdDecay:
      return sgd_strand<real, kSgdDecay>(s, from, n);
    default:
      return sgd_strand<real, 0>(s, from, n);
  }
}

void sgd(const UpdateArgs& args, std::int64_t begin, std::int64_t end) {
  const auto body = [](const UpdateSegment& s, std::int64_t, int, std::int64_t from, int n) {
    if (wants_double(s)) {
      sgd_strand<double>(s, from, n);
    } else {
      sgd_strand<float>(s, from, n);
    }
  };
  walk(args.segments, args.n_segments, begin, end, prefetch_update, body, [](std::int64_t) {});
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels{FASTACCUM_NAME(FASTACCUM_ISA), gather, norm, scale, adam, sgd};

}  // namespace fastaccum::cpu::FASTACCUM_ISA
