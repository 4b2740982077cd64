// The CPU core's loops, each called once between client requests to callgrind, which counts instructions
// there and nowhere else. Built and run by hot_loops.py:
//
//     hot_loops LEVEL...
//
// One segment of kElements elements is exactly one batch of chunks, so the core stays on the calling thread.
// After every loop the counters are dumped under "LEVEL/LOOP". A level that the CPU (as valgrind shows it)
// lacks is left out. A loop runs once before it counts: the first call binds symbols.
#include <valgrind/callgrind.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "cpu/core.h"
#include "dtype.h"
#include "hyper.h"

namespace {

using namespace fastaccum;

constexpr std::int64_t kElements = std::int64_t{1} << 17;
constexpr std::int64_t kChunks = kElements / kChunk;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void no_threads(std::int64_t, void (*)(std::int64_t, std::int64_t, void*), void*) {
  std::fputs("the core wanted threads: kElements is no longer one batch\n", stderr);
  std::exit(1);
}
constexpr cpu::ParallelFor kPool{no_threads};
constexpr cpu::NormSpec kTwoNorm{Norm::kTwo, 2.0, 1.0};

// Tensors of ordinary numbers, none of them denormal, which some instructions would be slow for.
struct Tensors {
  std::vector<float> buffer, kept, fresh, param, first, second;
  std::vector<bfloat16> narrow_fresh;
  std::vector<double> partials, nonfinite;

  Tensors()
      : buffer(kElements),
        kept(kElements),
        fresh(kElements),
        param(kElements),
        first(kElements),
        second(kElements),
        narrow_fresh(kElements),
        partials(kChunks),
        nonfinite(kChunks) {
    for (std::int64_t i = 0; i < kElements; ++i) {
      const float x = static_cast<float>(i % 1021 + 1) / 1024.0f;
      buffer[i] = kept[i] = fresh[i] = param[i] = first[i] = second[i] = x;
      narrow(x, &narrow_fresh[i]);
    }
  }
};

template <typename Loop>
void count(const char* level, const char* name, Loop loop) {
  // Not a temporary in the macro's argument: that is gone by the time the macro's asm reads it.
  const std::string label = std::string(level) + "/" + name;
  loop();
  CALLGRIND_ZERO_STATS;
  CALLGRIND_TOGGLE_COLLECT;
  loop();
  CALLGRIND_TOGGLE_COLLECT;
  CALLGRIND_DUMP_STATS_AT(label.c_str());
}

void accumulate(Tensors& t, const void* kept, const void* fresh, DType fresh_dtype, bool present, bool norm) {
  const cpu::GatherSegment segment{{0, kElements}, kept, fresh, DType::kFloat32, fresh_dtype, present};
  cpu::GatherArgs args{};
  args.buffer = t.buffer.data();
  args.buffer_dtype = DType::kFloat32;
  args.segments = &segment;
  args.n_segments = 1;
  args.n_chunks = kChunks;
  args.weight = args.kept_weight = 0.5;
  if (norm) {
    args.partials = t.partials.data();
    args.nonfinite = t.nonfinite.data();
  }
  args.spec = kTwoNorm;
  cpu::gather(args, kPool);
}

void accumulate_loops(const char* level, Tensors& t) {
  const auto f32 = DType::kFloat32;
  const void *kept = t.kept.data(), *fresh = t.fresh.data(), *narrow = t.narrow_fresh.data();
  count(level, "accumulate, first", [&] { accumulate(t, nullptr, fresh, f32, false, false); });
  count(level, "accumulate, second", [&] { accumulate(t, kept, fresh, f32, false, false); });
  count(level, "accumulate, later", [&] { accumulate(t, nullptr, fresh, f32, true, false); });
  count(level, "accumulate, last with norm", [&] { accumulate(t, nullptr, fresh, f32, true, true); });
  count(level, "accumulate, second and last with norm",
        [&] { accumulate(t, kept, fresh, f32, false, true); });
  count(level, "accumulate, later, bfloat16 gradient",
        [&] { accumulate(t, nullptr, narrow, DType::kBFloat16, true, false); });
}

void norm_and_scale(const char* level, Tensors& t) {
  count(level, "norm", [&] {
    const cpu::NormSegment segment{{0, kElements}, t.fresh.data(), DType::kFloat32};
    cpu::norm({&segment, 1, kChunks, t.partials.data(), t.nonfinite.data(), kTwoNorm}, kPool);
  });
  count(level, "scale", [&] {
    const auto f32 = DType::kFloat32;
    const cpu::ScaleSegment segment{{0, kElements}, t.kept.data(), t.buffer.data(), f32, f32, 0.5};
    cpu::scale({&segment, 1, kChunks, kInfinity}, kPool);
  });
}

void updates(const char* level, Tensors& t) {
  double hyper[kHyperColumns] = {};
  hyper[kLr] = 1e-3;
  hyper[kBeta1] = 0.9;
  hyper[kBeta2] = 0.999;
  hyper[kEps] = 1e-8;
  hyper[kWeightDecay] = 0.01;
  hyper[kMaxValue] = kInfinity;
  const double scalars[kScalarColumns] = {1e-2, 30.0, 0.0, 1e-3};
  const auto update = [&](void (*loop)(const cpu::UpdateArgs&, cpu::ParallelFor), double flags,
                          double momentum) {
    hyper[kHyperFlags] = flags;
    hyper[kMomentum] = momentum;
    cpu::UpdateSegment segment{};
    segment.at = {0, kElements};
    segment.grad = t.fresh.data();
    segment.param = t.param.data();
    segment.states[0] = t.first.data();
    segment.states[1] = t.second.data();
    segment.hyper = hyper;
    segment.scalars = scalars;
    segment.factor = 0.5;
    loop({&segment, 1, kChunks}, kPool);
  };
  count(level, "SGD", [&] { update(cpu::sgd, 0.0, 0.0); });
  count(level, "SGD, momentum", [&] { update(cpu::sgd, 0.0, 0.9); });
  count(level, "Adam", [&] { update(cpu::adam, 0.0, 0.0); });
  count(level, "AdamW", [&] { update(cpu::adam, kDecoupled, 0.0); });
}

}  // namespace

int main(int count, char** levels) {
  Tensors tensors;
  for (int i = 1; i < count; ++i) {
    if (!cpu::set_isa(levels[i])) continue;
    accumulate_loops(levels[i], tensors);
    norm_and_scale(levels[i], tensors);
    updates(levels[i], tensors);
  }
  std::printf("%lld\n", static_cast<long long>(kElements));
}
