"""Hugging Face Transformers: a Trainer whose windows are accumulated, clipped and updated fused.

The Trainer counts (``gradient_accumulation_steps``) and normalises the loss, by the tokens of the whole
window where the model takes ``num_items_in_batch``: so the window's gradient is a sum, and a short last
window is right too. Every micro-batch but the window's last is closed in ``training_step``; the last one
when the Trainer steps its optimizer. Between the two the Trainer clips what lies in ``.grad``, which is one
micro-batch only: so nothing lies there at that time, and the window is clipped to ``max_grad_norm`` in the
fused update.

The Trainer counts the tokens that a causal model predicts if its class's name says ``ForCausalLM``. Of
others, such as GPT2LMHeadModel, it counts the first token of each row as well, unless ``model.loss_type`` is
set to ``"ForCausalLM"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastaccum import arguments
from fastaccum.accumulator import FusedAccumulator
from fastaccum.bridges import missing
from fastaccum.bridges.driven import DrivenAccumulator, check_options

try:
    from transformers import Trainer, TrainerCallback
    from transformers.utils import logging
except ImportError as error:
    raise missing("transformers", "transformers", error) from error

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # what super() is, in the class that a user makes
else:
    _Trainer = object

logger = logging.get_logger(__name__)


class _Windows(TrainerCallback):
    """What happens at the borders of windows."""

    def __init__(self, trainer: FusedTraining) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # As the Trainer's own model.zero_grad(): what an interrupted training left does not count.
        self._trainer.accumulator.discard()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        left = self._trainer.accumulator.micro_step
        if left:
            logger.warning(
                f"the last window ended after {left} micro-batches without an update (the data ran out, or a "
                "callback stopped the epoch): they are dropped"
            )
            self._trainer.accumulator.discard()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.accumulator.show()


class FusedTraining(_Trainer):
    """Goes before ``Trainer`` or a class derived from it: ``class Mine(FusedTraining, Seq2SeqTrainer)``.

    The optimizer that the Trainer makes, or is given, is wrapped in a FusedAccumulator. ``max_grad_norm`` is
    its ``max_norm`` (0: no clipping), and the norm that is logged is the whole window's before clipping.

    Attributes:
        accumulator: the wrapper; its ``grad(param)``, ``stats()``, ``log(writer)`` are there in callbacks.
    """

    accumulator: DrivenAccumulator

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a class that would train without it."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(FusedTraining):
            raise TypeError(
                f"{cls.__name__} has Trainer before FusedTraining, and would train without it: put "
                f"FusedTraining first, class {cls.__name__}(FusedTraining, ...)"
            )

    def __init__(self, *args: Any, accumulator_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Makes the Trainer.

        Args:
            *args: the Trainer's.
            accumulator_options: more arguments for FusedAccumulator, such as
                ``{"nonfinite": "error", "master_weights": True}``.
            **kwargs: the Trainer's.

        Raises:
            TypeError, ValueError: an option or an optimizer that cannot be used; the message says why.
            NotImplementedError: float16 with a loss scale, FSDP or DeepSpeed was asked for.
        """
        self._accumulator_options = check_options(
            accumulator_options,
            "accumulator_options",
            {"reduction": "sum"},
            max_norm="max_grad_norm of TrainingArguments sets it",
        )
        # First of the user's, so that theirs find .grad as it is.
        kwargs["callbacks"] = [_Windows(self), *(kwargs.get("callbacks") or ())]
        super().__init__(*args, **kwargs)
        _check(self)
        _limit(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains. After that the model is another trainer's to train, until it is this one's turn again."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if hasattr(self, "accumulator"):
                self.accumulator.let_go()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, wrapped."""
        optimizer = super().create_optimizer(model)
        limit = _limit(self)
        known = getattr(self, "accumulator", None)
        # A second train() finds the one of the first, inside Accelerate's.
        found = (optimizer, getattr(optimizer, "optimizer", None))
        if known is not None and any(each is known for each in found):
            known.take_back()
            known.max_norm = limit
            return optimizer
        self.accumulator = DrivenAccumulator(optimizer, max_norm=limit, **self._accumulator_options)
        self.accumulator._known_as = f"a {type(self).__name__}; wait until its train() has ended"
        self.optimizer = self.accumulator
        return self.accumulator

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch: forward, backward, and its gradients join the window."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.accumulator.hide()
        else:
            self.accumulator.add()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with the window's norm as ``grad_norm``."""
        if "grad_norm" in logs and hasattr(self, "accumulator"):
            logs["grad_norm"] = float(self.accumulator.norm)
        super().log(logs, *args, **kwargs)


class FusedTrainer(FusedTraining, Trainer):
    """``transformers.Trainer`` on a FusedAccumulator; see :class:`FusedTraining`."""


def _limit(trainer: Any) -> float | None:
    """The Trainer's limit for the norm; it may have changed since the last call."""
    limit, value = trainer.args.max_grad_norm, trainer._accumulator_options.get("max_value")
    if not arguments.is_number(limit) or not limit >= 0:
        raise ValueError(f"max_grad_norm must be a number of at least 0 (0: no clipping), got {limit!r}")
    if limit and value is not None:
        raise ValueError(
            f"max_grad_norm={limit} (TrainingArguments has 1.0 by default) and accumulator_options="
            f"{{'max_value': {value}}} exclude each other: set max_grad_norm=0 to clip by value"
        )
    return float(limit) or None


def _check(trainer: Any) -> None:
    if isinstance(trainer.optimizer, FusedAccumulator):
        raise ValueError(
            "optimizers= holds a FusedAccumulator, and FusedTrainer makes its own: pass the optimizer inside "
            "it, and its options as accumulator_options="
        )
    if trainer.args.fp16:
        raise NotImplementedError(
            "fp16=True scales the loss, and the Trainer unscales one micro-batch only: use bf16=True"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        kind = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise NotImplementedError(
            f"FusedTrainer does not work with {kind}: use one process or DDP, or a loop of your own"
        )
