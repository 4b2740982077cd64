"""What a checkpoint may hold: checks before anything is loaded, copies so that nothing is shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastaccum import arguments, sharding

VERSION = 1
_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
# What an optimizer cannot make up for itself when it loads a group without it.
_OPTIONS = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening"}
_FIELDS = {
    "version", "accumulation_steps", "micro_step", "weight_kind", "total_weight", "kept", "kept_weight",
    "gradients", "skipped",
}  # fmt: skip


def owned(value: Any) -> Any:
    """The same containers with every tensor that is a view of something larger copied."""
    if isinstance(value, Tensor):
        if sharding.is_sharded(value):
            return value
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()
    if isinstance(value, dict):
        return type(value)((k, owned(v)) for k, v in value.items()) if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(owned(v) for v in value)
    return value


def keep_dtypes(state_dict: dict[str, Any], optimizer: Any) -> None:
    """Puts state of other dtypes than its parameter's back as it was saved: torch has converted it."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            loaded = optimizer.state[param].get(key)
            if key in _MOMENTS and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][key] = value.to(loaded.device, copy=True)


def steps_on_cpu(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Step counts as stock has them: on the CPU unless the group is capturable or fused."""
    state = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        if group.get("capturable") or group.get("fused"):
            continue
        for number in group["params"]:
            step = state.get(number, {}).get("step")
            if isinstance(step, Tensor) and step.device.type != "cpu":
                state[number] = {**state[number], "step": step.cpu()}
    return {**state_dict, "state": state}


def check_groups(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError unless a state_dict has these groups and states of these shapes."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state_dict has no {key!r}: it is not an optimizer's (truncated?)")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    here = [len(group["params"]) for group in groups]
    if saved != here:
        raise ValueError(
            f"the state_dict has parameter groups of {saved} parameters, this optimizer has {here}: "
            "build the same groups before loading"
        )
    for number, (group, saved_group) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        lacking = sorted((_OPTIONS & group.keys()) - saved_group.keys())
        if lacking:
            raise ValueError(
                f"parameter group {number} of the state_dict has no {', '.join(lacking)}: it was saved from "
                "another kind of optimizer"
            )
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [(param, group) for group in groups for param in group["params"]]
    for number, (param, group) in zip(numbers, params, strict=True):
        entry = state_dict["state"].get(number, {})
        if entry and {"betas", "amsgrad"} <= group.keys():  # Adam and AdamW
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if key not in entry:
                    raise ValueError(
                        f"the state_dict's state of parameter {number} has no {key} (truncated?)"
                    )
        for key, value in entry.items():
            if key in _MOMENTS and value is not None:
                _check_tensor(value, param, f"{key} of parameter {number}")


def _check_tensor(value: Any, param: Tensor, what: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the checkpoint's {what} must be a floating-point tensor, got {kind}")
    if value.shape != param.shape:
        raise ValueError(
            f"the checkpoint's {what} has shape {list(value.shape)}, the parameter has "
            f"{list(param.shape)}: it was saved from another model"
        )


def check_window(entry: Any, params: Sequence[Tensor], accumulation_steps: int) -> None:
    """Raises ValueError unless an open window's entry is whole and fits these parameters."""
    if not isinstance(entry, dict) or not _FIELDS <= entry.keys():
        missing = sorted(_FIELDS - entry.keys()) if isinstance(entry, dict) else entry
        raise ValueError(f"the 'fastaccum' entry is not whole (truncated?): missing {missing}")
    if not isinstance(entry["version"], int) or entry["version"] > VERSION:
        raise ValueError(
            f"the 'fastaccum' entry has format version {entry['version']}, this fastaccum reads {VERSION}: "
            "load it with a newer fastaccum"
        )
    for key in ("accumulation_steps", "micro_step", "windows"):
        value = entry.get(key, 0)  # older states have no "windows"
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"the 'fastaccum' entry has {key}={value!r}, it must be an int of at least 0")
    for key in ("total_weight", "kept_weight"):
        if not arguments.is_number(entry[key]) or not 0.0 <= entry[key] < math.inf:
            raise ValueError(
                f"the 'fastaccum' entry has {key}={entry[key]!r}, it must be finite and at least 0"
            )
    if entry["weight_kind"] not in (None, "plain", "weight", "count"):
        raise ValueError(f"the 'fastaccum' entry has an unknown weight_kind={entry['weight_kind']!r}")
    if not isinstance(entry["skipped"], Tensor) or entry["skipped"].numel() != 1:
        raise ValueError(f"the 'fastaccum' entry has skipped={entry['skipped']!r}, it must be a 0-d tensor")
    if not isinstance(entry["gradients"], dict):
        raise ValueError("the 'fastaccum' entry's gradients must be a dict of tensors by parameter number")
    held = entry["micro_step"]
    # A full window is one that could not be closed (nonfinite="error").
    if held > accumulation_steps:
        raise ValueError(
            f"the checkpoint holds {held} micro-batches of an open window, this optimizer updates on every "
            f"{accumulation_steps}: set accumulation_steps={entry['accumulation_steps']} to load it"
        )
    if held and entry["accumulation_steps"] != accumulation_steps:
        raise ValueError(
            f"the checkpoint's open window has accumulation_steps={entry['accumulation_steps']}, this "
            f"optimizer has {accumulation_steps}: set it to load the window"
        )
    unreduced = entry.get("unreduced") or {}
    if unreduced and not _is_weight(entry.get("unreduced_weight")):
        raise ValueError("the 'fastaccum' entry has unreduced gradients without their weight (truncated?)")
    masters = entry.get("master_weights") or {}
    for what, tensors in (
        ("gradient", entry["gradients"]), ("unreduced gradient", unreduced), ("master weight", masters)
    ):  # fmt: skip
        for number, tensor in tensors.items():
            if not isinstance(number, int) or not 0 <= number < len(params):
                raise ValueError(
                    f"the checkpoint has a {what} of parameter {number}, there are {len(params)} parameters"
                )
            _check_tensor(tensor, params[number], f"{what} of parameter {number}")


def _is_weight(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and value[0] in ("plain", "weight", "count")
        and arguments.is_number(value[1])
    )
