"""The pending micro-batch: what has arrived since the last ``step()``, and its weight.

With ``take="step"`` the gradients lie in ``.grad`` and are only noted. With ``take="backward"`` the
hooks move them out of ``.grad`` while backward runs, in buckets, into the window.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastaccum import arguments
from fastaccum.arrivals import Arrivals, graph_task
from fastaccum.gradients import gone
from fastaccum.slots import Slot
from fastaccum.window import Entry

# take="backward" adds gradients when this many bytes have arrived: well inside a CPU's last cache,
# where what backward has just written is still warm, and large enough to hide a call's 20 us.
BUCKET_BYTES = 4 << 20

# ("plain" | "weight" | "count", items); on a GPU the items may be a tensor that the host does not read.
Weight = tuple[str, float | Tensor]
_WORDS = {"plain": "no weight", "weight": "weight=", "count": "count="}


def given(weight: Any, count: Any, on_device: bool = False) -> Weight | None:
    """What the arguments of ``backward()`` or ``step()`` say, checked; tensors stay ``on_device``."""
    if weight is not None and count is not None:
        raise ValueError(
            "give weight= (the loss is a mean over n items) or count= (it is a sum over n), not both"
        )
    if weight is not None:
        return "weight", arguments.weight(weight, "weight", on_device)
    if count is not None:
        return "count", arguments.weight(count, "count", on_device)
    return None


def _shown(weight: Weight) -> str:
    value = "(on the device)" if isinstance(weight[1], Tensor) else f"{weight[1]:g}"
    return f"{weight[0]}={value}"


def _differ(a: Weight, b: Weight) -> bool:
    """Whether two weights are known to differ; values on a device are not compared."""
    if isinstance(a[1], Tensor) or isinstance(b[1], Tensor):
        return a[0] != b[0]
    return a != b


def selects_nothing(items: float | Tensor) -> bool:
    """A weight known to be 0; one on a device selects nothing there."""
    return not isinstance(items, Tensor) and items == 0.0


def current_stream(grad: Tensor) -> Any:
    """The stream that has made a gradient whose hook runs now; None on a CPU."""
    return torch.cuda.current_stream(grad.device) if grad.is_cuda else None


class Pending:
    """The pending micro-batch of one wrapper.

    Attributes:
        arrivals: the hooks and what they have noted.
        weight: what ``backward()`` was given, or None.
        taken: gradients moved out of ``.grad``, not added yet; each parameter once.
        scaled: ``backward()`` of the wrapper has brought them.
        added: some of the pending gradients are in the window's buffer already.
    """

    def __init__(self, owner: Any, take: str) -> None:
        """Prepares the hooks.

        Args:
            owner: the wrapper; held weakly, as the parameters hold the hooks.
            take: ``"step"`` or ``"backward"``.
        """
        self.weight: Weight | None = None
        self.added = self.scaled = False
        self._stream: Any = None  # on which the gradients in ``taken`` were made, on a GPU
        self._empty_bucket()
        self._tasks: set[int] = set()  # backward calls that have not ended
        self._in_backward = take == "backward"
        self._owner = weakref.ref(owner)
        reference = weakref.ref(self)

        def hook(param: Tensor) -> None:
            pending = reference()
            if pending is not None:
                pending._take(param)

        wrapper = self._owner

        def begins() -> Any:
            owner = wrapper()
            return () if owner is None else owner._replicas.stamps(owner._roster.params)

        def ended(arrived: list[Tensor], begun: Any) -> None:
            owner = wrapper()
            if owner is not None:
                owner._replicas.look(owner._roster.params, arrived, begun)

        self.arrivals = Arrivals(owner, hook if self._in_backward else None, begins, ended)

    @property
    def in_window(self) -> bool:
        """Whether gradients have left ``.grad`` (only with take="backward")."""
        return self.added or bool(self.taken)

    @property
    def broken(self) -> bool:
        """Whether a backward failed after some of its gradients were taken."""
        return bool(self._tasks) and graph_task() == -1

    def clear(self) -> None:
        """Forgets the micro-batch; ``.grad`` is the caller's affair."""
        self.arrivals.clear()
        self.weight = None
        self.added = self.scaled = False
        self._tasks.clear()
        self._empty_bucket()
        owner: Any = self._owner()
        owner._scaling.end_micro_batch()

    def drop_with_window(self) -> None:
        """The window is dropped: what was added to it is gone, what lies in ``.grad`` stays."""
        if self._in_backward:
            self.clear()

    # --------------------------------------------------------------------------------------- weights

    def agree(self, weight: Weight, window_kind: str | None) -> None:
        """Raises ValueError if a weight does not go with the pending ones and the window's."""
        if self.weight is not None and _differ(self.weight, weight):
            raise ValueError(
                f"all backward calls of one micro-batch carry the same weight, counted once: got "
                f"{_shown(weight)} after {_shown(self.weight)}"
            )
        if window_kind not in (None, weight[0]):
            raise ValueError(
                f"a window is weighted throughout or not at all: this micro-batch has {_WORDS[weight[0]]}, "
                f"earlier ones have {_WORDS[window_kind]}. flush() or discard() the window first"
            )

    def begin_backward(self, weight: Weight | None, window_kind: str | None) -> None:
        """Takes the weight of a ``backward()`` that is about to run.

        Raises:
            ValueError: it does not agree with what came before.
        """
        if weight is None:
            if self.weight is not None:
                self.agree(("plain", 1.0), window_kind)
            return
        self.agree(weight, window_kind)
        if weight[0] == "weight" and self.weight is None and self.in_window:
            raise ValueError(
                "backward(weight=) comes too late with take='backward': gradients of this micro-batch "
                "were added without it. Give every backward call of a micro-batch the same weight"
            )
        self.weight = weight

    def check_step(self, weight: Weight | None, window_kind: str | None) -> None:
        """Raises ValueError if ``step()`` was given a weight that cannot be followed."""
        if weight is None:
            return
        if weight[0] == "weight" and self._in_backward:
            raise ValueError(
                "step(weight=) comes too late with take='backward': gradients were added already. "
                "Use backward(loss, weight=), or step(count=) with a loss that is a sum"
            )
        self.agree(weight, window_kind)

    # ---------------------------------------------------------------------------------------- checks

    def check_arrived(self, slots: Iterable[Slot], grads: Sequence[Tensor | None], apart: bool) -> None:
        """Raises RuntimeError if a gradient that arrived is gone, or only a part of them arrived.

        Args:
            slots: all of them.
            grads: what lies in ``.grad`` of each.
            apart: the pending micro-batch can be dropped without closed ones.
        """
        if self._in_backward:
            return
        if self.arrivals.broken:
            raise RuntimeError(
                "a backward() raised after some of its gradients had arrived, so the pending micro-batch is "
                "incomplete: "
                + (
                    "call zero_grad() to drop it, then run the micro-batch again or go on"
                    if apart
                    else "under no_sync() it was added to earlier ones, so discard() the window"
                )
            )
        if not gone(grads):
            return
        for param in self.arrivals.noted:
            if param.grad is not None:
                continue
            number = next((slot.number for slot in slots if slot.param is param), None)
            if number is None:
                continue  # the parameter was taken out of its group
            raise RuntimeError(
                f"the gradient of parameter {number} (shape {list(param.shape)}) arrived but is gone from "
                ".grad at step(): something cleared it, such as model.zero_grad(). Call "
                "optimizer.zero_grad() on this wrapper to drop a micro-batch, or do not clear .grad"
            )

    def check_scaled(self, own_scaler: bool) -> None:
        """Raises RuntimeError if gradients arrived without the scale that the wrapper will divide by."""
        if own_scaler and not self.scaled and (self.arrivals.noted or self.in_window):
            raise RuntimeError(
                "with scaler= the loss must go through optimizer.backward(loss), which scales it: "
                "loss.backward() was called instead. zero_grad() drops the micro-batch"
            )

    def check_whole(self) -> None:
        """Raises RuntimeError if a backward failed after some of its gradients were added."""
        if self.broken:
            raise RuntimeError(
                "a backward() raised after some of its gradients were added to the window "
                "(take='backward'): the window is incomplete. Call discard() and start it again"
            )

    def check_apart(self, micro_step: int, what: str) -> None:
        """Raises RuntimeError if pending gradients are mixed with those of closed micro-batches."""
        if micro_step and self.in_window:
            raise RuntimeError(
                f"{what}: with take='backward' its gradients were already added to earlier ones. Call "
                "step() first, discard() the window, or use take='step'"
            )

    # ----------------------------------------------------------------------------- take="backward"

    def _take(self, param: Tensor) -> None:
        """The hook: moves a gradient out of ``.grad`` into the next bucket."""
        owner: Any = self._owner()
        task = graph_task()
        if task not in self._tasks:
            self._tasks.add(task)
            reference = weakref.ref(self)

            def end() -> None:
                pending = reference()
                if pending is not None:
                    pending._end(task)

            torch.autograd.Variable._execution_engine.queue_callback(end)
            owner._sync_slots()
            owner._replicas.refuse_backward(owner._roster.params)
        slot = owner._roster.slot_of(param)
        if slot is None or param.grad is None:
            return
        if slot.number in self._taken_numbers:  # a nested backward has brought it already
            self.add_taken()
        self.arrivals.noted.append(param)
        with torch.no_grad():
            grad = slot.taken(param.grad)
            param.grad = None
            stream = current_stream(grad)
            if self.taken and stream != self._stream and owner.accumulation_steps > 1:
                self.add_taken()  # a bucket is added on the stream that has made its gradients
            self._stream = stream
            self.taken.append((slot, grad))
            self._taken_numbers.add(slot.number)
            self._taken_bytes += grad.numel() * grad.element_size()
            # At K = 1 nothing is accumulated, so there is no buffer to add to: step() uses them as they are.
            if self._taken_bytes >= BUCKET_BYTES and owner.accumulation_steps > 1:
                self.add_taken()

    def _end(self, task: int) -> None:
        owner = self._owner()
        if owner is not None and owner.accumulation_steps > 1:
            with torch.no_grad():
                self.add_taken()
        self._tasks.discard(task)

    def add_taken(self) -> None:
        """Adds what was taken into the window."""
        if not self.taken:
            return
        kind, items = self.weight or ("plain", 1.0)
        if not selects_nothing(items):
            owner: Any = self._owner()
            factor = items if kind == "weight" else 1.0
            scale, _ = owner._scaling.of_micro_batch()
            current = current_stream(self.taken[0][1])
            if current == self._stream:
                owner._add(self.taken, factor, scale=scale)
            else:
                with torch.cuda.stream(self._stream):
                    owner._add(self.taken, factor, scale=scale)
                current.wait_stream(self._stream)
        self.added = True
        self._empty_bucket()

    def _empty_bucket(self) -> None:
        self.taken: list[Entry] = []
        self._taken_numbers: set[int] = set()
        self._taken_bytes = 0
        self._stream = None
