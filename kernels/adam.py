"""Adam and AdamW with average, unscale and clip folded in, in one pass over parameters and state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .strand import (
    AMSGRAD,
    BETA1,
    BETA2,
    DECOUPLED,
    EPS,
    INV_BIAS2_SQRT,
    LR_NOW,
    STEP_SIZE,
    WEIGHT_DECAY,
    divide,
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
    square_root,
    store_copy,
    store_entry,
)

_TABLES = ["strand_segment", "segments", "table", "grads", "hyper", "scalars", "factor", "skip"]


@triton.jit
def _row(
    at, mask, param, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, grad, by, limit, decay, coupled,
    weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, amsgrad, step_size, inv_bias2_sqrt, eps,
    REAL: tl.constexpr, PARAM: tl.constexpr, STATE0: tl.constexpr, STATE1: tl.constexpr,
    STATE2: tl.constexpr, COPY: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of every strand."""
    g = finished(load_entry(grad, at, mask, GRAD, REAL, ALIGNED), by, limit)
    p = load_entry(param, at, mask, PARAM, REAL, ALIGNED) * decay
    g = tl.where(coupled, g + p * weight_decay, g)
    m = load_entry(exp_avg, at, mask, STATE0, REAL, ALIGNED) * beta1 + g * one_minus_beta1
    v = load_entry(exp_avg_sq, at, mask, STATE1, REAL, ALIGNED) * beta2 + (g * g) * one_minus_beta2
    store_entry(exp_avg, at, m, mask, STATE0, ALIGNED)
    store_entry(exp_avg_sq, at, v, mask, STATE1, ALIGNED)
    if STATE2:
        largest = load_entry(max_exp_avg_sq, at, mask & amsgrad, STATE2, REAL, ALIGNED)
        largest = tl.where((largest > v) | (largest != largest), largest, v)
        store_entry(max_exp_avg_sq, at, largest, mask & amsgrad, STATE2, ALIGNED)
        v = tl.where(amsgrad, largest, v)
    p = p - divide(step_size * m, square_root(v) * inv_bias2_sqrt + eps)
    store_entry(param, at, p, mask, PARAM, ALIGNED)
    store_copy(copy, param, at, p, mask, COPY, PARAM, ALIGNED)


@triton.jit(do_not_specialize=["row_stride", "hyper_stride"], do_not_specialize_on_alignment=_TABLES)
def adam_kernel(
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
    """Kingma & Ba 2015, algorithm 1; decoupled decay: Loshchilov & Hutter 2019, algorithm 2."""
    if tl.load(skip) != 0:
        return
    strand, inside, segment, start, left = locate(strand_segment, segments)
    param, grad, hyper, scalars, inside, flags, by, limit = locate_update(
        table, row_stride, grads, hyper, hyper_stride, scalars, factor, segment, inside, start, REAL
    )
    left = tl.where(inside, left, 0)
    exp_avg = row_entry(table, row_stride, 1, segment, inside, start)
    exp_avg_sq = row_entry(table, row_stride, 2, segment, inside, start)
    max_exp_avg_sq = row_entry(table, row_stride, 3, segment, inside, start)
    copy = row_entry(table, row_stride, 4, segment, inside, start)
    # Every value is computed in float64 and rounded once: in float32, 1 - 0.999 is off by 1.3e-5.
    weight_decay = hyper_of(hyper, WEIGHT_DECAY, inside)
    beta1 = hyper_of(hyper, BETA1, inside)
    beta2 = hyper_of(hyper, BETA2, inside)
    decoupled = (flags & DECOUPLED) != 0
    amsgrad = ((flags & AMSGRAD) != 0)[:, None]
    coupled = (~decoupled & (weight_decay != 0.0))[:, None]
    decay = 1.0 - scalar_of(scalars, LR_NOW, inside) * weight_decay
    decay = tl.where(decoupled, decay, 1.0).to(REAL)[:, None]
    weight_decay = weight_decay.to(REAL)[:, None]
    one_minus_beta1 = (1.0 - beta1).to(REAL)[:, None]
    one_minus_beta2 = (1.0 - beta2).to(REAL)[:, None]
    beta1 = beta1.to(REAL)[:, None]
    beta2 = beta2.to(REAL)[:, None]
    eps = hyper_of(hyper, EPS, inside).to(REAL)[:, None]
    step_size = scalar_of(scalars, STEP_SIZE, inside).to(REAL)[:, None]
    inv_bias2_sqrt = scalar_of(scalars, INV_BIAS2_SQRT, inside).to(REAL)[:, None]
    if UNROLLED:
        for r in tl.static_range(16):
            at, mask = full_row(r, left)
            _row(
                at, mask, param, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, grad, by, limit, decay, coupled,
                weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, amsgrad, step_size,
                inv_bias2_sqrt, eps, REAL, PARAM, STATE0, STATE1, STATE2, COPY, GRAD, ALIGNED,
            )  # fmt: skip
    else:
        for r in range(16):
            at, mask = full_row(r, left)
            _row(
                at, mask, param, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, grad, by, limit, decay, coupled,
                weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, amsgrad, step_size,
                inv_bias2_sqrt, eps, REAL, PARAM, STATE0, STATE1, STATE2, COPY, GRAD, ALIGNED,
            )  # fmt: skip
    at, mask = ragged_row(left)
    _row(
        at, mask, param, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, grad, by, limit, decay, coupled,
        weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, amsgrad, step_size, inv_bias2_sqrt, eps,
        REAL, PARAM, STATE0, STATE1, STATE2, COPY, GRAD, ALIGNED,
    )  # fmt: skip


def launch_adam(
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
    """Updates parameters and states; one launch, or two (see ``dtypes``).

    Args:
        strand_segment: int32 ``[n_chunks * 16]``; -1 where there is no segment.
        segments: int64 ``[n, 2]`` of offset and numel.
        table: int64 ``[6, n]``: entries of the parameters, ``exp_avg``, ``exp_avg_sq``,
            ``max_exp_avg_sq`` and lower-precision copies, and rows of ``hyper`` | of ``scalars`` << 32.
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
        adam_kernel, strand_segment, segments, table, grads, hyper, scalars, factor, skip, dtypes, aligned
    )
