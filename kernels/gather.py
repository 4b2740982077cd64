"""Adds a micro-batch's gradients into the flat buffer and sums the result, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .strand import (
    FLOAT64,
    LANES,
    PER_CHUNK,
    PRESENT,
    STRAND,
    STRANDS,
    TAGS,
    at_strand,
    contribution,
    full_row,
    join,
    launch,
    load_entry,
    locate,
    narrow,
    norm_kind,
    not_finite,
    one,
    ragged_row,
    raw,
    store_partial,
    tag_of,
    tag_sets,
    unrolled,
    widen,
)

_TABLES = ["partials", "strand_segment", "segments", "fresh", "kept", "weight", "kept_weight"]


@triton.jit
def _weighted(gradient, weight):
    """The product; a weight of 0 selects nothing, where 0 * NaN would be NaN."""
    return tl.where(weight == 0, 0.0, gradient * weight).to(gradient.dtype)


@triton.jit
def _row(
    at, mask, buffer, strand, new, old, has_new, has_old, has_kept, read, written, by, kept_by,
    sums, bad,
    BUFFER: tl.constexpr, REAL: tl.constexpr, FRESH: tl.constexpr, KEPT: tl.constexpr, SUM: tl.constexpr,
    NORM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of every strand; returns the running sums."""
    place = buffer + (strand * STRAND)[:, None] + at
    total = widen(tl.load(place, mask=mask & read, other=0), BUFFER, REAL)
    if KEPT:
        first = _weighted(load_entry(old, at, mask, KEPT, REAL, ALIGNED), kept_by)
        total = tl.where(has_kept, first, total)
    if FRESH:
        scaled = _weighted(load_entry(new, at, mask, FRESH, REAL, ALIGNED), by)
        total = tl.where(has_new, tl.where(has_old, total + scaled, scaled), total)
    stored = narrow(total, BUFFER)
    tl.store(place, stored, mask=mask & written)
    if SUM:
        # The value as stored; what does not count is 0 already, being masked in every load.
        x = widen(stored, BUFFER, tl.float64)
        sums = join(sums, contribution(x, 2.0, 1.0, NORM), NORM)
        if BUFFER == FLOAT64:
            bad = bad | not_finite(x)
    return sums, bad


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=_TABLES)
def gather_kernel(
    buffer,
    partials,
    row_stride,
    strand_segment,
    segments,
    fresh,
    kept,
    weight,
    kept_weight,
    BUFFER: tl.constexpr,
    REAL: tl.constexpr,
    FRESH: tl.constexpr,
    KEPT: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Buffer = (buffer if present else kept * kept_weight) + fresh * weight."""
    strand, inside, segment, start, left = locate(strand_segment, segments)
    new = tl.load(fresh + segment, mask=inside, other=0)
    present = (new & PRESENT) != 0
    has_new = (tag_of(new) != 0)[:, None]
    new = at_strand(new, start)
    by = tl.load(weight).to(REAL)
    old = new
    has_kept = has_new
    kept_by = by
    has_old = present[:, None]
    written = has_new
    if KEPT:
        old = tl.load(kept + segment, mask=inside, other=0)
        old = tl.where(present, 0, old)
        has_kept = (tag_of(old) != 0)[:, None]
        old = at_strand(old, start)
        has_old = has_old | has_kept
        written = has_new | has_kept
        kept_by = tl.load(kept_weight).to(REAL)
    read = present[:, None]
    if not SUM:
        read = read & has_new
    sums = tl.zeros((STRANDS, LANES), tl.float64)
    bad = tl.zeros((STRANDS, LANES), tl.int32)
    if UNROLLED:
        for r in tl.static_range(16):
            at, mask = full_row(r, left)
            sums, bad = _row(
                at, mask, buffer, strand, new, old, has_new, has_old, has_kept, read, written, by,
                kept_by, sums, bad, BUFFER, REAL, FRESH, KEPT, SUM, NORM, ALIGNED,
            )  # fmt: skip
    else:
        for r in range(16):
            at, mask = full_row(r, left)
            sums, bad = _row(
                at, mask, buffer, strand, new, old, has_new, has_old, has_kept, read, written, by,
                kept_by, sums, bad, BUFFER, REAL, FRESH, KEPT, SUM, NORM, ALIGNED,
            )  # fmt: skip
    at, mask = ragged_row(left)
    sums, bad = _row(
        at, mask, buffer, strand, new, old, has_new, has_old, has_kept, read, written, by,
        kept_by, sums, bad, BUFFER, REAL, FRESH, KEPT, SUM, NORM, ALIGNED,
    )  # fmt: skip
    if SUM:
        store_partial(partials, row_stride, sums, bad, NORM, BUFFER == FLOAT64)


def launch_gather(
    buffer: Tensor,
    partials: Tensor | None,
    strand_segment: Tensor,
    segments: Tensor,
    fresh: Tensor,
    kept: Tensor | None,
    weight: Tensor | None,
    kept_weight: Tensor | None,
    norm_type: float,
    *,
    dtypes: Sequence[Iterable[int]] | None = None,
    aligned: bool = False,
) -> None:
    """Adds gradients into a flat buffer: ``(buffer or kept * kept_weight) + fresh * weight``.

    Args:
        buffer: flat, of any of the four dtypes; arithmetic is float64 if it is, else float32.
        partials: float64 ``[2, n_chunks]`` or None; every chunk of the launch is written.
        strand_segment: int32 ``[n_chunks * 16]``; -1 where there is no segment.
        segments: int64 ``[n, 2]`` of offset and numel.
        fresh: int64 ``[n]`` pointer entries, with the bit that says the buffer holds the segment.
        kept: likewise, of what stands in for the buffer where it holds nothing; or None.
        weight: float64 0-d on the device, like ``kept_weight``; None is 1.
        kept_weight: factor of ``kept``.
        norm_type: 1, 2 or inf.
        dtypes: the tags that may occur in ``fresh`` and in ``kept``; None is all of them.
        aligned: every address in the entries is a multiple of 16.
    """
    fresh_types, kept_types = tag_sets(dtypes, 2)
    kept_types = 0 if kept is None else kept_types
    tag = TAGS[buffer.dtype]
    launch(
        gather_kernel,
        strand_segment.numel() // PER_CHUNK,
        buffer.device,
        raw(buffer),
        one(buffer.device) if partials is None else partials,
        0 if partials is None else partials.stride(0),
        strand_segment,
        segments,
        fresh,
        fresh if kept is None else kept,
        one(buffer.device) if weight is None else weight,
        one(buffer.device) if kept_weight is None else kept_weight,
        BUFFER=tag,
        REAL=tl.float64 if tag == FLOAT64.value else tl.float32,
        FRESH=fresh_types,
        KEPT=kept_types,
        SUM=partials is not None,
        NORM=norm_kind(norm_type),
        ALIGNED=aligned,
        # With a third tensor the unrolled rows spill; a loop has enough loads under way.
        UNROLLED=unrolled(aligned, fresh_types) and not kept_types,
    )
