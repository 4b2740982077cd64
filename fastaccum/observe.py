"""What a window was like, for loggers: norms, skipped updates, the gradient noise scale.

The host never waits: on a GPU the numbers are copied to pinned memory when a window closes, and what is
read is the last copy that has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastaccum.sharding import Sharding
from fastaccum.slots import Slot
from fastaccum.window import Entry

DECAY = 0.95  # of the noise scale's moving averages: about twenty windows


def check_writer(writer: Any) -> None:
    """Raises TypeError unless it can be logged to."""
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            "log() needs a writer with add_scalar(name, value, step), such as "
            f"torch.utils.tensorboard.SummaryWriter(), got {writer!r}"
        )


class Arrived:
    """A few numbers on their way from the device; reading gives the newest that are here.

    Slots take turns. One is written again only when its copy has arrived, else the oldest news is dropped.
    """

    SLOTS = 4

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: list[tuple[Tensor, Any]] = []
        self._order: list[int] = []  # slots in flight, oldest first
        self.values: list[float] = []
        self.window = 0  # which window's they are

    def send(self, values: Tensor, window: int) -> None:
        """Starts a copy of a 1-d tensor."""
        if values.device.type != "cuda":
            self.values, self.window = values.tolist(), window
            return
        self.receive()
        if len(self._slots) < self.SLOTS:
            pinned = torch.empty(len(values) + 1, dtype=torch.float64, pin_memory=True)
            self._slots.append((pinned, torch.cuda.Event()))
            slot = len(self._slots) - 1
        else:
            free = [i for i in range(self.SLOTS) if i not in self._order]
            if not free:
                return  # the device is far behind: this window's numbers are not shown
            slot = free[0]
        pinned, event = self._slots[slot]
        pinned[-1] = window
        pinned[:-1].copy_(values, non_blocking=True)
        event.record(torch.cuda.current_stream(values.device))
        self._order.append(slot)

    def receive(self) -> None:
        """Takes what has arrived."""
        while self._order and self._slots[self._order[0]][1].query():
            numbers = self._slots[self._order.pop(0)][0].tolist()
            self.values, self.window = numbers[:-1], int(numbers[-1])


class NoiseScale:
    """The gradient noise scale: about how many micro-batches an update can use before more help little.

    McCandlish et al. 2018, appendix A.1, with the micro-batch as the small batch and the window as the
    large one. For K micro-batches with gradients g_i of mean G::

        |true G|^2 ~ (K |G|^2 - mean |g_i|^2) / (K - 1)
        tr(Sigma)  ~ K / (K - 1) (mean |g_i|^2 - |G|^2)       per micro-batch
        noise scale = tr(Sigma) / |true G|^2                   in micro-batches

    Both are averaged over windows before the division: a ratio of averages is far less noisy. All numbers
    stay on the device until :attr:`value` is read. Windows that are not finite do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._squares: list[Tensor] = []  # |g_i|^2 of the open window
        self._incomplete = False  # some of them are missing
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # signal, noise, weight

    def micro_batch(
        self, entries: Sequence[Entry], divisor: float | Tensor, sharding: Sharding | None = None
    ) -> None:
        """Notes a micro-batch's gradients; ``divisor`` makes the mean over its items of them."""
        if not entries:
            return
        norms = torch.stack(list(torch._foreach_norm([grad.double().flatten() for _, grad in entries])))
        if sharding is not None:
            norms = sharding.norms([slot.number for slot, _ in entries], norms, 2.0)
        self._squares.append(norms.square().sum() / (divisor * divisor))

    def window(self, norm: Tensor) -> None:
        """Closes the window with its mean's norm."""
        squares, incomplete = self._squares, self._incomplete
        self.drop()
        count = len(squares)
        if count < 2 or incomplete:
            return
        mean, square = torch.stack(squares).mean(), norm.double().square()
        signal = (count * square - mean) / (count - 1)
        noise = (mean - square) * (count / (count - 1))
        new = torch.stack([signal, noise, torch.ones_like(signal)])
        mixed = DECAY * self._sums + (1 - DECAY) * new
        self._sums = torch.where(mixed.isfinite().all(), mixed, self._sums)

    def skip_window(self) -> None:
        """The open window will tell nothing: its micro-batches cannot be told apart."""
        self._incomplete = True

    def drop(self) -> None:
        """The window is dropped."""
        self._squares, self._incomplete = [], False

    def open_window(self) -> tuple[list[Tensor], bool]:
        """What is known of the open window, for :meth:`put_back`."""
        return list(self._squares), self._incomplete

    def put_back(self, known: tuple[list[Tensor], bool]) -> None:
        """Goes on from what :meth:`open_window` gave."""
        self._squares, self._incomplete = list(known[0]), known[1]

    @property
    def value(self) -> float:
        """The estimate; NaN before the first window of two, inf where no signal is seen above the noise."""
        signal, noise, weight = self._sums.tolist()
        if weight == 0.0:
            return math.nan
        return max(noise, 0.0) / signal if signal > 0.0 else math.inf


def parameter_norms(
    grads: Sequence[Tensor],
    scale: float | Tensor,
    norm_type: float,
    slots: Sequence[Slot] = (),
    sharding: Sharding | None = None,
) -> list[Tensor]:
    """Each gradient's norm, float64, times ``|scale|``."""
    norms = [(_norm(grad, norm_type) * scale).abs() for grad in grads]
    if sharding is None:
        return norms
    return list(sharding.norms([slot.number for slot in slots], torch.stack(norms), norm_type).unbind())


def _norm(grad: Tensor, p: float) -> Tensor:
    # The maximum of nothing is an error to torch; a rank's part may be empty.
    if not grad.numel():
        return grad.new_zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(grad.double().flatten(), p)


def group_norms(slots: Sequence[Slot], norms: Sequence[Tensor], norm_type: float) -> dict[int, Tensor]:
    """Each parameter group's norm."""
    members: dict[int, list[Tensor]] = {}
    for slot, norm in zip(slots, norms, strict=True):
        members.setdefault(slot.group, []).append(norm)
    return {g: torch.linalg.vector_norm(torch.stack(some), norm_type) for g, some in members.items()}
