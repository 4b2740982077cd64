// The tables that updates read: hyper-parameters per group, and what changes with the step per parameter.
#pragma once

#include "strand.h"

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

// One row of that table.
struct Hypers {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, max_value;
  int norm_group, flags;
};
FASTACCUM_HOST_DEVICE Hypers hypers_of(const double* row) {
  return {row[kLr],
          row[kBeta1],
          row[kBeta2],
          row[kEps],
          row[kWeightDecay],
          row[kMomentum],
          row[kDampening],
          row[kMaxValue],
          static_cast<int>(row[kNormGroup]),
          static_cast<int>(row[kHyperFlags])};
}

// Columns of the per-parameter scalars: what changes with the step count and the schedule.
enum Scalars : int { kStepSize = 0, kInvBias2Sqrt, kFirst, kLrNow, kScalarColumns };

}  // namespace fastaccum
