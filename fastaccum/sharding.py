"""Parameters of which this rank holds a part: DTensors, as FSDP2 and tensor parallelism make them.

Kernels see the local part. What a window decides must be the same on all ranks, so the sums behind the
norm are reduced over the parameters' meshes first: what is sharded is summed, what is replicated counts
once. The order of that sum is the communication library's; every rank gets the same bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from fastaccum.layout import FINISH_LANES


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor without it; importing it takes long
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """This rank's part: the tensor itself, not a view that autograd records, as to_local() would give."""
    return tensor._local_tensor


def like(param: Any, part: Tensor) -> Tensor:
    """The DTensor of this rank's part, spread as ``param`` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def gradient(param: Any, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, spread as ``param`` is; a partial sum is reduced."""
    if not is_sharded(grad):
        raise RuntimeError(
            f"the gradient of a DTensor parameter (shape {list(param.shape)}) must be a DTensor, got "
            f"{type(grad).__name__}"
        )
    if grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return local(grad)


class Sharding:
    """How sums over the parameters of one roster become sums over all ranks.

    Attributes:
        kinds: each parameter's kind: a number per different mesh and placements, the same on all ranks.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._found: list[Any] = []  # (mesh, placements), None for a parameter that every rank holds whole
        self.kinds: list[int] = []
        for param in params:
            key = (param.device_mesh, param.placements) if is_sharded(param) else None  # type: ignore
            if key not in self._found:
                self._found.append(key)
            self.kinds.append(self._found.index(key))
        self._meshes: list[Any] = []
        for key in self._found:
            if key is not None and key[0] not in self._meshes:
                self._meshes.append(key[0])
        self._counts = [_counts(key) for key in self._found]

    def _in(self, mesh: Any) -> list[int]:
        return [i for i, key in enumerate(self._found) if (None if key is None else key[0]) == mesh]

    def reduced(
        self,
        partials: Tensor,
        spans: Sequence[tuple[int, int, int]],
        kinds: Sequence[int],
        groups: int,
        p: float,
    ) -> Tensor:
        """The sums of all ranks, by norm group, as ``finish_`` takes them.

        Args:
            partials: float64 ``[2, n_chunks]``: this rank's sums, and where they are not finite.
            spans: ``(norm group, first chunk, end chunk)``.
            kinds: each span's kind.
            groups: how many norm groups there are.
            p: the norm's.

        Returns:
            float64 ``[2, groups]``.
        """
        join = torch.maximum if p == math.inf else torch.add
        result = partials.new_zeros(2, groups)
        for mesh in (None, *self._meshes):
            here = self._in(mesh)
            sums = partials.new_zeros(2, groups)
            for (group, begin, end), kind in zip(spans, kinds, strict=True):
                if kind not in here or begin == end:
                    continue
                value = _folded(partials[0, begin:end], p)
                if self._counts[kind]:
                    sums[0, group] = join(sums[0, group], value)
                sums[1, group] += partials[1, begin:end].sum()
            _reduce(sums, mesh, p)
            result[0] = join(result[0], sums[0])
            result[1] += sums[1]
        return result

    def norms(self, numbers: Sequence[int], norms: Tensor, p: float) -> Tensor:
        """Norms of whole parameters from those of this rank's parts.

        Args:
            numbers: the slots' numbers.
            norms: ``[len(numbers)]``.
            p: the norm's.
        """
        powers = norms.clone() if p == math.inf else norms**p
        for mesh in self._meshes:
            here = self._in(mesh)
            places = [i for i, number in enumerate(numbers) if self.kinds[number] in here]
            counts = [float(self._counts[self.kinds[numbers[i]]]) for i in places]
            index = torch.tensor(places, dtype=torch.int64, device=norms.device)
            part = powers[index] * torch.tensor(counts, dtype=norms.dtype, device=norms.device)
            _reduce(part, mesh, p)
            powers[index] = part
        return powers if p == math.inf else powers ** (1.0 / p)

    def any(self, here: bool | Tensor, device: torch.device) -> Tensor:
        """Whether it is so on any rank: float64 0-d, 1 or 0."""
        flag = torch.as_tensor(here, dtype=torch.float64, device=device).clone()
        for mesh in self._meshes:
            _reduce(flag, mesh, math.inf)
        return flag


def _counts(key: Any) -> bool:
    """Whether this rank's part counts in a sum over the mesh: of what is replicated, only one does."""
    if key is None:
        return True
    mesh, placements = key
    place = mesh.get_coordinate()
    if place is None:
        return False
    return not any(at and spread.is_replicate() for at, spread in zip(place, placements, strict=True))


def _reduce(values: Tensor, mesh: Any, p: float) -> None:
    """Reduces over the whole mesh, in place."""
    operation = distributed.ReduceOp.MAX if p == math.inf else distributed.ReduceOp.SUM
    for dim in range(mesh.ndim) if mesh is not None else ():
        distributed.all_reduce(values, operation, group=mesh.get_group(dim))


def _folded(values: Tensor, p: float) -> Tensor:
    """Sum or maximum, in an order that does not depend on the number of threads."""
    rows = torch.nn.functional.pad(values, (0, -values.numel() % FINISH_LANES)).view(-1, FINISH_LANES)
    return rows.amax() if p == math.inf else rows.sum(0).sum()
