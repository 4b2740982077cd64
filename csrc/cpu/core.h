// The CPU core's interface: plain pointers in, no torch, no Python. The caller hands the parallel-for.
//
// Tables are sorted by offset. Nothing here checks arguments beyond what its types say: the binding
// (torch, MindSpore) knows the tensors and has checked them.
#pragma once

#include <cstdint>

#include "../strand.h"

#define FASTACCUM_API __attribute__((visibility("default")))

namespace fastaccum::cpu {

// Runs body(begin, end, context) over a partition of [0, count), possibly on several threads.
struct ParallelFor {
  void (*run)(std::int64_t count, void (*body)(std::int64_t, std::int64_t, void*), void* context);
};

// One parameter's place in the flat index space.
struct Segment {
  std::int64_t offset;  // first element, a multiple of kStrand
  std::int64_t numel;
};

struct GatherSegment {
  Segment at;
  const void* kept;   // gradient of the first micro-batch, or null
  const void* fresh;  // gradient of this micro-batch, or null
  DType kept_dtype;
  DType fresh_dtype;
  bool present;  // the buffer holds this segment's gradient already
};

struct NormSpec {
  Norm norm;
  double power;  // p, for kPower
  double scale;  // largest magnitude, for kPower
};

// buffer = (present ? buffer : kept * kept_weight) + fresh * weight, per segment; missing terms are
// left out. With partials: partials[c] of every chunk, and nonfinite[c] = 1 if the chunk holds one.
struct GatherArgs {
  void* buffer;
  DType buffer_dtype;
  const GatherSegment* segments;
  std::int64_t n_segments;
  std::int64_t n_chunks;
  double weight;
  double kept_weight;
  double* partials;   // [n_chunks] or null
  double* nonfinite;  // [n_chunks] or null
  NormSpec spec;
  bool stream = false;  // set by gather(): write whole new strands around the caches
};

struct NormSegment {
  Segment at;
  const void* data;
  DType dtype;
};

struct NormArgs {
  const NormSegment* segments;
  std::int64_t n_segments;
  std::int64_t n_chunks;
  double* partials;
  double* nonfinite;
  NormSpec spec;
};

struct ScaleSegment {
  Segment at;
  const void* source;
  void* target;
  DType source_dtype;
  DType target_dtype;
  double factor;
};

// target = clamp(source * factor, -max_value, max_value)
struct ScaleArgs {
  const ScaleSegment* segments;
  std::int64_t n_segments;
  std::int64_t n_chunks;
  double max_value;
};

constexpr int kMaxStates = 3;

struct UpdateSegment {
  Segment at;
  const void* grad;
  void* param;
  void* states[kMaxStates];  // Adam: exp_avg, exp_avg_sq, max_exp_avg_sq; SGD: momentum_buffer
  void* copy;                // a lower-precision copy of param, written in the same pass, or null
  DType grad_dtype;
  DType param_dtype;
  DType state_dtypes[kMaxStates];
  DType copy_dtype;
  const double* hyper;    // [kHyperColumns]
  const double* scalars;  // [kScalarColumns]
  double factor;
};

struct UpdateArgs {
  const UpdateSegment* segments;
  std::int64_t n_segments;
  std::int64_t n_chunks;
};

// One instruction level's drivers, each over chunks [begin, end).
struct Kernels {
  const char* name;
  void (*gather)(const GatherArgs&, std::int64_t begin, std::int64_t end);
  void (*norm)(const NormArgs&, std::int64_t begin, std::int64_t end);
  void (*scale)(const ScaleArgs&, std::int64_t begin, std::int64_t end);
  void (*adam)(const UpdateArgs&, std::int64_t begin, std::int64_t end);
  void (*sgd)(const UpdateArgs&, std::int64_t begin, std::int64_t end);
};

struct Span {
  std::int64_t norm_group, begin, end;  // a norm group's chunks, ascending
};

struct FinishArgs {
  const double* partials;
  const double* nonfinite;
  const Span* spans;
  std::int64_t n_spans;
  const double* max_norm;  // [n_norm_groups], inf: not clipped
  std::int64_t n_norm_groups;
  double weight;   // total weight x loss scale; the gradient is divided by it
  double divisor;  // what the data is divided by: weight, or 1 for reduction="sum"
  bool skip_nonfinite;
  NormSpec spec;
  // the parameters that take part: rows of `steps` and `scalars`, and of `hyper`
  const std::int64_t* row;    // [n]
  const std::int64_t* group;  // [n]
  std::int64_t n;
  const double* hyper;
  // outputs
  float* steps;
  double* scalars;  // [.., kScalarColumns]
  float* norm;
  double* group_norms;  // [n_norm_groups]
  double* factor;       // [n_norm_groups]
  std::int32_t* skip;
  std::int64_t* skipped;
  float* found_inf;  // or null; also read
};

FASTACCUM_API void gather(const GatherArgs&, ParallelFor);
FASTACCUM_API void norm(const NormArgs&, ParallelFor);
FASTACCUM_API void scale(const ScaleArgs&, ParallelFor);
FASTACCUM_API void adam(const UpdateArgs&, ParallelFor);
FASTACCUM_API void sgd(const UpdateArgs&, ParallelFor);
FASTACCUM_API void finish(const FinishArgs&);

// The level in use: the best this CPU has, or what FASTACCUM_ISA=baseline|avx2|avx512 says.
FASTACCUM_API const char* isa_name();
// Every level this CPU can run, best first, separated by spaces.
FASTACCUM_API const char* isa_available();
// Switches the level for this process; false if the CPU (or this build) does not have it.
FASTACCUM_API bool set_isa(const char* name);

}  // namespace fastaccum::cpu
