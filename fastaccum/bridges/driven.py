"""A FusedAccumulator whose windows are ended by a training framework, which counts micro-batches itself."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from fastaccum import dispatch
from fastaccum.accumulator import FusedAccumulator
from fastaccum.options import Options

# What a bridge decides, so it cannot be among the options that are handed on.
_DECIDED = ("optimizer", "accumulation_steps", "reduction", "scaler", "model", "process_group")


def check_options(
    options: dict[str, Any] | None, argument: str, given: dict[str, Any], **decided: str
) -> dict[str, Any]:
    """All options of the wrapper that a bridge will make, as a new dict; checked without its optimizer.

    Args:
        options: keyword arguments of FusedAccumulator.
        argument: what the user knows the options as.
        given: the bridge's own options.
        **decided: further options that cannot be given, and where each comes from.

    Raises:
        TypeError, ValueError, NotImplementedError: they are no dict, hold what the bridge decides, or are
            refused by FusedAccumulator.
    """
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise TypeError(f"{argument} must be a dict of FusedAccumulator's arguments, got {options!r}")
    for name in options.keys() & {*_DECIDED, *decided}:
        raise ValueError(
            f"{argument} cannot hold {name!r}: {decided.get(name, 'the framework decides it')}. Leave it out"
        )
    known = inspect.signature(FusedAccumulator).parameters.keys() - {*_DECIDED, *decided}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"{argument} has {', '.join(map(repr, unknown))}, which FusedAccumulator does not take: "
            f"it may hold {', '.join(sorted(known))}"
        )
    options = {**options, **given}
    trial = dict(options)
    if options.get("backend", "auto") in ("auto", *dispatch.NAMES):
        trial["backend"] = "reference"  # which one can run depends on the device, and that is not known yet
    parameter = torch.zeros(1, requires_grad=True, device="cpu")
    try:
        FusedAccumulator(torch.optim.SGD([parameter], lr=0.1), **trial)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{argument} cannot be used: {error}") from error
    return options


@dataclasses.dataclass
class DrivenOptions(Options):
    """Those of a :class:`DrivenAccumulator`."""

    divided_by: int | None = None


class DrivenAccumulator(FusedAccumulator):
    """A wrapper without a count of its own: :meth:`step` updates, :meth:`add` does not.

    The framework calls ``step()`` where it would step any optimizer, at the end of a window of any length;
    its bridge calls ``add()`` after every micro-batch before that.
    """

    _Options = DrivenOptions
    _options: DrivenOptions
    # Of an open window: it never fills up by itself.
    _OPEN = sys.maxsize

    def _start(self, *args: Any) -> None:
        self._adding = self._closing = False
        self._hidden: list[tuple[Tensor, Tensor]] = []
        super()._start(*args)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of the window: known only while its last one is closed."""
        return self._micro_step + 1 if self._closing else self._OPEN

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        raise AttributeError("accumulation_steps is the framework's to count: set it there")

    def add(self, scaler: GradScaler | None = None) -> None:
        """Closes a micro-batch; the window stays open.

        Args:
            scaler: what scaled its loss; stepped here, not updated.
        """
        self._adding = True
        try:
            self.step() if scaler is None else scaler.step(self)
        finally:
            self._adding = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Closes the micro-batch and the window: the parameters are updated."""
        self.show()
        if self.divided_by is not None:
            kwargs["count"] = 1.0 / self.divided_by
        self._closing = not self._adding
        try:
            return super().step(*args, **kwargs)
        finally:
            self._closing = False

    step.hooked = True  # type: ignore[attr-defined]  # as FusedAccumulator's

    @property
    def divided_by(self) -> int | None:
        """What the framework divides every loss by, to undo it: the gradient is a mean over what there was.

        None, the default, takes the losses as they come. To be set between micro-batches, and only with
        ``reduction="mean"``.
        """
        return self._options.divided_by

    @divided_by.setter
    def divided_by(self, value: int | None) -> None:
        self._options.divided_by = value
        # Each counts as a part of a micro-batch: a weight, but the same one on every rank.
        self._advice.withhold("weights")

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived since the last micro-batch was closed."""
        return bool(self._pending.arrivals.noted) or self._pending.in_window

    def let_go(self) -> None:
        """Training is over: its parameters are another's to train until :meth:`take_back`.

        Nothing is lost: state, counters and the open window stay and can be saved. Only a window that no
        ``step()`` could close any more is dropped: one that a failed backward left broken.
        """
        self.show()
        if self._pending.broken or self._pending.in_window:
            self.discard()
        self._pending.arrivals.release()

    def take_back(self) -> None:
        """Training goes on.

        Raises:
            ValueError: another trains the parameters now.
        """
        self._pending.arrivals.claim(self._roster.params)

    def hide(self) -> None:
        """Takes the pending gradients out of ``.grad`` until :meth:`show` or :meth:`step`."""
        params = (p for group in self.param_groups for p in group["params"])
        self._hidden = [(p, p.grad) for p in params if p.grad is not None]
        for param, _ in self._hidden:
            param.grad = None

    def show(self) -> None:
        """Puts hidden gradients back."""
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad

    def discard(self) -> None:
        """Drops the open window, what is hidden included."""
        self._hidden = []
        super().discard()
