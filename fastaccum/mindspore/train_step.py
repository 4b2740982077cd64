"""A training step as one cell: forward, backward and accumulate in one graph; update and clear in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, nn

from fastaccum.mindspore.accumulator import FusedAccumulator


class TrainStep(nn.Cell):
    """Runs a micro-batch: returns its loss, and updates when the window is full.

    Args:
        network: a cell (or a function) of the inputs that returns the loss, a 0-d Tensor; e.g.
            ``nn.WithLossCell(net, loss_fn)``.
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
        self.scale = accumulator.loss_scale
        self._gradients = mindspore.value_and_grad(self._scaled, None, accumulator.parameters)

    def _scaled(self, *inputs: Any) -> Tensor:
        return self.network(*inputs) * self.scale

    @mindspore.jit
    def _micro_batch(self, weight: Tensor, *inputs: Any) -> Tensor:
        loss, gradients = self._gradients(*inputs)
        self.sum.add(weight, *gradients)
        return loss / self.scale

    def __call__(self, *inputs: Any, weight: float | None = None, count: float | None = None) -> Tensor:
        """Runs a micro-batch.

        Args:
            *inputs: of the network.
            weight: the loss is a mean over so many items.
            count: the loss is a sum over so many items.

        Returns:
            the loss.
        """
        loss = self._micro_batch(self.accumulator.weight_of(weight, count), *inputs)
        self.accumulator.close_if_due()
        return loss

    def construct(self, *inputs: Any) -> Tensor:
        """As :meth:`__call__`; a graph cannot hold it, as Python decides when a window closes."""
        return self(*inputs)
