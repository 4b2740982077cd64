"""Gradient accumulation for MindSpore on the same native core; never imports torch.

Install it as ``pip install 'fastaccum[mindspore]'``, or without torch: the wheel with
``pip install --no-deps``, then ``mindspore`` and ``numpy<2``. It runs on the CPU, in PyNative and in graph
mode.
"""

from __future__ import annotations

try:
    import mindspore as _mindspore  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fastaccum.mindspore needs MindSpore, which cannot be imported "
        f"({error}): pip install 'fastaccum[mindspore]'"
    ) from error

from fastaccum.mindspore.accumulator import FusedAccumulator
from fastaccum.mindspore.gradient_sum import GradientSum
from fastaccum.mindspore.train_step import TrainStep

__all__ = ["FusedAccumulator", "GradientSum", "TrainStep"]
