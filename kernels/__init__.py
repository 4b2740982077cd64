"""Triton kernels, one file per op: a kernel and its launcher.

Importing the package imports neither Triton nor a kernel; the first use of a launcher does. A launcher
takes tables (see each function), launches once, and checks nothing: its caller has.
"""

from __future__ import annotations

import importlib
from typing import Any

# Each launcher and its file.
_FILES = {
    "launch_gather": "gather",
    "launch_norm": "norm",
    "launch_finish": "finish",
    "launch_scale": "scale",
    "launch_adam": "adam",
    "launch_sgd": "sgd",
}

__all__ = [*_FILES]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    launcher = getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
    globals()[name] = launcher
    return launcher


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})
