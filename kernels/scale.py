"""Target = clamp(source * factor), for clipping in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .strand import (
    FLOAT64,
    PER_CHUNK,
    at_strand,
    clamp,
    double_bits,
    double_of,
    full_row,
    launch,
    load_entry,
    locate,
    ragged_row,
    real_types,
    store_entry,
    tag_of,
    tag_sets,
    unrolled,
)

_TABLES = ["strand_segment", "segments", "table", "factor"]


@triton.jit
def _row(
    at, mask, source, target, by, limit,
    REAL: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of every strand."""
    x = load_entry(source, at, mask, SOURCE, REAL, ALIGNED) * by
    store_entry(target, at, clamp(x, limit), mask, TARGET, ALIGNED)


@triton.jit(do_not_specialize=["row_stride", "limit_bits"], do_not_specialize_on_alignment=_TABLES)
def scale_kernel(
    strand_segment,
    segments,
    table,
    row_stride,
    factor,
    limit_bits,
    REAL: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """One chunk, of the strands whose arithmetic is REAL."""
    strand, inside, segment, start, left = locate(strand_segment, segments)
    source = tl.load(table + segment, mask=inside, other=0)
    target = tl.load(table + row_stride + segment, mask=inside, other=0)
    inside = inside & (tag_of(source) != 0) & (tag_of(target) != 0)
    double = (tag_of(source) == FLOAT64) | (tag_of(target) == FLOAT64)
    inside = inside & (double == (REAL == tl.float64))
    which = tl.load(table + 2 * row_stride + segment, mask=inside, other=0)
    by = tl.load(factor + which, mask=inside, other=1.0)
    limit = double_of(limit_bits)
    # A factor of 1 changes nothing in place: such tensors are not even read.
    same = ((source ^ target) & 0x00FFFFFFFFFFFFFF) == 0
    left = tl.where(inside, left, 0)
    if limit == float("inf"):
        left = tl.where(same & (by == 1.0), 0, left)
    source = at_strand(source, start)
    target = at_strand(target, start)
    by = by.to(REAL)[:, None]
    limit = limit.to(REAL)
    if UNROLLED:
        for r in tl.static_range(16):
            at, mask = full_row(r, left)
            _row(at, mask, source, target, by, limit, REAL, SOURCE, TARGET, ALIGNED)
    else:
        for r in range(16):
            at, mask = full_row(r, left)
            _row(at, mask, source, target, by, limit, REAL, SOURCE, TARGET, ALIGNED)
    at, mask = ragged_row(left)
    _row(at, mask, source, target, by, limit, REAL, SOURCE, TARGET, ALIGNED)


def launch_scale(
    strand_segment: Tensor,
    segments: Tensor,
    table: Tensor,
    factor: Tensor,
    max_value: float,
    *,
    dtypes: Sequence[Iterable[int]] | None = None,
    aligned: bool = False,
) -> None:
    """Writes ``clamp(source * factor, -max_value, max_value)``; one launch, or two (see ``dtypes``).

    Args:
        strand_segment: int32 ``[n_chunks * 16]``; -1 where there is no segment.
        segments: int64 ``[n, 2]`` of offset and numel.
        table: int64 ``[3, n]``: entries of sources and of targets, and indices into ``factor``.
        factor: float64 ``[f]`` on the device.
        max_value: inf does not clamp.
        dtypes: the tags that may occur among the sources and the targets; None is all of them. If
            float64 stands beside others, one launch does the float64 arithmetic and one the float32.
        aligned: every address in the entries is a multiple of 16.
    """
    types = tag_sets(dtypes, 2)
    for real, (source, target) in real_types(types, (0, 1)):
        launch(
            scale_kernel,
            strand_segment.numel() // PER_CHUNK,
            table.device,
            strand_segment,
            segments,
            table,
            table.stride(0),
            factor,
            double_bits(max_value),
            REAL=real,
            SOURCE=source,
            TARGET=target,
            ALIGNED=aligned,
            UNROLLED=unrolled(aligned, source, target),
        )
