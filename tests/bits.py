"""Comparing tensors bit for bit, with the storage around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastaccum import ops
from fastaccum.layout import Layout

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def clone(value: Any) -> Any:
    """A copy of nested arguments, whole storages included (so canaries and misalignment stay)."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: copied(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copied(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        old = value.untyped_storage()
        if old._cdata not in storages:
            storages[old._cdata] = whole(value).clone().untyped_storage()
        new = torch.empty(0, dtype=value.dtype)
        return new.set_(storages[old._cdata], value.storage_offset(), value.shape, value.stride())

    return copied(value)


def whole(tensor: Tensor) -> Tensor:
    """Everything in a tensor's storage, canaries included."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def different(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ in any bit; a NaN equals a NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    bits = INTEGERS[a.element_size()]
    if torch.equal(a.view(bits), b.view(bits)):
        return torch.zeros((), dtype=torch.bool).expand(a.shape)
    differ = a.view(bits) != b.view(bits)
    return differ & ~(a.isnan() & b.isnan()) if a.is_floating_point() else differ


def tensors_of(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of arguments by name, lists unrolled."""
    for name, value in named.items():
        for i, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(tensor, Tensor):
                yield (f"{name}[{i}]" if isinstance(value, (list, tuple)) else name), tensor


def assert_same(
    got: Mapping[str, Any], wanted: Mapping[str, Any], note: str = "", exact: bool = True
) -> None:
    """Every tensor and what lies around it is the same, bit for bit (or to 1e-12)."""
    for (name, a), (_, b) in zip(tensors_of(got), tensors_of(wanted), strict=True):
        a, b = whole(a), whole(b)
        if not exact and a.is_floating_point():
            rtol = 1e-12 if a.dtype == torch.float64 else torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=rtol, atol=0, equal_nan=True, msg=f"{note}: {name}")
            continue
        bad = different(a, b)
        if bad.any():
            at = bad.nonzero().flatten()
            raise AssertionError(
                f"{note}: {name} differs in {len(at)} of {a.numel()} places, first at {at[0]}: "
                f"{a[at[0]].item()!r}, not {b[at[0]].item()!r}"
            )


def total_norm(
    ops: Any, tensors: list[Tensor], norm_type: float = 2.0, groups: list[int] | None = None
) -> tuple[Tensor, int]:
    """The norm of tensors by ``norm_`` and ``finish_``, and whether any value was not finite."""
    layout = Layout.of([t.numel() for t in tensors], groups)
    partials = torch.full((2, layout.n_chunks), math.nan, dtype=torch.float64)
    rows = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True))).view(-1, 2)
    index = torch.arange(len(tensors))
    scale = None
    if norm_type not in (1.0, 2.0, math.inf):
        ops.norm_(partials, rows, tensors, index, norm_type=math.inf)
        scale = partials[0].max()
    ops.norm_(partials, rows, tensors, index, norm_type=norm_type, scale=scale)
    n = len({g for g, _, _ in layout.spans}) or 1
    double = {"dtype": torch.float64}
    norm, skip = torch.zeros(()), torch.zeros((), dtype=torch.int32)
    one = torch.ones((), **double)
    ops.finish_(
        norm, torch.zeros(n, **double), torch.zeros(n, **double), skip,
        torch.zeros((), dtype=torch.int64), partials, torch.tensor(layout.spans).view(-1, 3),
        torch.full((n,), math.inf, **double), one, one, norm_type=norm_type, scale=scale,
    )  # fmt: skip
    return norm, int(skip)


def count_steps(steps: Tensor, scalars: Tensor, row: Tensor, group: Tensor, hyper: Tensor) -> None:
    """Counts a step as ``finish_`` does it for a window whose gradient is nothing but zeros."""
    double = {"dtype": torch.float64}
    one, infinite = torch.ones((), **double), torch.full((1,), math.inf, **double)
    ops.finish_(
        torch.zeros(()), torch.zeros(1, **double), torch.zeros(1, **double),
        torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int64),
        torch.zeros(2, 0, **double), torch.zeros(0, 3, dtype=torch.int64),
        infinite, one, one, steps=steps, scalars=scalars, row=row, group=group, hyper=hyper,
    )  # fmt: skip
