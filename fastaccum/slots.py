"""One slot per physical parameter: its group, its memory order, its place in the flat buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fastaccum import sharding
from fastaccum.layout import Layout


class Slot:
    """A parameter as the accumulator sees it.

    Attributes:
        param: the parameter.
        number: its position among all slots (and in the step counters).
        group: number of its parameter group.
        dense: its elements fill one stretch of memory, so kernels may run over it.
        contiguous: row-major; then a gradient has the same memory order if it is contiguous.
        stride: its strides, for the other dense ones.
        sharded: it is a DTensor; shapes and orders are then those of this rank's part.
    """

    __slots__ = ("contiguous", "dense", "group", "number", "param", "sharded", "stride")

    def __init__(self, param: Tensor, number: int, group: int) -> None:
        self.param = param
        self.number = number
        self.group = group
        self.sharded = sharding.is_sharded(param)
        data = self.data
        self.contiguous = data.is_contiguous()
        self.dense = self.contiguous or _is_dense(data)
        self.stride = data.stride()

    @property
    def data(self) -> Tensor:
        """What kernels see of the parameter."""
        return sharding.local(self.param) if self.sharded else self.param

    def local(self, tensor: Tensor) -> Tensor:
        """What kernels see of a tensor that is spread as the parameter is."""
        return sharding.local(tensor) if self.sharded and sharding.is_sharded(tensor) else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """The reverse: a DTensor for the part of a parameter that is one."""
        return sharding.like(self.param, tensor) if self.sharded else tensor

    def ordered(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it lies in memory in this slot's order, else a copy that does."""
        if self.contiguous or not self.dense:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        if tensor.stride() == self.stride:
            return tensor
        copy = torch.empty_strided(tensor.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)

    def taken(self, grad: Tensor) -> Tensor:
        """A gradient as it goes into a window: dense, in this slot's memory order.

        Raises:
            RuntimeError: it has another shape than the parameter.
        """
        if self.sharded:
            grad = sharding.gradient(self.param, grad)
        if grad.is_sparse:
            grad = grad.coalesce().to_dense()
        elif grad.layout != torch.strided:
            grad = grad.to_dense()
        if grad.shape != self.data.shape:
            raise RuntimeError(
                f"the gradient of parameter {self.number} has shape {list(grad.shape)}, the parameter has "
                f"{list(self.data.shape)}"
            )
        # Kernels see memory, not the bit that flips its sign.
        return self.ordered(grad.resolve_neg() if grad.is_neg() else grad)

    def empty(self) -> Tensor:
        """An uninitialised tensor like the parameter, in this slot's memory order."""
        if self.dense:
            return torch.empty_like(self.data, memory_format=torch.preserve_format)
        # With gaps, preserve_format would keep the order of the strides, not the row-major one.
        return torch.empty_like(self.data, memory_format=torch.contiguous_format)

    def shaped(self, flat: Tensor) -> Tensor:
        """A flat stretch of a buffer in the parameter's shape."""
        if self.contiguous or not self.dense:
            return flat.view(self.data.shape)
        return flat.as_strided(self.data.shape, self.stride)


def _is_dense(tensor: Tensor) -> bool:
    """Strides are those of a permuted contiguous tensor."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@dataclasses.dataclass
class Plan:
    """The slots that share one accumulation dtype, laid out in one index space.

    Attributes:
        dtype: what gradients are accumulated in.
        slots: in layout order: by norm group, then by number.
        layout: their offsets.
        first_chunk: where this plan's chunks start among all plans' chunks.
        first_segment: where its segments start among all plans'.
        segments: int64 ``[n, 2]``.
        all_index: int64 ``[n]``: 0, 1, 2, …
        numbers: int64 ``[n]``: the slots' numbers.
        groups: int64 ``[n]``: the slots' parameter groups.
        indices: what :meth:`index` has made lately.
    """

    dtype: torch.dtype
    slots: list[Slot]
    layout: Layout
    first_chunk: int
    first_segment: int
    segments: Tensor
    all_index: Tensor
    numbers: Tensor
    groups: Tensor
    indices: dict[tuple[int, ...], Tensor] = dataclasses.field(default_factory=dict, compare=False)

    def index(self, positions: Sequence[int]) -> Tensor:
        """Positions as an int64 tensor, the same one for the same positions."""
        if len(positions) == len(self.slots):
            return self.all_index
        key = tuple(positions)
        if key not in self.indices:
            if len(self.indices) >= 512:  # take="backward" has one per bucket: 120 for GPT-2
                self.indices.pop(next(iter(self.indices)))
            self.indices[key] = torch.tensor(positions, dtype=torch.int64)
        return self.indices[key]


def accumulation_dtype(param_dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """float32 for 16- and 32-bit gradients, float64 for float64, unless one was asked for."""
    if asked is not None:
        return asked
    return torch.float64 if param_dtype == torch.float64 else torch.float32


def make_plans(
    slots: Sequence[Slot],
    norm_group_of: Sequence[int],
    asked: torch.dtype | None,
    kinds: Sequence[int] | None = None,
) -> tuple[list[Plan], list[tuple[int, int, int]], list[int], int]:
    """Lays slots out.

    Args:
        slots: all slots.
        norm_group_of: norm group of each parameter group.
        asked: ``accumulate_dtype``.
        kinds: each slot's kind of sharding; a chunk's sum is of one kind.

    Returns:
        Plans, one per accumulation dtype; spans ``(norm group, first chunk, end chunk)`` over all
        plans' chunks numbered on; each span's kind; the number of chunks.
    """
    n_kinds = max(kinds, default=0) + 1 if kinds else 1

    def sums(slot: Slot) -> int:
        """Of one such number a chunk may hold slots: norm group and kind in one."""
        return norm_group_of[slot.group] * n_kinds + (kinds[slot.number] if kinds else 0)

    by_dtype: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        by_dtype.setdefault(accumulation_dtype(slot.param.dtype, asked), []).append(slot)
    plans: list[Plan] = []
    spans: list[tuple[int, int, int]] = []
    span_kinds: list[int] = []
    chunks = 0
    for dtype, members in by_dtype.items():
        members.sort(key=lambda slot: (sums(slot), slot.number))
        layout = Layout.of([s.data.numel() for s in members], list(map(sums, members)))
        plans.append(
            Plan(
                dtype,
                members,
                layout,
                chunks,
                sum(len(plan.slots) for plan in plans),
                torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)), dtype=torch.int64),
                torch.arange(len(members)),
                torch.tensor([s.number for s in members], dtype=torch.int64),
                torch.tensor([s.group for s in members], dtype=torch.int64),
            )
        )
        spans += [(both // n_kinds, chunks + begin, chunks + end) for both, begin, end in layout.spans]
        span_kinds += [both % n_kinds for both, _, _ in layout.spans]
        chunks += layout.n_chunks
    return plans, spans, span_kinds, chunks
