"""What one wrapper measures for its user: counts, numbers for a logger, norms per parameter, the noise scale.

Nothing of it is measured unless it was asked for, and nothing here changes what a window does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastaccum import observe, traffic
from fastaccum.outcome import Outcome
from fastaccum.sharding import Sharding
from fastaccum.updates import FusedRule, GenericRule
from fastaccum.window import Finished, Window


class Observer:
    """The measurements of one wrapper.

    Attributes:
        windows: closed so far, by this wrapper.
        windows_before: closed by those whose state it goes on from.
        norms: the last window's norm per parameter, where they are tracked.
        noise: the noise scale, if it is tracked.
    """

    def __init__(self) -> None:
        self.windows = self.windows_before = 0
        self.norms: dict[Tensor, Tensor] = {}
        self.noise: observe.NoiseScale | None = None
        self._tracks_norms = False
        self._news: observe.Arrived | None = None  # from the first look at stats() on
        self._watched_from = 0  # windows closed before it
        self._traffic = traffic.Traffic()

    @property
    def count(self) -> int:
        """Windows closed so far, those before a resume included."""
        return self.windows_before + self.windows

    def track(self, norms: bool, noise: bool, device: torch.device) -> None:
        """Chooses what is measured from the next window on."""
        self._tracks_norms = norms
        if not noise:
            self.noise = None
        elif self.noise is None:
            self.noise = observe.NoiseScale(device)

    # ------------------------------------------------------------------------------------ the window

    def mixed(self) -> None:
        """Micro-batches of the open window are reduced together and cannot be told apart."""
        if self.noise is not None:
            self.noise.skip_window()

    def dropped(self) -> None:
        """The open window is dropped."""
        if self.noise is not None:
            self.noise.drop()

    def complete(
        self,
        window: Window,
        finished: Finished,
        divisor: float | Tensor,
        sharding: Sharding | None,
        *,
        micro_batches: int,
        take: str,
        norm_type: float,
        rule: FusedRule | GenericRule,
    ) -> None:
        """Looks at a window that is about to be decided; memory may run out here.

        Args:
            window: with all its gradients.
            finished: the same, by parameter.
            divisor: of its sums.
            sharding: over ranks.
            micro_batches: how many it holds.
            take: ``"step"`` or ``"backward"``.
            norm_type: p.
            rule: of the update that would follow.
        """
        if self._tracks_norms:
            slots = finished.selection.slots
            scale = window.sum_weight / divisor  # the sums lack their weight and the division
            norms = observe.parameter_norms(finished.grads, scale, norm_type, slots, sharding)
            self.norms = {slot.param: norm for slot, norm in zip(slots, norms, strict=True)}
        if self._news is not None:
            self._traffic.window(window, finished, micro_batches, take, norm_type, rule.moved)

    def decided(self, outcome: Outcome) -> None:
        """The window is not refused."""
        if self._news is not None:
            outcome.count_clipped()

    def empty(self) -> None:
        """The window that closes holds nothing."""
        self._traffic.nothing()

    def closed(self, outcome: Outcome) -> None:
        """The window is over, updated or not."""
        self.windows += 1
        if self.noise is not None:
            self.noise.window(outcome.norm)
        if self._news is not None:
            self._news.send(outcome.numbers(), self.windows)

    # --------------------------------------------------------------------------------------- reading

    def stats(self, outcome: Outcome, counts_clipped: bool) -> dict[str, float]:
        """See :meth:`fastaccum.FusedAccumulator.stats`."""
        if self._news is None or self._news.device != outcome.device:
            self._news = observe.Arrived(outcome.device)
            self._watched_from = self.windows
            outcome.clipped.zero_()
            self._news.send(outcome.numbers(), self.windows)
        news = self._news
        news.receive()
        norm, skipped, clipped = news.values or (math.nan, math.nan, math.nan)
        result = {"window": self.windows_before + news.window, "norm": norm, "skipped": skipped}
        watched = news.window - self._watched_from
        if watched > 0:
            if counts_clipped:
                result["clip_share"] = clipped / watched
            result["bytes_moved"] = self._traffic.bytes
        if self.noise is not None:
            value = self.noise.value
            result["noise_scale"] = value
            result["recommended_accumulation_steps"] = (
                float(max(1, math.ceil(value))) if math.isfinite(value) else value
            )
        return result

    def log(self, writer: Any, numbers: dict[str, float], step: int | None, prefix: str) -> None:
        """See :meth:`fastaccum.FusedAccumulator.log`."""
        for name, value in numbers.items():
            if name != "window":
                writer.add_scalar(prefix + name, value, self.count if step is None else step)
