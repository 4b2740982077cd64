"""A training step as one cell: forward, backward and accumulate in one graph; update and clear in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn

from fastaccum.mindspore.accumulator import FusedAccumulator
from fastaccum.mindspore.homes import held_by


class TrainStep(nn.Cell):
    """Runs a micro-batch: returns its loss, and updates when the window is full.

    Args:
        network: a cell (or a function) of the inputs that returns the loss, one number; e.g.
            ``nn.WithLossCell(net, loss_fn)``. What a function refers to by name is looked through for
            parameters that were loaded.
        accumulator: wraps the optimizer of its parameters. If it has a ``loss_scale``, the loss is multiplied
            by it for the backward pass.

    Raises:
        TypeError: an argument is something else.
    """

    def __init__(self, network: nn.Cell | Callable[..., Tensor], accumulator: FusedAccumulator) -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(accumulator, FusedAccumulator):
            raise TypeError(
                f"accumulator must be a FusedAccumulator, got {type(accumulator).__name__}: wrap the "
                "optimizer in one"
            )
        if not callable(network):
            raise TypeError(f"network must be a cell or a function, got {type(network).__name__}")
        self.network = network
        self.accumulator = accumulator
        self.sum = accumulator.sum
        self._gradients = mindspore.value_and_grad(self._scaled, None, accumulator.parameters, has_aux=True)
        self._ran = False

    def _scaled(self, scale: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        loss = self.network(*inputs)
        # Raised while the graph is compiled, before any of it runs.
        if not isinstance(loss, Tensor):
            raise TypeError(
                "network must return its loss, a Tensor of one number; it returned something else"
            )
        if loss.size != 1:
            raise ValueError(
                f"network must return its loss, one number, got shape {loss.shape}: take its mean or sum"
            )
        # float16 ends at 65504, and a loss of 10 times 2**14 is beyond it.
        wide = loss.astype(mindspore.float32) if loss.dtype == mindspore.float16 else loss
        return wide * scale.astype(wide.dtype), loss

    @mindspore.jit
    def _micro_batch(self, weight: Tensor, scale: Tensor, *inputs: Any) -> Tensor:
        (_, loss), gradients = self._gradients(scale, *inputs)
        self.sum.add(weight, *gradients)
        return loss

    def __call__(self, *inputs: Any, weight: float | None = None, count: float | None = None) -> Tensor:
        """Runs a micro-batch.

        Args:
            *inputs: of the network.
            weight: the loss is a mean over so many items.
            count: the loss is a sum over so many items.

        Returns:
            the loss.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`FusedAccumulator.step`; or the network does not
                return one number.
        """
        accumulator = self.accumulator
        given = accumulator.open_micro_batch(weight, count)
        if not self._ran:
            accumulator.homes.keep(held_by(self.network))
            self._ran = True
        accumulator.homes.settle()
        loss = self._micro_batch(given, Tensor(np.float64(accumulator.loss_scale)), *inputs)
        accumulator.close_if_due()
        return loss

    def construct(self, *inputs: Any) -> Tensor:
        """As :meth:`__call__`; a graph cannot hold it, as Python decides when a window closes."""
        return self(*inputs)
