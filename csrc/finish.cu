// finish: decides the end of a window on the device. One block: totals, norm, clip factors, skip, then the
// step counters and bias corrections of the parameters that take part.
#include "finish.h"
#include "rows.h"

namespace fastaccum::gpu {
namespace {

template <typename Table>
struct Params {
  FinishArgs args;
  Table words;
};

// The last step of strand order: lane j sums the group's chunks congruent to j, ascending; then an
// adjacent fold over the block. The result is valid in thread 0.
template <Norm kNorm>
FASTACCUM_DEVICE double total_of(const FinishArgs& args, std::int64_t norm_group, std::int64_t* next_span,
                                 double* warps) {
  const std::int64_t thread = threadIdx.x;
  double sum = 0.0;
  std::int64_t position = 0;  // of a span's first chunk among the group's
  for (; *next_span < args.n_spans; ++*next_span) {
    const Span span = args.spans[*next_span];
    if (span.norm_group != norm_group) break;
    std::int64_t chunk = span.begin + ((thread - position) & (kFinishLanes - 1));
#pragma unroll 8
    for (; chunk < span.end; chunk += kFinishLanes)
      sum = Contribution<kNorm>::join(sum, args.partials.sums[chunk]);
    position += span.end - span.begin;
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    sum = Contribution<kNorm>::join(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  if (thread % 32 == 0) warps[thread / 32] = sum;
  __syncthreads();
  if (thread < 32) {
    sum = warps[thread];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      sum = Contribution<kNorm>::join(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  __syncthreads();  // before another group's sums go into `warps`
  return sum;
}

FASTACCUM_DEVICE bool any_bad(const FinishArgs& args) {
  for (std::int64_t s = 0; s < args.n_spans; ++s)
    for (std::int64_t c = args.spans[s].begin + threadIdx.x; c < args.spans[s].end; c += kFinishLanes)
      if (args.partials.nonfinite[c] != 0.0) return true;
  return false;
}

template <typename Table>
FASTACCUM_DEVICE void count_step(const FinishArgs& args, const Table& words, std::int64_t slot, bool skip) {
  const std::int64_t mask = args.n_groups * kGroupWords + args.n_norm_groups;
  if (((words.at(mask + slot / 64) >> (slot % 64)) & 1) == 0) return;
  FASTACCUM_ASSERT(args.group[slot] >= 0 && args.group[slot] < args.n_groups);
  const float step = args.steps[slot] + (skip ? 0.0f : 1.0f);
  if (!skip) args.steps[slot] = step;
  bias_corrections(group_of(words, args.group[slot]), step, args.scalars + slot * kScalarColumns);
}

// kPower: any other p; its pow() would cost the common kernel a stack.
template <bool kPower, typename Table>
__global__ void __launch_bounds__(kFinishLanes, 1) finish_kernel(FASTACCUM_GRID_CONSTANT(Params<Table>) p) {
  __shared__ double warps[kFinishLanes / 32];
  __shared__ bool skip;
  const FinishArgs& args = p.args;
  const bool is_max = args.spec.norm == Norm::kInf;
  const double scale = 1.0 / load(args.divisor);
  const auto norm_of = [&](double total) {
    if constexpr (kPower)
      return norm_of_total(total, Norm::kPower, args.spec.power, power_scale(args.spec)) * magnitude(scale);
    return (args.spec.norm == Norm::kTwo ? square_root(total) : total) * magnitude(scale);
  };
  const bool asked = args.skip_nonfinite || args.found_inf != nullptr;
  const int found = __syncthreads_or(asked && any_bad(args));
  double joined = 0.0;
  std::int64_t next_span = 0;  // spans are sorted by norm group
  for (std::int64_t g = 0; g < args.n_norm_groups; ++g) {
    const double total = is_max ? total_of<Norm::kInf>(args, g, &next_span, warps)
                                : total_of<Norm::kTwo>(args, g, &next_span, warps);
    if (threadIdx.x != 0) continue;
    joined = is_max ? max_or_nan(joined, total) : joined + total;
    const double norm = norm_of(total);
    args.group_norms[g] = norm;
    args.factor[g] = clip_factor(norm, as_double(p.words.at(args.n_groups * kGroupWords + g))) * scale;
  }
  if (threadIdx.x == 0) {
    // Nothing was weighed: there is no gradient to speak of, and no update.
    const bool empty = !(load(args.weight) > 0.0);
    *args.norm = empty ? 0.0f : static_cast<float>(norm_of(joined));
    const bool told = args.found_inf != nullptr && *args.found_inf != 0.0f;
    const bool unbounded = load(args.weight) > 1.7976931348623157e308;
    const bool bad = told || (args.skip_nonfinite && (found != 0 || unbounded));
    if (args.found_inf != nullptr) *args.found_inf = told || found != 0 ? 1.0f : 0.0f;
    skip = empty || bad;
    *args.skip = skip ? 1 : 0;
    if (bad && !empty) *args.skipped += 1;
  }
  __syncthreads();
  for (std::int64_t slot = threadIdx.x; slot < args.n_slots; slot += kFinishLanes)
    count_step(args, p.words, slot, skip);
}

}  // namespace

Status finish(const FinishArgs& args, Stream stream) {
  return with_table<kFinishWords>(args.words, [&](const auto& words) {
    using Table = std::decay_t<decltype(words)>;
    const Params<Table> params{args, words};
    if (args.spec.norm == Norm::kPower)
      return launch<finish_kernel<true, Table>>(1, kFinishLanes, stream, params);
    return launch<finish_kernel<false, Table>>(1, kFinishLanes, stream, params);
  });
}

}  // namespace fastaccum::gpu
