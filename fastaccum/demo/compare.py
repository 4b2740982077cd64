"""When two trainings count as the same.

Float32 trainings differ in their last bits, and the difference grows with every step; a fixed
tolerance would be too strict for one training and blind in another. So stock PyTorch sets the
measure. The same loop is run in float64, and the largest distance of fastaccum's loss from it may
be at most `FACTOR` times the largest such distance of stock's own float32 runs (its loop over
single tensors, its foreach and its fused optimizer), plus `FLOOR`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FACTOR, FLOOR = 4.0, 1e-6
RULE = f"error <= {FACTOR:g} x the largest error of stock's loop, foreach, fused + {FLOOR:g}"


@dataclass(frozen=True)
class Verdict:
    """How far a run was from float64, and how far it may be."""

    windows: int
    error: float
    stock_errors: dict[str, float]
    limit: float

    @property
    def agreed(self) -> bool:
        """Whether the run is as exact as stock's; never where a loss was not finite."""
        return self.error <= self.limit


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of two loss curves; NaN if either has a value that is not finite."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.nan


def judge(losses: Sequence[float], exact: Sequence[float], stock: Mapping[str, Sequence[float]]) -> Verdict:
    """Applies the rule to the windows that the float64 run took part in.

    Args:
        losses: The loss of every window, by fastaccum.
        exact: The same in float64, perhaps only of the first windows.
        stock: The same by each of stock PyTorch's runs.
    """
    windows = len(exact)
    errors = {name: largest_difference(run[:windows], exact) for name, run in stock.items()}
    limit = FACTOR * max(errors.values()) + FLOOR
    if not all(map(math.isfinite, errors.values())):
        limit = math.nan  # a broken measure proves nothing
    return Verdict(windows, largest_difference(losses[:windows], exact), errors, limit)
