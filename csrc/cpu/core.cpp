// Chooses the instruction level and runs the drivers on the caller's threads. Compiled at baseline.
#include "core.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../finish.h"
#include "../norm.h"

namespace fastaccum::cpu {

namespace baseline {
extern const Kernels kernels;
}
#if defined(FASTACCUM_X86_LEVELS)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

//------------------------------------------------------------------------------- instruction level

// Best first.
std::vector<const Kernels*> levels_of_this_cpu() {
  std::vector<const Kernels*> levels;
#if defined(FASTACCUM_X86_LEVELS)
  __builtin_cpu_init();
  const bool f16c = __builtin_cpu_supports("f16c");
  if (f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    levels.push_back(&avx512::kernels);
  if (f16c && __builtin_cpu_supports("avx2")) levels.push_back(&avx2::kernels);
#endif
  levels.push_back(&baseline::kernels);
  return levels;
}

const std::vector<const Kernels*>& levels() {
  static const std::vector<const Kernels*> all = levels_of_this_cpu();
  return all;
}

const Kernels* find_level(const char* name) {
  for (const Kernels* level : levels())
    if (std::strcmp(level->name, name) == 0) return level;
  return nullptr;
}

// An FASTACCUM_ISA that this CPU does not have is reported by the Python side, which compares
// isa_name() with what was asked for; here the best level stands.
std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> level{[] {
    const char* wanted = std::getenv("FASTACCUM_ISA");
    const Kernels* found = wanted != nullptr ? find_level(wanted) : nullptr;
    return found != nullptr ? found : levels().front();
  }()};
  return level;
}

//-------------------------------------------------------------------------------------- threading

// Chunks are handed out in small batches from one counter: on a busy machine the slower thread simply
// takes fewer. Which thread takes a chunk cannot change a bit of the result.
constexpr std::int64_t kBatch = 16;  // 131 072 elements

// Buffers of at least this size are written around the caches where nothing was there before.
constexpr std::int64_t kStreamBytes = std::int64_t{32} << 20;

template <typename Args>
struct Job {
  const Args& args;
  void (*kernel)(const Args&, std::int64_t, std::int64_t);
  std::int64_t n_chunks;
  std::atomic<std::int64_t> next{0};

  static void work(std::int64_t, std::int64_t, void* context) {
    Job& job = *static_cast<Job*>(context);
    for (;;) {
      const std::int64_t begin = job.next.fetch_add(kBatch, std::memory_order_relaxed);
      if (begin >= job.n_chunks) return;
      const std::int64_t end = begin + kBatch < job.n_chunks ? begin + kBatch : job.n_chunks;
      job.kernel(job.args, begin, end);
    }
  }
};

template <typename Args>
void run(const Args& args, void (*kernel)(const Args&, std::int64_t, std::int64_t), ParallelFor pool) {
  if (args.n_chunks == 0) return;
  Job<Args> job{args, kernel, args.n_chunks};
  const std::int64_t batches = (args.n_chunks + kBatch - 1) / kBatch;
  if (batches <= 1) {
    Job<Args>::work(0, 1, &job);
  } else {
    pool.run(batches, &Job<Args>::work, &job);
  }
}

//------------------------------------------------------------------------------------------ totals

// Strand order, last step: T[j] over the chunks congruent to j, ascending, then an adjacent fold.
template <Norm kNorm>
double total_of(const FinishArgs& args, std::int64_t norm_group) {
  std::vector<double> lanes(kFinishLanes, 0.0);
  std::int64_t position = 0;
  for (std::int64_t s = 0; s < args.n_spans; ++s) {
    const Span& span = args.spans[s];
    if (span.norm_group != norm_group) continue;
    for (std::int64_t c = span.begin; c < span.end; ++c, ++position) {
      double& lane = lanes[position % kFinishLanes];
      lane = Contribution<kNorm>::join(lane, args.partials[c]);
    }
  }
  return fold<kNorm, kFinishLanes>(lanes.data());
}

bool any_bad(const FinishArgs& args) {
  for (std::int64_t s = 0; s < args.n_spans; ++s)
    for (std::int64_t c = args.spans[s].begin; c < args.spans[s].end; ++c)
      if (args.nonfinite[c] != 0.0) return true;
  return false;
}

}  // namespace

const char* isa_name() { return current().load()->name; }

const char* isa_available() {
  static const std::string names = [] {
    std::string text;
    for (const Kernels* level : levels()) {
      if (!text.empty()) text += ' ';
      text += level->name;
    }
    return text;
  }();
  return names.c_str();
}

bool set_isa(const char* name) {
  const Kernels* level = find_level(name);
  if (level != nullptr) current().store(level);
  return level != nullptr;
}

void gather(const GatherArgs& args, ParallelFor pool) {
  GatherArgs chosen = args;
  // Only a buffer that starts on a vector and does not fit the last cache anyway.
  chosen.stream = args.n_chunks * kChunk * size_of(args.buffer_dtype) >= kStreamBytes &&
                  reinterpret_cast<std::uintptr_t>(args.buffer) % 64 == 0;
  run(chosen, current().load()->gather, pool);
}
void norm(const NormArgs& args, ParallelFor pool) { run(args, current().load()->norm, pool); }
void scale(const ScaleArgs& args, ParallelFor pool) { run(args, current().load()->scale, pool); }
void adam(const UpdateArgs& args, ParallelFor pool) { run(args, current().load()->adam, pool); }
void sgd(const UpdateArgs& args, ParallelFor pool) { run(args, current().load()->sgd, pool); }

void finish(const FinishArgs& args) {
  const bool is_max = args.spec.norm == Norm::kInf;
  const double scale = 1.0 / args.divisor;
  double joined = 0.0;
  for (std::int64_t g = 0; g < args.n_norm_groups; ++g) {
    const double total = is_max ? total_of<Norm::kInf>(args, g) : total_of<Norm::kTwo>(args, g);
    joined = is_max ? max_or_nan(joined, total) : joined + total;
    const double norm =
        norm_of_total(total, args.spec.norm, args.spec.power, args.spec.scale) * magnitude(scale);
    args.group_norms[g] = norm;
    args.factor[g] = clip_factor(norm, args.max_norm[g]) * scale;
  }
  const double norm =
      norm_of_total(joined, args.spec.norm, args.spec.power, args.spec.scale) * magnitude(scale);
  // Nothing was weighed: there is no gradient to speak of, and no update.
  const bool empty = !(args.weight > 0.0);
  *args.norm = empty ? 0.0f : static_cast<float>(norm);
  const bool told = args.found_inf != nullptr && *args.found_inf != 0.0f;
  const bool found = (args.skip_nonfinite || args.found_inf != nullptr) && any_bad(args);
  const bool unbounded = args.weight > 1.7976931348623157e308;  // a weight on the device may be anything
  const bool bad = !empty && (told || (args.skip_nonfinite && (found || unbounded)));
  if (args.found_inf != nullptr) *args.found_inf = told || found ? 1.0f : 0.0f;
  *args.skip = (empty || bad) ? 1 : 0;
  if (bad) *args.skipped += 1;
  for (std::int64_t i = 0; i < args.n; ++i) {
    float& step = args.steps[args.row[i]];
    if (*args.skip == 0) step += 1.0f;
    bias_corrections(hypers_of(args.hyper + args.group[i] * kHyperColumns), step,
                     args.scalars + args.row[i] * kScalarColumns);
  }
}

}  // namespace fastaccum::cpu
