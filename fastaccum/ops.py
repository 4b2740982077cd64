"""The kernels' vocabulary: schema, fake, checks and a public function for every op.

Every op mutates what its schema says and returns nothing. Arguments come in one order everywhere:
destination, tables, sources, state, then scalars. Scalars that may live on a device are 0-d (or 1-d)
float64 tensors, so that nothing has to be read back by the host.

Words: a *segment* is one parameter's place in a flat index space (``segments``: int64 ``[n, 2]`` of
offset and numel, see :mod:`fastaccum.layout`); ``index`` lists, ascending, the segment of each tensor
of a list; ``partials`` is float64 ``[2, n_chunks]``: each chunk's sum, and 1 where it is not finite.
A tensor stands in a list in its memory order, which must be dense; its segment has the same order.

None of the ops is differentiable: they work on gradients and parameters under ``torch.no_grad``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastaccum.layout import CHUNK

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HYPER_COLUMNS = 10
SCALAR_COLUMNS = 4

# One library object for the life of the process: dropping it would unregister the ops.
LIBRARY = torch.library.Library("fastaccum", "DEF")


def _define(schema: str) -> None:
    LIBRARY.define(schema + " -> ()")
    # The ops only mutate, so the fake has nothing to say.
    torch.library.register_fake("fastaccum::" + schema.split("(")[0], lambda *args, **kwargs: None)


# ----------------------------------------------------------------------------------------- checks


def _is(kind: type, value: object, argument: str, wanted: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{argument} must be {wanted}, got {type(value).__name__}")


def _table(tensor: Tensor, argument: str, dtype: torch.dtype, shape: str) -> None:
    _is(Tensor, tensor, argument, f"a {dtype} tensor {shape}")
    if tensor.dtype != dtype:
        raise TypeError(f"{argument} must be a {dtype} tensor {shape}, got {tensor.dtype}")


def _scalar(tensor: Tensor | None, argument: str) -> None:
    if tensor is not None:
        _table(tensor, argument, torch.float64, "0-d")


def _dense(tensor: Tensor) -> bool:
    """Whether the elements lie in consecutive places, in some order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _list(tensors: Sequence[Tensor], argument: str, device: torch.device | None = None) -> None:
    _is((list, tuple), tensors, argument, "a list of tensors")  # type: ignore[arg-type]
    for i, tensor in enumerate(tensors):
        _is(Tensor, tensor, f"{argument}[{i}]", "a tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{argument}[{i}] must be float32, bfloat16, float16 or float64, got {tensor.dtype}"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"{argument}[{i}] must be dense (strided), got {tensor.layout}: coalesce it")
        if not _dense(tensor):
            raise ValueError(
                f"{argument}[{i}] must be dense (no gaps, no overlaps), got strides {tensor.stride()} "
                f"for shape {list(tensor.shape)}"
            )
        if device is not None and tensor.device != device:
            raise ValueError(f"{argument}[{i}] must be on {device}, got {tensor.device}")


def _segments(segments: Tensor) -> None:
    _table(segments, "segments", torch.int64, "[n, 2] (offset, numel)")
    if segments.dim() != 2 or segments.shape[1] != 2:
        raise ValueError(f"segments must have shape [n, 2] (offset, numel), got {list(segments.shape)}")


def _below(table: Tensor, argument: str, end: int) -> None:
    """Raises unless a table on the CPU holds numbers of ``range(end)`` only."""
    if torch.compiler.is_compiling():
        return  # no reading of values while tracing; the native code checks them again
    if table.device.type != "cpu":
        raise ValueError(f"{argument} must be on the CPU, got {table.device}")
    for i, value in enumerate(table.tolist()):
        if not 0 <= value < end:
            raise ValueError(f"{argument}[{i}] must be at least 0 and below {end}, got {value}")


def _beside(device: torch.device, **tensors: Tensor | None) -> None:
    """Raises unless all are on one device."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{argument} must be on {device}, got {tensor.device}")


def _fits(tensors: Sequence[Tensor], index: Tensor, segments: Tensor, argument: str) -> None:
    _table(index, f"{argument}'s index", torch.int64, "[len(tensors)]")
    if index.numel() < len(tensors):
        raise ValueError(f"{argument}'s index must name a segment for each of the {len(tensors)} tensors")
    if torch.compiler.is_compiling():
        return  # no reading of values while tracing; the native code checks them again
    rows, last = segments.tolist(), -1
    for i, (tensor, k) in enumerate(zip(tensors, index.tolist(), strict=False)):
        if not last < k < len(rows):
            raise ValueError(f"{argument}'s index must ascend within [0, {len(rows)}), got {k} at {i}")
        if rows[k][1] != tensor.numel():
            raise ValueError(
                f"{argument}[{i}] must have the {rows[k][1]} elements of segment {k}, "
                f"got {tensor.numel()} ({list(tensor.shape)})"
            )
        last = k


def _norm_type(norm_type: float) -> float:
    if isinstance(norm_type, bool) or not isinstance(norm_type, numbers.Real) or not norm_type > 0:
        raise ValueError(f"norm_type must be a number above 0 or inf, got {norm_type!r}")
    return float(norm_type)


def _call(name: str, *args: object) -> None:
    # Without no_grad, a parameter among the mutated arguments would make autograd object.
    with torch.no_grad():
        getattr(torch.ops.fastaccum, name)(*args)


def _bump(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that these were written: a graph that saved one must not use the new values."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


# ----------------------------------------------------------------------------------------- gather

_define(
    "gather_(Tensor(a!) buffer, Tensor(b!) present, Tensor(c!)? partials, Tensor segments, "
    "Tensor[] fresh, Tensor fresh_index, Tensor[] kept, Tensor kept_index, "
    "Tensor? weight=None, Tensor? kept_weight=None, float norm_type=2.0)"
)


def _check_gather(
    buffer: Tensor,
    present: Tensor,
    partials: Tensor | None,
    segments: Tensor,
    fresh: Sequence[Tensor],
    fresh_index: Tensor,
    kept: Sequence[Tensor],
    kept_index: Tensor,
    weight: Tensor | None,
    kept_weight: Tensor | None,
    norm_type: float,
) -> None:
    _segments(segments)
    _list([buffer], "buffer")
    _list(fresh, "fresh", buffer.device)
    _list(kept, "kept", buffer.device)
    _fits(fresh, fresh_index, segments, "fresh")
    _fits(kept, kept_index, segments, "kept")
    _table(present, "present", torch.uint8, "[n]")
    if present.numel() < len(segments):
        raise ValueError(f"present must have {len(segments)} elements, got {present.numel()}")
    _scalar(weight, "weight")
    _scalar(kept_weight, "kept_weight")
    if not torch.compiler.is_compiling():
        end = _end(segments)
        if not buffer.is_contiguous() or buffer.numel() < end:
            raise ValueError(f"buffer must be contiguous, with {end} elements or more, got {buffer.numel()}")
        for i, k in enumerate(kept_index[: len(kept)].tolist()):
            if present[k]:
                raise ValueError(f"kept[{i}] must be of a segment that is not present, got segment {k}")
    if partials is not None:
        _partials(partials, segments)
        if _norm_type(norm_type) not in (1.0, 2.0, math.inf):
            raise ValueError(f"gather_ sums norm_type 1, 2 or inf, got {norm_type}: use norm_ for others")


def gather_(
    buffer: Tensor,
    present: Tensor,
    partials: Tensor | None,
    segments: Tensor,
    fresh: Sequence[Tensor],
    fresh_index: Tensor,
    kept: Sequence[Tensor] = (),
    kept_index: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    kept_weight: Tensor | None = None,
    norm_type: float = 2.0,
) -> None:
    """Adds a micro-batch's gradients into the flat buffer, in one pass over memory.

    Per segment: ``buffer = (buffer if present else kept * kept_weight) + fresh * weight``, terms that
    are not there left out; ``present`` becomes 1. A product and a sum are rounded separately, so the
    result is that of ``acc += weight * grad`` in eager mode, bit for bit. A weight of 0 selects nothing:
    the term is +0 whatever the gradient holds.

    Args:
        buffer: ``[numel]``, any of the four dtypes, contiguous; mutated.
        present: uint8 ``[n]`` on the CPU: 1 where the buffer holds a gradient; mutated.
        partials: float64 ``[2, n_chunks]`` or None; every chunk's partial is written.
        segments: int64 ``[n, 2]``.
        fresh: this micro-batch's gradients, any dtypes.
        fresh_index: int64 ``[len(fresh)]``, ascending.
        kept: the first micro-batch's gradients where the buffer does not hold them yet.
        kept_index: int64 ``[len(kept)]``, ascending.
        weight: 0-d float64 factor of ``fresh``; None is 1.
        kept_weight: 0-d float64 factor of ``kept``; None is 1.
        norm_type: 1, 2 or inf: what ``partials`` sum.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    if kept_index is None:
        kept_index = fresh_index[:0]
    _check_gather(
        buffer,
        present,
        partials,
        segments,
        fresh,
        fresh_index,
        kept,
        kept_index,
        weight,
        kept_weight,
        norm_type,
    )
    _call(
        "gather_", buffer, present, partials, segments, list(fresh), fresh_index, list(kept), kept_index,
        weight, kept_weight, float(norm_type),
    )  # fmt: skip


def _end(segments: Tensor) -> int:
    return int(segments[-1].sum()) if len(segments) else 0


def _partials(partials: Tensor, segments: Tensor) -> None:
    _table(partials, "partials", torch.float64, "[2, n_chunks]")
    need = 0 if torch.compiler.is_compiling() else -(-_end(segments) // CHUNK)
    if partials.dim() != 2 or partials.shape[0] != 2 or partials.shape[1] < need:
        raise ValueError(f"partials must have shape [2, {need}] or more, got {list(partials.shape)}")


# ------------------------------------------------------------------------------------------- norm

_define(
    "norm_(Tensor(a!) partials, Tensor segments, Tensor[] tensors, Tensor index, "
    "float norm_type=2.0, Tensor? scale=None)"
)


def _check_norm(
    partials: Tensor,
    segments: Tensor,
    tensors: Sequence[Tensor],
    index: Tensor,
    norm_type: float,
    scale: Tensor | None,
) -> None:
    _segments(segments)
    _partials(partials, segments)
    _list(tensors, "tensors", partials.device)
    _fits(tensors, index, segments, "tensors")
    _scalar(scale, "scale")


def norm_(
    partials: Tensor,
    segments: Tensor,
    tensors: Sequence[Tensor],
    index: Tensor,
    *,
    norm_type: float = 2.0,
    scale: Tensor | None = None,
) -> None:
    """Sums ``|x|^p`` over each chunk, in float64 and in strand order.

    Args:
        partials: float64 ``[2, n_chunks]``; row 0 becomes the sums (maxima for inf), row 1 is 1 where
            a chunk holds a value that is not finite. Mutated.
        segments: int64 ``[n, 2]``.
        tensors: the segments' values, any dtypes; segments without a tensor count as 0.
        index: int64 ``[len(tensors)]``, ascending.
        norm_type: any p > 0, or inf.
        scale: 0-d float64, for p other than 1, 2, inf: ``|x / scale|^p`` is summed, so that no power
            overflows; pass the largest magnitude. 0, inf and NaN count as 1.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    _check_norm(partials, segments, tensors, index, norm_type, scale)
    _call("norm_", partials, segments, list(tensors), index, _norm_type(norm_type), scale)


# ----------------------------------------------------------------------------------------- finish

_define(
    "finish_(Tensor(a!) norm, Tensor(b!) group_norms, Tensor(c!) factor, Tensor(d!) skip, "
    "Tensor(e!) skipped, Tensor partials, Tensor spans, Tensor max_norm, Tensor weight, "
    "Tensor divisor, Tensor(f!)? steps, Tensor(g!)? scalars, Tensor? row, Tensor? group, "
    "Tensor? hyper, Tensor[] lrs, Tensor? lr_groups, "
    "float norm_type=2.0, Tensor? scale=None, bool skip_nonfinite=True, Tensor(h!)? found_inf=None)"
)


def _check_finish(
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
    steps: Tensor | None,
    scalars: Tensor | None,
    row: Tensor | None,
    group: Tensor | None,
    hyper: Tensor | None,
    lrs: Sequence[Tensor],
    lr_groups: Tensor | None,
    norm_type: float,
    scale: Tensor | None,
    skip_nonfinite: bool,
    found_inf: Tensor | None,
) -> None:
    if found_inf is not None:
        _table(found_inf, "found_inf", torch.float32, "0-d")
    for name, tensor, dtype, shape in (
        ("norm", norm, torch.float32, "0-d"), ("group_norms", group_norms, torch.float64, "[groups]"),
        ("factor", factor, torch.float64, "[groups]"), ("skip", skip, torch.int32, "0-d"),
        ("skipped", skipped, torch.int64, "0-d"), ("partials", partials, torch.float64, "[2, n_chunks]"),
        ("spans", spans, torch.int64, "[m, 3]"), ("max_norm", max_norm, torch.float64, "[groups]"),
        ("weight", weight, torch.float64, "0-d"), ("divisor", divisor, torch.float64, "0-d"),
    ):  # fmt: skip
        _table(tensor, name, dtype, shape)
    _scalar(scale, "scale")
    for name, tensor in (("group_norms", group_norms), ("factor", factor)):
        if tensor.numel() < max_norm.numel():
            raise ValueError(f"{name} must have {max_norm.numel()} or more elements, got {tensor.numel()}")
    if spans.dim() != 2 or spans.shape[1] != 3:
        raise ValueError(f"spans must have shape [m, 3], got {list(spans.shape)}")
    if partials.dim() != 2 or partials.shape[0] != 2:
        raise ValueError(f"partials must have shape [2, n_chunks], got {list(partials.shape)}")
    _beside(
        norm.device, group_norms=group_norms, factor=factor, skip=skip, skipped=skipped, partials=partials,
        steps=steps, scalars=scalars, found_inf=found_inf,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        for i, (g, begin, end) in enumerate(spans.tolist()):
            if not (0 <= g < max_norm.numel() and 0 <= begin <= end <= partials.shape[1]):
                raise ValueError(
                    f"spans[{i}] must be (a norm group below {max_norm.numel()}, first chunk, end chunk of "
                    f"{partials.shape[1]}), got {(g, begin, end)}"
                )
    _counters(steps, scalars, row, group, hyper, lrs, lr_groups)


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
    *,
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
    """Decides the end of a window on the device: norm, clip factor, whether to update, step counts.

    The finished gradient is ``sum / divisor``; its norm is ``norm_of(partials) / |divisor|``; a norm
    group's factor is ``min(1, max_norm / (norm + 1e-6)) / divisor``, the clip of
    ``torch.nn.utils.clip_grad_norm_`` and the average in one number.

    Args:
        norm: float32 0-d: the norm over all groups. Mutated, like the next four.
        group_norms: float64 ``[n_groups]``.
        factor: float64 ``[n_groups]``: what an update multiplies the sum by.
        skip: int32 0-d: 1 when the update must not happen (not finite, or total weight 0).
        skipped: int64 0-d: counts windows skipped for a gradient that is not finite.
        partials: float64 ``[2, n_chunks]`` of :func:`gather_` or :func:`norm_`.
        spans: int64 ``[m, 3]``: norm group, first chunk, end chunk.
        max_norm: float64 ``[n_groups]``; inf does not clip.
        weight: float64 0-d: the window's total weight.
        divisor: float64 0-d: what the sum is divided by.
        steps: float32 ``[n]`` step counters, or None where there are no parameters to update (then the
            next six are not looked at). Those of ``row`` count one step, unless skipped. Mutated.
        scalars: float64 ``[n, SCALAR_COLUMNS]``, rows of ``row``: lr / (1 - beta1^t),
            1 / sqrt(1 - beta2^t), 1 on the first step, lr. beta^t is computed by squaring in float64.
            Mutated.
        row: int64 ``[m]``: rows of ``steps`` and ``scalars`` of the parameters that take part.
        group: int64 ``[m]``: their rows of ``hyper``.
        hyper: float64 ``[groups, HYPER_COLUMNS]``: lr, beta1, beta2, eps, weight_decay, momentum,
            dampening, max_value (inf: none), norm group, flags (1 decoupled, 2 amsgrad, 4 maximize,
            8 nesterov).
        lrs: learning rates that are tensors on the device (one element, float32 or float64): nothing
            has to be read back, and a captured graph sees the value of the day.
        lr_groups: int64 ``[len(lrs)]``: the rows of ``hyper`` whose lr they replace.
        norm_type: as in the op that wrote ``partials``.
        scale: likewise.
        skip_nonfinite: False updates whatever the gradient holds, as stock PyTorch does.
        found_inf: float32 0-d, as ``torch.amp.GradScaler`` keeps it: not 0 skips the update in any case.
            It becomes 1 where the gradient is not finite, else stays. Mutated.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    _check_finish(
        norm,
        group_norms,
        factor,
        skip,
        skipped,
        partials,
        spans,
        max_norm,
        weight,
        divisor,
        steps,
        scalars,
        row,
        group,
        hyper,
        lrs,
        lr_groups,
        norm_type,
        scale,
        skip_nonfinite,
        found_inf,
    )
    _call(
        "finish_", norm, group_norms, factor, skip, skipped, partials, spans, max_norm, weight, divisor,
        steps, scalars, row, group, hyper, list(lrs), lr_groups, _norm_type(norm_type), scale,
        bool(skip_nonfinite), found_inf,
    )  # fmt: skip


def _counters(
    steps: Tensor | None,
    scalars: Tensor | None,
    row: Tensor | None,
    group: Tensor | None,
    hyper: Tensor | None,
    lrs: Sequence[Tensor],
    lr_groups: Tensor | None,
) -> None:
    if steps is None:
        return
    for name, value in (("scalars", scalars), ("row", row), ("group", group), ("hyper", hyper)):
        if value is None:
            raise TypeError(f"{name} must be given with steps, got None")
    _table(steps, "steps", torch.float32, "[n]")
    _table(row, "row", torch.int64, "[m]")  # type: ignore[arg-type]
    _update_tables(len(row), group, row, hyper, scalars, None)  # type: ignore[arg-type]
    if len(scalars) > steps.numel():  # type: ignore[arg-type]
        raise ValueError(f"steps must have the {len(scalars)} elements of scalars, got {steps.numel()}")  # type: ignore[arg-type]
    if len(lrs):
        _list(lrs, "lrs", steps.device)
        _is(Tensor, lr_groups, "lr_groups", "an int64 tensor [len(lrs)]")
        _table(lr_groups, "lr_groups", torch.int64, "[len(lrs)]")  # type: ignore[arg-type]
        for i, lr in enumerate(lrs):
            if lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"lrs[{i}] must be one float32 or float64 element, got {lr.dtype} {list(lr.shape)}"
                )
        _below(lr_groups[: len(lrs)], "lr_groups", len(hyper))  # type: ignore[index,arg-type]


def _update_tables(
    count: int, group: Tensor, row: Tensor, hyper: Tensor, scalars: Tensor, skip: Tensor | None
) -> None:
    _table(group, "group", torch.int64, "[m]")
    _table(row, "row", torch.int64, "[m]")
    _table(hyper, "hyper", torch.float64, f"[groups, {HYPER_COLUMNS}]")
    _table(scalars, "scalars", torch.float64, f"[n, {SCALAR_COLUMNS}]")
    if skip is not None:
        _table(skip, "skip", torch.int32, "0-d")
    if hyper.dim() != 2 or hyper.shape[1] != HYPER_COLUMNS:
        raise ValueError(f"hyper must have shape [groups, {HYPER_COLUMNS}], got {list(hyper.shape)}")
    if scalars.dim() != 2 or scalars.shape[1] != SCALAR_COLUMNS:
        raise ValueError(f"scalars must have shape [n, {SCALAR_COLUMNS}], got {list(scalars.shape)}")
    for name, table in (("group", group), ("row", row)):
        if len(table) < count:
            raise ValueError(f"{name} must have an entry for each of the {count} parameters")
    _below(group[:count], "group", len(hyper))
    _below(row[:count], "row", len(scalars))


# ------------------------------------------------------------------------------------------ scale

_define("scale_(Tensor(a!)[] tensors, Tensor factor, Tensor factor_index, float max_value)")
_define(
    "scale_into_(Tensor(a!)[] out, Tensor[] tensors, Tensor factor, Tensor factor_index, float max_value)"
)


def _check_scale(tensors: Sequence[Tensor], factor: Tensor, factor_index: Tensor, max_value: float) -> None:
    _scale_tables(factor, max_value)
    _list(tensors, "tensors", factor.device)
    _check_factor_index(factor_index, tensors, factor)


def scale_(
    tensors: Sequence[Tensor],
    factor: Tensor,
    factor_index: Tensor | None = None,
    *,
    max_value: float = math.inf,
) -> None:
    """Multiplies tensors in place by a device scalar and clamps them: ``clip`` when given its factor.

    Tensors whose factor is exactly 1 are not touched (their version counters move all the same).

    Args:
        tensors: dense tensors, any dtypes. Mutated.
        factor: float64 ``[f]`` (or 0-d).
        factor_index: int64 ``[len(tensors)]``: each tensor's factor; the first by default.
        max_value: elements are clamped to ``[-max_value, max_value]``.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    factor_index = _factor_index(factor_index, tensors)
    _check_scale(tensors, factor, factor_index, max_value)
    _call("scale_", list(tensors), factor, factor_index, float(max_value))
    _bump(tensors)


def _check_scale_into(
    out: Sequence[Tensor], tensors: Sequence[Tensor], factor: Tensor, factor_index: Tensor, max_value: float
) -> None:
    _scale_tables(factor, max_value)
    _list(out, "out", factor.device)
    _list(tensors, "tensors", factor.device)
    if [t.numel() for t in out] != [t.numel() for t in tensors]:
        raise ValueError("out and tensors must hold as many tensors, of as many elements each")
    _check_factor_index(factor_index, tensors, factor)


def scale_into_(
    out: Sequence[Tensor],
    tensors: Sequence[Tensor],
    factor: Tensor,
    factor_index: Tensor | None = None,
    *,
    max_value: float = math.inf,
) -> None:
    """``out = clamp(tensor * factor, -max_value, max_value)``, converting to out's dtype.

    Args:
        out: dense tensors, as many elements each as the tensor beside it, same memory order. Mutated.
        tensors: the sources; must not overlap ``out``.
        factor: float64 ``[f]`` (or 0-d).
        factor_index: int64 ``[len(tensors)]``: each tensor's factor; the first by default.
        max_value: the clamp, inf for none.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    factor_index = _factor_index(factor_index, tensors)
    _check_scale_into(out, tensors, factor, factor_index, max_value)
    _call("scale_into_", list(out), list(tensors), factor, factor_index, float(max_value))
    _bump(out)


def _factor_index(factor_index: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    return torch.zeros(len(tensors), dtype=torch.int64) if factor_index is None else factor_index


def _check_factor_index(factor_index: Tensor, tensors: Sequence[Tensor], factor: Tensor) -> None:
    _table(factor_index, "factor_index", torch.int64, "[len(tensors)]")
    if factor_index.numel() < len(tensors):
        raise ValueError(f"factor_index must name a factor for each of the {len(tensors)} tensors")
    _below(factor_index[: len(tensors)], "factor_index", factor.numel())


def _scale_tables(factor: Tensor, max_value: float) -> None:
    _table(factor, "factor", torch.float64, "[f]")
    if isinstance(max_value, bool) or not isinstance(max_value, numbers.Real) or not max_value >= 0:
        raise ValueError(f"max_value must be a number of at least 0, got {max_value!r}")


# ---------------------------------------------------------------------------------------- updates

_UPDATE = (
    "Tensor[] grads, Tensor segments, Tensor index, Tensor group, Tensor row, Tensor hyper, Tensor scalars, "
    "Tensor factor, Tensor skip)"
)
_define(
    "adam_(Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] copies, " + _UPDATE
)
_define("sgd_(Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor(c!)[] copies, " + _UPDATE)


def _check_adam(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    grads: Sequence[Tensor],
    segments: Tensor,
    index: Tensor,
    group: Tensor,
    row: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
) -> None:
    states = [("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)]
    if len(max_exp_avg_sqs):
        states.append(("max_exp_avg_sqs", max_exp_avg_sqs))
    _table(factor, "factor", torch.float64, "[n_groups]")
    _update_lists(params, copies, grads, states, segments, index, factor.device)
    _update_tables(len(params), group, row, hyper, scalars, skip)
    _beside(factor.device, scalars=scalars, skip=skip)
    _check_options({AMSGRAD: ("max_exp_avg_sqs", max_exp_avg_sqs)}, group[: len(params)], hyper, factor)


def adam_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    grads: Sequence[Tensor],
    segments: Tensor,
    index: Tensor,
    group: Tensor,
    row: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
) -> None:
    """Adam or AdamW (flag 1 of ``hyper``) with average, unscale and clip folded in, in one pass.

    Formulas: Kingma & Ba 2015, algorithm 1; decoupled decay: Loshchilov & Hutter 2019, algorithm 2;
    amsgrad: Reddi et al. 2018, as in ``torch.optim.Adam``. Arithmetic is float32 (float64 where a
    parameter or a gradient is), rounded once when stored.

    Args:
        params: parameters, any dtypes. Mutated, like the states.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        max_exp_avg_sqs: their maxima, or empty without amsgrad.
        copies: lower-precision copies of float32 or float64 parameters, written in the same pass; or empty.
        grads: sums to be multiplied by ``factor``: views of a buffer, or gradients as they came.
        segments: int64 ``[n, 2]``.
        index: int64 ``[len(params)]``, ascending: the parameters' segments.
        group: int64 ``[len(params)]``: rows of ``hyper``.
        row: int64 ``[len(params)]``: rows of ``scalars``.
        hyper: see :func:`finish_`.
        scalars: of :func:`finish_`.
        factor: float64 ``[n_groups]`` of :func:`finish_`.
        skip: int32 0-d of :func:`finish_`: 1 writes nothing at all.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    _check_adam(
        params,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        copies,
        grads,
        segments,
        index,
        group,
        row,
        hyper,
        scalars,
        factor,
        skip,
    )
    _call(
        "adam_", list(params), list(exp_avgs), list(exp_avg_sqs), list(max_exp_avg_sqs), list(copies),
        list(grads), segments, index, group, row, hyper, scalars, factor, skip,
    )  # fmt: skip
    _bump([*params, *copies])


def _check_sgd(
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    copies: Sequence[Tensor],
    grads: Sequence[Tensor],
    segments: Tensor,
    index: Tensor,
    group: Tensor,
    row: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
) -> None:
    states = [("momentum_buffers", momentum_buffers)] if len(momentum_buffers) else []
    _table(factor, "factor", torch.float64, "[n_groups]")
    _update_lists(params, copies, grads, states, segments, index, factor.device)
    _update_tables(len(params), group, row, hyper, scalars, skip)
    _beside(factor.device, scalars=scalars, skip=skip)
    _check_options({MOMENTUM: ("momentum_buffers", momentum_buffers)}, group[: len(params)], hyper, factor)


def sgd_(
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    copies: Sequence[Tensor],
    grads: Sequence[Tensor],
    segments: Tensor,
    index: Tensor,
    group: Tensor,
    row: Tensor,
    hyper: Tensor,
    scalars: Tensor,
    factor: Tensor,
    skip: Tensor,
) -> None:
    """SGD with momentum, dampening, nesterov and weight decay, in one pass.

    Formulas as in ``torch.optim.SGD``. On a parameter's first step (``scalars``) the momentum buffer,
    which must be zero, becomes the gradient.

    Args:
        params: parameters, any dtypes. Mutated.
        momentum_buffers: one per parameter, or empty when every momentum is 0. Mutated.
        copies: see :func:`adam_`, like all that follows. Mutated.
        grads: sums to be multiplied by ``factor``.
        segments: int64 ``[n, 2]``.
        index: int64 ``[len(params)]``, ascending.
        group: int64 ``[len(params)]``.
        row: int64 ``[len(params)]``.
        hyper: see :func:`finish_`.
        scalars: of :func:`finish_`.
        factor: float64 ``[n_groups]`` of :func:`finish_`.
        skip: int32 0-d of :func:`finish_`.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has changed.
    """
    _check_sgd(
        params, momentum_buffers, copies, grads, segments, index, group, row, hyper, scalars, factor, skip
    )
    _call(
        "sgd_", list(params), list(momentum_buffers), list(copies), list(grads), segments, index, group, row,
        hyper, scalars, factor, skip,
    )  # fmt: skip
    _bump([*params, *copies])


# What a group may ask for: a flag of the last column, and a column that is not 0.
AMSGRAD, MOMENTUM = 2, "momentum"


def _check_options(
    needs: dict[Any, tuple[str, Sequence[Tensor]]], group: Tensor, hyper: Tensor, factor: Tensor
) -> None:
    """Raises where a group's norm group is out of range, or what its options need was not given."""
    if torch.compiler.is_compiling():
        return
    rows = hyper.tolist()
    for g in set(group.tolist()):
        if not 0 <= rows[g][8] < factor.numel():
            raise ValueError(f"hyper[{g}]'s norm group must be below {factor.numel()}, got {rows[g][8]:g}")
        for option, (argument, tensors) in needs.items():
            wanted = rows[g][5] != 0 if option == MOMENTUM else int(rows[g][9]) & option
            if wanted and not len(tensors):
                raise ValueError(f"{argument} must be given for hyper[{g}], got none")


def _update_lists(
    params: Sequence[Tensor],
    copies: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[tuple[str, Sequence[Tensor]]],
    segments: Tensor,
    index: Tensor,
    device: torch.device,
) -> None:
    _segments(segments)
    _list(params, "params", device)
    written = [("copies", copies)] if len(copies) else []
    for name, tensors in (("grads", grads), *states, *written):
        _list(tensors, name, device)
        if [t.numel() for t in tensors] != [p.numel() for p in params]:
            raise ValueError(f"{name} must hold one tensor per parameter, of as many elements")
    for i, param in enumerate(params if len(copies) else ()):
        if param.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"params[{i}] must be float32 or float64 to have a copy, got {param.dtype}")
    _fits(params, index, segments, "params")


NAMES = ("gather_", "norm_", "finish_", "scale_", "scale_into_", "adam_", "sgd_")

# What the public functions check, by op, for callers of the bare ops where nothing else would: on a GPU.
CHECKS: dict[str, Callable[..., None]] = {
    "gather_": _check_gather,
    "norm_": _check_norm,
    "finish_": _check_finish,
    "scale_": _check_scale,
    "scale_into_": _check_scale_into,
    "adam_": _check_adam,
    "sgd_": _check_sgd,
}
