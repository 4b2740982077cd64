// SGD with momentum: the update of one element, for the host and the device.
#pragma once

#include "hyper.h"

namespace fastaccum {

enum SgdFlags : int { kSgdMomentum = 1, kSgdNesterov = 2, kSgdDecay = 4 };

// Sutskever et al. 2013 in PyTorch's form. On a parameter's first step the buffer is zero and the
// caller passes momentum_in = 0 and one_minus_dampening = 1, so that the buffer becomes the gradient.
template <typename real, int kFlags>
struct Sgd {
  real factor;     // average x unscale x clip; negative for maximize
  real max_value;  // clamp of the finished gradient; infinity for none
  real weight_decay;
  real momentum;             // in nesterov's look-ahead
  real momentum_in;          // of the buffer: momentum, or 0 on the first step
  real one_minus_dampening;  // 1 on the first step
  real lr;

  FASTACCUM_HOST_DEVICE void operator()(real g, real& param, real& buffer) const {
    g = g * factor;
    g = g > max_value ? max_value : (g < -max_value ? -max_value : g);
    if constexpr ((kFlags & kSgdDecay) != 0) g = g + param * weight_decay;
    if constexpr ((kFlags & kSgdMomentum) != 0) {
      const real b = buffer * momentum_in + g * one_minus_dampening;
      buffer = b;
      g = (kFlags & kSgdNesterov) != 0 ? g + b * momentum : b;
    }
    param = param - g * lr;
  }
};

// The functor of one parameter: its group's row of hyper-parameters, its own scalars, the window's factor.
template <typename real, int kFlags>
FASTACCUM_HOST_DEVICE Sgd<real, kFlags> sgd_of(const Hypers& h, const double* scalars, double factor) {
  const bool first = scalars[kFirst] != 0.0;
  return {static_cast<real>((h.flags & kMaximize) != 0 ? -factor : factor),
          static_cast<real>(h.max_value),
          static_cast<real>(h.weight_decay),
          static_cast<real>(h.momentum),
          static_cast<real>(first ? 0.0 : h.momentum),
          static_cast<real>(first ? 1.0 : 1.0 - h.dampening),
          static_cast<real>(scalars[kLrNow])};
}

// The flags that a group's options ask for.
FASTACCUM_HOST_DEVICE int sgd_flags(const Hypers& h) {
  const bool momentum = h.momentum != 0.0;
  return (momentum ? kSgdMomentum : 0) | (momentum && (h.flags & kNesterov) != 0 ? kSgdNesterov : 0) |
         (h.weight_decay != 0.0 ? kSgdDecay : 0);
}

}  // namespace fastaccum
