// adam: Adam and AdamW over a table of parameters, average, unscale and clip folded in.
#include "adam.h"
#include "update.h"

namespace fastaccum::gpu {
namespace {

struct AdamRule {
  template <typename real, int kFlags, int kVector>
  static FASTACCUM_DEVICE void run_as(const Tensors& t, const Place<kVector>& place, const Hypers& h,
                                      const double* scalars, double factor) {
    constexpr int kStates = (kFlags & kAdamAmsgrad) != 0 ? 3 : 2;
    const auto adam = adam_of<real, kFlags>(h, scalars, factor);
    update_strand<kStates, real>(
        t, place, [&](real g, real& p, real& m, real& v, real& largest) { adam(g, p, m, v, largest); });
  }

  template <typename real, bool kFull, int kVector>
  static FASTACCUM_DEVICE void run(const Tensors& t, const Place<kVector>& place, const Hypers& h,
                                   const double* scalars, double factor) {
    const int flags = adam_flags(h);
    if constexpr (kFull) {
      if (flags == (kAdamCoupled | kAdamAmsgrad))
        return run_as<real, kAdamCoupled | kAdamAmsgrad>(t, place, h, scalars, factor);
      if (flags == kAdamAmsgrad) return run_as<real, kAdamAmsgrad>(t, place, h, scalars, factor);
    }
    FASTACCUM_ASSERT((flags & kAdamAmsgrad) == 0);
    if (flags == kAdamCoupled) return run_as<real, kAdamCoupled>(t, place, h, scalars, factor);
    run_as<real, 0>(t, place, h, scalars, factor);
  }
};

}  // namespace

Status adam(const UpdateArgs& args, Stream stream) { return update<AdamRule>(args, stream); }

}  // namespace fastaccum::gpu
