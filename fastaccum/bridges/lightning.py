"""Lightning: a callback that makes the windows of the Trainer's ``accumulate_grad_batches`` fused.

Lightning counts, divides every loss by ``accumulate_grad_batches``, ends windows (at the end of an epoch
too), steps schedulers and ``global_step`` once per update and keeps DDP from reducing in between. The
callback puts a FusedAccumulator around the optimizer of ``configure_optimizers()`` for the time of ``fit()``,
and lets every micro-batch but the window's last join the window when its batch is over. Where ``fit()`` runs
without an optimizer there are no windows, and the callback does nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastaccum import arguments
from fastaccum.accumulator import FusedAccumulator
from fastaccum.bridges import missing
from fastaccum.bridges.driven import DrivenAccumulator, check_options
from fastaccum.checkpoint import owned, steps_on_cpu

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        SingleDeviceStrategy,
        SingleDeviceXLAStrategy,
        XLAStrategy,
    )
except ImportError as error:
    raise missing("lightning", "lightning", error) from error

# Derived from those that are served, with engines of their own.
_NOT_SERVED = (DeepSpeedStrategy, SingleDeviceXLAStrategy, XLAStrategy)


class FusedWindows(Callback):
    """``Trainer(accumulate_grad_batches=4, callbacks=[FusedWindows(max_norm=1.0)])``.

    For automatic optimization.

    Attributes:
        accumulator: the wrapper while ``fit()`` runs, for ``stats()``, ``log(writer)``, ``grad(param)``; else
            None.
    """

    # The optimizer of the last fit() and what its wrapper knew besides: a checkpoint may be saved later.
    _left: tuple[Any, dict[str, Any]] | None = None

    def __init__(
        self,
        max_norm: float | None = None,
        reduction: str = "sum",
        accumulator_options: dict[str, Any] | None = None,
    ) -> None:
        """Makes the callback.

        Args:
            max_norm: clip every window to this norm; in place of ``gradient_clip_val``, which is refused.
            reduction: ``"sum"``: the numbers are Lightning's, which divides by ``accumulate_grad_batches`` in
                a short last window too. ``"mean"``: the mean over the micro-batches that there were.
            accumulator_options: more arguments for FusedAccumulator.

        Raises:
            TypeError, ValueError, NotImplementedError: an option that cannot be used; the message says why.
        """
        given = {
            "max_norm": arguments.max_norm(max_norm),
            "reduction": arguments.choice(reduction, "reduction", arguments.REDUCTIONS),
        }
        where = "it is an argument of FusedWindows"
        self._options = check_options(accumulator_options, "accumulator_options", given, max_norm=where)
        self.accumulator: DrivenAccumulator | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wraps the optimizer, before a checkpoint's state is loaded into it.

        Raises:
            ValueError, NotImplementedError: what ``fit()`` is about to do does not go with it.
        """
        self.accumulator = self._left = None
        # Without an optimizer Lightning has one that holds nothing, and has warned.
        if not any(group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups):
            return
        _check(trainer, pl_module)
        self.accumulator = DrivenAccumulator(trainer.optimizers[0], **self._options)
        self.accumulator._known_as = "the FusedWindows of another Trainer; wait until its fit() has ended"
        trainer.optimizers = [self.accumulator]

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Follows ``accumulate_grad_batches``, which another callback may change."""
        if self.accumulator is not None and self._options["reduction"] == "mean":
            self.accumulator.divided_by = trainer.accumulate_grad_batches

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """The micro-batch joins the window, if the optimizer has not stepped."""
        if self.accumulator is not None and self.accumulator.pending:
            self.accumulator.add(trainer.scaler)
            if trainer.scaler is not None:
                trainer.scaler.update()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the plain optimizer behind; the module is another Trainer's to fit."""
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same: Lightning does not call ``teardown()`` then."""
        self._end(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds what the plain optimizer does not know to a checkpoint that is saved after ``fit()``."""
        if self._left is None or trainer.optimizers != [self._left[0]]:
            return
        for state in checkpoint.get("optimizer_states", ()):
            state.update(steps_on_cpu(owned(state)), fastaccum=self._left[1])

    def _end(self, trainer: Trainer) -> None:
        accumulator, self.accumulator = self.accumulator, None
        if accumulator is None:
            return
        accumulator.let_go()
        if trainer.optimizers == [accumulator]:
            trainer.optimizers = [accumulator.optimizer]
            # Now, and to the CPU: Lightning is about to move the parameters there and to free the GPU.
            entry = tree_map_only(Tensor, Tensor.cpu, accumulator.window_state_dict())
            self._left = accumulator.optimizer, entry


def _check(trainer: Trainer, module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            "FusedWindows needs automatic optimization: with automatic_optimization=False make a "
            "FusedAccumulator in configure_optimizers() and call its step() after every manual_backward()"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val} would clip the window's last micro-batch only: "
            f"leave it out of the Trainer and use FusedWindows(max_norm={trainer.gradient_clip_val})"
        )
    served = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not served or isinstance(trainer.strategy, _NOT_SERVED):
        raise NotImplementedError(
            f"FusedWindows works on one device and with DDP, not with {type(trainer.strategy).__name__}: "
            "use FusedAccumulator in a loop of your own"
        )
    if isinstance(trainer.optimizers[0], FusedAccumulator):
        raise ValueError(
            "configure_optimizers() returned a FusedAccumulator, and Lightning counts micro-batches itself: "
            "return the optimizer inside it, and give its options to FusedWindows"
        )
