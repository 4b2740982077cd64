"""The statistics of a noisy machine: medians, spreads, and when a difference is no difference.

Providers are timed round by round, so sample i of every provider saw the same weather. The value
of a ratio is the ratio of the medians; its spread comes from the rounds' own ratios, in which
the weather common to both sides has cancelled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A difference counts only when it is at least so many times its spread.
SPREADS = 5.0
CANNOT_TELL = "cannot tell"


def iqr(samples: Sequence[float]) -> float:
    """Interquartile range (inclusive quartiles); 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def spread_of_median(samples: Sequence[float]) -> float:
    """Standard error of the median, from the IQR (1.349 sigma); infinite below three samples.

    The median of n normal samples has 1.2533 times the standard error of their mean.
    """
    if len(samples) < 3:
        return math.inf
    return 1.2533 * iqr(samples) / 1.349 / math.sqrt(len(samples))


def summary(samples: Sequence[float]) -> dict[str, float]:
    """What the JSON records of one list of samples."""
    return {
        "median": statistics.median(samples),
        "iqr": iqr(samples),
        "min": min(samples),
        "n": len(samples),
    }


@dataclass(frozen=True)
class Estimate:
    """A measured value and the spread of it."""

    value: float
    spread: float

    def against(self, target: float) -> int:
        """-1 below ``target``, 1 above it, 0 when the difference is within `SPREADS` spreads."""
        difference = self.value - target
        if not abs(difference) >= SPREADS * self.spread:
            return 0
        return 1 if difference >= 0 else -1

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(self.value * factor, self.spread * factor)


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Ratio of the medians of two lists of samples that were taken in the same rounds.

    Raises:
        ValueError: the lists differ in length, so they cannot be of the same rounds.
    """
    if len(over) != len(under):
        raise ValueError(f"samples must be paired by round, got {len(over)} and {len(under)}")
    rounds = [a / b for a, b in zip(over, under, strict=True)]
    value = statistics.median(over) / statistics.median(under)
    return Estimate(value, spread_of_median(rounds))


def speed_words(estimate: Estimate) -> str:
    """The ratio of somebody's time to ours, in words."""
    return {1: "faster", -1: "slower", 0: CANNOT_TELL}[estimate.against(1.0)]
