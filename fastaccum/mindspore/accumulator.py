"""When a window opens, holds and closes: the wrapper around an optimizer of MindSpore."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from fastaccum import arguments
from fastaccum.mindspore import operators, rules
from fastaccum.mindspore.gradient_sum import GradientSum
from fastaccum.mindspore.homes import Homes
from fastaccum.mindspore.window_end import FinishedGradients, FusedUpdate, Outcome


def _weight(value: Any, argument: str) -> float:
    """A micro-batch's weight: a finite number of at least 0, or a Tensor of one element."""
    if isinstance(value, Tensor):
        if value.size != 1:
            raise ValueError(f"{argument} must be a number or a Tensor of one element, got {value.shape}")
        value = value.asnumpy().reshape(()).item()
    if not arguments.is_number(value):
        raise TypeError(f"{argument} must be a number or a 0-d Tensor, got {type(value).__name__}")
    if not 0.0 <= value <= sys.float_info.max:
        raise ValueError(f"{argument} must be finite and at least 0 (a number of items), got {value}")
    return float(value)


def _loss_scale(value: Any) -> float:
    """A scale that gradients can be divided by."""
    if arguments.positive(value, "loss_scale", "pass 1.0 for none") in (None, math.inf):
        raise ValueError(f"loss_scale must be a finite number above 0, got {value!r}; 1.0 is none")
    return float(value)


class FusedAccumulator(nn.Cell):
    """Gradient accumulation around an optimizer of MindSpore, on the CPU.

    Hand it each micro-batch's gradients; it updates on every ``accumulation_steps``-th. The window's gradient
    is the sum of ``w_i g_i`` over the sum of ``w_i``, with ``w_i = 1`` unless weights are given, so a short
    last window is right too. Its global 2-norm is summed in float64 and clipped after the division, by
    ``min(1, max_norm / (norm + 1e-6))``. Gradients of 16-bit parameters are summed in float32::

        adam = nn.Adam(net.trainable_params(), 1e-3)
        optimizer = FusedAccumulator(adam, accumulation_steps=4, max_norm=1.0)
        gradients = mindspore.value_and_grad(forward, None, optimizer.parameters)
        for inputs, labels in dataset:
            loss, grads = gradients(inputs, labels)
            optimizer.step(grads)
        optimizer.flush()

    ``nn.SGD``, ``nn.Momentum``, ``nn.Adam``, ``nn.AdamWeightDecay`` and ``SGD``, ``Adam``, ``AdamW`` of
    ``mindspore.experimental.optim`` run in the fused update, with their own state; any other optimizer is
    called with the finished gradient. It is a Cell: a checkpoint of it holds the optimizer, the parameters
    and an open window, and may be loaded at any time (see :meth:`settle`). Methods are called from Python,
    not from inside a graph; what they run is compiled. ``max_norm`` and ``nonfinite`` may be changed at any
    time and count when the window ends; ``accumulation_steps``, ``reduction`` and ``loss_scale`` between
    windows.

    Args:
        optimizer: a ``mindspore.nn.Optimizer`` with ``loss_scale=1.0``, or one of
            ``mindspore.experimental.optim``.
        accumulation_steps: micro-batches per update, at least 1.
        max_norm: limit of the global norm, or None.
        reduction: "mean" divides by the total weight; "sum" does not (the losses were already normalised).
        nonfinite: what happens to a window that holds inf or NaN: "skip" leaves parameters, state and step
            count as they are and counts it, "propagate" updates all the same, "error" raises RuntimeError
            before anything changes and leaves the window open.
        loss_scale: what the losses were multiplied by; the gradient is divided by it.

    Attributes:
        optimizer: the wrapped one.
        parameters: its parameters, as ``value_and_grad(..., weights=)`` takes them.
        sum: the :class:`~fastaccum.mindspore.gradient_sum.GradientSum`.
        updated: the last ``step`` or ``flush`` closed a window.
        stepped: its update was applied.

    Raises:
        TypeError, ValueError: an argument cannot be used, with what was expected; nothing has changed.
        RuntimeError: MindSpore is set to another device than the CPU.
    """

    def __init__(
        self,
        optimizer: nn.Optimizer,
        accumulation_steps: int = 1,
        *,
        max_norm: float | None = None,
        reduction: str = "mean",
        nonfinite: str = "skip",
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(auto_prefix=False)
        self._steps_wanted = arguments.accumulation_steps(accumulation_steps)
        self._max_norm = arguments.max_norm(max_norm)
        self._reduction = arguments.choice(reduction, "reduction", arguments.REDUCTIONS)
        self._nonfinite = arguments.choice(nonfinite, "nonfinite", arguments.NONFINITE)
        self._loss_scale = _loss_scale(loss_scale)
        device = mindspore.get_context("device_target")
        if device != "CPU":
            raise RuntimeError(
                f"fastaccum.mindspore runs on the CPU, MindSpore is set to {device}: "
                'call mindspore.set_device("CPU") first'
            )
        rule = rules.rule_for(optimizer)
        self.optimizer = optimizer
        self.parameters = ParameterTuple(optimizer.parameters)
        self.sum = GradientSum(self.parameters)
        self._rule = rule
        self.outcome = Outcome(1 if rule is None else len(self.parameters), self.parameters)
        if rule is None:
            self._end = FinishedGradients(self.sum, self.outcome, self.parameters)
        else:
            self._end = FusedUpdate(self.sum, self.outcome, rule)
        self._set_control()
        self._hyper_rows = np.zeros((1, operators.HYPER_COLUMNS))
        self._hyper = Tensor(self._hyper_rows)
        self._unweighted = Tensor(np.array([1.0, 1.0, 0.0]))
        self.updated = self.stepped = False
        # From now on a graph of the user's may know the window; all else is for the graphs that are run here.
        self._window_home = Homes([*self.sum.get_parameters(), *self.outcome.get_parameters()])
        self._homes: Homes | None = None
        self._held = self._read_window()

    # ------------------------------------------------------------------------------------ micro-batches

    def step(
        self, gradients: Sequence[Tensor], *, weight: float | None = None, count: float | None = None
    ) -> None:
        """Adds a micro-batch; the ``accumulation_steps``-th closes the window and updates.

        Args:
            gradients: one Tensor per parameter, in the order of ``parameters``.
            weight: the loss is a mean over so many items (rows, tokens).
            count: the loss is a sum over so many items.

        Raises:
            TypeError, ValueError: an argument cannot be used, or this window's other micro-batches have
                weights and this one has not (or the reverse); nothing has changed.
            RuntimeError: ``nonfinite="error"`` and the window is not finite; or the window is full since it
                could not be closed; or see :meth:`settle`.
        """
        self.sum.check(gradients)
        self.sum.add(self.open_micro_batch(weight, count), *gradients)
        self.close_if_due()

    def __call__(self, gradients: Sequence[Tensor], **weights: Any) -> None:
        """As :meth:`step`: an optimizer of MindSpore is called with its gradients."""
        self.step(gradients, **weights)

    def construct(self, gradients: Sequence[Tensor]) -> None:
        """Refuses: a window is opened and closed by Python, not by a graph."""
        raise RuntimeError(
            "a FusedAccumulator is called from Python; inside a graph use "
            "accumulator.sum.add(weight, *gradients)"
        )

    def open_micro_batch(self, weight: float | None, count: float | None) -> Tensor:
        """A micro-batch's weight as the accumulate operator takes it, float64 ``[3]``; refuses a full window.

        Raises:
            TypeError, ValueError, RuntimeError: see :meth:`step`.
        """
        if not rules.same_parameters(self.optimizer, tuple(self.parameters)):
            raise ValueError(
                "the optimizer's list of parameters has changed since it was wrapped: wrap it again after "
                "the last group was added"
            )
        held = self._settle_window()
        if held[operators.MICRO_BATCHES] >= self._steps_wanted:
            raise RuntimeError(
                f"the window already holds its {self._steps_wanted} micro-batches and could not be closed: "
                "flush() tries it again, discard() drops it"
            )
        if weight is not None and count is not None:
            raise ValueError("give weight (the loss is a mean) or count (it is a sum), not both")
        given = weight is not None or count is not None
        if held[operators.MICRO_BATCHES] and bool(held[operators.WEIGHTED]) != given:
            raise ValueError(
                "a window is weighted throughout or not at all: this micro-batch "
                + (
                    "has a weight, the earlier ones have none"
                    if given
                    else "has no weight, the earlier ones have"
                )
            )
        if count is not None:
            return Tensor(np.array([1.0, _weight(count, "count"), 1.0]))
        if weight is not None:
            value = _weight(weight, "weight")
            return Tensor(np.array([value, value, 1.0]))
        return self._unweighted

    # ------------------------------------------------------------------------------------------- windows

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per update; may be changed between windows.

        Raises:
            TypeError, ValueError: not an int of at least 1.
            RuntimeError: a window is open.
        """
        return self._steps_wanted

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        wanted = arguments.accumulation_steps(value)
        self._check_between_windows("accumulation_steps")
        self._steps_wanted = wanted

    @property
    def max_norm(self) -> float | None:
        """The limit of the global norm, or None; may be changed: it counts when the window ends."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        self._max_norm = arguments.max_norm(value)
        self._set_control()

    @property
    def nonfinite(self) -> str:
        """What happens to a window that holds inf or NaN; as :attr:`max_norm`."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, value: str) -> None:
        self._nonfinite = arguments.choice(value, "nonfinite", arguments.NONFINITE)
        self._set_control()

    @property
    def reduction(self) -> str:
        """Whether the total weight divides; as :attr:`accumulation_steps`."""
        return self._reduction

    @reduction.setter
    def reduction(self, value: str) -> None:
        wanted = arguments.choice(value, "reduction", arguments.REDUCTIONS)
        self._check_between_windows("reduction")
        self._reduction = wanted
        self._set_control()

    @property
    def loss_scale(self) -> float:
        """What the losses are multiplied by; as :attr:`accumulation_steps`."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        wanted = _loss_scale(value)
        self._check_between_windows("loss_scale")
        self._loss_scale = wanted
        self._set_control()

    def _check_between_windows(self, name: str) -> None:
        if self.micro_step:
            raise RuntimeError(
                f"{name} cannot change while a window holds {self.micro_step} micro-batches: "
                "call flush() or discard() first"
            )

    def _set_control(self) -> None:
        limit = math.inf if self._max_norm is None else self._max_norm
        flags = float(self._reduction == "mean"), float(self._nonfinite != "propagate")
        self._control = Tensor(np.array([limit, self._loss_scale, *flags]))

    @property
    def micro_step(self) -> int:
        """Micro-batches in the open window."""
        return self.sum.micro_batches

    def close_if_due(self) -> None:
        """Updates if the window is full."""
        self.updated = self.stepped = False
        if self._settle_window()[operators.MICRO_BATCHES] >= self._steps_wanted:
            self._close()

    def flush(self) -> bool:
        """Updates with what a partial window holds, and returns whether there was one.

        Raises:
            RuntimeError: ``nonfinite="error"`` and the window is not finite.
        """
        self.updated = self.stepped = False
        if not self._settle_window()[operators.MICRO_BATCHES]:
            return False
        self._close()
        return True

    def discard(self) -> None:
        """Drops the open window."""
        self._window_home.settle()
        self.sum.clear()
        self._held = self._read_window()

    def settle(self) -> None:
        """Makes compiled graphs see values that were loaded (``load_param_into_net``, ``set_data``).

        A graph that MindSpore has compiled goes on with the memory that a parameter had before. The methods
        of this class and ``TrainStep`` see to it themselves; call it after loading if a graph of your own
        (``mindspore.jit``) holds the optimizer's parameters or adds to the window.

        Raises:
            RuntimeError: a parameter was loaded with another shape or dtype.
        """
        self.homes.settle()
        self._window_home.settle()
        self._held = self._read_window()

    @property
    def homes(self) -> Homes:
        """What :meth:`settle` brings home besides the window: what graphs that are run from here hold."""
        if self._homes is None:
            others = [*self._end.get_parameters(), *self.optimizer.get_parameters()]
            self._homes = Homes([p for p in others if p not in self._window_home])
        return self._homes

    def _read_window(self) -> list[float]:
        return self.sum.window.asnumpy().tolist()

    def _settle_window(self) -> list[float]:
        """Brings a loaded window home; what it holds, which is kept to see whether another graph adds."""
        homes = self.homes  # made before any graph runs from here
        if self._window_home.moved():
            if self._window_home.at_home(self.sum.window).asnumpy().tolist() != self._held:
                raise RuntimeError(
                    "a window was loaded, and a graph of your own added micro-batches that may not be in it: "
                    "call settle() right after load_param_into_net, or now to go on with what was loaded"
                )
            homes.settle()
            self._window_home.settle()
        self._held = self._read_window()
        return self._held

    def _close(self) -> None:
        self.homes.settle()
        if self.nonfinite == "error" and not self.sum.is_finite():
            raise RuntimeError(
                "the window's gradient is not finite; nothing was updated and the window is still open: call "
                "discard() to drop it"
            )
        if self._rule is None:
            self._call_optimizer()
        else:
            rows = self._rule.hyper()
            if not np.array_equal(rows, self._hyper_rows):
                self._hyper_rows, self._hyper = rows, Tensor(rows)
            self._end(self._control, self._hyper)
            self.stepped = not self.outcome.number(operators.SKIP)
        self.updated = True
        self._held = [0.0] * operators.WINDOW_COLUMNS

    def _call_optimizer(self) -> None:
        finished = self._end.of_window(self._control, self._hyper)
        applied = not self.outcome.number(operators.SKIP)
        if applied:
            # As variables: a plain tuple is a constant, for which the optimizer would be compiled every time.
            self.optimizer(mindspore.mutable(finished))
        self.sum.clear()
        self.stepped = applied

    # ------------------------------------------------------------------------------------- what it was like

    @property
    def norm(self) -> Tensor:
        """The last window's global norm before clipping: float32, 0-d."""
        return Tensor(np.float32(self.outcome.number(operators.NORM)))

    @property
    def skipped(self) -> Tensor:
        """Updates skipped because the gradient was not finite: int64, 0-d."""
        return Tensor(np.int64(self.outcome.number(operators.SKIPPED)))

    def grad(self, parameter: Parameter) -> Tensor | None:
        """The open window's gradient of one parameter, normalised; None if the window is empty.

        Raises:
            ValueError: the optimizer does not hold this parameter.
        """
        places = [i for i, mine in enumerate(self.parameters) if mine is parameter]
        if not places:
            name = getattr(parameter, "name", parameter)
            raise ValueError(f"the optimizer holds no such parameter: {name}")
        total = self.sum.sum_of(places[0])
        if total is None:
            return None
        control = self._control.asnumpy()
        weight = float(self.sum.window.asnumpy()[operators.TOTAL_WEIGHT])
        divisor = (weight if control[2] else 1.0) * self.loss_scale
        factor = total.dtype.type(1.0 / divisor if divisor else 0.0)
        return Tensor(total * factor)
