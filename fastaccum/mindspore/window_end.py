"""The end of a window, as compiled functions: decide, update, clear."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from fastaccum.mindspore import operators
from fastaccum.mindspore.gradient_sum import GradientSum, named
from fastaccum.mindspore.rules import FusedRule


class Outcome(nn.Cell):
    """What the end of the last window decided; parameters, as :mod:`fastaccum.mindspore.operators` says."""

    def __init__(self, rows: int, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.outcome = named(np.zeros(operators.OUTCOME_COLUMNS), "outcome", parameters)
        self.scalars = named(np.zeros((rows, operators.SCALAR_COLUMNS)), "scalars", parameters)

    def number(self, column: int) -> float:
        """One of its numbers."""
        return float(self.outcome.asnumpy()[column])


class FusedUpdate(nn.Cell):
    """Decides, updates parameters and state, and clears, in one graph of three operators."""

    def __init__(self, gradients: GradientSum, outcome: Outcome, rule: FusedRule) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = gradients
        self.decided = outcome
        self.step = rule.step
        self.powers = ParameterTuple(rule.powers)
        self.params = ParameterTuple(rule.optimizer.parameters)
        self.states1 = rule.states[0]
        self.states2 = rule.states[1] if len(rule.states) > 1 else ()
        self.states3 = rule.states[2] if len(rule.states) > 2 else ()
        self._finish = operators.finish()
        self._update = rule.operator

    @mindspore.jit
    def construct(self, control: Tensor, hyper: Tensor) -> Tensor:
        """Control and hyper as :mod:`fastaccum.mindspore.operators` describes them."""
        window, decided = self.gradients, self.decided
        self._finish(
            control,
            hyper,
            window.window,
            window.partials,
            decided.outcome,
            decided.scalars,
            self.step,
            *self.powers,
        )
        self._update(
            window.segments,
            hyper,
            decided.scalars,
            decided.outcome,
            window.buffer,
            *self.params,
            *self.states1,
            *self.states2,
            *self.states3,
        )
        return window.clear()


class FinishedGradients(nn.Cell):
    """Decides, and returns the averaged and clipped gradients in their parameters' dtypes."""

    def __init__(self, gradients: GradientSum, outcome: Outcome, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = gradients
        self.decided = outcome
        self.step = named(np.zeros(1, np.int32), "step", parameters)
        self._finish = operators.finish()
        shapes = [shape or (1,) for shape in gradients.shapes]
        self.scalars = [i for i, shape in enumerate(gradients.shapes) if not shape]
        self._finished = operators.finished(shapes, [p.dtype for p in parameters])

    @mindspore.jit
    def construct(self, control: Tensor, hyper: Tensor) -> tuple[Tensor, ...]:
        """As :class:`FusedUpdate`; of hyper nothing is used."""
        window, decided = self.gradients, self.decided
        self._finish(
            control, hyper, window.window, window.partials, decided.outcome, decided.scalars, self.step
        )
        return self._finished(window.segments, decided.outcome, window.buffer)

    def of_window(self, control: Tensor, hyper: Tensor) -> tuple[Tensor, ...]:
        """The same, in their parameters' shapes."""
        found = self(control, hyper)
        found = [found] if isinstance(found, Tensor) else list(found)  # one output does not come in a tuple
        for i in self.scalars:
            found[i] = found[i].reshape(())
        return tuple(found)
