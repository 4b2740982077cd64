// The end of a window, decided once: norm, clip factor, skip, step counters, bias corrections.
#pragma once

#include "hyper.h"

namespace fastaccum {

// min(1, max_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_; max_norm = inf: no clipping.
// Written so that a NaN norm gives NaN, as in stock PyTorch.
FASTACCUM_HOST_DEVICE double clip_factor(double norm, double max_norm) {
  if (max_norm > 1.7976931348623157e308) return 1.0;
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

// beta^t by squaring, most significant bit first: a fixed order of multiplications, so the same bits
// everywhere, where pow() differs between libraries. Error about t * 2^-53 relative.
FASTACCUM_HOST_DEVICE double integer_power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (int bit = 62; bit >= 0; --bit) {
    result = result * result;
    if ((exponent >> bit) & 1) result = result * base;
  }
  return result;
}

FASTACCUM_HOST_DEVICE void bias_corrections(const Hypers& h, double step, double* scalars) {
  const auto t = static_cast<std::int64_t>(step);
  scalars[kStepSize] = h.lr / (1.0 - integer_power(h.beta1, t));
  scalars[kInvBias2Sqrt] = 1.0 / square_root(1.0 - integer_power(h.beta2, t));
  scalars[kFirst] = t == 1 ? 1.0 : 0.0;
  scalars[kLrNow] = h.lr;
}

}  // namespace fastaccum
