"""What one micro-batch allocates, allocation by allocation, from its forward pass to its last gradient.

The allocators report to torch's profiler what they give and take back, inside of operators too.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler_legacy
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_autograd: Any = torch.autograd  # its two old profiler functions are in no stub
_ARRIVAL = "fastaccum: a gradient has arrived"
CUDA_BLOCK = 512  # bytes; the caching allocator rounds every request up to it


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(rounded(storage.nbytes(), storage.device) for storage in storages.values())


def rounded(size: int, device: torch.device) -> int:
    """What an allocation of ``size`` bytes takes."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK if device.type == "cuda" else size


class Live(TorchDispatchMode):
    """Counts the bytes that are alive on a device; on the meta device, what there would be.

    Memory that is new in a result of an operator counts until it is freed.

    Attributes:
        now: bytes alive of what was allocated under this mode.
        peak: the most there ever were.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        """Starts at 0; the memory of ``known`` tensors is not new."""
        super().__init__()
        self.now = self.peak = 0
        self._device = device
        self._known = {t.untyped_storage()._cdata: t.untyped_storage() for t in known}
        self._alive: dict[int, Any] = {}

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
        self.peak = max(self.peak, self.now)


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
            ValueError: the numbers of rows are the same, or other gradients arrive: there is no line then.
        """
        if own_rows == other_rows:
            raise ValueError(f"a line needs two points, both have {own_rows} rows")
        if self.order != other.order:
            raise ValueError(
                f"{len(self.order)} gradients arrive with {own_rows} rows and {len(other.order)} with "
                f"{other_rows}, or in another order: what other numbers of rows need cannot be told"
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
        ValueError: the loss is not one number that depends on a parameter, or it ran backward itself.
    """
    device = params[0].device
    without = [param for param in params if param.grad is None]
    there = {t.untyped_storage()._cdata for t in (*params, *known, *inputs)}
    saved: dict[int, int] = {}
    order: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.device == device:
            storage = tensor.untyped_storage()
            if storage._cdata not in there:
                saved[storage._cdata] = rounded(storage.nbytes(), device)
        return tensor

    def arrived(grad: Tensor) -> None:
        order.append(rounded(grad.numel() * grad.element_size(), device))
        with record_function(_ARRIVAL):
            pass

    handles = []
    _autograd._enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())
    try:
        handles += [param.register_hook(arrived) for param in params]
        with torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                value = loss()
            if order:
                for param in without:
                    param.grad = None
                raise ValueError("loss must return the loss and not call backward(), which comes by itself")
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError(f"loss must give one number with a gradient, got {_shown(value)}")
            grads = torch.autograd.grad(value, params, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del grads
    finally:
        records = _autograd._disable_profiler_legacy()
        for handle in handles:
            handle.remove()
    live, marks = _curve(records, device)
    return Timeline(
        live=live,
        arrived=marks,
        order=order,
        saved=float(sum(saved.values())),
        inputs=float(storage_bytes(t for t in inputs if t.device == device)),
    )


def _curve(records: Sequence[Sequence[Any]], device: torch.device) -> tuple[list[float], list[int]]:
    """(bytes alive after each allocation, gradients that had arrived by then)."""
    # A GPU's backward runs in a thread of its own: events are put in order by their times.
    threads = [list(thread) for thread in records if len(thread)]
    (start,) = (e for thread in threads for e in thread if e.name() == "__start_profile")
    timed = [(start.cpu_elapsed_us(event), event) for thread in threads for event in thread]
    live, marks, now, count = [0.0], [0], 0, 0
    for _, event in sorted(timed, key=lambda pair: pair[0]):
        if event.kind() == "memory_alloc":
            size = event.cuda_memory_usage() if device.type == "cuda" else event.cpu_memory_usage()
            now += size
            if size > 0:
                live.append(float(now))
                marks.append(count)
        elif event.kind() == "push" and event.name() == _ARRIVAL:
            count += 1
    return live, marks


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} (requires_grad={value.requires_grad})"
    return type(value).__name__
