"""What one micro-batch allocates, allocation by allocation, from its forward pass to its last gradient."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_BLOCK = 512  # bytes; the caching allocator rounds every request up to it


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(rounded(storage.nbytes(), storage.device) for storage in storages.values())


def rounded(size: int, device: torch.device) -> int:
    """What an allocation of ``size`` bytes takes."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK if device.type == "cuda" else size


class Live(TorchDispatchMode):
    """Notes the bytes that are alive on a device after every allocation.

    Memory that is new in a result of an operator counts until it is freed. What an operator takes and gives
    back while it runs is not seen.

    Attributes:
        now: bytes alive of what was allocated under this mode.
        curve: ``now`` after each allocation, beside the value that ``mark`` had.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        """Starts at 0; the memory of ``known`` tensors is not new."""
        super().__init__()
        self.now = 0
        self.mark = 0
        self.curve: list[tuple[int, int]] = []
        self._device = device
        self._known = {t.untyped_storage()._cdata: t.untyped_storage() for t in known}
        self._alive: dict[int, Any] = {}

    @property
    def peak(self) -> int:
        """The most that was alive."""
        return max((live for live, _ in self.curve), default=0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operator and looks at its results."""
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.device != self._device or key in self._known or key in self._alive:
            return
        size = rounded(storage.nbytes(), storage.device)

        def freed(_: Any) -> None:
            self.now -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.curve.append((self.now, self.mark))


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One micro-batch's forward and backward pass.

    Attributes:
        live: bytes alive after each allocation, gradients that have arrived included.
        arrived: how many gradients had arrived by then.
        order: bytes of each gradient, in order of arrival.
        saved: bytes that the forward pass saved for backward, beside parameters and inputs.
        inputs: bytes of the micro-batch.
    """

    live: Sequence[float]
    arrived: Sequence[int]
    order: Sequence[int]
    saved: float
    inputs: float

    def peak(self, taken: Sequence[int] | None = None) -> float:
        """The most that is alive at once.

        Args:
            taken: bytes of gradients that are gone again once n = 0, 1, 2, … have arrived; None: none are.
        """
        if taken is None:
            return max(self.live)
        return max(live - taken[n] for live, n in zip(self.live, self.arrived, strict=True))

    def scaled(self, other: Timeline, rows: float, own_rows: int, other_rows: int) -> Timeline:
        """The timeline for another number of rows, by the straight line through this one and another.

        Each allocation has a line of its own. Where the model allocates otherwise for another number of rows,
        so that the two cannot be laid side by side, each stretch between two gradients has one, for its peak.

        Raises:
            ValueError: the numbers of rows are the same, or so different gradients arrive that there is no line.
        """
        if own_rows == other_rows:
            raise ValueError(f"a line needs two points, both have {own_rows} rows")
        if self.order != other.order:
            raise ValueError(
                f"{len(self.order)} gradients arrive with {own_rows} rows, {len(other.order)} with {other_rows}, or "
                "in another order: what other numbers of rows need cannot be told"
            )

        def line(a: float, b: float) -> float:
            return a + (b - a) * (rows - own_rows) / (other_rows - own_rows)

        saved, inputs = line(self.saved, other.saved), line(self.inputs, other.inputs)
        one, two = (self, other) if self.arrived == other.arrived else (self._stretches(), other._stretches())
        live = [line(a, b) for a, b in zip(one.live, two.live, strict=True)]
        return dataclasses.replace(self, live=live, arrived=one.arrived, saved=saved, inputs=inputs)

    def _stretches(self) -> Timeline:
        """The peak between each two gradients."""
        peaks = [0.0] * (len(self.order) + 1)
        for live, n in zip(self.live, self.arrived, strict=True):
            peaks[n] = max(peaks[n], live)
        return dataclasses.replace(self, live=peaks, arrived=list(range(len(peaks))))


def record(
    loss: Callable[[], Tensor], params: Sequence[Tensor], known: Iterable[Tensor], inputs: Sequence[Tensor]
) -> Timeline:
    """Runs a forward and backward pass and notes what it allocates; no ``.grad`` is touched.

    Args:
        loss: runs the forward pass and returns a scalar.
        params: gradients are taken with respect to these, all on one device.
        known: other memory that was there before, buffers of the model for example.
        inputs: the micro-batch's tensors.

    Raises:
        ValueError: the loss is not one number that depends on a parameter.
    """
    device = params[0].device
    before = [*params, *known, *inputs]
    there = {t.untyped_storage()._cdata for t in before}
    saved: dict[int, int] = {}
    order: list[int] = []
    live = Live(device, before)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.device == device:
            storage = tensor.untyped_storage()
            if storage._cdata not in there:
                saved[storage._cdata] = rounded(storage.nbytes(), device)
        return tensor

    def arrived(param: Tensor) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            order.append(rounded(grad.numel() * grad.element_size(), device))
            live.mark = len(order)

        return hook

    handles = [param.register_hook(arrived(param)) for param in params]
    try:
        with torch.enable_grad(), live:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                value = loss()
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError(f"loss must give one number with a gradient, got {_shown(value)}")
            grads = torch.autograd.grad(value, params, allow_unused=True)
        del grads
    finally:
        for handle in handles:
            handle.remove()
    return Timeline(
        live=[float(bytes_) for bytes_, _ in live.curve],
        arrived=[n for _, n in live.curve],
        order=order,
        saved=float(sum(saved.values())),
        inputs=float(storage_bytes(t for t in inputs if t.device == device)),
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} (requires_grad={value.requires_grad})"
    return type(value).__name__
