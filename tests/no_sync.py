"""Finds what would make a GPU wait, or allocate, inside the accumulator: by the ops that it dispatches.

Reading a tensor's value is a host read wherever the tensor lies, so it shows on the CPU too, with the
emulated CUDA kernels standing in for the real ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from torch.utils._python_dispatch import TorchDispatchMode

from fastaccum import accumulator, gradients, pending, updates

READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"}
# What a steady window may dispatch: our launches, writes into tensors that are there, and views. A list of
# what may not be would miss `a / b`, which allocates and launches as well.
STEADY = {
    *("fill_", "zero_", "index_fill_", "add_", "div_", "copy_", "set_"),
    *("detach", "view", "alias", "slice", "select", "as_strided", "unsqueeze", "permute", "t", "transpose"),
    *("unbind", "expand", "reshape", "_unsafe_view", "view_as_real", "unfold", "narrow", "unflatten"),
}


class Forbidden(AssertionError):
    """An op was dispatched that may not be."""


class Forbid(TorchDispatchMode):
    """Raises at a host read, or with ``steady`` at what is not in STEADY, unless within :func:`allowed`."""

    exempt = 0

    steady = False  # from the second window on

    def __init__(self, besides: set[str]) -> None:
        super().__init__()
        self.besides = besides

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        ours = func.namespace == "fastaccum"
        wrong = name not in STEADY | self.besides and not ours if Forbid.steady else name in READS
        if wrong and not Forbid.exempt:
            raise Forbidden(f"{func} inside the accumulator")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def steady() -> Iterator[None]:
    Forbid.steady = True
    try:
        yield
    finally:
        Forbid.steady = False


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


def watch(monkeypatch, besides: set[str] = frozenset()) -> None:
    """From now on ``step()``, ``flush()`` and the hooks may not read a value.

    While ``Forbid.steady`` is set they may dispatch nothing but STEADY and ``besides``, either.

    What is exempt: the reference backend, the user's own code (closures, hooks), ``nonfinite="error"`` and
    ``stepped``, whose purpose is to tell the host, the generic path, gradients that must be copied to be
    kept, and options that are tensors, which are read once per value.
    """

    def watched(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            owner = getattr(self, "_owner", lambda: self)()
            options = getattr(owner, "_options", None)
            if options is not None and (options.nonfinite == "error" or options.backend == "reference"):
                return function(self, *args, **kwargs)
            with Forbid(besides):
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
    monkeypatch.setattr(gradients, "own", _exempt(gradients.own))
    monkeypatch.setattr(updates.Numbers, "of", _exempt(updates.Numbers.of))
