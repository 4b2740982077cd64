"""The sum of a window's gradients: one flat buffer, an operator that adds, an operator that clears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from fastaccum.layout import Layout
from fastaccum.mindspore import operators

FLOATS = (mindspore.float32, mindspore.bfloat16, mindspore.float16, mindspore.float64)


def named(value: np.ndarray, name: str, parameters: Sequence[Parameter]) -> Parameter:
    """A parameter of fastaccum's own; it is saved in checkpoints and never trained.

    It is called after the first of the parameters that it serves, as no two in a graph may have one name.
    """
    return Parameter(Tensor(value), name=f"fastaccum.{parameters[0].name}.{name}", requires_grad=False)


def words(dtype: Any) -> str:
    """A MindSpore dtype in lower case."""
    return str(dtype).lower()


class GradientSum(nn.Cell):
    """Gradients summed over the micro-batches of a window, in float32 (float64 for float64 parameters).

    Everything that it knows is in its parameters, so that checkpoints hold an open window and graphs change
    it in place. ``add`` and ``clear`` are compiled functions; inside another graph they become part of it.

    Args:
        parameters: the ``mindspore.Parameter`` objects whose gradients are summed, in this order.

    Attributes:
        layout: where each gradient lies in the buffer.
        segments: the same as a table (see :mod:`fastaccum.mindspore.operators`).
        buffer, present, partials, window: parameters, as described there.

    Raises:
        TypeError, ValueError: the parameters are not as described.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        if isinstance(parameters, (Parameter, str)) or not isinstance(parameters, Sequence):
            raise TypeError(f"parameters must be a list of Parameters, got {type(parameters).__name__}")
        if not parameters:
            raise ValueError("parameters must hold at least one Parameter, got none")
        for i, parameter in enumerate(parameters):
            if not isinstance(parameter, Parameter):
                raise TypeError(f"parameters[{i}] must be a Parameter, got {type(parameter).__name__}")
            if parameter.dtype not in FLOATS:
                raise TypeError(
                    f"parameters[{i}] ({parameter.name}) must be float32, bfloat16, float16 or float64, got "
                    f"{words(parameter.dtype)}"
                )
        wide = [parameter.dtype == mindspore.float64 for parameter in parameters]
        if any(wide) and not all(wide):
            raise ValueError(
                "float64 parameters and others cannot share one sum: "
                f"{parameters[wide.index(True)].name} is float64, {parameters[wide.index(False)].name} is "
                f"{words(parameters[wide.index(False)].dtype)}; use one FusedAccumulator for each"
            )
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.names = [parameter.name for parameter in parameters]
        self.layout = Layout.of([int(np.prod(shape)) for shape in self.shapes])
        rows = list(zip(self.layout.offsets, self.layout.numels, strict=True))
        self.segments = Tensor(np.array(rows, np.int64))
        dtype = np.float64 if any(wide) else np.float32
        self.buffer = named(np.zeros(self.layout.numel, dtype), "buffer", parameters)
        self.present = named(np.zeros(len(rows), np.uint8), "present", parameters)
        self.partials = named(np.zeros((2, self.layout.n_chunks)), "partials", parameters)
        self.window = named(np.zeros(operators.WINDOW_COLUMNS), "window", parameters)
        self._add = operators.accumulate()
        self._clear = operators.clear()

    def check(self, gradients: Any) -> None:
        """Raises unless there is a gradient of the right shape for every parameter.

        Raises:
            TypeError, ValueError: what was expected, and what came.
        """
        if not isinstance(gradients, (tuple, list)):
            raise TypeError(f"gradients must be a tuple of Tensors, got {type(gradients).__name__}")
        if len(gradients) != len(self.shapes):
            raise ValueError(
                f"gradients must hold one Tensor for each of the {len(self.shapes)} parameters of the "
                f"optimizer, got {len(gradients)}: take them with value_and_grad(..., "
                "weights=optimizer.parameters)"
            )
        for i, (gradient, shape) in enumerate(zip(gradients, self.shapes, strict=True)):
            if not isinstance(gradient, Tensor):
                raise TypeError(
                    f"gradients[{i}] (of {self.names[i]}) must be a dense Tensor, got "
                    f"{type(gradient).__name__}"
                )
            if gradient.dtype not in FLOATS:
                raise TypeError(
                    f"gradients[{i}] (of {self.names[i]}) must be float32, bfloat16, float16 or float64, got "
                    f"{words(gradient.dtype)}"
                )
            if tuple(gradient.shape) != shape:
                raise ValueError(
                    f"gradients[{i}] (of {self.names[i]}) must have shape {shape}, got "
                    f"{tuple(gradient.shape)}"
                )

    @mindspore.jit
    def add(self, weight: Tensor, *gradients: Tensor) -> Tensor:
        """Adds a micro-batch's gradients: the accumulate operator.

        Args:
            weight: float64 ``[3]``: factor, what the micro-batch counts for, 1 if that was given.
            *gradients: as :meth:`check` wants them.
        """
        # One by one: MindSpore takes a tuple for a constant, and compiles again for every new one.
        return self._add(
            self.segments, weight, self.window, self.present, self.partials, self.buffer, *gradients
        )

    @mindspore.jit
    def clear(self) -> Tensor:
        """Empties the window: the clear operator."""
        return self._clear(self.window, self.present)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the window holds."""
        return int(self.window.asnumpy()[operators.MICRO_BATCHES])

    def sum_of(self, i: int) -> np.ndarray | None:
        """A copy of the sum of one parameter's gradients, in its shape; None in an empty window."""
        if not self.present.asnumpy()[i]:
            return None
        first = self.layout.offsets[i]
        return self.buffer.asnumpy()[first : first + self.layout.numels[i]].reshape(self.shapes[i]).copy()

    def is_finite(self) -> bool:
        """Whether the sum holds neither inf nor NaN."""
        return not self.partials.asnumpy()[1].any()
