"""What FusedAccumulator is held to: the plain loop, one tensor at a time, float64 and in kind.

A micro-batch is a pair (weight, gradients), a gradient None where the parameter took no part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastaccum import FusedAccumulator, dispatch
from fastaccum.ops import DTYPES

MicroBatch = tuple[float, Sequence[Tensor | None]]

_WHY_NOT = dispatch.reasons_against("native", torch.device("cpu"))
BACKENDS = [
    pytest.param("native", marks=pytest.mark.skipif(bool(_WHY_NOT), reason="; ".join(_WHY_NOT))),
    "reference",
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_take = pytest.mark.parametrize("take", ["step", "backward"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A small vector to train."""
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def send(params: Tensor | Sequence[Tensor], grads: Any) -> None:
    """A backward call that gives each parameter exactly its gradient; None takes no part."""
    if isinstance(params, Tensor):
        params, grads = [params], [grads]
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    if pairs:
        losses = [(p * torch.as_tensor(g, dtype=p.dtype)).sum().double() for p, g in pairs]
        torch.stack(losses).sum().backward()


def fused(params: Any, accumulation_steps: int = 1, **options: Any) -> FusedAccumulator:
    """SGD with lr 1 from 0: the parameter is minus the sum of the windows' gradients."""
    params = [params] if isinstance(params, Tensor) else params
    return FusedAccumulator(torch.optim.SGD(params, lr=1.0), accumulation_steps, **options)


def stock(kind: type, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """A stock optimizer whose step is the single-tensor loop, where it has others."""
    options = {"foreach": False, **options}
    if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        options = {"fused": False, **options}
    if kind is torch.optim.Muon:
        del options["foreach"]
    return kind(params, **options)


def run_window(
    params: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    divisor: float | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
) -> Tensor:
    """One window of the plain loop in the parameters' dtype; returns the norm before clipping."""
    divisor = sum(weight for weight, _ in micro_batches) if divisor is None else divisor
    for i, param in enumerate(params):
        param.grad = None
        for weight, grads in micro_batches:
            grad = grads[i]
            if grad is not None and weight:
                grad = grad.to(param.dtype) * weight
                param.grad = grad if param.grad is None else param.grad + grad
        if param.grad is not None:
            param.grad = param.grad / divisor
    # Stock has no inf norm of an empty tensor, and an infinite limit makes NaN of an infinite norm.
    clipped = [p for p in params if p.grad is not None and p.numel()]
    norm = torch.nn.utils.get_total_norm([p.grad for p in clipped], norm_type, foreach=False)
    if max_norm is not None and max_norm < math.inf:
        torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type, foreach=False)
    if max_value is not None:
        torch.nn.utils.clip_grad_value_(params, max_value, foreach=False)
    optimizer.step()
    for param in params:
        param.grad = None
    return norm


def twins(params: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """Row-major copies of parameters, of another dtype if one is given."""
    return [
        nn.Parameter(p.detach().to(dtype or p.dtype).clone(memory_format=torch.contiguous_format))
        for p in params
    ]


def error(params: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest difference from a float64 truth, relative to its largest value."""
    worst = 0.0
    for p, t in zip(params, truth, strict=True):
        if t.numel():
            scale = max(1.0, float(t.detach().abs().max()))
            off = float((p.detach().double() - t.detach()).abs().max()) / scale
            worst = max(worst, math.inf if math.isnan(off) else off)
    return worst


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """All that a refused call must leave alone: parameters, gradients, groups, state, window."""
    groups = [
        {k: list(map(id, v)) if k == "params" else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = optimizer.window_state_dict() if hasattr(optimizer, "window_state_dict") else {}
    state = [dict(optimizer.state.get(p, {})) for p in params]
    return copy.deepcopy((groups, params, [p.grad for p in params], state, own))


def assert_identical(a: Any, b: Any, where: str = "") -> None:
    """Nested values are the same, tensors bit for bit (a NaN equals a NaN)."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(a.detach().nan_to_num(12345.0), b.detach().nan_to_num(12345.0)), (
            f"{where}: {a} and {b}"
        )
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {sorted(map(str, a))} and {sorted(map(str, b))}"
        for key in a:
            assert_identical(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_identical(x, y, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a!r} and {b!r}"


def unchanged(optimizer: torch.optim.Optimizer, call: Callable[[], Any], exception: Any, match: str) -> None:
    """The call raises this and changes nothing."""
    before = snapshot(optimizer)
    with pytest.raises(exception, match=match):
        call()
    assert_identical(before, snapshot(optimizer))
