"""The two sets of GPU kernels behind one interface: CUDA C++ and Triton.

Each method is one launch. CUDA takes what changes every window by value, in the launch's arguments; Triton
cannot, so there it goes into small tables on the device, uploaded when it has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastaccum import ops
from fastaccum.tables import (
    DTYPE_MASK,
    MISALIGNED,
    TAG_SHIFT,
    TAGS,
    Counters,
    DeviceLayout,
    Groups,
    Pointers,
    Tables,
    Uploader,
    bits,
    entries,
)

for _schema in (
    "launch_gather(Tensor(a!) buffer, Tensor(b!)? partials, Tensor strand_segment, Tensor segments, "
    "Tensor fresh, Tensor? kept, Tensor? weight, Tensor? kept_weight, float norm_type) -> ()",
    "launch_norm(Tensor(a!) partials, Tensor strand_segment, Tensor segments, Tensor pointers, "
    "float norm_type, Tensor? scale) -> ()",
    "launch_finish(Tensor(a!) norm, Tensor(b!) group_norms, Tensor(c!) factor, Tensor(d!) skip, "
    "Tensor(e!) skipped, Tensor(f!) steps, Tensor(g!) scalars, Tensor partials, Tensor spans, "
    "Tensor words, int n_groups, Tensor weight, Tensor divisor, Tensor group, float norm_type, "
    "Tensor? scale, bool skip_nonfinite, Tensor(h!)? found_inf) -> ()",
    "launch_scale(Tensor strand_segment, Tensor segments, Tensor table, Tensor factor, "
    "float max_value) -> ()",
    "launch_adam(Tensor strand_segment, Tensor segments, Tensor table, Tensor grads, Tensor words, "
    "Tensor scalars, Tensor factor, Tensor skip, bool full) -> ()",
    "launch_sgd(Tensor strand_segment, Tensor segments, Tensor table, Tensor grads, Tensor words, "
    "Tensor scalars, Tensor factor, Tensor skip, bool full) -> ()",
    "launch_store(Tensor(a!) table, Tensor words) -> ()",
    "launch_upload(Tensor(a!) table, Tensor pinned) -> ()",
    "launch_prepare(Tensor device) -> int",
):
    ops.LIBRARY.define(_schema)


class Launcher(Uploader, Protocol):
    """A set of kernels. See :mod:`fastaccum.ops` for what each computes."""

    name: str

    def gather(
        self, layout: DeviceLayout, buffer: Tensor, partials: Tensor | None, fresh: list[int],
        kept: Pointers | None, weight: Tensor | None, kept_weight: Tensor | None, norm_type: float,
    ) -> None:  # fmt: skip
        """``fresh``: one entry per segment."""

    def norm(
        self, layout: DeviceLayout, partials: Tensor, pointers: Pointers, norm_type: float,
        scale: Tensor | None,
    ) -> None:  # fmt: skip
        """One launch."""

    def finish(
        self, device: torch.device, out: Sequence[Any], counters: Counters, weight: Tensor, divisor: Tensor,
        norm_type: float, scale: Tensor | None, skip_nonfinite: bool, found_inf: Tensor | None,
    ) -> None:  # fmt: skip
        """``out``: what is written, and the partials."""

    def scale(self, layout: DeviceLayout, table: Pointers, factor: Tensor, max_value: float) -> None:
        """``table``: sources, targets, indices of factors."""

    def update(
        self, op: str, layout: DeviceLayout, table: Pointers, grads: Pointers, groups: Groups,
        scalars: Tensor, factor: Tensor, skip: Tensor,
    ) -> None:  # fmt: skip
        """``table``: parameters, three states, copies, and rows of group and scalars."""


def _on_capture(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch asks about the current device's stream
        return torch.cuda.is_current_stream_capturing()


def _tags(words: Sequence[int]) -> set[int]:
    """Which dtypes' tags occur."""
    return {(word & DTYPE_MASK) >> TAG_SHIFT for word in words} - {0}


_FLOAT64 = TAGS[torch.float64] >> TAG_SHIFT


class CudaLauncher:
    """The CUDA C++ kernels."""

    name = "native"

    def __init__(self, device: torch.device) -> None:
        self._ops = torch.ops.fastaccum
        # Loads every kernel, too: a first launch inside a graph's capture may not.
        self.limit = int(self._ops.launch_prepare(torch.empty(0, device=device)))

    def capturing(self, device: torch.device) -> bool:
        """See Uploader."""
        return _on_capture(device)

    def store(self, table: Tensor, words: Tensor) -> None:
        """See Uploader."""
        self._ops.launch_store(table, words)

    def upload(self, table: Tensor, pinned: Tensor) -> None:
        """See Uploader."""
        self._ops.launch_upload(table, pinned)

    def gather(
        self, layout: DeviceLayout, buffer: Tensor, partials: Tensor | None, fresh: list[int],
        kept: Pointers | None, weight: Tensor | None, kept_weight: Tensor | None, norm_type: float,
    ) -> None:  # fmt: skip
        """See Launcher."""
        words = layout.tables.by_value("fresh", fresh)
        self._ops.launch_gather(
            buffer, partials, layout.strand_segment, layout.segments, words,
            None if kept is None else kept.table, weight, kept_weight, norm_type,
        )  # fmt: skip

    def norm(
        self, layout: DeviceLayout, partials: Tensor, pointers: Pointers, norm_type: float,
        scale: Tensor | None,
    ) -> None:  # fmt: skip
        """See Launcher."""
        self._ops.launch_norm(
            partials, layout.strand_segment, layout.segments, pointers.table, norm_type, scale
        )

    @staticmethod
    def _rows(groups: Groups | None, lrs: Sequence[tuple[int, Tensor]] = ()) -> list[int]:
        """Groups as words: the row, then the entry of a learning rate on the device or 0."""
        if groups is None:
            return []
        at = dict(zip([g for g, _ in lrs], entries([lr for _, lr in lrs]), strict=True))
        return [word for g, row in enumerate(groups.rows) for word in (*bits(row), at.get(g, 0))]

    def finish(
        self, device: torch.device, out: Sequence[Any], counters: Counters, weight: Tensor, divisor: Tensor,
        norm_type: float, scale: Tensor | None, skip_nonfinite: bool, found_inf: Tensor | None,
    ) -> None:  # fmt: skip
        """See Launcher."""
        n_groups = 0 if counters.groups is None else len(counters.groups.rows)
        words = [*self._rows(counters.groups, counters.lrs), *bits(counters.limits), *counters.active]
        self._ops.launch_finish(
            *out, counters.spans, counters.tables.by_value("words", words), n_groups, weight,
            divisor, counters.group, norm_type, scale, skip_nonfinite, found_inf,
        )  # fmt: skip

    def scale(self, layout: DeviceLayout, table: Pointers, factor: Tensor, max_value: float) -> None:
        """See Launcher."""
        self._ops.launch_scale(layout.strand_segment, layout.segments, table.table, factor, max_value)

    def update(
        self, op: str, layout: DeviceLayout, table: Pointers, grads: Pointers, groups: Groups,
        scalars: Tensor, factor: Tensor, skip: Tensor,
    ) -> None:  # fmt: skip
        """See Launcher."""
        rows = layout.tables.by_value("groups", self._rows(groups))
        full = groups.amsgrad or _FLOAT64 in table.tags(layout.n) | grads.tags(layout.n)
        getattr(self._ops, f"launch_{op}")(
            layout.strand_segment, layout.segments, table.table, grads.table, rows, scalars, factor, skip,
            full,
        )  # fmt: skip


class TritonLauncher:
    """The Triton kernels."""

    name = "triton"
    limit = 0  # nothing travels by value

    def __init__(self, device: torch.device) -> None:
        import fastaccum.kernels as kernels

        self._kernels, self._device = kernels, device
        # Kernels are compiled for the dtypes that may occur. What has once been seen stays in, so that a
        # parameter that comes and goes does not compile anew.
        self._seen: dict[tuple[str, int], set[int]] = {}
        self._one = torch.ones((), dtype=torch.float64, device=device)

    def capturing(self, device: torch.device) -> bool:
        """See Uploader."""
        return _on_capture(device)

    def store(self, table: Tensor, words: Tensor) -> None:
        """Never called: the limit is 0."""
        raise AssertionError(f"{words.numel()} words by value, and Triton's kernels take none")

    def upload(self, table: Tensor, pinned: Tensor) -> None:
        """See Uploader."""
        table.copy_(pinned, non_blocking=True)

    def _scalar(self, value: Tensor | None, tables: Tables, role: str) -> Tensor:
        """A float64 scalar on the device."""
        if value is None:
            return self._one
        if value.device == self._device and self._device.type != "cpu":
            return value
        return tables.put(role, bits([float(value)])).view(torch.float64)

    def _options(self, op: str, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        dtypes = []
        for i, words in enumerate(rows):
            seen = self._seen.setdefault((op, i), set())
            seen |= _tags(words)
            dtypes.append(tuple(sorted(seen)))
        return {"dtypes": dtypes, "aligned": not any(word & MISALIGNED for some in rows for word in some)}

    def gather(
        self, layout: DeviceLayout, buffer: Tensor, partials: Tensor | None, fresh: list[int],
        kept: Pointers | None, weight: Tensor | None, kept_weight: Tensor | None, norm_type: float,
    ) -> None:  # fmt: skip
        """See Launcher."""
        self._kernels.launch_gather(
            buffer, partials, layout.strand_segment, layout.segments,
            layout.tables.put("fresh", fresh), None if kept is None else kept.table,
            self._scalar(weight, layout.tables, "weight"),
            self._scalar(kept_weight, layout.tables, "kept_weight"), norm_type,
            **self._options("gather", (fresh, [] if kept is None else kept.words)),
        )  # fmt: skip

    def norm(
        self, layout: DeviceLayout, partials: Tensor, pointers: Pointers, norm_type: float,
        scale: Tensor | None,
    ) -> None:  # fmt: skip
        """See Launcher."""
        self._kernels.launch_norm(
            partials, layout.strand_segment, layout.segments, pointers.table, norm_type, scale,
            **self._options("norm", (pointers.words,)),
        )  # fmt: skip

    def finish(
        self, device: torch.device, out: Sequence[Any], counters: Counters, weight: Tensor, divisor: Tensor,
        norm_type: float, scale: Tensor | None, skip_nonfinite: bool, found_inf: Tensor | None,
    ) -> None:  # fmt: skip
        """See Launcher."""
        tables = counters.tables
        rows = [] if counters.groups is None else counters.groups.rows
        words = bits([value for row in rows for value in row])
        hyper = tables.put("hyper", words).view(torch.float64).view(-1, ops.HYPER_COLUMNS)
        lrs = None
        if counters.lrs:
            at = dict(zip([g for g, _ in counters.lrs], entries([lr for _, lr in counters.lrs]), strict=True))
            lrs = tables.put("lrs", [at.get(g, 0) for g in range(len(rows))])
        self._kernels.launch_finish(
            *out, counters.spans, tables.put("limits", bits(counters.limits)).view(torch.float64),
            self._scalar(weight, tables, "total"), self._scalar(divisor, tables, "divisor"),
            tables.put("active", counters.active), counters.group, hyper, norm_type, scale,
            skip_nonfinite,
            lrs=lrs, found_inf=found_inf,
        )  # fmt: skip

    def scale(self, layout: DeviceLayout, table: Pointers, factor: Tensor, max_value: float) -> None:
        """See Launcher."""
        n = layout.n
        self._kernels.launch_scale(
            layout.strand_segment, layout.segments, table.table.view(3, n), factor, max_value,
            **self._options("scale", (table.words[:n], table.words[n : 2 * n])),
        )  # fmt: skip

    def update(
        self, op: str, layout: DeviceLayout, table: Pointers, grads: Pointers, groups: Groups,
        scalars: Tensor, factor: Tensor, skip: Tensor,
    ) -> None:  # fmt: skip
        """See Launcher."""
        n = layout.n
        rows = [table.words[i * n : (i + 1) * n] for i in range(5)]
        words = bits([value for row in groups.rows for value in row])
        hyper = layout.tables.put("hyper", words).view(torch.float64).view(-1, ops.HYPER_COLUMNS)
        getattr(self._kernels, f"launch_{op}")(
            layout.strand_segment, layout.segments, table.table.view(6, n), grads.table, hyper, scalars,
            factor, skip,
            **self._options(op, (*rows, grads.words)),
        )  # fmt: skip
