"""Decides a window on the device: norm, clip factor, skip, step counters, bias corrections."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .strand import (
    BETA1,
    BETA2,
    FIRST,
    INV_BIAS2_SQRT,
    LR,
    LR_NOW,
    POWER,
    SCALAR_COLUMNS,
    STEP_SIZE,
    TWO,
    double_bits,
    double_of,
    fold_last,
    join,
    launch,
    load_lr,
    norm_kind,
    one,
    square_root,
)

FINISH_LANES = tl.constexpr(1024)  # running sums over the chunks' partials, folded at the end
UNROLL = tl.constexpr(4)  # rows of lanes whose loads are under way together: latency is all there is

_TABLES = [
    "norm", "group_norms", "factor", "skip", "skipped", "steps", "scalars", "partials", "spans", "max_norm",
    "weight", "divisor", "active", "group", "hyper", "lrs", "scale", "found_inf",
]  # fmt: skip
_NUMBERS = [
    "row_stride", "n_spans", "n_groups", "n_slots", "hyper_stride", "lrs_stride", "power_bits",
    "skip_nonfinite",
]  # fmt: skip


@triton.jit
def _total(partials, row_stride, spans, n_spans, wanted, NORM: tl.constexpr):
    """A norm group's sum: its chunks, numbered on through its spans, in 1024 lanes and folded.

    Returns the lanes' fold and whether any chunk of the group was flagged.
    """
    lane = tl.arange(0, FINISH_LANES).to(tl.int64)
    lanes = tl.zeros((FINISH_LANES,), tl.float64)
    flagged = tl.zeros((FINISH_LANES,), tl.int32)
    before = n_spans.to(tl.int64) * 0  # the group's chunks in earlier spans
    span = n_spans * 0
    while span < n_spans:
        begin = tl.load(spans + span * 3 + 1)
        count = tl.load(spans + span * 3 + 2) - begin
        if tl.load(spans + span * 3) != wanted:
            count = count * 0
        base = before // FINISH_LANES * FINISH_LANES
        while base < before + count:
            for _ in tl.static_range(UNROLL):
                at = base + lane
                mask = (at >= before) & (at < before + count)
                chunk = partials + begin + (at - before)
                lanes = join(lanes, tl.load(chunk, mask=mask, other=0.0), NORM)
                flagged = flagged | (tl.load(chunk + row_stride, mask=mask, other=0.0) != 0.0).to(tl.int32)
                base += FINISH_LANES
        before += count
        span += 1
    lanes = fold_last(tl.reshape(lanes, (512, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (256, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (128, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (64, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (32, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (16, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (8, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (4, 2)), 1, NORM)
    lanes = fold_last(tl.reshape(lanes, (2, 2)), 1, NORM)
    return fold_last(lanes, 0, NORM), tl.max(flagged, axis=0)


@triton.jit
def _norm_of(total, divide, power, scale, NORM: tl.constexpr):
    """The norm that a joined total stands for."""
    if NORM == TWO:
        root = square_root(total)
    elif NORM == POWER:
        root = tl.exp2(tl.log2(total) * (1.0 / power)) * scale
    else:
        root = total
    return root * tl.abs(divide)


@triton.jit
def _integer_power(base, exponent):
    """Base ** exponent by squaring, most significant bit first: the same bits on every backend."""
    result = base * 0.0 + 1.0
    for i in range(63):
        result = result * result
        result = tl.where(((exponent >> (62 - i)) & 1) != 0, result * base, result)
    return result


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TABLES)
def finish_kernel(
    norm,
    group_norms,
    factor,
    skip,
    skipped,
    steps,
    scalars,
    partials,
    row_stride,
    spans,
    n_spans,
    max_norm,
    n_groups,
    weight,
    divisor,
    active,
    n_slots,
    group,
    hyper,
    hyper_stride,
    lrs,
    lrs_stride,
    power_bits,
    scale,
    skip_nonfinite,
    found_inf,
    NORM: tl.constexpr,
    LRS: tl.constexpr,
    FOUND: tl.constexpr,
):
    """One program for the whole window."""
    unity = tl.full((), 1.0, tl.float64)
    divide = unity / tl.load(divisor)
    power = double_of(power_bits)
    unit = unity
    if NORM == POWER:
        unit = tl.load(scale)
        unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
    joined = tl.full((), 0.0, tl.float64)
    flagged = tl.full((), 0, tl.int32)
    wanted = n_groups * 0
    while wanted < n_groups:
        total, bad = _total(partials, row_stride, spans, n_spans, wanted, NORM)
        joined = join(joined, total, NORM)
        flagged = flagged | bad
        its_norm = _norm_of(total, divide, power, unit, NORM)
        limit = tl.load(max_norm + wanted)
        # Written so that a NaN norm gives NaN, as in stock PyTorch.
        clip = limit / (its_norm + tl.full((), 1e-6, tl.float64))
        clip = tl.where((clip > 1.0) | (limit == float("inf")), 1.0, clip)
        tl.store(group_norms + wanted, its_norm)
        tl.store(factor + wanted, clip * divide)
        wanted += 1
    empty = tl.where(tl.load(weight) > 0.0, 0, 1)
    unbounded = tl.where(tl.load(weight) == float("inf"), 1, 0)
    bad = tl.where(((flagged | unbounded) != 0) & (skip_nonfinite != 0), 1, 0)
    if FOUND:
        told = tl.where(tl.load(found_inf) != 0.0, 1, 0)
        tl.store(found_inf, tl.where((told != 0) | (flagged != 0), 1.0, 0.0))
        bad = bad | told
    skips = empty | bad
    total = _norm_of(joined, divide, power, unit, NORM)
    tl.store(norm, tl.where(empty != 0, 0.0, total).to(tl.float32))
    tl.store(skip, skips)
    tl.store(skipped, tl.load(skipped) + tl.where(empty != 0, 0, bad))

    lane = tl.arange(0, FINISH_LANES)
    first = n_slots.to(tl.int64) * 0
    while first < n_slots:
        slot = first + lane
        mask = slot < n_slots
        word = tl.load(active + (slot >> 6), mask=mask, other=0)
        mask = mask & (((word >> (slot & 63)) & 1) != 0)
        step = tl.load(steps + slot, mask=mask, other=0.0) + tl.where(skips != 0, 0.0, 1.0)
        if skips == 0:
            tl.store(steps + slot, step, mask=mask)
        its_group = tl.load(group + slot, mask=mask, other=0).to(tl.int64)
        row = hyper + its_group * hyper_stride
        count = step.to(tl.int64)
        lr = tl.load(row + LR, mask=mask, other=0.0)
        if LRS:
            lr = load_lr(tl.load(lrs + its_group * lrs_stride, mask=mask, other=0), lr, mask)
        bias1 = 1.0 - _integer_power(tl.load(row + BETA1, mask=mask, other=0.0), count)
        bias2 = 1.0 - _integer_power(tl.load(row + BETA2, mask=mask, other=0.0), count)
        out = scalars + slot * SCALAR_COLUMNS
        tl.store(out + STEP_SIZE, lr / bias1, mask=mask)
        tl.store(out + INV_BIAS2_SQRT, unity / square_root(bias2), mask=mask)
        tl.store(out + FIRST, tl.where(count == 1, unity, 0.0), mask=mask)
        tl.store(out + LR_NOW, lr, mask=mask)
        first += FINISH_LANES


def launch_finish(
    norm: Tensor,
    group_norms: Tensor,
    factor: Tensor,
    skip: Tensor,
    skipped: Tensor,
    steps: Tensor,
    scalars: Tensor,
    partials: Tensor,
    spans: Tensor,
    max_norm: Tensor,
    weight: Tensor,
    divisor: Tensor,
    active: Tensor,
    group: Tensor,
    hyper: Tensor,
    norm_type: float,
    scale: Tensor | None,
    skip_nonfinite: bool,
    *,
    lrs: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Norm, clip factors and skip of a window; step counts and bias corrections of the active slots.

    Args:
        norm: float32 0-d. Written, like the next six.
        group_norms: float64 ``[n_groups]``.
        factor: float64 ``[n_groups]``.
        skip: int32 0-d.
        skipped: int64 0-d counter.
        steps: float32 ``[n_slots]``.
        scalars: float64 ``[n_slots, 4]``: lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 on the first step, lr.
        partials: float64 ``[2, n_chunks]``.
        spans: int64 ``[m, 3]``: norm group, first chunk, end chunk.
        max_norm: float64 ``[n_groups]``; inf does not clip.
        weight: float64 0-d.
        divisor: float64 0-d.
        active: int64 ``[ceil(n_slots / 64)]``: the bits of the slots that take part.
        group: int32 or int64 ``[n_slots]``: rows of ``hyper``.
        hyper: float64 ``[G, 10]``; rows may lie further apart.
        norm_type: as in what wrote ``partials``.
        scale: likewise, on the device.
        skip_nonfinite: False updates whatever the gradient holds.
        lrs: int64 ``[G]``, of any stride: pointer entries of learning rates that are float32 or float64
            tensors on the device, 0 where ``hyper`` has it; or None.
        found_inf: float32 0-d, or None: not 0 skips; becomes 1 where the gradient is not finite. Written.
    """
    kind = norm_kind(norm_type)
    launch(
        finish_kernel,
        1,
        partials.device,
        norm,
        group_norms,
        factor,
        skip,
        skipped,
        steps,
        scalars,
        partials,
        partials.stride(0),
        spans,
        spans.shape[0],
        max_norm,
        max_norm.numel(),
        weight,
        divisor,
        active,
        steps.numel(),
        group,
        hyper,
        hyper.stride(0),
        group if lrs is None else lrs,
        0 if lrs is None else lrs.stride(0),
        double_bits(norm_type),
        one(partials.device) if scale is None else scale,
        int(skip_nonfinite),
        norm if found_inf is None else found_inf,
        NORM=kind,
        LRS=lrs is not None,
        FOUND=found_inf is not None,
        num_warps=16,
    )
