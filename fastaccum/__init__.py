"""fastaccum: fused gradient accumulation, clipping and optimizer updates for PyTorch.

Importing this package imports nothing heavy: torch comes with the first name that needs it, so that
``fastaccum.mindspore`` and ``python -m fastaccum doctor`` work where torch is missing or broken.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastaccum._version import __version__

_HOME = {
    "FusedAccumulator": "fastaccum.accumulator",
    "clip_grad_norm_": "fastaccum.clip",
    "get_total_norm": "fastaccum.clip",
    "backends": "fastaccum.dispatch",
    "report": "fastaccum.doctor",
    "ops": "fastaccum.ops",
    "accumulation_steps_for": "fastaccum.batch_size",
    "scale_lr": "fastaccum.batch_size",
    "WarmUp": "fastaccum.batch_size",
    "memory_plan": "fastaccum.memory",
    "find_micro_batch_size": "fastaccum.micro_batch",
    "MemoryMonitor": "fastaccum.monitor",
    "convert_batch_norm": "fastaccum.batch_norm",
    "warn_of_small_batches": "fastaccum.batch_norm",
    "virtual_batch_norm_statistics": "fastaccum.batch_norm",
}

__all__ = [
    "FusedAccumulator",
    "MemoryMonitor",
    "WarmUp",
    "__version__",
    "accumulation_steps_for",
    "backends",
    "clip_grad_norm_",
    "convert_batch_norm",
    "find_micro_batch_size",
    "get_total_norm",
    "memory_plan",
    "ops",
    "report",
    "scale_lr",
    "virtual_batch_norm_statistics",
    "warn_of_small_batches",
]

if TYPE_CHECKING:
    from fastaccum import ops
    from fastaccum.accumulator import FusedAccumulator
    from fastaccum.batch_norm import (
        convert_batch_norm,
        virtual_batch_norm_statistics,
        warn_of_small_batches,
    )
    from fastaccum.batch_size import WarmUp, accumulation_steps_for, scale_lr
    from fastaccum.clip import clip_grad_norm_, get_total_norm
    from fastaccum.dispatch import backends
    from fastaccum.doctor import report
    from fastaccum.memory import memory_plan
    from fastaccum.micro_batch import find_micro_batch_size
    from fastaccum.monitor import MemoryMonitor

if not TYPE_CHECKING:  # to which a misspelt name would be any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'fastaccum' has no attribute {name!r}")
        try:
            module = importlib.import_module(_HOME[name])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"fastaccum.{name} needs PyTorch: pip install torch (fastaccum.mindspore works without)",
                name="torch",
            ) from error
        return module if _HOME[name] == f"fastaccum.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
