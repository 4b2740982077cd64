"""Hugging Face Accelerate: an Accelerator whose windows are accumulated, clipped and updated fused.

The loop stays as Accelerate documents it, with ``gradient_accumulation_steps`` of the Accelerator and
``accelerator.accumulate(model)``; the plain optimizer goes into ``prepare()``. Accelerate counts, ends windows
(at the end of a prepared data loader too), and steps the scheduler once per update. The block under
``accumulate()`` is one micro-batch: where it does not end the window, its gradients join the window when the
block is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastaccum import arguments
from fastaccum.accumulator import FusedAccumulator
from fastaccum.bridges import missing
from fastaccum.bridges.driven import DrivenAccumulator, check_options

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", "accelerate", error) from error

_SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class FusedAccelerator(Accelerator):
    """``accelerate.Accelerator`` whose prepared optimizers are FusedAccumulators.

    Attributes:
        accumulators: the wrappers, in the order of ``prepare()``; ``optimizer.optimizer`` of what it returns.
    """

    def __init__(
        self,
        *args: Any,
        max_norm: float | None = None,
        reduction: str = "sum",
        accumulator_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes the Accelerator.

        Args:
            *args: the Accelerator's.
            max_norm: clip every window to this norm; ``clip_grad_norm_`` in the loop does the same.
            reduction: ``"sum"``: the numbers are Accelerate's, whose ``backward()`` divides by
                ``gradient_accumulation_steps``, in a short last window too. ``"mean"``: the mean over the
                micro-batches that there were.
            accumulator_options: more arguments for FusedAccumulator.
            **kwargs: the Accelerator's.

        Raises:
            TypeError, ValueError: an option that cannot be used; the message says why.
            NotImplementedError: FSDP, DeepSpeed or another engine with its own optimizer was asked for.
        """
        where = "it is an argument of FusedAccelerator"
        options = check_options(accumulator_options, "accumulator_options", max_norm=where)
        options["max_norm"] = arguments.max_norm(max_norm)
        options["reduction"] = arguments.choice(reduction, "reduction", arguments.REDUCTIONS)
        super().__init__(*args, **kwargs)
        if self.distributed_type not in _SERVED:
            raise NotImplementedError(
                f"FusedAccelerator works on one process and with DDP, not with {self.distributed_type}"
            )
        self._options = options
        self.accumulators: list[DrivenAccumulator] = []

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The optimizer in a FusedAccumulator, prepared.

        Raises:
            ValueError: it is a FusedAccumulator: two counts of micro-batches would divide and skip twice.
        """
        if isinstance(optimizer, FusedAccumulator):
            raise ValueError(
                f"prepare() was given a FusedAccumulator (accumulation_steps={optimizer.accumulation_steps}), and "
                f"this accelerator counts itself (gradient_accumulation_steps={self.gradient_accumulation_steps}): "
                "give it the optimizer inside; or use a plain Accelerator() and call step() after every backward"
            )
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = DrivenAccumulator(optimizer, **self._options)
            self.accumulators.append(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """One micro-batch; ``optimizer.step()`` in it does nothing unless it ends the window."""
        with super().accumulate(*models):
            yield
        if self.sync_gradients:
            return
        count = {"count": 1.0 / self.gradient_accumulation_steps} if self._options["reduction"] == "mean" else {}
        ...

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the window that ends next, when it ends.

        Returns:
            The norm before clipping: 0-d float32, which holds it once ``optimizer.step()`` has ended the window.
        """
        ...

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Refused: it would clip one micro-batch."""
        raise NotImplementedError(
            "clip_grad_value_() would clip one micro-batch, not the window: give FusedAccelerator "
            'accumulator_options={"max_value": ...}'
        )
