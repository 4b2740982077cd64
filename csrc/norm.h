// Norm: what one element contributes, and how two contributions join. Sums are float64.
#pragma once

#include "strand.h"

namespace fastaccum {

// max() that keeps a NaN from either side; fmax and vector max instructions drop it.
FASTACCUM_HOST_DEVICE double max_or_nan(double a, double b) { return (a > b || a != a) ? a : b; }

// kPower: |x / scale|^p, where scale is the largest |x|, so that no power overflows.
template <Norm kNorm>
struct Contribution {
  double power = 2.0;
  double scale = 1.0;

  FASTACCUM_HOST_DEVICE double of(double x) const {
    // A float32 (or narrower) square is exact in float64, so fused and unfused adds give the same bits.
    if constexpr (kNorm == Norm::kTwo) return x * x;
    if constexpr (kNorm == Norm::kPower) return raised(magnitude(x) / scale, power);
    return magnitude(x);
  }
  static FASTACCUM_HOST_DEVICE double join(double a, double b) {
    if constexpr (kNorm == Norm::kInf) return max_or_nan(a, b);
    return a + b;
  }
};

// Adjacent fold, x[i] = x[2i] + x[2i+1] until one is left: the order is part of the contract.
template <Norm kNorm, int kCount>
FASTACCUM_HOST_DEVICE double fold(double* x) {
  for (int n = kCount; n > 1; n /= 2)
    for (int i = 0; i < n / 2; ++i) x[i] = Contribution<kNorm>::join(x[2 * i], x[2 * i + 1]);
  return x[0];
}

// What powers are divided by: the largest magnitude, but neither 0 nor what makes inf / inf of itself.
FASTACCUM_HOST_DEVICE double usable_scale(double largest) {
  return largest > 0.0 && largest <= 1.7976931348623157e308 ? largest : 1.0;
}

// The norm that a joined total stands for.
FASTACCUM_HOST_DEVICE double norm_of_total(double total, Norm norm, double power, double scale) {
  if (norm == Norm::kTwo) return square_root(total);
  if (norm == Norm::kPower) return total == 0.0 ? 0.0 : raised(total, 1.0 / power) * scale;
  return total;
}

}  // namespace fastaccum
