"""What FSDP2 keeps to itself: gradients of backward calls that it was told not to reduce.

Under ``set_requires_gradient_sync(False)`` a gradient stays whole on this rank, in FSDP2's own objects, and
is reduced together with the next one. torch has no public way to ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, distributed

Marks = dict[int, tuple[tuple[int, int], ...]]  # id of a parameter -> which tensors, written how often


def unreduced(params: Sequence[Tensor]) -> Marks:
    """The parameters with gradients inside FSDP2; a mark changes whenever a backward adds to them."""
    ours = set(map(id, params))
    result: Marks = {}
    for found in _sharded_params():
        if id(found.sharded_param) not in ours:
            continue
        whole = getattr(found, "_unsharded_param", None)  # only after the first forward
        grads = (found.unsharded_accumulated_grad, None if whole is None else whole.grad)
        marks = tuple((id(grad), grad._version) for grad in grads if grad is not None)
        if marks:
            result[id(found.sharded_param)] = marks
    return result


def _sharded_params() -> Iterator[Any]:
    if not distributed.is_available():
        return
    from torch.distributed import _composable_state

    for reference in list(_composable_state._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        for group in groups:
            yield from group.fsdp_params
