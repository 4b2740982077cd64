"""The open window's gradient: kept as it came after one micro-batch, in flat buffers after two.

Nothing is zeroed: a buffer's segment counts only where ``present`` says so, and the first add into it
overwrites. The window knows gradients and their weights; it does not know optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastaccum.layout import CHUNK
from fastaccum.slots import Plan, Slot
from fastaccum.tables import host

Entry = tuple[Slot, Tensor]  # a gradient in its slot's memory order
# (plan, places in it, sums in memory order, the places as a tensor)
Part = tuple[Plan, Sequence[int], list[Tensor], Tensor]


class Selection:
    """The parameters that a window updates, in one index space over all plans: one launch serves them all.

    Attributes:
        slots: the parameters.
        segments: int64 ``[n, 2]``.
        index: int64 ``[len(slots)]``: the slots' segments.
        group: their parameter groups.
        row: their numbers.
        gaps: which of ``slots`` have elements with gaps between them.
    """

    def __init__(self, parts: Sequence[Part], segments: Tensor) -> None:
        """Joins the plans' parts; ``segments`` are those of all plans."""
        self._parts = [(plan, index) for plan, _, _, index in parts]
        self.slots: list[Slot] = []
        indices: list[Tensor] = []
        groups: list[Tensor] = []
        rows: list[Tensor] = []
        for plan, places, _, index in parts:
            whole = len(places) == len(plan.slots)
            self.slots += plan.slots if whole else [plan.slots[k] for k in places]
            rows.append(plan.numbers if whole else plan.numbers[index])
            groups.append(plan.groups if whole else plan.groups[index])
            indices.append(index + plan.first_segment if plan.first_segment else index)
        self.segments, self.index = segments, _joined(indices)
        self.group, self.row = _joined(groups), _joined(rows)
        self.gaps = [i for i, slot in enumerate(self.slots) if not slot.dense]

    def serves(self, parts: Sequence[Part]) -> bool:
        """Whether these are gradients of the same parameters."""
        return len(parts) == len(self._parts) and all(
            plan is mine and index is places
            for (plan, _, _, index), (mine, places) in zip(parts, self._parts, strict=True)
        )


def _joined(parts: list[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.int64)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Finished(NamedTuple):
    """A closed window's sums.

    Attributes:
        parts: per plan with gradients.
        selection: their parameters.
        grads: the same sums over all plans.
    """

    parts: list[Part]
    selection: Selection
    grads: list[Tensor]


NOTHING = Finished([], Selection([], torch.zeros(0, 2, dtype=torch.int64)), [])


class FlatBuffer:
    """A plan's accumulator; padding never counts and is zeroed once."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.data = torch.zeros(plan.layout.numel, dtype=plan.dtype, device=device)
        self.present = torch.zeros(len(plan.slots), dtype=torch.uint8)
        self.views = [
            self.data[offset : offset + numel]
            for offset, numel in zip(plan.layout.offsets, plan.layout.numels, strict=True)
        ]


class Window:
    """What closed micro-batches have left, per slot.

    Attributes:
        total: the sum of the weights.
        kept_weight: the factor of the gradients in ``kept``.
    """

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.partials = torch.zeros(2, 0, dtype=torch.float64)
        self.position: dict[int, tuple[int, int]] = {}  # slot number -> (plan, place in the plan)
        self.buffers: list[FlatBuffer] = []
        self.kept: dict[int, Tensor] = {}  # slot number -> gradient
        self._kept_tables: list[tuple[list[Tensor], Tensor]] | None = None  # the same, by plan
        self.kept_weight: float | Tensor = 1.0
        self.total: float | Tensor = 0.0
        self._device_total: Tensor | None = None  # memory for a total that the host does not know
        self.has_partials = False  # the last add has summed the norm
        self._in_buffers = False  # some buffer's `present` has a 1
        self._segments = NOTHING.selection.segments
        self._selection = NOTHING.selection  # of the last window that was closed
        # Factors of an add, on the host: they travel by value.
        self._weight, self._kept_weight = _scalar(1.0), _scalar(1.0)

    # ------------------------------------------------------------------------------------ layout

    def lay_out(self, plans: list[Plan], n_chunks: int, device: torch.device) -> None:
        """Takes new plans over; gradients that are held move to their new places."""
        # Keyed by parameter: a slot's number may change when parameters are added.
        kept = {id(self._slot(n).param): grad for n, grad in self.kept.items()}
        held = {id(slot.param): slot.shaped(view) for slot, view in self._buffered()}
        self.plans = plans
        # Of all plans: a launch over it writes every chunk.
        self._segments = NOTHING.selection.segments
        if plans:
            shifted = [p.segments + torch.tensor([p.first_chunk * CHUNK, 0]) for p in plans[1:]]
            self._segments = torch.cat([plans[0].segments, *shifted]) if shifted else plans[0].segments
        self.partials = torch.zeros(2, n_chunks, dtype=torch.float64, device=device)
        self.position = {
            slot.number: (i, k) for i, plan in enumerate(plans) for k, slot in enumerate(plan.slots)
        }
        self.buffers = []
        self.has_partials = self._in_buffers = False
        self._kept_tables = None
        self.kept = {
            slot.number: slot.ordered(kept[id(slot.param)])
            for plan in plans
            for slot in plan.slots
            if id(slot.param) in kept
        }
        if held:
            self._allocate(device)
            for buffer in self.buffers:
                for k, slot in enumerate(buffer.plan.slots):
                    if id(slot.param) in held:
                        slot.shaped(buffer.views[k]).copy_(held[id(slot.param)])
                        buffer.present[k] = 1
                        self._in_buffers = True

    def _allocate(self, device: torch.device) -> None:
        self.buffers = [FlatBuffer(plan, device) for plan in self.plans]

    def _slot(self, number: int) -> Slot:
        plan, k = self.position[number]
        return self.plans[plan].slots[k]

    def _buffered(self) -> list[Entry]:
        return [
            (buffer.plan.slots[k], buffer.views[k])
            for buffer in self.buffers
            for k, here in enumerate(host(buffer.present))
            if here
        ]

    # ------------------------------------------------------------------------------------ adding

    @property
    def empty(self) -> bool:
        """No gradient is held."""
        return not self.kept and not self._in_buffers

    def add(
        self,
        backend: SimpleNamespace,
        entries: Sequence[Entry],
        weight: float | Tensor,
        *,
        keep: bool,
        partials: bool,
        norm_type: float,
    ) -> None:
        """Adds a micro-batch's gradients, or keeps the first ones as they came.

        Args:
            backend: the ops.
            entries: gradients in their slots' memory order.
            weight: their factor.
            keep: the window holds nothing yet, so the gradients may be kept as they are.
            partials: sum the norm of the result in the same pass (the window closes now).
            norm_type: of that norm; only 1, 2 and inf are summed here.
        """
        self.has_partials = False
        if keep and self.empty:
            self.kept = {slot.number: grad for slot, grad in entries}
            self._kept_tables = self._by_plan(entries)
            self.kept_weight = weight
            # Where the window closes with them, they go into the tables of its last launches instead.
            upload: Any = getattr(backend, "keep", None) if not partials else None
            for plan, (grads, index) in zip(self.plans, self._kept_tables if upload else (), strict=False):
                upload(plan.segments, grads, index)
            return
        if not self.buffers:
            self._allocate(entries[0][1].device if entries else next(iter(self.kept.values())).device)
        factor = _factor(weight, self._weight)
        kept_factor = _factor(self.kept_weight, self._kept_weight)
        fresh = self._by_plan(entries)
        kept = self._kept_by_plan()
        for i, (plan, buffer) in enumerate(zip(self.plans, self.buffers, strict=True)):
            backend.gather_(
                buffer.data,
                buffer.present,
                self._partials(plan) if partials else None,
                plan.segments,
                *fresh[i],
                *kept[i],
                factor,
                kept_factor,
                norm_type,
            )
        self.kept, self._kept_tables = {}, None
        self._in_buffers = True
        self.has_partials = partials

    def finite(self, backend: SimpleNamespace, entries: Sequence[Entry]) -> bool | Tensor:
        """Whether gradients are finite; on a GPU as a float64 0-d tensor of 1 or 0."""
        flags = torch.zeros_like(self.partials)
        for plan, (grads, index) in zip(self.plans, self._by_plan(entries), strict=True):
            chunks = flags[:, plan.first_chunk : plan.first_chunk + plan.layout.n_chunks]
            backend.norm_(chunks, plan.segments, grads, index, math.inf, None)
        if backend.synchronous:
            return not bool(flags[1].any())
        return 1.0 - flags[1].amax()

    def _kept_by_plan(self) -> list[tuple[list[Tensor], Tensor]]:
        if self._kept_tables is None:
            entries = [(self._slot(number), grad) for number, grad in self.kept.items()]
            self._kept_tables = self._by_plan(entries)
        return self._kept_tables

    def _by_plan(self, entries: Sequence[Entry]) -> list[tuple[list[Tensor], Tensor]]:
        """Per plan: tensors in layout order and their index."""
        if len(self.plans) == 1 and len(entries) == len(self.plans[0].slots):
            plan = self.plans[0]
            if all(map(is_, map(itemgetter(0), entries), plan.slots)):
                return [([grad for _, grad in entries], plan.all_index)]
        lists: list[list[tuple[int, Tensor]]] = [[] for _ in self.plans]
        for slot, grad in entries:
            plan_number, k = self.position[slot.number]
            lists[plan_number].append((k, grad))
        result = []
        for plan, pairs in zip(self.plans, lists, strict=True):
            pairs.sort(key=lambda pair: pair[0])
            result.append(([grad for _, grad in pairs], plan.index([k for k, _ in pairs])))
        return result

    def _partials(self, plan: Plan) -> Tensor:
        return self.partials[:, plan.first_chunk : plan.first_chunk + plan.layout.n_chunks]

    # ----------------------------------------------------------------------------------- closing

    @property
    def device(self) -> torch.device:
        """Where the gradients that are held lie."""
        return next(iter(self.kept.values())).device if self.kept else self.buffers[0].data.device

    def finished(self, entries: Sequence[Entry] = (), keep: bool = False) -> Finished:
        """What the window will hold once these gradients are added: the same tensors, not their numbers yet.

        Args:
            entries: gradients that :meth:`add` is about to be given.
            keep: as for :meth:`add`.
        """
        parts = self._parts(entries, keep)
        if not self._selection.serves(parts):
            self._selection = Selection(parts, self._segments)
        grads = parts[0][2] if len(parts) == 1 else [grad for part in parts for grad in part[2]]
        return Finished(parts, self._selection, grads)

    def _parts(self, entries: Sequence[Entry], keep: bool) -> list[Part]:
        result: list[Part] = []
        as_they_are = self._by_plan(entries) if keep and self.empty and entries else None
        if self.kept and not entries:
            as_they_are = self._kept_by_plan()
        if as_they_are is not None:
            for plan, (grads, index) in zip(self.plans, as_they_are, strict=True):
                if grads:
                    whole = len(grads) == len(plan.slots)
                    result.append((plan, range(len(grads)) if whole else host(index), grads, index))
            return result
        if entries and not self.buffers:
            self._allocate(entries[0][1].device)
        fresh: list[set[int]] = [set() for _ in self.plans]
        for number in (*(slot.number for slot, _ in entries), *self.kept):
            plan_number, k = self.position[number]
            fresh[plan_number].add(k)
        for i, buffer in enumerate(self.buffers if self._in_buffers or entries else ()):
            if len(fresh[i]) == len(buffer.views):
                places: list[int] = list(range(len(buffer.views)))
            else:
                here = host(buffer.present)
                places = [k for k in range(len(buffer.views)) if k in fresh[i] or here[k]]
            if places:
                grads = (
                    buffer.views if len(places) == len(buffer.views) else [buffer.views[k] for k in places]
                )
                result.append((buffer.plan, places, grads, buffer.plan.index(places)))
        return result

    def sum_norm(self, backend: SimpleNamespace, norm_type: float, scale: Tensor | None = None) -> None:
        """Fills ``partials`` if the last add has not."""
        if self.has_partials:
            return
        finished = self.finished()
        chosen = finished.selection
        backend.norm_(self.partials, chosen.segments, finished.grads, chosen.index, norm_type, scale)
        self.has_partials = True

    def count(self, items: float | Tensor) -> None:
        """Adds to the total weight; on the device once a weight is there."""
        if not isinstance(items, Tensor) and not isinstance(self.total, Tensor):
            self.total += items
            return
        if not isinstance(self.total, Tensor):
            if self._device_total is None:
                self._device_total = torch.zeros_like(items)  # type: ignore[arg-type]
            self.total = self._device_total.fill_(self.total)
        self.total.add_(items)

    @property
    def sum_weight(self) -> float | Tensor:
        """The factor that the sums still lack: kept gradients were not multiplied by their weight."""
        return self.kept_weight if self.kept else 1.0

    def gradient(self, slot: Slot, divisor: float | Tensor) -> Tensor | None:
        """A copy of one slot's gradient, averaged, in the parameter's shape."""
        plan, k = self.position[slot.number]
        if slot.number in self.kept:
            total = self.kept[slot.number].to(self.plans[plan].dtype)
            if isinstance(self.kept_weight, Tensor):  # a weight of 0 selects nothing
                total = torch.where(self.kept_weight == 0, 0.0, total)
        elif self.buffers and self.buffers[plan].present[k]:
            total = slot.shaped(self.buffers[plan].views[k])
        else:
            return None
        scale = self.sum_weight / divisor
        # A 0-d float64 would make a 0-d gradient float64.
        return slot.whole(total * (scale.to(total.dtype) if isinstance(scale, Tensor) else scale))

    def reset(self) -> None:
        """Forgets the gradients; buffers stay allocated."""
        self.kept, self._kept_tables = {}, None
        self.kept_weight = 1.0
        self.total = 0.0
        self.has_partials = False
        if self._in_buffers:
            self._in_buffers = False
            for buffer in self.buffers:
                buffer.present.zero_()

    # ------------------------------------------------------------------------------------- state

    def export(self) -> tuple[bool, dict[int, Tensor]]:
        """(kept as they came, copies of the sums by slot number), in the parameters' shapes."""
        if self.kept:
            return True, {n: self._slot(n).whole(grad.clone()) for n, grad in self.kept.items()}
        return False, {slot.number: slot.whole(slot.shaped(view).clone()) for slot, view in self._buffered()}

    def restore(self, kept: bool, sums: dict[int, Tensor], device: torch.device) -> None:
        """The reverse of :meth:`export`; ``sums`` are already checked."""
        self.reset()
        if kept:
            parts = {n: self._slot(n).local(grad) for n, grad in sums.items()}
            self.kept = {n: self._slot(n).ordered(part.to(device, copy=True)) for n, part in parts.items()}
        elif sums:
            self._allocate(device)
            for number, total in sums.items():
                plan, k = self.position[number]
                slot = self._slot(number)
                slot.shaped(self.buffers[plan].views[k]).copy_(slot.local(total))
                self.buffers[plan].present[k] = 1
            self._in_buffers = True

    def memory(self) -> dict[str, int]:
        """Bytes held: the flat buffers, gradients kept as they came, the norm's partials."""
        return {
            "buffer": sum(b.data.numel() * b.data.element_size() for b in self.buffers),
            "kept": sum(g.untyped_storage().nbytes() for g in self.kept.values()),
            "partials": self.partials.numel() * self.partials.element_size(),
        }


def _factor(weight: float | Tensor, memory: Tensor) -> Tensor | None:
    """A weight as the ops take it: None for 1, else float64, on the host unless it lies on the device."""
    if isinstance(weight, Tensor):
        return weight
    return None if weight == 1.0 else memory.fill_(weight)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
