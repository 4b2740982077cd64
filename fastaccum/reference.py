"""Every op in plain PyTorch: the specification that the native backends are held to.

Read it beside ``ops.py``, which documents the arguments. Nothing here is written for speed. The order
of summation and of rounding is the contract's, so results are the native ones bit for bit (other
``norm_type`` than 1, 2 and inf excepted: ``pow`` differs between libraries).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastaccum.layout import CHUNK, FINISH_LANES, LANES, ROWS, STRANDS_PER_CHUNK

# Columns of the hyper-parameter table; the same in csrc/finish.h.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MOMENTUM, DAMPENING, MAX_VALUE, NORM_GROUP, FLAGS = range(10)
DECOUPLED, AMSGRAD, MAXIMIZE, NESTEROV = 1, 2, 4, 8
# Columns of the per-parameter scalars.
STEP_SIZE, INV_BIAS2_SQRT, FIRST, LR_NOW = range(4)


def memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as a 1-d view in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _opmath(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _rounded(value: float, dtype: torch.dtype) -> float:
    """A float64 scalar rounded once to the dtype of the arithmetic, as a Python float."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def _value(scalar: Tensor | None, default: float = 1.0) -> float:
    return default if scalar is None else scalar.item()


def _usable_scale(largest: float) -> float:
    """What powers are divided by: neither 0 nor what makes inf / inf of itself."""
    return largest if 0.0 < largest < math.inf else 1.0


def _square_root(x: Tensor) -> Tensor:
    """The nearest float to the root.

    torch's (MKL's) is 1 ulp off in a fifth of float32 values, and in one float64 value of seventy.
    """
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    roots = [math.sqrt(v) if v >= 0.0 else math.nan for v in x.flatten().tolist()]
    return x.new_tensor(roots).view(x.shape)


# ------------------------------------------------------------------------------------------- sums


def _fold(x: Tensor, norm_type: float) -> Tensor:
    """Adjacent fold of the last dimension (a power of two)."""
    while x.shape[-1] > 1:
        x = _join(x[..., 0::2], x[..., 1::2], norm_type)
    return x[..., 0]


def _join(a: Tensor, b: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(a, b) if norm_type == math.inf else a + b


def _contribution(x: Tensor, norm_type: float, scale: float) -> Tensor:
    if norm_type == 2.0:
        return x * x
    if norm_type in (1.0, math.inf):
        return x.abs()
    return (x.abs() / scale).pow(norm_type)


def _reduce_chunks(partials: Tensor, flat: Tensor, n_chunks: int, norm_type: float, scale: float) -> None:
    """Strand order: down the rows of a lane, adjacent lanes, adjacent strands.

    ``partials`` is float64 ``[2, n_chunks]``: row 0 the sums, row 1 whether the chunk is not finite.
    ``flat`` is float64; elements that do not count are 0.
    """
    grid = torch.nn.functional.pad(flat, (0, n_chunks * CHUNK - flat.numel()))
    grid = grid.view(n_chunks, STRANDS_PER_CHUNK, ROWS, LANES)
    lanes = torch.zeros(n_chunks, STRANDS_PER_CHUNK, LANES, dtype=torch.float64, device=flat.device)
    for row in range(ROWS):
        lanes = _join(lanes, _contribution(grid[:, :, row], norm_type, scale), norm_type)
    partials[0, :n_chunks] = _fold(_fold(lanes, norm_type), norm_type)
    partials[1, :n_chunks] = (~grid.isfinite()).flatten(1).any(1).double()


def _flat_double(segments: Tensor, tensors: list[Tensor], index: Tensor) -> tuple[Tensor, int]:
    rows = segments.tolist()
    end = rows[-1][0] + rows[-1][1] if rows else 0
    flat = segments.new_zeros(end, dtype=torch.float64)
    for tensor, k in zip(tensors, index.tolist(), strict=False):
        offset, numel = rows[k]
        flat[offset : offset + numel] = memory_order(tensor)
    return flat, -(-end // CHUNK)


# -------------------------------------------------------------------------------------------- ops


def gather_(
    buffer: Tensor,
    present: Tensor,
    partials: Tensor | None,
    segments: Tensor,
    fresh: list[Tensor],
    fresh_index: Tensor,
    kept: list[Tensor],
    kept_index: Tensor,
    weight: Tensor | None = None,
    kept_weight: Tensor | None = None,
    norm_type: float = 2.0,
) -> None:
    """Buffer = (buffer if present else kept * kept_weight) + fresh * weight."""
    opmath = _opmath(buffer.dtype)
    rows = segments.tolist()

    def slot(k: int) -> Tensor:
        return buffer[rows[k][0] : rows[k][0] + rows[k][1]]

    # A factor of 1 is exact, so every gradient is multiplied; never add(alpha=), which may be fused.
    # What was kept joins the fresh gradient before the one rounding to the buffer's dtype.
    sums: dict[int, Tensor] = {}
    for tensors, index, by in ((kept, kept_index, kept_weight), (fresh, fresh_index, weight)):
        factor = _rounded(_value(by), opmath)
        for tensor, k in zip(tensors, index.tolist(), strict=False):
            # A weight of 0 selects nothing, where 0 * NaN would be NaN.
            scaled = (
                memory_order(tensor).to(opmath) * factor if factor else slot(k).new_zeros((), dtype=opmath)
            )
            if k not in sums and present[k]:
                sums[k] = slot(k).to(opmath)
            sums[k] = sums[k] + scaled if k in sums else scaled
    for k, total in sums.items():
        slot(k).copy_(total)
        present[k] = 1
    if partials is not None:
        here = present[: len(rows)].nonzero().flatten()
        flat, n_chunks = _flat_double(segments, [slot(k) for k in here.tolist()], here)
        _reduce_chunks(partials, flat, n_chunks, norm_type, 1.0)


def norm_(
    partials: Tensor,
    segments: Tensor,
    tensors: list[Tensor],
    index: Tensor,
    norm_type: float = 2.0,
    scale: Tensor | None = None,
) -> None:
    """partials[0, c] = sum of |x|^p over chunk c, in strand order."""
    flat, n_chunks = _flat_double(segments, tensors, index)
    _reduce_chunks(partials, flat, n_chunks, norm_type, _usable_scale(_value(scale)))


def finish_(
    norm: Tensor,
    group_norms: Tensor,
    factor: Tensor,
    skip: Tensor,
    skipped: Tensor,
    partials: Tensor,
    spans: Tensor,
    max_norm: Tensor,
    weight: Tensor,
    divisor: Tensor,
    steps: Tensor | None = None,
    scalars: Tensor | None = None,
    row: Tensor | None = None,
    group: Tensor | None = None,
    hyper: Tensor | None = None,
    lrs: Sequence[Tensor] = (),
    lr_groups: Tensor | None = None,
    norm_type: float = 2.0,
    scale: Tensor | None = None,
    skip_nonfinite: bool = True,
    found_inf: Tensor | None = None,
) -> None:
    """Norm, clip factor and skip of a finished window; step counters and bias corrections."""
    divide = (1.0 / divisor).item()  # inf for a divisor of 0, where Python would raise
    power_scale = _usable_scale(_value(scale))

    def total(group: int) -> Tensor:
        chunks = [partials[0, b:e] for g, b, e in spans.tolist() if g == group]
        sums = torch.cat(chunks) if chunks else partials.new_zeros(0)
        rows = torch.nn.functional.pad(sums, (0, -sums.numel() % FINISH_LANES)).view(-1, FINISH_LANES)
        lanes = partials.new_zeros(FINISH_LANES)
        for row in rows:
            lanes = _join(lanes, row, norm_type)
        return _fold(lanes, norm_type)

    def norm_of(total: Tensor) -> Tensor:
        if norm_type == 2.0:
            return _square_root(total) * abs(divide)
        if norm_type in (1.0, math.inf):
            return total * abs(divide)
        return total.pow(1.0 / norm_type) * power_scale * abs(divide)

    joined = partials.new_zeros(())
    for g in range(max_norm.numel()):
        joined = _join(joined, total(g), norm_type)
        group_norms[g] = norm_of(total(g))
        limit = max_norm[g]
        clip = 1.0 if limit.isinf() else (limit / (group_norms[g] + 1e-6)).clamp(max=1.0)
        factor[g] = clip * divide
    empty = not weight.item() > 0.0
    found = any(bool(partials[1, b:e].any()) for _, b, e in spans.tolist())
    bad = skip_nonfinite and (found or weight.item() == math.inf)
    if found_inf is not None:
        bad = bad or bool(found_inf)
        found_inf.fill_(1.0 if found or bool(found_inf) else 0.0)
    norm.copy_(torch.zeros(()) if empty else norm_of(joined))
    skip.fill_(int(empty or bad))
    skipped.add_(int(bad and not empty))
    if steps is None:
        return
    assert scalars is not None and row is not None and group is not None and hyper is not None
    hyper = hyper.clone()
    for lr, g in zip(lrs, () if lr_groups is None else lr_groups.tolist(), strict=True):
        hyper[g, LR] = lr.item()
    _advance(steps, scalars, row, group, hyper, skip)


def _integer_power(base: float, exponent: int) -> float:
    """Base ** exponent by squaring, most significant bit first: the same bits on every backend."""
    result = 1.0
    for bit in range(62, -1, -1):
        result = result * result
        if exponent >> bit & 1:
            result = result * base
    return result


def _advance(steps: Tensor, scalars: Tensor, row: Tensor, group: Tensor, hyper: Tensor, skip: Tensor) -> None:
    """steps[row] += 1 unless skipped; bias corrections for the new step counts."""
    if not skip:
        steps[row] += 1.0
    for k, g in zip(row.tolist(), group.tolist(), strict=False):
        step = int(steps[k])
        bias1 = 1.0 - _integer_power(hyper[g, BETA1].item(), step)
        bias2 = 1.0 - _integer_power(hyper[g, BETA2].item(), step)
        lr = hyper[g, LR].item()
        scalars[k, STEP_SIZE] = lr / bias1 if bias1 else math.copysign(math.inf, lr) if lr else math.nan
        scalars[k, INV_BIAS2_SQRT] = 1.0 / math.sqrt(bias2) if bias2 else math.inf
        scalars[k, FIRST] = float(step == 1)
        scalars[k, LR_NOW] = lr


def scale_(tensors: list[Tensor], factor: Tensor, factor_index: Tensor, max_value: float = math.inf) -> None:
    """Tensor = clamp(tensor * factor) in place."""
    scale_into_(tensors, tensors, factor, factor_index, max_value)


def scale_into_(
    out: list[Tensor],
    tensors: list[Tensor],
    factor: Tensor,
    factor_index: Tensor,
    max_value: float = math.inf,
) -> None:
    """Out = clamp(tensor * factor, -max_value, max_value)."""
    for target, tensor, i in zip(out, tensors, factor_index.tolist(), strict=False):
        opmath = _opmath(tensor.dtype, target.dtype)
        scaled = memory_order(tensor).to(opmath) * _rounded(factor.view(-1)[i].item(), opmath)
        limit = _rounded(max_value, opmath)
        memory_order(target).copy_(scaled.clamp(-limit, limit))


def _finished(grad: Tensor, opmath: torch.dtype, hyper: list[float], factor: Tensor) -> Tensor:
    """The gradient that the update sees: factor, clamp, sign."""
    by = factor[int(hyper[NORM_GROUP])].item()
    if int(hyper[FLAGS]) & MAXIMIZE:
        by = -by
    limit = _rounded(hyper[MAX_VALUE], opmath)
    return (memory_order(grad).to(opmath) * _rounded(by, opmath)).clamp(-limit, limit)


def _write_copy(copies: list[Tensor], i: int, param: Tensor) -> None:
    if copies:
        memory_order(copies[i]).copy_(memory_order(param))


def adam_(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    grads: list[Tensor],
    segments: Tensor,
    index: Tensor,
    group: Tensor,
    row: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
) -> None:
    """Adam (Kingma & Ba 2015, algorithm 1), AdamW (Loshchilov & Hutter 2019, algorithm 2)."""
    if skip:
        return
    for i, param in enumerate(params):
        h, s = hyper[group[i]].tolist(), scalars[row[i]].tolist()
        opmath = _opmath(param.dtype, grads[i].dtype)
        decoupled = int(h[FLAGS]) & DECOUPLED
        r = [_rounded(x, opmath) for x in (h[BETA1], 1 - h[BETA1], h[BETA2], 1 - h[BETA2], h[EPS])]
        beta1, one_minus_beta1, beta2, one_minus_beta2, eps = r
        g = _finished(grads[i], opmath, h, factor)
        p = memory_order(param).to(opmath)
        if decoupled:
            p = p * _rounded(1.0 - s[LR_NOW] * h[WEIGHT_DECAY], opmath)
        elif h[WEIGHT_DECAY] != 0.0:
            g = g + p * _rounded(h[WEIGHT_DECAY], opmath)
        m = memory_order(exp_avgs[i]).to(opmath) * beta1 + g * one_minus_beta1
        v = memory_order(exp_avg_sqs[i]).to(opmath) * beta2 + (g * g) * one_minus_beta2
        memory_order(exp_avgs[i]).copy_(m)
        memory_order(exp_avg_sqs[i]).copy_(v)
        if int(h[FLAGS]) & AMSGRAD:
            v = torch.maximum(memory_order(max_exp_avg_sqs[i]).to(opmath), v)
            memory_order(max_exp_avg_sqs[i]).copy_(v)
        denominator = _square_root(v) * _rounded(s[INV_BIAS2_SQRT], opmath) + eps
        memory_order(param).copy_(p - (m * _rounded(s[STEP_SIZE], opmath)) / denominator)
        _write_copy(copies, i, param)


def sgd_(
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    copies: list[Tensor],
    grads: list[Tensor],
    segments: Tensor,
    index: Tensor,
    group: Tensor,
    row: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
) -> None:
    """SGD with momentum in PyTorch's form (torch.optim.SGD's docstring)."""
    if skip:
        return
    for i, param in enumerate(params):
        h, s = hyper[group[i]].tolist(), scalars[row[i]].tolist()
        opmath = _opmath(param.dtype, grads[i].dtype)
        g = _finished(grads[i], opmath, h, factor)
        p = memory_order(param).to(opmath)
        if h[WEIGHT_DECAY] != 0.0:
            g = g + p * _rounded(h[WEIGHT_DECAY], opmath)
        if h[MOMENTUM] != 0.0:
            first = s[FIRST] != 0.0
            keep = _rounded(0.0 if first else h[MOMENTUM], opmath)
            take = _rounded(1.0 if first else 1.0 - h[DAMPENING], opmath)
            b = memory_order(momentum_buffers[i]).to(opmath) * keep + g * take
            memory_order(momentum_buffers[i]).copy_(b)
            g = g + b * _rounded(h[MOMENTUM], opmath) if int(h[FLAGS]) & NESTEROV else b
        memory_order(param).copy_(p - g * _rounded(s[LR_NOW], opmath))
        _write_copy(copies, i, param)
