"""Sums |x|^p over each chunk of tensors that lie anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .strand import (
    HAS_FLOAT64,
    LANES,
    PER_CHUNK,
    POWER,
    STRANDS,
    at_strand,
    contribution,
    double_bits,
    double_of,
    full_row,
    join,
    launch,
    load_entry,
    locate,
    norm_kind,
    not_finite,
    one,
    ragged_row,
    store_partial,
    tag_sets,
    unrolled,
)

_TABLES = ["partials", "strand_segment", "segments", "pointers", "scale"]


@triton.jit
def _row(
    at, mask, entry, power, unit, sums, bad,
    TYPES: tl.constexpr, NORM: tl.constexpr, FLAGS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of every strand; returns the running sums."""
    x = load_entry(entry, at, mask, TYPES, tl.float64, ALIGNED)
    sums = join(sums, contribution(x, power, unit, NORM), NORM)
    if FLAGS:
        bad = bad | not_finite(x)
    return sums, bad


@triton.jit(do_not_specialize=["row_stride", "power_bits"], do_not_specialize_on_alignment=_TABLES)
def norm_kernel(
    partials,
    row_stride,
    strand_segment,
    segments,
    pointers,
    power_bits,
    scale,
    TYPES: tl.constexpr,
    NORM: tl.constexpr,
    FLAGS: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """One chunk's partial."""
    strand, inside, segment, start, left = locate(strand_segment, segments)
    entry = at_strand(tl.load(pointers + segment, mask=inside, other=0), start)
    power = double_of(power_bits)
    unit = power
    if NORM == POWER:
        unit = tl.load(scale)
        unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
    sums = tl.zeros((STRANDS, LANES), tl.float64)
    bad = tl.zeros((STRANDS, LANES), tl.int32)
    if UNROLLED:
        for r in tl.static_range(16):
            at, mask = full_row(r, left)
            sums, bad = _row(at, mask, entry, power, unit, sums, bad, TYPES, NORM, FLAGS, ALIGNED)
    else:
        for r in range(16):
            at, mask = full_row(r, left)
            sums, bad = _row(at, mask, entry, power, unit, sums, bad, TYPES, NORM, FLAGS, ALIGNED)
    at, mask = ragged_row(left)
    sums, bad = _row(at, mask, entry, power, unit, sums, bad, TYPES, NORM, FLAGS, ALIGNED)
    store_partial(partials, row_stride, sums, bad, NORM, FLAGS)


def launch_norm(
    partials: Tensor,
    strand_segment: Tensor,
    segments: Tensor,
    pointers: Tensor,
    norm_type: float,
    scale: Tensor | None,
    *,
    dtypes: Sequence[Iterable[int]] | None = None,
    aligned: bool = False,
) -> None:
    """Sums ``|x|^p`` (for p other than 1, 2, inf: ``|x / scale|^p``) over each chunk.

    Args:
        partials: float64 ``[2, n_chunks]``; every chunk of the launch is written.
        strand_segment: int32 ``[n_chunks * 16]``; -1 where there is no segment.
        segments: int64 ``[n, 2]`` of offset and numel.
        pointers: int64 ``[n]`` pointer entries; segments without one count as 0.
        norm_type: any p > 0, or inf.
        scale: float64 0-d on the device, or None; 0, inf and NaN count as 1.
        dtypes: the tags that may occur in ``pointers``, as a sequence of one; None is all of them.
        aligned: every address in the entries is a multiple of 16.
    """
    (types,) = tag_sets(dtypes, 1)
    kind = norm_kind(norm_type)
    launch(
        norm_kernel,
        strand_segment.numel() // PER_CHUNK,
        partials.device,
        partials,
        partials.stride(0),
        strand_segment,
        segments,
        pointers,
        double_bits(norm_type),
        one(partials.device) if scale is None else scale,
        TYPES=types,
        NORM=kind,
        FLAGS=bool(types & HAS_FLOAT64) or kind == POWER.value,
        ALIGNED=aligned,
        UNROLLED=unrolled(aligned, types) and kind != POWER.value,
    )
