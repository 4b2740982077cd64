"""Questions about all gradients in ``.grad`` at once.

They are asked in every ``step()``, once per parameter: a loop in Python costs 0.1 to 0.3 us for each
question, ``map`` of a C function half as much. Reading ``.grad`` costs more than any of them, as it makes a
Python object and waits for memory: :func:`of` reads each once, and the others are asked of its list.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, gt, is_
from typing import Any

import torch
from torch import Tensor

_grad, _layout, _requires_grad = attrgetter("grad"), attrgetter("layout"), attrgetter("requires_grad")


def of(params: Sequence[Tensor]) -> list[Any]:
    """What the parameters have in ``.grad``: tensors, None where there is none."""
    return list(map(_grad, params))


def gone(grads: Sequence[Tensor | None]) -> bool:
    """Whether some parameter has none."""
    return any(map(is_, grads, repeat(None)))


def ordinary(grads: Sequence[Tensor]) -> bool:
    """Whether all are strided, row-major, what their memory says (no negative bit) and without a graph."""
    return (
        all(map(is_, map(_layout, grads), repeat(torch.strided)))
        and all(map(Tensor.is_contiguous, grads))
        and not any(map(Tensor.is_neg, grads))
        and not any(map(_requires_grad, grads))
    )


def _no_count(grad: Tensor) -> int:
    return 0


# Holders on the C++ side (DLPack); a torch that cannot tell does without.
_use_count = getattr(torch.Tensor, "_use_count", _no_count)


def _references(grads: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    # A sparse gradient has no storage of its own, and becomes a dense copy anyway.
    return [
        (sys.getrefcount(grad), torch._C._storage_Use_Count(grad.untyped_storage()._cdata), _use_count(grad))
        if grad.layout == torch.strided
        else (0, 0, 0)
        for grad in grads
    ]


def _lone_gradient() -> tuple[int, int, int]:
    """What the counts are for a gradient that only its parameter and the list hold, as this Python counts."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    return _references([param.grad])[0]


_LONE = _lone_gradient()


def own(grads: list[Tensor]) -> None:
    """Replaces, in place, every gradient that others could still write to by a copy.

    A gradient is kept for the next micro-batches only if nothing else refers to it or to its storage:
    a view of DDP's bucket, a graph's static output or a tensor that the user holds would change later.
    The list and ``.grad`` must be their only holders on this side.
    """
    for i, counts in enumerate(_references(grads)):
        if counts != _LONE and any(map(gt, counts, _LONE)):
            grads[i] = grads[i].clone(memory_format=torch.preserve_format)
