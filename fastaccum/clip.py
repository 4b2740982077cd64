"""Drop-ins for ``torch.nn.utils``: the global norm and clipping, in two passes or fewer."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastaccum import arguments, dispatch
from fastaccum.layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.lru_cache(maxsize=16)
def _tables(numels: tuple[int, ...], thread: int) -> tuple[Layout, Tensor, Tensor, Tensor]:
    layout = Layout.of(numels)
    segments = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)), dtype=torch.int64)
    spans = torch.tensor([[0, 0, layout.n_chunks]])
    return layout, segments.reshape(-1, 2), torch.arange(len(numels)), spans


def _as_list(tensors: Tensor | Iterable[Tensor], argument: str) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument}[{i}] must be a tensor, got {type(tensor).__name__}")
    return found


def _stock_norm_type(norm_type: Any) -> float:
    """Every number that torch takes, 0 and negatives too."""
    if isinstance(norm_type, str):
        norm_type = float(norm_type)
    if not arguments.is_number(norm_type) or math.isnan(norm_type):
        raise TypeError(f"norm_type must be a number or 'inf', got {norm_type!r}")
    return float(norm_type)


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all tensors as if they were one vector; ``torch.nn.utils.get_total_norm``, fused.

    Sums are float64 in a fixed order, so the result is the same for any number of threads, does not
    overflow while the norm itself fits float32, and is float32 (float64 if a tensor is) for 16-bit
    tensors too.

    Args:
        tensors: a tensor or an iterable of tensors, of any of the four floating dtypes.
        norm_type: any p that torch takes.
        error_if_nonfinite: raise instead of returning inf or NaN (waits for the device).
        foreach: accepted for compatibility, without effect.

    Returns:
        0-d tensor; ``tensor(0.)`` if there is nothing to measure.

    Raises:
        TypeError: something that is not a tensor.
        ValueError: tensors on several devices, or of a dtype that has no norm here.
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
    """
    norm, _, _ = _total_norm(_as_list(tensors, "tensors"), _stock_norm_type(norm_type))
    if error_if_nonfinite:
        _require_finite(norm, norm_type)
    return norm


def _require_finite(norm: Tensor, norm_type: float) -> None:
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


def _total_norm(
    tensors: list[Tensor], norm_type: float, max_norm: float = math.inf
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """(norm, clip factor float64 [1] or None if there is nothing, the tensors as they lie in memory)."""
    if not tensors:
        return torch.tensor(0.0), None, []
    device = tensors[0].device
    kinds = {(tensor.device, tensor.layout, tensor.dtype) for tensor in tensors}
    for i, tensor in enumerate(tensors) if len(kinds) > 1 or not kinds <= _usual(device) else ():
        if tensor.device != device:
            raise ValueError(
                f"tensors are on several devices ({device} and {tensor.device} at {i}): take the norm per "
                "device and combine the results"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"tensor {i} is {tensor.layout}: coalesce() it and pass to_dense(), or its values"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"tensor {i} has dtype {tensor.dtype}; the four floating dtypes have a norm here"
            )
    out_dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    with torch.no_grad():
        dense = [_dense(tensor) for tensor in tensors]
        if not norm_type > 0:
            # Stock's own definition for 0 and negative p: the norm of the norms, per tensor.
            norms = [torch.linalg.vector_norm(t.double(), norm_type) for t in tensors]
            norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).reshape(1)
            return norm.to(out_dtype), factor, dense
        norm64, factor = _fused_norm(dense, norm_type, max_norm)
        return norm64.to(out_dtype), factor, dense


def _usual(device: torch.device) -> set[tuple[torch.device, torch.layout, torch.dtype]]:
    """One of these for all tensors: nothing more has to be asked of each."""
    return {(device, torch.strided, dtype) for dtype in DTYPES}


def _dense(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()  # 2 us each, which gradients do not need
    return tensor if tensor.is_contiguous() else _permuted(tensor)


def _permuted(tensor: Tensor) -> Tensor:
    """Any dense permutation as it lies in memory, else a row-major copy."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride()[d])
    return tensor.permute(order) if tensor.permute(order).is_contiguous() else tensor.contiguous()


def _fused_norm(tensors: list[Tensor], norm_type: float, max_norm: float) -> tuple[Tensor, Tensor]:
    device = tensors[0].device
    backend = dispatch.load(dispatch.choose("auto", device), device)
    layout, segments, index, spans = _tables(tuple(t.numel() for t in tensors), threading.get_ident())
    f64: dict[str, Any] = {"dtype": torch.float64, "device": device}
    partials = torch.empty(2, layout.n_chunks, **f64)
    scale = None
    if norm_type not in (1.0, 2.0, math.inf):
        backend.norm_(partials, segments, tensors, index, math.inf, None)
        scale = partials[0].max() if layout.n_chunks else torch.ones((), **f64)
    backend.norm_(partials, segments, tensors, index, norm_type, scale)
    norm = torch.empty((), dtype=torch.float32, device=device)
    norms, factor = torch.empty(1, **f64), torch.empty(1, **f64)
    one = torch.ones((), **f64)
    backend.finish_(
        norm, norms, factor, torch.empty((), dtype=torch.int32, device=device),
        torch.zeros((), dtype=torch.int64, device=device), partials,
        spans, torch.tensor([max_norm], dtype=torch.float64),
        one, one, None, None, None, None, None, [], None, norm_type, scale, False,
    )  # fmt: skip
    return norms[0], factor


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips the gradients of parameters in place by their global norm; ``torch.nn.utils``'s, fused.

    Gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``, each physical parameter once. When
    that is 1, nothing is written.

    Given a :class:`~fastaccum.FusedAccumulator`, clips the window that its next closing ``step()`` or
    ``flush()`` finishes, in place of the wrapper's own ``max_norm``, and returns its ``norm`` tensor, which
    holds the value then.

    Args:
        parameters: a tensor, an iterable of tensors, or a FusedAccumulator.
        max_norm: the largest norm, above 0.
        norm_type: any p that torch takes.
        error_if_nonfinite: raise, before any gradient is touched, if the norm is inf or NaN.
        foreach: accepted for compatibility, without effect.

    Returns:
        The norm before clipping, 0-d, float32 (float64 if a gradient is).

    Raises:
        TypeError, ValueError: as :func:`get_total_norm`; or ``max_norm`` is not above 0.
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
    """
    from fastaccum.accumulator import FusedAccumulator

    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        max_norm = max_norm.item()
    limit = arguments.max_norm(max_norm)
    if limit is None:
        raise TypeError("max_norm must be a number, got None")
    if isinstance(parameters, FusedAccumulator):
        if norm_type != parameters._options.norm_type:
            raise ValueError(
                f"this FusedAccumulator was built with norm_type={parameters._options.norm_type}, "
                f"got {norm_type}"
            )
        if error_if_nonfinite:
            raise ValueError(
                "error_if_nonfinite=True goes with parameters: a window's norm is known when it closes. Make "
                "the FusedAccumulator with nonfinite='error'"
            )
        return parameters.clip_next(limit)
    params = {id(p): p for p in _as_list(parameters, "parameters")}
    grads = [p.grad for p in params.values() if p.grad is not None]
    norm, factor, dense = _total_norm(grads, _stock_norm_type(norm_type), limit)
    if error_if_nonfinite:
        _require_finite(norm, norm_type)
    if factor is not None:
        _scale(grads, dense, factor)
    return norm


def _scale(grads: list[Tensor], dense: list[Tensor], factor: Tensor) -> None:
    """Multiplies the gradients by the factor; ``dense`` are they as they lie in memory, or copies."""
    with torch.no_grad():
        others = [i for i, (grad, copy) in enumerate(zip(grads, dense, strict=True)) if grad is not copy]
        for i in others:
            grad = grads[i]
            if any(size > 1 and step == 0 for size, step in zip(grad.shape, grad.stride(), strict=True)):
                raise RuntimeError(
                    f"gradient {i} (shape {list(grad.shape)}) is expanded: several of its elements share "
                    "memory and cannot be scaled in place. clone() it first"
                )
        device = grads[0].device
        if device.type == "cpu" and float(factor) == 1.0:  # at hand there; a GPU's kernel looks itself
            return
        backend = dispatch.load(dispatch.choose("auto", device), device)
        backend.scale_(dense, factor, torch.zeros(len(dense), dtype=torch.int64), math.inf)
        for i in others:
            if dense[i].data_ptr() != grads[i].data_ptr():  # gaps or overlaps between the elements
                grads[i].copy_(dense[i])
        torch.autograd.graph.increment_version(grads)
