"""The ops on a GPU: the list-based signatures of :mod:`fastaccum.ops` over tables and a launcher.

A *launcher* (:mod:`fastaccum.launchers`) is a set of kernels, CUDA C++ or Triton. Each op is one launch,
plus the upload of a table whose addresses have changed. Nothing here waits for the device, and after the
first window nothing allocates.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastaccum import ops
from fastaccum.launchers import Launcher
from fastaccum.layout import Layout
from fastaccum.tables import (
    PRESENT,
    Counters,
    DeviceLayout,
    Groups,
    Pointers,
    Tables,
    entries,
    host,
    mask,
    spread,
    version_of,
)

AMSGRAD = 2  # flag of the hyper-parameter table


class _FinishTables:
    """What stays between windows for one set of outcome tensors."""

    def __init__(self, tables: Tables) -> None:
        self.spans: Tensor | None = None  # on the device
        self.group: list[int] = []
        self.tables = tables


class Backend:
    """The ops of one device over one launcher; called like the functions of ``torch.ops.fastaccum``.

    Attributes:
        name: the launcher's.
        synchronous: False: a result must not be read by the host without need.
    """

    synchronous = False

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.name = launcher.name
        self._launcher, self._device = launcher, device
        self._layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._finish: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._nothing: dict[torch.dtype, Tensor] = {}

    # ------------------------------------------------------------------------------------- tables

    def _layout(self, segments: Tensor) -> DeviceLayout:
        layout = self._layouts.get(segments)
        if layout is None or layout.version != version_of(segments):
            layout = self._layouts[segments] = DeviceLayout(segments, self._device, self._launcher)
        return layout

    def _groups_of(self, hyper: Tensor) -> Groups:
        groups = self._groups.get(hyper)
        if groups is None or groups.version != version_of(hyper):
            rows = host(hyper)
            amsgrad = any(int(row[-1]) & AMSGRAD for row in rows)
            groups = self._groups[hyper] = Groups(rows, amsgrad, version_of(hyper))
        return groups

    def _tables(self) -> Tables:
        return Tables(self._device, self._launcher)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if dtype not in self._nothing:
            self._nothing[dtype] = torch.empty(*shape, dtype=dtype, device=self._device)
        return self._nothing[dtype]

    def keep(self, segments: Tensor, kept: Sequence[Tensor], index: Tensor) -> None:
        """Uploads the table of a window's first gradients now, so that the next gather need not."""
        if kept:
            self._layout(segments).pointers("kept", kept, index)

    # ---------------------------------------------------------------------------------------- ops

    def gather_(
        self, buffer: Tensor, present: Tensor, partials: Tensor | None, segments: Tensor,
        fresh: Sequence[Tensor], fresh_index: Tensor, kept: Sequence[Tensor], kept_index: Tensor,
        weight: Tensor | None = None, kept_weight: Tensor | None = None, norm_type: float = 2.0,
    ) -> None:  # fmt: skip
        """See :func:`fastaccum.ops.gather_`."""
        layout = self._layout(segments)
        new = spread(entries(fresh), fresh_index, layout.n)
        words = [w | PRESENT if here else w for w, here in zip(new, host(present), strict=False)]
        table = layout.pointers("kept", kept, kept_index) if kept else None
        self._launcher.gather(layout, buffer, partials, words, table, weight, kept_weight, float(norm_type))
        for index, tensors in ((fresh_index, fresh), (kept_index, kept)):
            if tensors:
                present.index_fill_(0, index[: len(tensors)], 1)

    def norm_(
        self, partials: Tensor, segments: Tensor, tensors: Sequence[Tensor], index: Tensor,
        norm_type: float = 2.0, scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See :func:`fastaccum.ops.norm_`."""
        layout = self._layout(segments)
        pointers = layout.pointers("grads", tensors, index)
        self._launcher.norm(layout, partials, pointers, float(norm_type), scale)

    def finish_(
        self, norm: Tensor, group_norms: Tensor, factor: Tensor, skip: Tensor, skipped: Tensor,
        partials: Tensor, spans: Tensor, max_norm: Tensor, weight: Tensor, divisor: Tensor,
        steps: Tensor | None, scalars: Tensor | None, row: Tensor | None, group: Tensor | None,
        hyper: Tensor | None, lrs: Sequence[Tensor], lr_groups: Tensor | None, norm_type: float = 2.0,
        scale: Tensor | None = None, skip_nonfinite: bool = True, found_inf: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See :func:`fastaccum.ops.finish_`."""
        if hyper is not None and self._launcher.capturing(self._device) and len(lrs) < len(hyper):
            raise RuntimeError(
                "a CUDA graph is being captured and a learning rate is a number, which replays would use for "
                "ever: make lr a tensor on the parameters' device (torch's optimizers take one)"
            )
        kept = self._finish.get(spans)
        if kept is None:
            kept = self._finish[spans] = _FinishTables(self._tables())
        if kept.spans is None:
            # By norm group, so that the kernel need not look for a group's.
            ordered = sorted(host(spans), key=lambda span: span[0])
            on_host = torch.tensor(ordered, dtype=torch.int64).view(-1, 3)
            kept.spans = on_host.to(self._device, copy=True)
        if steps is None:
            steps = self._empty(torch.float32, 0)
            scalars = self._empty(torch.float64, 0, ops.SCALAR_COLUMNS)
        n = steps.numel()
        if len(kept.group) != n:
            kept.group = [0] * n
        active: list[int] = []
        if row is not None and group is not None:
            active, of_group = host(row), list(kept.group)
            for k, g in zip(active, host(group), strict=False):
                of_group[k] = g
            kept.group = of_group
        counters = Counters(
            kept.spans,
            None if hyper is None else self._groups_of(hyper),
            list(zip(host(lr_groups), lrs, strict=True)) if lrs and lr_groups is not None else [],
            host(max_norm),
            mask(active, n),
            kept.tables.put("group", kept.group) if n else self._empty(torch.int64, 0),
            kept.tables,
        )
        out = (norm, group_norms, factor, skip, skipped, steps, scalars, partials)
        self._launcher.finish(
            self._device,
            out,
            counters,
            weight,
            divisor,
            float(norm_type),
            scale,
            bool(skip_nonfinite),
            found_inf,
        )

    def scale_(
        self, tensors: Sequence[Tensor], factor: Tensor, factor_index: Tensor, max_value: float = math.inf
    ) -> None:
        """See :func:`fastaccum.ops.scale_`."""
        self.scale_into_(tensors, tensors, factor, factor_index, max_value)

    def scale_into_(
        self, out: Sequence[Tensor], tensors: Sequence[Tensor], factor: Tensor, factor_index: Tensor,
        max_value: float = math.inf,
    ) -> None:  # fmt: skip
        """See :func:`fastaccum.ops.scale_into_`."""
        if not tensors:
            return
        # Another thread's call must not write into the same tables.
        layout = self._layout(_segments_of(tuple(t.numel() for t in tensors), threading.get_ident()))
        index = host(factor_index)[: layout.n]
        words = [*entries(tensors), *entries(out), *index]
        table = layout.tables.put("scale", words)
        self._launcher.scale(layout, Pointers(table, words), factor.view(-1), float(max_value))

    def adam_(
        self, params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor], copies: Sequence[Tensor], *rest: Any,
    ) -> None:  # fmt: skip
        """See :func:`fastaccum.ops.adam_`."""
        self._update("adam", params, (exp_avgs, exp_avg_sqs, max_exp_avg_sqs), copies, *rest)

    def sgd_(
        self,
        params: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        copies: Sequence[Tensor],
        *rest: Any,
    ) -> None:
        """See :func:`fastaccum.ops.sgd_`."""
        self._update("sgd", params, (momentum_buffers, [], []), copies, *rest)

    def _update(
        self, op: str, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor], grads: Sequence[Tensor], segments: Tensor, index: Tensor, group: Tensor,
        row: Tensor, hyper: Tensor, scalars: Tensor, factor: Tensor, skip: Tensor,
    ) -> None:  # fmt: skip
        if not params:
            return
        layout = self._layout(segments)
        meta = [g | k << 32 for g, k in zip(host(group), host(row), strict=False)][: len(params)]
        rows = [
            spread(entries(t), index, layout.n) if t else [0] * layout.n for t in (params, *states, copies)
        ]
        words = [word for some in (*rows, spread(meta, index, layout.n)) for word in some]
        table = Pointers(layout.tables.put("update", words), words)
        pointers = layout.pointers("grads", grads, index)
        self._launcher.update(op, layout, table, pointers, self._groups_of(hyper), scalars, factor, skip)


@lru_cache(maxsize=16)
def _segments_of(numels: tuple[int, ...], thread: int) -> Tensor:
    layout = Layout.of(numels)
    rows = list(zip(layout.offsets, layout.numels, strict=True))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
