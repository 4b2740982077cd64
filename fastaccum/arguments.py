"""Checks of user arguments: what was expected, what came, which argument, what to do.

Those that know no tensors serve ``fastaccum.mindspore`` too, so torch is imported where one is looked at.
"""

from __future__ import annotations

import math
import numbers
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

REDUCTIONS = ("mean", "sum")
TAKES = ("step", "backward")
NONFINITE = ("skip", "propagate", "error")
NONFINITE_MICRO_BATCH = ("keep", "drop")


def is_number(value: object) -> bool:
    """A real number that is not a bool (``True`` must not mean 1)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def accumulation_steps(value: Any) -> int:
    """An int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"accumulation_steps must be an int (micro-batches per update), got {value!r} "
            f"of type {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {value}; 1 updates every time")
    return int(value)


def whole(value: Any, argument: str, least: int, what: str) -> int:
    """An int of at least ``least``; ``what`` says what it counts."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{argument} must be an int ({what}), got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{argument} must be at least {least} ({what}), got {value}")
    return int(value)


def positive(value: Any, argument: str, advice: str) -> float | None:
    """None, or a number above 0 (inf allowed, NaN not)."""
    if value is None:
        return None
    if not is_number(value):
        raise TypeError(f"{argument} must be a number or None, got {value!r} of type {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{argument} must be above 0, got {value}; {advice}")
    return float(value)


def max_norm(value: Any, argument: str = "max_norm") -> float | None:
    """A limit for the global norm, or None for no clipping."""
    return positive(value, argument, "to train without clipping pass None, to freeze use lr=0")


def choice(value: Any, argument: str, allowed: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return str(value)


def norm_type(value: Any) -> float:
    """Any p above 0, or inf (also as a string, as torch takes it)."""
    if isinstance(value, str) and value in ("inf", "+inf"):
        return math.inf
    if not is_number(value):
        raise TypeError(f"norm_type must be a number or 'inf', got {value!r}")
    if not value > 0:
        raise ValueError(f"norm_type must be above 0 (inf for the maximum), got {value}")
    return float(value)


def weight(value: Any, argument: str, on_device: bool = False) -> float | Tensor:
    """A micro-batch's weight: finite, at least 0; a number or a tensor of one element.

    With ``on_device`` a tensor stays one, float64 and 0-d: its value is not looked at.
    """
    import torch
    from torch import Tensor

    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{argument} must be a number or a 0-d real tensor, got {value!r}")
        if on_device:
            return value.detach().to(torch.float64).view(())
        value = value.item()
    if not is_number(value):
        raise TypeError(
            f"{argument} must be a number or a 0-d tensor, got {value!r} of type {type(value).__name__}"
        )
    if not (0.0 <= value <= sys.float_info.max):
        raise ValueError(f"{argument} must be finite and at least 0 (a number of items), got {value}")
    return float(value)


def boolean(value: Any, argument: str) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be a bool, got {value!r}")
    return value


def accumulate_dtype(value: Any) -> torch.dtype | None:
    """None or one of the four floating dtypes."""
    import torch

    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if value is not None and value not in allowed:
        raise ValueError(f"accumulate_dtype must be None or one of {allowed}, got {value!r}")
    return value


def not_yet(**arguments: Any) -> None:
    """Refuses arguments whose feature is not built yet, rather than ignore them."""
    for name, (value, default, instead) in arguments.items():
        if value is not default and value != default:
            raise NotImplementedError(f"{name}={value!r} is not supported yet; {instead}")
