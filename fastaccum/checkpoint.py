"""What a checkpoint may hold: checks before anything is loaded, copies so that nothing is shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

VERSION = 1
_FIELDS = {
    "version", "accumulation_steps", "micro_step", "weight_kind", "total_weight", "kept", "kept_weight",
    "gradients", "skipped",
}  # fmt: skip


def owned(value: Any) -> Any:
    """The same containers with every tensor that is a view of something larger copied."""
    if isinstance(value, Tensor):
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()
    if isinstance(value, dict):
        return type(value)((k, owned(v)) for k, v in value.items()) if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(owned(v) for v in value)
    return value


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
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [param for group in groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            if key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer") and value is not None:
                if value.shape != param.shape:
                    raise ValueError(
                        f"the state_dict's {key} of parameter {number} has shape {list(value.shape)}, the "
                        f"parameter has {list(param.shape)}: it was saved from another model"
                    )


def check_window(entry: Any, params: Sequence[Tensor], accumulation_steps: int) -> None:
    """Raises ValueError unless an open window's entry is whole and fits these parameters."""
    if not isinstance(entry, dict) or not _FIELDS <= entry.keys():
        missing = sorted(_FIELDS - entry.keys()) if isinstance(entry, dict) else entry
        raise ValueError(f"the 'fastaccum' entry is not whole (truncated?): missing {missing}")
    if not isinstance(entry["version"], int) or entry["version"] > VERSION:
        raise ValueError(
            f"the 'fastaccum' entry has format version {entry['version']}, this fastaccum reads up to {VERSION}: "
            "load it with a newer fastaccum"
        )
    held = entry["micro_step"]
    if held and held >= accumulation_steps:
        raise ValueError(
            f"the checkpoint holds {held} micro-batches of an open window, this optimizer updates on every "
            f"{accumulation_steps}: set accumulation_steps={entry['accumulation_steps']} to load it"
        )
    if held and entry["accumulation_steps"] != accumulation_steps:
        raise ValueError(
            f"the checkpoint's open window has accumulation_steps={entry['accumulation_steps']}, this "
            f"optimizer has {accumulation_steps}: set it to load the window"
        )
    if not (0.0 <= entry["total_weight"] < math.inf):
        raise ValueError(f"the checkpoint's total weight is {entry['total_weight']}")
    for number, grad in entry["gradients"].items():
        if not 0 <= number < len(params):
            raise ValueError(f"the checkpoint's open window has parameter {number}, there are {len(params)}")
        if grad.shape != params[number].shape:
            raise ValueError(
                f"the checkpoint's gradient of parameter {number} has shape {list(grad.shape)}, the parameter "
                f"has {list(params[number].shape)}: it was saved from another model"
            )
