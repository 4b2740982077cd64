"""Hugging Face Accelerate: an Accelerator whose windows are accumulated, clipped and updated fused.

The loop stays as Accelerate documents it, with ``gradient_accumulation_steps`` of the Accelerator and
``accelerator.accumulate(model)``; the plain optimizer goes into ``prepare()``. Accelerate counts, ends
windows (at the end of a prepared data loader too), and steps the prepared scheduler as it always does: per
update once for each process, or once with ``split_batches=True``. The block under ``accumulate()`` is one
micro-batch: where it does not end the window, its gradients join the window when the block is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastaccum import arguments, groups
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
            TypeError, ValueError, NotImplementedError: an option that cannot be used; the message says why.
            NotImplementedError: FSDP, DeepSpeed or another engine with its own optimizer was asked for.
        """
        where = "it is an argument of FusedAccelerator"
        given = {
            "max_norm": arguments.max_norm(max_norm),
            "reduction": arguments.choice(reduction, "reduction", arguments.REDUCTIONS),
        }
        options = check_options(accumulator_options, "accumulator_options", given, max_norm=where)
        super().__init__(*args, **kwargs)
        if self.distributed_type not in _SERVED:
            raise NotImplementedError(
                f"FusedAccelerator works on one process and with DDP, not with {self.distributed_type}: "
                "use FusedAccumulator in a loop of your own"
            )
        self._options = options
        self.accumulators: list[DrivenAccumulator] = []

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares all, or nothing: where something is refused, nothing of it stays registered.

        Args:
            *args: models, plain optimizers, data loaders, schedulers.
            **kwargs: the Accelerator's.

        Raises:
            TypeError, ValueError: an optimizer cannot be wrapped; the message says why.
        """
        for optimizer in args:
            if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(
                optimizer, AcceleratedOptimizer
            ):
                self._check(optimizer)
        lists = (self._models, self._optimizers, self._schedulers, self._dataloaders, self.accumulators)
        before = [len(registered) for registered in lists]
        try:
            return super().prepare(*args, **kwargs)
        except BaseException:
            for accumulator in self.accumulators[before[-1] :]:
                accumulator.let_go()
            for registered, length in zip(lists, before, strict=True):
                del registered[length:]
            raise

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if an optimizer cannot be wrapped; before its model is moved, wrapped or cast."""
        if isinstance(optimizer, FusedAccumulator):
            raise ValueError(
                "prepare() was given a FusedAccumulator, which counts micro-batches (accumulation_steps="
                f"{optimizer.accumulation_steps}), as this accelerator does (gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}): give it the optimizer inside; or use a plain "
                "Accelerator() and call step() after every backward"
            )
        groups.check_optimizer(optimizer)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The optimizer in a FusedAccumulator, prepared.

        Raises:
            ValueError: it is a FusedAccumulator: two counts of micro-batches would divide and skip twice.
        """
        if not isinstance(optimizer, AcceleratedOptimizer):
            self._check(optimizer)
            optimizer = DrivenAccumulator(optimizer, **self._options)
            optimizer._known_as = "the optimizer of a FusedAccelerator; call free_memory() of that one first"
            self.accumulators.append(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def free_memory(self, *objects: Any) -> Any:
        """Lets go of all that was prepared: another may train it."""
        for accumulator in self.accumulators:
            accumulator.let_go()
        self.accumulators.clear()
        return super().free_memory(*objects)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """One micro-batch; ``optimizer.step()`` in it does nothing unless it ends the window."""
        if self._options["reduction"] == "mean":
            for accumulator in self.accumulators:
                accumulator.divided_by = self.gradient_accumulation_steps
        with super().accumulate(*models):
            yield
        if self.sync_gradients:
            return
        pending = [accumulator for accumulator in self.accumulators if accumulator.pending]
        for accumulator in pending:
            accumulator.add(self.scaler)
        if pending and self.scaler is not None:
            self.scaler.update()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the open window, once it ends.

        Args:
            parameters: all that one prepared optimizer updates; others may be among them.
            max_norm: the limit, above 0.
            norm_type: must be that of the FusedAccumulator, 2 unless ``accumulator_options`` has another.

        Returns:
            The norm before clipping, 0-d float32: it holds it from ``optimizer.step()`` on.

        Raises:
            ValueError: these are not the parameters of one optimizer, or another norm is asked for.
        """
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        meant = [accumulator for accumulator in self.accumulators if given & _trained(accumulator)]
        if len(meant) != 1 or not _trained(meant[0]) <= given:
            raise ValueError(
                "clip_grad_norm_() clips the window of one optimizer: expected all parameters of one that "
                f"was given to prepare(), got some of {len(meant)}"
            )
        own = meant[0]._options.norm_type
        if arguments.norm_type(norm_type) != own:
            raise ValueError(
                f"norm_type={norm_type} is not that of the FusedAccumulator, {own}: give FusedAccelerator "
                f"accumulator_options={{'norm_type': {norm_type}}}"
            )
        return meant[0].clip_next(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Refused: it would clip one micro-batch."""
        raise NotImplementedError(
            "clip_grad_value_() would clip one micro-batch, not the window: give FusedAccelerator "
            'accumulator_options={"max_value": ...}'
        )


def _trained(accumulator: DrivenAccumulator) -> set[int]:
    return {id(p) for group in accumulator.param_groups for p in group["params"] if p.requires_grad}
