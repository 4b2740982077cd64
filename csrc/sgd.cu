// sgd: SGD with momentum over a table of parameters, average, unscale and clip folded in.
#include "sgd.h"
#include "update.h"

namespace fastaccum::gpu {
namespace {

struct SgdRule {
  template <typename real, int kFlags, int kVector>
  static FASTACCUM_DEVICE void run_as(const Tensors& t, const Place<kVector>& place, const Hypers& h,
                                      const double* scalars, double factor) {
    constexpr int kStates = (kFlags & kSgdMomentum) != 0 ? 1 : 0;
    const auto sgd = sgd_of<real, kFlags>(h, scalars, factor);
    update_strand<kStates, real>(t, place,
                                 [&](real g, real& p, real& buffer, real&, real&) { sgd(g, p, buffer); });
  }

  template <typename real, bool, int kVector>
  static FASTACCUM_DEVICE void run(const Tensors& t, const Place<kVector>& place, const Hypers& h,
                                   const double* scalars, double factor) {
    switch (sgd_flags(h)) {
      case kSgdMomentum:
        return run_as<real, kSgdMomentum>(t, place, h, scalars, factor);
      case kSgdMomentum | kSgdDecay:
        return run_as<real, kSgdMomentum | kSgdDecay>(t, place, h, scalars, factor);
      case kSgdMomentum | kSgdNesterov:
        return run_as<real, kSgdMomentum | kSgdNesterov>(t, place, h, scalars, factor);
      case kSgdMomentum | kSgdNesterov | kSgdDecay:
        return run_as<real, kSgdMomentum | kSgdNesterov | kSgdDecay>(t, place, h, scalars, factor);
      case kSgdDecay:
        return run_as<real, kSgdDecay>(t, place, h, scalars, factor);
      default:
        return run_as<real, 0>(t, place, h, scalars, factor);
    }
  }
};

}  // namespace

Status sgd(const UpdateArgs& args, Stream stream) { return update<SgdRule>(args, stream); }

}  // namespace fastaccum::gpu
