// The end of a window, decided once: norm, clip factor, skip, step counters, bias corrections.
#pragma once

#include "norm.h"

namespace fastaccum {

// Columns of the hyper-parameter table, one float64 row per parameter group.
enum Hyper : int {
  kLr = 0,
  kBeta1,
  kBeta2,
  kEps,
  kWeightDecay,
  kMomentum,
  kDampening,
  kMaxValue,
  kNormGroup,
  kHyperFlags,
  kHyperColumns
};
enum HyperFlag : int { kDecoupled = 1, kAmsgrad = 2, kMaximize = 4, kNesterov = 8 };

// Columns of the per-parameter scalars that change with the step count.
enum Scalars : int { kStepSize = 0, kInvBias2Sqrt, kFirst, kScalarColumns };

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

FASTACCUM_HOST_DEVICE void bias_corrections(const double* hyper, double step, double* scalars) {
  const auto t = static_cast<std::int64_t>(step);
  scalars[kStepSize] = hyper[kLr] / (1.0 - integer_power(hyper[kBeta1], t));
  scalars[kInvBias2Sqrt] = 1.0 / square_root(1.0 - integer_power(hyper[kBeta2], t));
  scalars[kFirst] = t == 1 ? 1.0 : 0.0;
}

}  // namespace fastaccum
