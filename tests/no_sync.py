"""Finds what would make a GPU wait, or allocate, inside the accumulator: by the ops that it dispatches.

Reading a tensor's value is a host read wherever the tensor lies, so it shows on the CPU too, with the
emulated CUDA kernels standing in for the real ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastaccum import accumulator, pending, updates, window

READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"}
ALLOCATES = {
    *("empty", "zeros", "ones", "full", "rand", "randn", "arange", "scalar_tensor", "tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided", "new_empty", "new_zeros"),
    *("clone", "_to_copy", "copy_", "lift_fresh", "lift_fresh_copy", "cat", "stack"),
}


class Forbidden(AssertionError):
    """An op was dispatched that may not be."""


class Forbid(TorchDispatchMode):
    """Raises at an op whose name is in ``names``, unless within :func:`allowed`."""

    exempt = 0

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.names and not Forbid.exempt:
            raise Forbidden(f"{func} inside the accumulator")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    Forbid.exempt += 1
    try:
        yield
    finally:
        Forbid.exempt -= 1


def _exempt(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with allowed():
            return function(*args, **kwargs)

    return wrapper


def watch(monkeypatch, names: set[str] = READS) -> None:
    """From now on ``step()``, ``flush()`` and the hooks may not dispatch those ops.

    What is exempt: the reference backend, the user's own code (closures, hooks), ``nonfinite="error"`` and
    ``stepped``, whose purpose is to tell the host, the generic path, gradients that must be copied to be
    kept, and options that are tensors, which are read once per value.
    """

    def watched(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            options = getattr(self, "_options", {})
            owner = getattr(self, "_owner", lambda: None)()
            options = options or getattr(owner, "_options", {})
            if options.get("nonfinite") == "error" or options.get("backend") == "reference":
                return function(self, *args, **kwargs)
            with Forbid(names):
                return function(self, *args, **kwargs)

        return wrapper

    acc = accumulator.FusedAccumulator
    for cls, method in (
        (acc, "_close_micro_batch"),
        (acc, "_close_window"),
        (pending.Pending, "_take"),
        (pending.Pending, "_end"),
    ):
        monkeypatch.setattr(cls, method, watched(getattr(cls, method)))
    monkeypatch.setattr(acc, "_run_hooks", _exempt(acc._run_hooks))
    monkeypatch.setattr(updates.GenericRule, "update", _exempt(updates.GenericRule.update))
    monkeypatch.setattr(accumulator, "own", _exempt(window.own))
    monkeypatch.setattr(updates.Numbers, "of", _exempt(updates.Numbers.of))


def steady() -> set[str]:
    """What may not be dispatched from the second window on."""
    return READS | ALLOCATES


assert torch.ops.aten.empty.memory_format.overloadpacket.__name__ in ALLOCATES
