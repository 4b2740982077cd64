// Adam and AdamW: the update of one element, for the host and the device.
#pragma once

#include "hyper.h"

namespace fastaccum {

enum AdamFlags : int { kAdamCoupled = 1, kAdamAmsgrad = 2 };

// Kingma & Ba 2015, algorithm 1; decoupled decay: Loshchilov & Hutter 2019, algorithm 2.
// Every value is computed in float64 by the caller and rounded once to `real`: in float32, 1 - 0.999
// alone would be off by 1.3e-5. No operation here may be contracted to a fused multiply-add.
template <typename real, int kFlags>
struct Adam {
  real factor;     // average x unscale x clip; negative for maximize
  real max_value;  // clamp of the finished gradient; infinity for none
  real decay;      // 1 - lr * weight_decay when decoupled, else 1
  real weight_decay;
  real beta1, one_minus_beta1, beta2, one_minus_beta2;
  real step_size;       // lr / (1 - beta1^t)
  real inv_bias2_sqrt;  // 1 / sqrt(1 - beta2^t)
  real eps;

  FASTACCUM_HOST_DEVICE void operator()(real g, real& param, real& exp_avg, real& exp_avg_sq,
                                        real& max_exp_avg_sq) const {
    g = g * factor;
    g = g > max_value ? max_value : (g < -max_value ? -max_value : g);
    real p = param * decay;
    if constexpr ((kFlags & kAdamCoupled) != 0) g = g + p * weight_decay;
    const real m = exp_avg * beta1 + g * one_minus_beta1;
    const real v = exp_avg_sq * beta2 + (g * g) * one_minus_beta2;
    exp_avg = m;
    exp_avg_sq = v;
    real second = v;
    if constexpr ((kFlags & kAdamAmsgrad) != 0) {
      const real old = max_exp_avg_sq;
      second = (old > v || old != old) ? old : v;
      max_exp_avg_sq = second;
    }
    param = p - (step_size * m) / (square_root(second) * inv_bias2_sqrt + eps);
  }
};

// The functor of one parameter: its group's row of hyper-parameters, its own scalars, the window's factor.
template <typename real, int kFlags>
FASTACCUM_HOST_DEVICE Adam<real, kFlags> adam_of(const Hypers& h, const double* scalars, double factor) {
  return {static_cast<real>((h.flags & kMaximize) != 0 ? -factor : factor),
          static_cast<real>(h.max_value),
          static_cast<real>((h.flags & kDecoupled) != 0 ? 1.0 - scalars[kLrNow] * h.weight_decay : 1.0),
          static_cast<real>(h.weight_decay),
          static_cast<real>(h.beta1),
          static_cast<real>(1.0 - h.beta1),
          static_cast<real>(h.beta2),
          static_cast<real>(1.0 - h.beta2),
          static_cast<real>(scalars[kStepSize]),
          static_cast<real>(scalars[kInvBias2Sqrt]),
          static_cast<real>(h.eps)};
}

// The flags that a group's options ask for.
FASTACCUM_HOST_DEVICE int adam_flags(const Hypers& h) {
  const bool coupled = (h.flags & kDecoupled) == 0 && h.weight_decay != 0.0;
  return (coupled ? kAdamCoupled : 0) | ((h.flags & kAmsgrad) != 0 ? kAdamAmsgrad : 0);
}

}  // namespace fastaccum
