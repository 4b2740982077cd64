"""SGD with momentum, dampening, nesterov and weight decay, in one pass over parameters and state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .strand import (
    DAMPENING,
    FIRST,
    LR_NOW,
    MOMENTUM,
    NESTEROV,
    WEIGHT_DECAY,
    finished,
    full_row,
    hyper_of,
    launch_update,
    load_entry,
    locate,
    locate_update,
    ragged_row,
    row_entry,
    scalar_of,
    store_copy,
    store_entry,
)

_TABLES = ["strand_segment", "segments", "table", "grads", "hyper", "scalars", "factor", "skip"]


@triton.jit
def _row(
    at, mask, param, buffer, copy, grad, by, limit, decays, weight_decay, has_momentum, keep, take,
    nesterov, momentum, lr,
    REAL: tl.constexpr, PARAM: tl.constexpr, STATE0: tl.constexpr, COPY: tl.constexpr, GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of every strand."""
    g = finished(load_entry(grad, at, mask, GRAD, REAL, ALIGNED), by, limit)
    p = load_entry(param, at, mask, PARAM, REAL, ALIGNED)
    g = tl.where(decays, g + p * weight_decay, g)
    if STATE0:
        b = load_entry(buffer, at, mask & has_momentum, STATE0, REAL, ALIGNED) * keep + g * take
        store_entry(buffer, at, b, mask & has_momentum, STATE0, ALIGNED)
        g = tl.where(has_momentum, tl.where(nesterov, g + b * momentum, b), g)
    p = p - g * lr
    store_entry(param, at, p, mask, PARAM, ALIGNED)
    store_copy(copy, param, at, p, mask, COPY, PARAM, ALIGNED)


@triton.jit(do_not_specialize=["row_stride", "hyper_stride"], do_not_specialize_on_alignment=_TABLES)
def sgd_kernel(
    strand_segment,
    segments,
    table,
    row_stride,
    grads,
    hyper,
    hyper_stride,
    scalars,
    factor,
    skip,
    REAL: tl.constexpr,
    PARAM: tl.constexpr,
    STATE0: tl.constexpr,
    STATE1: tl.constexpr,
    STATE2: tl.constexpr,
    COPY: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Sutskever et al. 2013 in PyTorch's form."""
    if tl.load(skip) != 0:
        return
    strand, inside, segment, start, left = locate(strand_segment, segments)
    param, grad, hyper, scalars, inside, flags, by, limit = locate_update(
        table, row_stride, grads, hyper, hyper_stride, scalars, factor, segment, inside, start, REAL
    )
    left = tl.where(inside, left, 0)
    buffer = row_entry(table, row_stride, 1, segment, inside, start)
    copy = row_entry(table, row_stride, 4, segment, inside, start)
    weight_decay = hyper_of(hyper, WEIGHT_DECAY, inside)
    decays = (weight_decay != 0.0)[:, None]
    weight_decay = weight_decay.to(REAL)[:, None]
    momentum = hyper_of(hyper, MOMENTUM, inside)
    has_momentum = (momentum != 0.0)[:, None]
    nesterov = ((flags & NESTEROV) != 0)[:, None]
    # On the first step the buffer, which is zero, becomes the gradient.
    first = scalar_of(scalars, FIRST, inside) != 0.0
    keep = tl.where(first, 0.0, momentum).to(REAL)[:, None]
    take = tl.where(first, 1.0, 1.0 - hyper_of(hyper, DAMPENING, inside)).to(REAL)[:, None]
    momentum = momentum.to(REAL)[:, None]
    lr = scalar_of(scalars, LR_NOW, inside).to(REAL)[:, None]
    if UNROLLED:
        for r in tl.static_range(16):
            at, mask = full_row(r, left)
            _row(
                at, mask, param, buffer, copy, grad, by, limit, decays, weight_decay, has_momentum, keep,
                take, nesterov, momentum, lr, REAL, PARAM, STATE0, COPY, GRAD, ALIGNED,
            )  # fmt: skip
    else:
        for r in range(16):
            at, mask = full_row(r, left)
            _row(
                at, mask, param, buffer, copy, grad, by, limit, decays, weight_decay, has_momentum, keep,
                take, nesterov, momentum, lr, REAL, PARAM, STATE0, COPY, GRAD, ALIGNED,
            )  # fmt: skip
    at, mask = ragged_row(left)
    _row(
        at, mask, param, buffer, copy, grad, by, limit, decays, weight_decay, has_momentum, keep, take,
        nesterov, momentum, lr,
        REAL, PARAM, STATE0, COPY, GRAD, ALIGNED,
    )  # fmt: skip


def launch_sgd(
    strand_segment: Tensor,
    segments: Tensor,
    table: Tensor,
    grads: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
    *,
    dtypes: Sequence[Iterable[int]] | None = None,
    aligned: bool = False,
) -> None:
    """Updates parameters and momentum buffers; one launch, or two (see ``dtypes``).

    Args:
        strand_segment: int32 ``[n_chunks * 16]``; -1 where there is no segment.
        segments: int64 ``[n, 2]`` of offset and numel.
        table: int64 ``[6, n]``: entries of the parameters, momentum buffers, nothing, nothing and
            lower-precision copies, and rows of ``hyper`` | of ``scalars`` << 32.
        grads: int64 ``[n]`` entries; 0 leaves the segment alone.
        hyper: float64 ``[G, 10]``; rows may lie further apart.
        scalars: float64 ``[n_slots, 4]``.
        factor: float64 ``[n_norm_groups]``.
        skip: int32 0-d; not 0: nothing is written.
        dtypes: the tags that may occur in the first five rows of ``table`` and in ``grads``; None is
            all of them. Arithmetic is float64 where the parameter or the gradient is, else float32:
            if both occur, each has its launch.
        aligned: every address in the entries is a multiple of 16.
    """
    launch_update(
        sgd_kernel, strand_segment, segments, table, grads, hyper, scalars, factor, skip, dtypes, aligned
    )
