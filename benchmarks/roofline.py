"""What the memory of this machine gives in this process: copy, triad and reduction loops.

The loops are timed in the same rounds as the work they are compared with, because the bandwidth
of a shared machine moves from minute to minute. Bytes are the ones the program names: a store
that first reads its cache line ("write allocate") costs the machine more than is counted, which
is why the in-place triad, whose lines are read anyway, is usually the faster of the two.
"""

from __future__ import annotations

import time

import torch

# Bytes moved per float32 element.
LOOPS = {"copy": 8, "triad": 12, "triad in place": 12, "reduction": 4}
ELEMENTS = 1 << 25  # 128 MiB a tensor: four times a large L3
TINY = 1 << 12


class Roofline:
    """Three resident tensors and the four loops over them."""

    def __init__(self, elements: int = ELEMENTS) -> None:
        self.elements = elements
        self.a, self.b, self.c = (torch.full((elements,), 1.0 + i) for i in range(3))

    def sample(self) -> dict[str, float]:
        """Seconds of one pass of each loop."""
        calls = {
            "copy": lambda: self.c.copy_(self.a),
            "triad": lambda: torch.add(self.a, self.b, alpha=1e-3, out=self.c),
            # The factor is so small that the sum neither grows nor stops being computed.
            "triad in place": lambda: self.b.add_(self.a, alpha=1e-12),
            "reduction": self.a.sum,
        }
        seconds = {}
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start
        return seconds

    def bytes(self) -> dict[str, int]:
        """Bytes that each loop of `sample` moves."""
        return {name: per * self.elements for name, per in LOOPS.items()}
