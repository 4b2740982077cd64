"""The largest micro-batch that runs: by trying, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fastaccum import arguments
from fastaccum.batch_size import accumulation_steps_for
from fastaccum.buffers import Buffers

if TYPE_CHECKING:
    from fastaccum.accumulator import FusedAccumulator

# What a device without memory says, beside torch.OutOfMemoryError: allocators, and libraries that ask them.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")

# No window closes while sizes are tried.
_ENDLESS = 1 << 62


class MicroBatch(NamedTuple):
    """What :func:`find_micro_batch_size` has found; their product is the virtual batch of a rank."""

    micro_batch_size: int
    accumulation_steps: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def find_micro_batch_size(
    step_fn: Callable[[int], Any],
    virtual_batch_size: int,
    *,
    optimizer: FusedAccumulator | None = None,
    model: nn.Module | None = None,
    start: int | None = None,
    world_size: int = 1,
    reserve_state: bool = True,
) -> MicroBatch:
    """Tries micro-batch sizes, halving on out-of-memory, until one runs; the virtual batch stays the same.

    ``step_fn(rows)`` runs micro-batches of that many rows: forward, backward, and ``optimizer.step()`` if it
    likes; two of them with their ``step()`` show the most that a window holds. No window closes while sizes
    are tried, so nothing is updated, and ``flush()`` raises. After every try, whether it ran, ran out of
    memory or raised something else, what it left is dropped: the pending micro-batch and those it closed. An
    open window is then again what it was, bit for bit: nothing of it is lost, nothing is counted twice. The
    random state of torch, and buffers of ``model`` (the statistics of a BatchNorm), are put back too.

    Assign the result yourself: ``optimizer.accumulation_steps = found.accumulation_steps``.

    Args:
        step_fn: called with a number of rows; it must keep nothing itself.
        virtual_batch_size: rows of one update on all ranks together.
        optimizer: the wrapper that ``step_fn`` uses; without one, ``step_fn`` must leave no gradients.
        model: its buffers are put back.
        start: the first size to try, by default the whole virtual batch of a rank; must divide it.
        world_size: ranks that share the virtual batch. Every rank tries by itself: take the smallest.
        reserve_state: hold, while trying, the memory of optimizer state that is not made yet.

    Returns:
        ``(micro_batch_size, accumulation_steps)``.

    Raises:
        TypeError, ValueError: a wrong argument, or sizes that do not divide; or the window is open and
            ``take="backward"``, where a failed backward cannot be taken out of it.
        RuntimeError: a micro-batch is pending already.
        torch.OutOfMemoryError: one row does not run either.
        Exception: whatever else ``step_fn`` raises.
    """
    if not callable(step_fn):
        raise TypeError(f"step_fn must be callable with a number of rows, got {type(step_fn).__name__}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    arguments.boolean(reserve_state, "reserve_state")
    share = accumulation_steps_for(virtual_batch_size, 1, world_size)
    rows = share if start is None else arguments.whole(start, "start", 1, "rows of the first try")
    if share % rows:
        sizes = [n for n in range(1, share + 1) if share % n == 0]
        near = sorted(sorted(sizes, key=lambda n: abs(n - rows))[:3])
        raise ValueError(
            f"start={rows} does not divide the {share} rows that a rank has of the virtual batch: "
            f"{', '.join(map(str, near))} do"
        )
    if optimizer is not None:
        _check(optimizer)
    with _left_alone(optimizer, model) as drop:
        # Held until the end; what the tries allocate comes on top, as in training.
        reserved = _reserved(optimizer) if optimizer is not None and reserve_state else None
        while True:
            failure = _try(step_fn, rows, drop)
            if failure is None:
                del reserved
                return MicroBatch(rows, share // rows)
            if rows == 1:
                raise torch.OutOfMemoryError(f"a micro-batch of 1 row runs out of memory too: {failure}")
            rows = max(n for n in range(1, rows // 2 + 1) if share % n == 0)


def _try(step_fn: Callable[[int], Any], rows: int, drop: Callable[[], None]) -> str | None:
    """Runs a size; what the error said if memory ran out, else None."""
    failure = None
    try:
        step_fn(rows)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = f"{type(error).__name__}: {error}"  # the error itself holds the frames and their tensors
    drop()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return failure


def _check(optimizer: Any) -> None:
    from fastaccum.accumulator import FusedAccumulator

    if not isinstance(optimizer, FusedAccumulator):
        raise TypeError(f"optimizer must be a FusedAccumulator, got {type(optimizer).__name__}")
    waiting = optimizer._pending.in_window or optimizer._pending.broken
    if waiting or any(param.grad is not None for param in optimizer._roster.all_params()):
        raise RuntimeError(
            "a micro-batch is pending (a backward without its step()): step() or zero_grad() before sizes "
            "are tried, whose gradients would be added to it"
        )
    if optimizer._options.take == "backward" and optimizer.micro_step:
        raise ValueError(
            "take='backward' adds gradients into the open window while backward runs, so one that fails "
            "cannot be taken out: flush() first, or try sizes before training"
        )


@contextlib.contextmanager
def _left_alone(optimizer: FusedAccumulator | None, model: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Puts back what the tries change, at the end and whenever what it yields is called."""
    buffers = None if model is None else Buffers(model)
    window = None if optimizer is None else _OpenWindow(optimizer)

    def drop() -> None:
        if window is not None:
            window.put_back()
        if buffers is not None:
            buffers.put_back()

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            if optimizer is not None:
                optimizer._options.accumulation_steps = _ENDLESS
                optimizer._stays_open = True
            yield drop
        finally:
            if window is not None:
                window.close()
            drop()


class _OpenWindow:
    """What a wrapper holds between two updates, kept on the host meanwhile."""

    def __init__(self, optimizer: FusedAccumulator) -> None:
        self._optimizer = optimizer
        self._steps = optimizer.accumulation_steps
        # state_dict() loads what it gave bit for bit; on the host, it takes none of the memory looked for.
        self._entry = tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.window_state_dict())
        self._others = {name: getattr(optimizer, name) for name in ("_updated", "_clip_once")}
        noise = optimizer._observer.noise
        self._noise = None if noise is None else noise.open_window()

    def close(self) -> None:
        """Windows close again."""
        self._optimizer._options.accumulation_steps = self._steps
        self._optimizer._stays_open = False

    def put_back(self) -> None:
        """Drops what came after, the pending micro-batch included."""
        optimizer = self._optimizer
        steps = optimizer.accumulation_steps
        optimizer.discard()
        optimizer._options.accumulation_steps = self._steps
        optimizer.load_window_state_dict(self._entry)
        optimizer._options.accumulation_steps = steps
        for name, value in self._others.items():
            setattr(optimizer, name, value)
        if self._noise is not None and optimizer._observer.noise is not None:
            optimizer._observer.noise.put_back(self._noise)


def _reserved(optimizer: FusedAccumulator) -> torch.Tensor | None:
    from fastaccum.memory import missing_state

    device = optimizer._outcome.device
    size = missing_state(optimizer)
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None
