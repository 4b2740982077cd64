"""Which implementation runs on which device, and why the others do not.

A backend is a set of functions named like the ops (:data:`fastaccum.ops.NAMES`), called without the
public functions' checks: the accumulator builds its arguments itself. ``fastaccum.backends()`` (calling
the module is calling :func:`explain`) and ``python -m fastaccum doctor`` show the choice.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fastaccum import ops, reference

NAMES = ("native", "triton", "reference")


@functools.cache
def native_module() -> tuple[Any, str | None]:
    """The compiled module, or None and the reason."""
    try:
        return importlib.import_module("fastaccum._C"), None
    except ImportError as error:
        return None, _reason_from_build() or str(error)


def _reason_from_build() -> str | None:
    """What setup.py wrote down when it built a package without native code."""
    from importlib import resources

    note = resources.files("fastaccum") / "_build_note.txt"
    return note.read_text().strip() if note.is_file() else None


def reasons_against(backend: str, device: torch.device) -> list[str]:
    """Why a backend cannot serve a device; empty if it can."""
    if backend == "reference":
        return []
    if backend == "native":
        module, reason = native_module()
        if module is None:
            return [f"the native library is not there: {reason}"]
        if device.type != "cpu":
            return [f"there are no native kernels for {device.type} yet"]
        wanted = os.environ.get("FASTACCUM_ISA")
        if wanted and wanted not in module.isa_available().split():
            return [f"FASTACCUM_ISA={wanted}: this CPU (and build) has {module.isa_available()}"]
        return []
    return ["the Triton kernels are not there yet"]


def choose(backend: str, device: torch.device) -> str:
    """The backend's name for a device.

    Args:
        backend: ``auto`` takes the first that can serve the device, in the order native, triton,
            reference, or what ``FASTACCUM_BACKEND`` says.
        device: where the gradients are.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a backend was asked for that cannot run; every reason is given.
    """
    asked = backend
    if backend == "auto":
        backend = os.environ.get("FASTACCUM_BACKEND", "auto")
        asked = f"FASTACCUM_BACKEND={backend}"
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend must be one of auto, {', '.join(NAMES)}, got {asked!r}")
    if backend == "auto":
        return next(name for name in NAMES if not reasons_against(name, device))
    reasons = reasons_against(backend, device)
    if reasons:
        raise RuntimeError(
            f"backend {asked!r} cannot run on {device}: " + "; ".join(reasons)
            + ". Use backend='auto' to take one that can."
        )  # fmt: skip
    return backend


@functools.cache
def load(name: str) -> SimpleNamespace:
    """The functions of a backend that :func:`choose` has named."""
    functions: dict[str, Callable[..., None]] = {}
    for op in ops.NAMES:
        if name == "reference":
            functions[op] = getattr(reference, op)
        else:
            functions[op] = getattr(torch.ops.fastaccum, op).default
    return SimpleNamespace(name=name, **functions)


def explain(device: torch.device | str | None = None) -> dict[str, dict[str, list[str]]]:
    """For each device: each backend and the reasons why it cannot run (none: it can).

    Args:
        device: one device, or None for the CPU and every GPU that torch sees.
    """
    if device is not None:
        devices = [torch.device(device)]
    else:
        devices = [torch.device("cpu")]
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {str(d): {name: reasons_against(name, d) for name in NAMES} for d in devices}


def _register() -> None:
    """Gives torch.ops.fastaccum its CPU kernels: native ones, or the reference in their place."""
    module, _ = native_module()
    if module is not None:
        return
    for op in ops.NAMES:
        ops.LIBRARY.impl(op, getattr(reference, op), "CompositeExplicitAutograd")


_register()


class _Callable(ModuleType):
    def __call__(self, device: torch.device | str | None = None) -> dict[str, dict[str, list[str]]]:
        return explain(device)


sys.modules[__name__].__class__ = _Callable
