"""What a window cost: seconds per stage, and the bytes of gradients alive at the worst moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import mul

from torch import Tensor, nn

FORWARD_BACKWARD, ACCUMULATION, WINDOW_END = STAGES = (
    "forward+backward",
    "accumulation",
    "window end",
)


@dataclass(frozen=True)
class Window:
    """One window of one run."""

    loss: float
    micro_batches: int
    items: int
    seconds: dict[str, float]
    gradient_bytes: int | None  # None where it was not measured


class Meter:
    """Measures one run from the outside, alike for every loop.

    Stock PyTorch accumulates in the middle of backward. Two hooks per parameter find that share:
    one runs when a gradient arrives, one when it has been accumulated. The time between them is
    moved from forward+backward to accumulation. (In the first micro-batch of a window it is close
    to nothing: the gradient becomes `.grad` as it is.)

    Looking at the memory takes time, so it is done in the second window only, and that window's
    time is not used.
    """

    MEMORY_WINDOW = 1

    def __init__(self, model: nn.Module) -> None:
        """Hooks every parameter of the model."""
        self.parameters = list(model.parameters())
        self.buffer_bytes: Callable[[], int] = lambda: 0  # what is held outside of `.grad`
        self.windows: list[Window] = []
        self._peak = 0
        self._start_window()
        self._arrival = 0.0
        for parameter in self.parameters:
            parameter.register_hook(self._arrived)

    def follow_accumulation(self) -> None:
        """Starts to watch the end of accumulation, behind all hooks that exist by now."""
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start

    def add_micro_batch(self, loss: float, items: int, weight: float) -> None:
        """Adds a micro-batch's mean loss to the window's."""
        self._micro_batches.append((loss, items, weight))

    def look_at_memory(self, in_flight: Tensor | None = None) -> None:
        """Notes the bytes of all gradients alive now, if this is the window for it."""
        if len(self.windows) != self.MEMORY_WINDOW:
            return
        held = [p.grad for p in self.parameters if p.grad is not None]
        if in_flight is not None:
            held.append(in_flight)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        self._peak = max(self._peak, sum(storages.values()) + self.buffer_bytes())

    def close_window(self) -> Window:
        """Ends the window and returns what was measured."""
        losses, items, weights = zip(*self._micro_batches, strict=True)
        window = Window(
            loss=sum(map(mul, losses, weights)) / sum(weights),
            micro_batches=len(losses),
            items=sum(items),
            seconds=self.seconds,
            gradient_bytes=self._peak or None,
        )
        self.windows.append(window)
        self._start_window()
        return window

    def _start_window(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._micro_batches: list[tuple[float, int, float]] = []
        self._peak = 0

    def _arrived(self, gradient: Tensor) -> None:
        self.look_at_memory(gradient)
        self._arrival = time.perf_counter()

    def _accumulated(self, _: Tensor) -> None:
        took = time.perf_counter() - self._arrival
        self.seconds[ACCUMULATION] += took
        self.seconds[FORWARD_BACKWARD] -= took
