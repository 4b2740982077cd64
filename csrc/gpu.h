// The GPU launchers' interface: plain pointers in, no torch. Each function is exactly one launch on the
// given stream; it never synchronises, allocates or copies, so it may be captured into a graph.
//
// Tables that outlive a window lie on the device. What changes every window travels by value in the
// kernel's arguments, or lies on the device where it is too large (see kTableEntries).
#pragma once

#include <cstdint>

#include "gpu_language.h"
#include "hyper.h"
#include "strand.h"

namespace fastaccum::gpu {

// A pointer and its dtype in one word: the address below, the tag in the top byte.
using Entry = std::uint64_t;
constexpr int kTagShift = 56;
constexpr Entry kAddressMask = (Entry{1} << kTagShift) - 1;
constexpr Entry kDTypeMask = 7;                     // of the tag: 0 no tensor, else DType + 1
constexpr Entry kPresent = Entry{64} << kTagShift;  // the flat buffer holds this segment already
constexpr int kTableRows = 6;                       // of an update: param, 3 states, copy, meta
enum TableRow : int { kParam = 0, kState = 1, kCopy = 4, kMeta = 5 };

// CUDA 13 drivers take 32 764 bytes of arguments, older ones may take 4096. `finish` has more arguments
// of its own.
#if defined(FASTACCUM_TABLE_ENTRIES)
constexpr int kTableEntries = FASTACCUM_TABLE_ENTRIES;  // tests: small, to reach the device table
constexpr int kFinishWords = FASTACCUM_TABLE_ENTRIES;
#elif defined(CUDART_VERSION) && CUDART_VERSION < 13000
constexpr int kTableEntries = 480, kFinishWords = 460;
#else
constexpr int kTableEntries = 4080, kFinishWords = 4040;
#endif

using Stream = cudaStream_t;
// Null, or what the launch reported.
using Status = const char*;

// A float64 that the host knows, or that lies on the device.
struct Scalar {
  const double* device;  // null: `value` holds
  double value;
};

// Words that travel by value if `device` is null.
struct Words {
  const Entry* host;    // [count], read before the launcher returns
  const Entry* device;  // [count]
  std::int64_t count;
};

struct Segment {
  std::int64_t offset;  // first element, a multiple of kStrand
  std::int64_t numel;
};

// The flat index space, on the device.
struct Layout {
  const std::int32_t* strand_segment;  // [n_chunks * kStrandsPerChunk], -1: padding
  const Segment* segments;             // [n_segments]
  std::int64_t n_segments;
  std::int64_t n_chunks;
};

struct Partials {
  double* sums;       // [n_chunks], or null
  double* nonfinite;  // [n_chunks]: 1 where the chunk holds a value that is not finite
};

struct NormSpec {
  Norm norm;
  double power;
  Scalar scale;
};

// buffer = (present ? buffer : kept * kept_weight) + fresh * weight, per segment; what is missing is left
// out.
struct GatherArgs {
  Layout layout;
  void* buffer;
  DType buffer_dtype;
  Words fresh;        // [n_segments] entries, with kPresent
  const Entry* kept;  // device [n_segments] entries, or null
  Scalar weight, kept_weight;
  Partials partials;
  Norm norm;
};

struct NormArgs {
  Layout layout;
  const Entry* pointers;  // device [n_segments]
  Partials partials;
  NormSpec spec;
};

struct ScaleArgs {
  Layout layout;
  const Entry* table;    // device [3, n_segments]: source, target, index of the factor
  const double* factor;  // device
  std::int64_t n_factors;
  double max_value;
};

// A parameter group in a table of words: its hyper-parameters as float64 bits, then the entry of a learning
// rate that lies on the device, or 0.
constexpr int kGroupWords = kHyperColumns + 1;

struct UpdateArgs {
  Layout layout;
  const Entry* table;     // device [kTableRows, n_segments]
  const Entry* grads;     // device [n_segments], 0: the segment takes no part
  Words groups;           // [n_groups, kGroupWords]
  const double* scalars;  // device [n_slots, kScalarColumns]
  const double* factor;   // device [n_norm_groups]
  std::int64_t n_slots, n_norm_groups;
  const std::int32_t* skip;
  bool full;  // some tensor is float64, or some group wants amsgrad
};

struct Span {
  std::int64_t norm_group, begin, end;  // a norm group's chunks, ascending
};

struct FinishArgs {
  Partials partials;
  const Span* spans;  // device [n_spans], sorted by norm group
  std::int64_t n_spans;
  // Words of [n_groups, kGroupWords], then [n_norm_groups] limits as float64 bits (inf: not clipped), then
  // a bit mask over the slots that take part.
  Words words;
  std::int64_t n_groups, n_norm_groups;
  Scalar weight, divisor;
  NormSpec spec;
  bool skip_nonfinite;
  const std::int64_t* group;  // device [n_slots]
  std::int64_t n_slots;
  // outputs, on the device
  float* steps;     // [n_slots]
  double* scalars;  // [n_slots, kScalarColumns]
  float* norm;
  double* group_norms;  // [n_norm_groups]
  double* factor;       // [n_norm_groups]
  std::int32_t* skip;
  std::int64_t* skipped;
  float* found_inf;  // or null; also read
};

Status gather(const GatherArgs&, Stream);
Status norm(const NormArgs&, Stream);
Status finish(const FinishArgs&, Stream);
Status scale(const ScaleArgs&, Stream);
Status adam(const UpdateArgs&, Stream);
Status sgd(const UpdateArgs&, Stream);
// Writes at most kTableEntries words into a device table; unlike a copy, a graph may capture it.
Status store(Entry* table, const Entry* words, std::int64_t count, Stream);
// Copies from pinned memory, which must stay as it is until the stream has got there.
Status upload(void* device, const void* pinned, std::int64_t bytes, Stream);
// Loads every kernel of a device now: a first launch inside a graph's capture may not.
Status load_kernels();
// Makes a device the current one of this library's own copy of the CUDA runtime, too.
Status use_device(int device);
// Whether the stream is being captured.
bool capturing(Stream);

}  // namespace fastaccum::gpu
