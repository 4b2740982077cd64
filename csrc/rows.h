// What the kernels have in common: which elements a thread owns, how it reads and writes them, and how
// the threads of a chunk join their sums.
//
// A block owns a chunk. kLanes / kVector threads share a strand, and a thread owns kVector neighbouring
// lanes of all 16 rows, so that a row is one access: 16 bytes per thread, or 32 where the architecture
// has them. The dtypes of a strand are run-time values, the same for all its threads: one launch serves
// every mixture.
#pragma once

#include <cstring>
#include <type_traits>

#include "dtype.h"
#include "gpu.h"
#include "gpu_language.h"
#include "norm.h"

namespace fastaccum::gpu {

#define FASTACCUM_DEVICE __device__ __forceinline__

// 256-bit accesses exist from compute capability 10.0 on. A kernel is compiled for both widths, and the
// body of the one that an architecture does not use is left out.
constexpr int kNarrow = 4, kWide = 8;
template <int kVector>
FASTACCUM_DEVICE constexpr bool compiled() {
#if defined(__CUDA_ARCH__)
  return kVector == (__CUDA_ARCH__ >= 1000 ? kWide : kNarrow);
#else
  return true;
#endif
}
FASTACCUM_HOST_DEVICE constexpr int threads(int vector) { return kStrandsPerChunk * kLanes / vector; }

//---------------------------------------------------------------------------------------- by value

// A table in the kernel's arguments, in one of two sizes, or on the device.
template <int kCount>
struct ByValue {
  Entry words[kCount];
  FASTACCUM_DEVICE Entry at(std::int64_t i) const { return words[i]; }
};
struct OnDevice {
  const Entry* words;
  FASTACCUM_DEVICE Entry at(std::int64_t i) const { return words[i]; }
};

FASTACCUM_DEVICE double load(const Scalar& scalar) {
  return scalar.device != nullptr ? *scalar.device : scalar.value;
}

FASTACCUM_DEVICE double power_scale(const NormSpec& spec) { return usable_scale(load(spec.scale)); }

FASTACCUM_DEVICE double as_double(Entry bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A pointer that was an integer may point anywhere; told that it is global memory, the compiler uses
// LDG/STG and, where there are any, 256-bit accesses. It must be told at every access: what was said
// where the pointer was made is lost when it passes a select or a loop.
template <typename T>
FASTACCUM_DEVICE T* global(T* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// A group's row of such a table; its learning rate may lie on the device, as float32 or float64.
template <typename Table>
FASTACCUM_DEVICE Hypers group_of(const Table& words, std::int64_t group) {
  double row[kHyperColumns];
  const std::int64_t first = group * kGroupWords;
#pragma unroll
  for (int c = 0; c < kHyperColumns; ++c) row[c] = as_double(words.at(first + c));
  const Entry lr = words.at(first + kHyperColumns);
  if (lr != 0) {
    const auto at = lr & kAddressMask;
    const bool wide = ((lr >> kTagShift) & kDTypeMask) == static_cast<Entry>(DType::kFloat64) + 1;
    // The cache hint also says that this is global memory.
    row[kLr] =
        wide ? __ldcs(reinterpret_cast<const double*>(at)) : __ldcs(reinterpret_cast<const float*>(at));
  }
  return hypers_of(row);
}

// Calls body(table) with the smallest kind of table that holds the words: a launch copies its arguments.
template <int kLimit = kTableEntries, typename Body>
Status with_table(const Words& words, const Body& body) {
  constexpr int kSmall = kLimit < 500 ? kLimit : 500;
  if (words.device != nullptr) return body(OnDevice{words.device});
  if (words.count > kLimit) return "a table by value is too long: store it on the device first";
  const auto copied = [&](auto table) {
    std::memcpy(table.words, words.host, static_cast<std::size_t>(words.count) * sizeof(Entry));
    return body(table);
  };
  if (words.count <= kSmall) return copied(ByValue<kSmall>{});
  return copied(ByValue<kLimit>{});
}

//------------------------------------------------------------------------------------------ arrays

// One tensor's elements from a strand's first on.
struct Array {
  char* data;  // null: there is none
  DType dtype;

  static FASTACCUM_DEVICE Array of(Entry entry, std::int64_t from) {
    const int tag = static_cast<int>((entry >> kTagShift) & kDTypeMask);
    if (tag == 0) return {nullptr, DType::kFloat32};
    const DType dtype = static_cast<DType>(tag - 1);
    return {reinterpret_cast<char*>(entry & kAddressMask) + from * size_of(dtype), dtype};
  }
  FASTACCUM_DEVICE bool exists() const { return data != nullptr; }
  // Whether every row can be read at full width and, as `real`, without loss.
  template <typename real, int kVector>
  FASTACCUM_DEVICE bool vectorises() const {
    const std::int64_t size = size_of(dtype);
    return data == nullptr || (size <= static_cast<std::int64_t>(sizeof(real)) &&
                               reinterpret_cast<std::uintptr_t>(data) % (size * kVector) == 0);
  }
};

// What is left of a value after it was stored in a narrow buffer.
FASTACCUM_DEVICE float rounded(float value, DType dtype) {
  if (dtype == DType::kBFloat16) {
    bfloat16 stored;
    narrow(value, &stored);
    return widen(stored);
  }
  float16 stored;
  narrow(value, &stored);
  return widen(stored);
}
FASTACCUM_DEVICE double rounded(double value, DType) { return value; }

// A thread's share of a row as it lies in memory: kVector elements of at most sizeof(real) bytes.
template <typename real, int kVector>
struct Row {
  static constexpr int kWords = kVector * static_cast<int>(sizeof(real)) / 4;
  std::uint32_t words[kWords];
};

// CUDA's own 32-byte vectors are aligned on 16 bytes before CUDA 13, which forbids one access.
struct alignas(32) Bits256 {
  unsigned long long parts[4];
};

enum class Reuse { kNone, kSome };  // kNone: dead after one read, so it need not stay in a cache

template <int kBytes, Reuse kReuse>
FASTACCUM_DEVICE void load_bytes(const char* from, std::uint32_t* words) {
  static_assert(kBytes >= 4, "a thread's share of a row is at least a word");
  if constexpr (kBytes == 4) {  // two 16-bit elements beside float64 ones
    const unsigned* at = global(reinterpret_cast<const unsigned*>(from));
    words[0] = kReuse == Reuse::kNone ? __ldcs(at) : *at;
  } else if constexpr (kBytes == 8) {
    const uint2* at = global(reinterpret_cast<const uint2*>(from));
    const uint2 x = kReuse == Reuse::kNone ? __ldcs(at) : *at;
    words[0] = x.x, words[1] = x.y;
  } else if constexpr (kBytes == 16) {
    const uint4* at = global(reinterpret_cast<const uint4*>(from));
    const uint4 x = kReuse == Reuse::kNone ? __ldcs(at) : *at;
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (kBytes == 32) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
    load_bytes<16, kReuse>(from, words);
    load_bytes<16, kReuse>(from + 16, words + 4);
#else
    const Bits256 x = *global(reinterpret_cast<const Bits256*>(from));
    std::memcpy(words, &x, sizeof x);
#endif
  } else {
    load_bytes<kBytes / 2, kReuse>(from, words);
    load_bytes<kBytes / 2, kReuse>(from + kBytes / 2, words + kBytes / 8);
  }
}

// Through __stcs: a plain vector store is split into four scalar ones in a quarter of the unrolled rows.
template <int kBytes>
FASTACCUM_DEVICE void store_bytes(char* to, const std::uint32_t* words) {
  static_assert(kBytes >= 4, "a thread's share of a row is at least a word");
  if constexpr (kBytes == 4) {
    __stcs(global(reinterpret_cast<unsigned*>(to)), words[0]);
  } else if constexpr (kBytes == 8) {
    __stcs(global(reinterpret_cast<uint2*>(to)), make_uint2(words[0], words[1]));
  } else if constexpr (kBytes == 16) {
    __stcs(global(reinterpret_cast<uint4*>(to)), make_uint4(words[0], words[1], words[2], words[3]));
  } else if constexpr (kBytes == 32) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
    store_bytes<16>(to, words);
    store_bytes<16>(to + 16, words + 4);
#else
    Bits256 x;
    std::memcpy(&x, words, sizeof x);
    *global(reinterpret_cast<Bits256*>(to)) = x;
#endif
  } else {
    store_bytes<kBytes / 2>(to, words);
    store_bytes<kBytes / 2>(to + kBytes / 2, words + kBytes / 8);
  }
}

// Rows in flight where a kernel reads one or two arrays: 64 bytes per thread and array hide the latency
// at 30 % occupancy. Updates read four arrays and need no more than one row.
template <typename real, int kVector>
FASTACCUM_DEVICE constexpr int unrolled() {
  return 64 / (kVector * static_cast<int>(sizeof(real)));
}

// How a thread reaches its elements: whole rows of aligned arrays, or one element after the other where
// a strand is ragged or an array is not aligned.
template <typename real, int kVector, bool kWholeRows>
struct Access {
  int first;  // this thread's first lane
  int left;   // elements of the strand

  // Reads without converting: a conversion would wait for the data before the next read is issued.
  template <Reuse kReuse = Reuse::kSome>
  FASTACCUM_DEVICE Row<real, kVector> read(const Array& array, int row) const {
    Row<real, kVector> raw;
    const int at = row * kLanes + first;
    if constexpr (kWholeRows) {
      if constexpr (sizeof(real) == 8) {
        if (array.dtype == DType::kFloat64) {
          load_bytes<8 * kVector, kReuse>(array.data + at * 8, raw.words);
          return raw;
        }
      }
      if (array.dtype == DType::kFloat32) {
        load_bytes<4 * kVector, kReuse>(array.data + at * 4, raw.words);
      } else {
        load_bytes<2 * kVector, kReuse>(array.data + at * 2, raw.words);
      }
    } else {
      real values[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = at + j < left ? element(array, at + j) : real(0);
      std::memcpy(raw.words, values, sizeof values);
    }
    return raw;
  }

  FASTACCUM_DEVICE void widen_row(const Array& array, const Row<real, kVector>& raw, real* values) const {
    if constexpr (!kWholeRows) {
      std::memcpy(values, raw.words, sizeof raw.words);
      return;
    }
    if constexpr (sizeof(real) == 8) {
      if (array.dtype == DType::kFloat64) {
        std::memcpy(values, raw.words, sizeof raw.words);
        return;
      }
    }
    if (array.dtype == DType::kFloat32) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = static_cast<real>(float_from_bits(raw.words[j]));
    } else if (array.dtype == DType::kBFloat16) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = static_cast<real>(widen(bfloat16{half_word(raw, j)}));
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = static_cast<real>(widen(float16{half_word(raw, j)}));
    }
  }

  // Converts with one rounding and writes.
  FASTACCUM_DEVICE void write(const Array& array, int row, const real* values) const {
    const int at = row * kLanes + first;
    if constexpr (!kWholeRows) {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (at + j < left) set_element(array, at + j, values[j]);
    } else {
      write_whole(array, at, values);
    }
  }

 private:
  static FASTACCUM_DEVICE void write_whole(const Array& array, int at, const real* values) {
    std::uint32_t words[Row<real, kVector>::kWords];
    if constexpr (sizeof(real) == 8) {
      if (array.dtype == DType::kFloat64) {
        std::memcpy(words, values, sizeof words);
        store_bytes<8 * kVector>(array.data + at * 8, words);
        return;
      }
    }
    if (array.dtype == DType::kFloat32) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) words[j] = bits_of(static_cast<float>(values[j]));
      store_bytes<4 * kVector>(array.data + at * 4, words);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; j += 2)
      words[j / 2] =
          narrow_bits(array, values[j]) | static_cast<std::uint32_t>(narrow_bits(array, values[j + 1])) << 16;
    store_bytes<2 * kVector>(array.data + at * 2, words);
  }

  static FASTACCUM_DEVICE std::uint16_t half_word(const Row<real, kVector>& raw, int j) {
    return static_cast<std::uint16_t>(raw.words[j / 2] >> (16 * (j & 1)));
  }
  static FASTACCUM_DEVICE std::uint16_t narrow_bits(const Array& array, real value) {
    if (array.dtype == DType::kBFloat16) {
      bfloat16 out;
      narrow(value, &out);
      return out.bits;
    }
    float16 out;
    narrow(value, &out);
    return out.bits;
  }
  static FASTACCUM_DEVICE real element(const Array& array, int i) {
    switch (array.dtype) {
      case DType::kFloat64:
        return static_cast<real>(*global(reinterpret_cast<const double*>(array.data) + i));
      case DType::kFloat32:
        return static_cast<real>(*global(reinterpret_cast<const float*>(array.data) + i));
      case DType::kBFloat16:
        return static_cast<real>(widen(*global(reinterpret_cast<const bfloat16*>(array.data) + i)));
      default:
        return static_cast<real>(widen(*global(reinterpret_cast<const float16*>(array.data) + i)));
    }
  }
  static FASTACCUM_DEVICE void set_element(const Array& array, int i, real value) {
    switch (array.dtype) {
      case DType::kFloat64:
        return narrow(value, global(reinterpret_cast<double*>(array.data) + i));
      case DType::kFloat32:
        return narrow(value, global(reinterpret_cast<float*>(array.data) + i));
      case DType::kBFloat16:
        return narrow(value, global(reinterpret_cast<bfloat16*>(array.data) + i));
      default:
        return narrow(value, global(reinterpret_cast<float16*>(array.data) + i));
    }
  }
};

//------------------------------------------------------------------------------------------- place

// The strand that a thread works on.
template <int kVector>
struct Place {
  std::int64_t strand;
  std::int64_t segment;  // -1: padding
  std::int64_t from;     // the strand's first element within its segment
  int left;              // its elements, at most kStrand
  int first;             // this thread's first lane

  static FASTACCUM_DEVICE Place find(const Layout& layout) {
    constexpr int kThreadsPerStrand = kLanes / kVector;
    Place place;
    place.strand = static_cast<std::int64_t>(blockIdx.x) * kStrandsPerChunk + threadIdx.x / kThreadsPerStrand;
    place.first = static_cast<int>(threadIdx.x % kThreadsPerStrand) * kVector;
    place.segment = layout.strand_segment[place.strand];
    if (place.segment < 0) return place;
    FASTACCUM_ASSERT(place.segment < layout.n_segments);
    const Segment segment = layout.segments[place.segment];
    place.from = place.strand * kStrand - segment.offset;
    const std::int64_t left = segment.numel - place.from;
    FASTACCUM_ASSERT(place.from >= 0 && left > 0);
    place.left = left < kStrand ? static_cast<int>(left) : kStrand;
    return place;
  }
};

//-------------------------------------------------------------------------------------------- sums

// A thread's share of its strand's sum: one float64 per lane, rows in ascending order.
template <Norm kNorm, int kVector>
struct LaneSums {
  double lanes[kVector];
  Contribution<kNorm> contribution;
  bool bad = false;  // an element is not finite

  FASTACCUM_DEVICE explicit LaneSums(Contribution<kNorm> c) : contribution(c) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) lanes[j] = 0.0;
  }
  // Elements beyond the strand's end are zeros, which add nothing.
  template <typename real>
  FASTACCUM_DEVICE void add(const real* values) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const double d = static_cast<double>(values[j]);
#if defined(__CUDA_ARCH__)
      if constexpr (kNorm == Norm::kTwo && sizeof(real) == 4) {
        lanes[j] = fma(d, d, lanes[j]);  // the square is exact, so the bits are the same
        continue;
      }
#endif
      lanes[j] = Contribution<kNorm>::join(lanes[j], contribution.of(d));
      if constexpr (sizeof(real) == 8 || kNorm == Norm::kPower) bad = bad || !(values[j] - values[j] == 0);
    }
  }
  // After a strand's rows. Sums of float32 values are finite exactly if the values are, so they need no
  // test per element; sums of float64 values may overflow.
  template <typename real>
  FASTACCUM_DEVICE void close() {
    if constexpr (sizeof(real) == 4 && kNorm != Norm::kPower) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) bad = bad || !(lanes[j] - lanes[j] == 0);
    }
  }

  // All threads of the block: joins lanes, then strands, always adjacent ones, into the chunk's partial.
  FASTACCUM_DEVICE void store(const Partials& partials) {
    constexpr int kWarps = threads(kVector) / 32;
    __shared__ double warps[kWarps];
    double sum = fold<kNorm, kVector>(lanes);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      sum = Contribution<kNorm>::join(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    const int any_bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) {
      double joined[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) joined[i] = warps[i];
      partials.sums[blockIdx.x] = fold<kNorm, kWarps>(joined);
      partials.nonfinite[blockIdx.x] = any_bad != 0 ? 1.0 : 0.0;
    }
  }
};

//------------------------------------------------------------------------------------------ launch

// The width for the current device.
int vector_width();
// What the last launch reported.
Status status();
// Adds to the kernels that load_kernels() loads.
bool remember(const void* kernel);

template <auto kKernel>
struct Known {
  static inline const bool remembered = remember(reinterpret_cast<const void*>(kKernel));
};

template <auto kKernel, typename Params>
Status launch(std::int64_t blocks, int threads_per_block, Stream stream, const Params& params) {
  static_cast<void>(Known<kKernel>::remembered);
  FASTACCUM_LAUNCH(kKernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads_per_block), 0,
                   stream, params);
  return status();
}

}  // namespace fastaccum::gpu
