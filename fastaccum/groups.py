"""Which optimizers, groups and parameters can be wrapped: checks, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastaccum import arguments, ops, sharding

_REFUSED = {
    "LBFGS": "it re-evaluates the loss several times within one step",
    "SparseAdam": "it takes sparse gradients only, and a window's gradient is dense",
}


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError or ValueError if it is not an optimizer that can be wrapped."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; build it first: "
            "FusedAccumulator(torch.optim.AdamW(model.parameters()), accumulation_steps=4)"
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith("torch.optim"):
            raise ValueError(f"{kind.__name__} cannot be wrapped: {_REFUSED[kind.__name__]}")
    for number, group in enumerate(optimizer.param_groups):
        check_group(group, number)


def check_group(group: dict[str, Any], number: int) -> None:
    """Raises ValueError if a group's options or parameters cannot be served."""
    if group.get("differentiable"):
        raise ValueError(
            f"parameter group {number} has differentiable=True, which cannot be wrapped: the update is "
            "not recorded by autograd"
        )
    for param in group["params"]:
        check_param(param, number)


def check_param(param: Tensor, group: int) -> None:
    """Raises ValueError unless it is a dense parameter of one of the four dtypes."""
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"a parameter of group {group} is lazy and has no shape yet: run a forward pass before wrapping"
        )
    part = sharding.local(param) if sharding.is_sharded(param) else param
    if is_traceable_wrapper_subclass(part):
        raise ValueError(
            f"a parameter of group {group} is a {type(part).__name__}, a tensor subclass that wraps others: "
            "only plain tensors and DTensors of them are supported"
        )
    where = f"a parameter of group {group} (shape {list(param.shape)})"
    if param.is_complex():
        raise ValueError(
            f"{where} is complex: wrap torch.view_as_real of it, or leave it to another optimizer"
        )
    if param.layout != torch.strided:
        raise ValueError(f"{where} is {param.layout}: only dense parameters are supported")
    if not param.is_floating_point():
        raise ValueError(f"{where} has dtype {param.dtype}: only floating-point parameters have gradients")
    if param.dtype not in ops.DTYPES:
        raise ValueError(
            f"{where} has dtype {param.dtype}; float32, bfloat16, float16 and float64 are supported"
        )


def device_of(groups: Sequence[dict[str, Any]]) -> torch.device:
    """The one device of all parameters."""
    devices = {param.device for group in groups for param in group["params"]}
    if len(devices) > 1:
        raise ValueError(
            f"parameters are on several devices ({', '.join(sorted(map(str, devices)))}): give each device's "
            "parameters an optimizer and a FusedAccumulator of their own"
        )
    return devices.pop() if devices else torch.device("cpu")


def check_limits(groups: Sequence[dict[str, Any]], max_value: float | None) -> None:
    """Raises ValueError if a group clips by norm while the wrapper clips by value."""
    limits = group_max_norms(groups)
    if max_value is not None and any(limit is not None for limit in limits):
        raise ValueError(
            f"a parameter group has its own max_norm ({limits}), and max_value={max_value}: they exclude "
            "each other, clip by norm or by value"
        )


def check_take(groups: Sequence[dict[str, Any]], take: str) -> None:
    """Raises ValueError if gradients would be taken before they are there."""
    if take == "backward" and any(sharding.is_sharded(p) for group in groups for p in group["params"]):
        raise ValueError("take='backward' does not work with DTensor parameters (FSDP2): use take='step'")


def group_max_norms(groups: Sequence[dict[str, Any]]) -> list[float | None]:
    """Each group's own limit, or None for the shared norm."""
    return [
        arguments.max_norm(group.get("max_norm"), f"param_groups[{i}]['max_norm']")
        for i, group in enumerate(groups)
    ]
