"""What an optimizer's update is, in the core's terms: operator, state, hyper-parameters.

The optimizer stays the owner of its state and options: its parameters are updated in place, and its options
are read again for every window. MindSpore's own forms of a rule are kept where they differ from other
frameworks': ``nn.Adam`` and ``experimental.optim.Adam`` add eps before the bias correction,
``nn.AdamWeightDecay`` has no bias correction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.experimental import optim

from fastaccum.mindspore import operators
from fastaccum.mindspore.gradient_sum import named
from fastaccum.mindspore.operators import AMSGRAD, DECOUPLED, EPSILON_HAT, MAXIMIZE, NESTEROV, UNCORRECTED

# Columns of the hyper-parameter table.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MOMENTUM, DAMPENING, MAX_VALUE, NORM_GROUP, FLAGS = range(10)


def number(value: Any) -> float:
    """An option as the number that was written.

    MindSpore keeps options in float32, where 0.999 is off by 1.3e-8 and 1 - 0.999 by 1.3e-5. The shortest
    decimal that rounds to the float32 is what the user wrote, if that had up to 6 digits.
    """
    if not isinstance(value, Tensor):
        return float(value)
    found = value.asnumpy().reshape(())
    return float(str(found)) if found.dtype == np.float32 else float(found)


class FusedRule:
    """An update that the core does.

    Attributes:
        operator: of the update.
        states: its lists of state, one tensor per parameter each.
        step: int32, one element: updates applied. The optimizer's own counter where it has one.
        powers: powers of the betas, where the optimizer keeps them.
    """

    def __init__(self, optimizer: nn.Cell) -> None:
        self.optimizer = optimizer
        self.operator = operators.adam()
        self.states: list[ParameterTuple] = []
        self.step = named(np.zeros(1, np.int32), "step", optimizer.parameters)
        self.powers: tuple[Parameter, ...] = ()

    def hyper(self) -> np.ndarray:
        """The options as they are now: float64 ``[n, 10]``, a row per parameter."""
        table = np.zeros((len(self.optimizer.parameters), operators.HYPER_COLUMNS))
        table[:, MAX_VALUE] = math.inf
        self.fill(table)
        return table

    def fill(self, table: np.ndarray) -> None:
        """Writes the rule's own columns."""
        raise NotImplementedError


class _NnRule(FusedRule):
    """What the fused optimizers of ``mindspore.nn`` share: learning rate and weight decay, grouped or not."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(optimizer)
        self.step = optimizer.global_step

    def fill(self, table: np.ndarray) -> None:
        """Learning rate and weight decay."""
        optimizer = self.optimizer
        read: dict[int, float] = {}

        def current(option: Any) -> float:
            if id(option) not in read:
                now = option(optimizer.global_step) if isinstance(option, nn.Cell) else option
                read[id(option)] = number(now)
            return read[id(option)]

        lr, decay = optimizer.learning_rate, optimizer.weight_decay
        table[:, LR] = [current(x) for x in lr] if optimizer.is_group_lr else current(lr)
        if optimizer.exec_weight_decay:
            decays = [current(x) for x in decay] if optimizer.is_group else current(decay)
            table[:, WEIGHT_DECAY] = np.where(optimizer.decay_flags, decays, 0.0)


class AdamRule(_NnRule):
    """``nn.Adam``."""

    def __init__(self, optimizer: nn.Adam) -> None:
        super().__init__(optimizer)
        self.states = [optimizer.moment1, optimizer.moment2]
        self.powers = (optimizer.beta1_power, optimizer.beta2_power)
        if optimizer.use_amsgrad:
            self.states.append(optimizer.vhat)

    def fill(self, table: np.ndarray) -> None:
        """See the base class."""
        super().fill(table)
        optimizer = self.optimizer
        for column, option in ((BETA1, optimizer.beta1), (BETA2, optimizer.beta2), (EPS, optimizer.eps)):
            table[:, column] = number(option)
        table[:, FLAGS] = EPSILON_HAT + AMSGRAD * optimizer.use_amsgrad


class AdamWeightDecayRule(_NnRule):
    """``nn.AdamWeightDecay``."""

    def __init__(self, optimizer: nn.AdamWeightDecay) -> None:
        super().__init__(optimizer)
        self.states = [optimizer.moments1, optimizer.moments2]

    def fill(self, table: np.ndarray) -> None:
        """See the base class."""
        super().fill(table)
        optimizer = self.optimizer
        for column, option in ((BETA1, optimizer.beta1), (BETA2, optimizer.beta2), (EPS, optimizer.eps)):
            table[:, column] = number(option)
        table[:, FLAGS] = DECOUPLED + UNCORRECTED


class MomentumRule(_NnRule):
    """``nn.Momentum`` without Nesterov's look-ahead."""

    def __init__(self, optimizer: nn.Momentum) -> None:
        super().__init__(optimizer)
        self.operator = operators.sgd()
        self.states = [optimizer.moments]

    def fill(self, table: np.ndarray) -> None:
        """See the base class."""
        super().fill(table)
        table[:, MOMENTUM] = number(self.optimizer.momentum)


class SgdRule(_NnRule):
    """``nn.SGD``."""

    def __init__(self, optimizer: nn.SGD) -> None:
        super().__init__(optimizer)
        self.operator = operators.sgd()
        self.states = [optimizer.accum, optimizer.stat]

    def fill(self, table: np.ndarray) -> None:
        """See the base class."""
        super().fill(table)
        table[:, MOMENTUM] = number(self.optimizer.momentum)
        table[:, DAMPENING] = self.optimizer.dampening
        table[:, FLAGS] = NESTEROV * self.optimizer.nesterov


class _ExperimentalRule(FusedRule):
    """What the fused optimizers of ``mindspore.experimental.optim`` share: their groups."""

    def row(self, group: dict[str, Any]) -> dict[int, float]:
        """A group's columns beyond learning rate and weight decay."""
        raise NotImplementedError

    def fill(self, table: np.ndarray) -> None:
        """All columns, group by group."""
        optimizer = self.optimizer
        for i, group in enumerate(optimizer.param_groups):
            rows = table[optimizer.group_start_id[i] : optimizer.group_start_id[i + 1]]
            rows[:, LR] = number(group["lr"])
            rows[:, WEIGHT_DECAY] = number(group["weight_decay"])
            for column, value in self.row(group).items():
                rows[:, column] = value


class ExperimentalAdamRule(_ExperimentalRule):
    """``experimental.optim.Adam`` and ``AdamW``."""

    def __init__(self, optimizer: optim.Adam | optim.AdamW) -> None:
        super().__init__(optimizer)
        self.form = DECOUPLED if type(optimizer) is optim.AdamW else EPSILON_HAT
        self.step = optimizer.state_step
        self.states = [optimizer.exp_avg, optimizer.exp_avg_sq]
        if any(group["amsgrad"] for group in optimizer.param_groups):
            self.states.append(optimizer.max_exp_avg_sq)

    def row(self, group: dict[str, Any]) -> dict[int, float]:
        """See the base class."""
        flags = self.form + AMSGRAD * bool(group["amsgrad"]) + MAXIMIZE * bool(group["maximize"])
        beta1, beta2 = map(number, group["betas"])
        return {BETA1: beta1, BETA2: beta2, EPS: number(group["eps"]), FLAGS: flags}


class ExperimentalSgdRule(_ExperimentalRule):
    """``experimental.optim.SGD``."""

    def __init__(self, optimizer: optim.SGD) -> None:
        super().__init__(optimizer)
        self.operator = operators.sgd()
        self.states = [optimizer.accum, optimizer.stat]

    def row(self, group: dict[str, Any]) -> dict[int, float]:
        """See the base class."""
        flags = NESTEROV * bool(group["nesterov"]) + MAXIMIZE * bool(group["maximize"])
        return {MOMENTUM: number(group["momentum"]), DAMPENING: number(group["dampening"]), FLAGS: flags}


def _is_plain(optimizer: nn.Cell) -> bool:
    """Whether no option asks for what the core does not do, or for what MindSpore itself does not follow.

    On the CPU MindSpore 2.10 takes ``use_nesterov`` of ``nn.Momentum`` and ``amsgrad`` of
    ``experimental.optim.Adam``, and does not follow them. What the optimizer does is what users get here.
    """
    if isinstance(optimizer, nn.Optimizer) and any(getattr(optimizer, "group_grad_centralization", ())):
        return False
    if type(optimizer) is nn.Adam:
        return not (optimizer.use_nesterov or optimizer.use_lazy or optimizer.use_offload)
    if type(optimizer) is nn.Momentum:
        return not optimizer.use_nesterov
    if type(optimizer) is optim.Adam:
        return not any(group["amsgrad"] for group in optimizer.param_groups)
    return True


_FUSED = {
    nn.Adam: AdamRule,
    nn.AdamWeightDecay: AdamWeightDecayRule,
    nn.Momentum: MomentumRule,
    nn.SGD: SgdRule,
    optim.Adam: ExperimentalAdamRule,
    optim.AdamW: ExperimentalAdamRule,
    optim.SGD: ExperimentalSgdRule,
}


def rule_for(optimizer: Any) -> FusedRule | None:
    """The fused rule for exactly these optimizers (a subclass may do anything); None for any other.

    Raises:
        TypeError: it is not an optimizer of MindSpore.
        ValueError: it cannot be served.
    """
    if not isinstance(optimizer, (nn.Optimizer, optim.optimizer.Optimizer)):
        raise TypeError(
            "optimizer must be a mindspore.nn.Optimizer (or one of mindspore.experimental.optim), got "
            f"{type(optimizer).__name__}"
        )
    name = type(optimizer).__name__
    if getattr(optimizer, "loss_scale", 1.0) != 1.0:
        raise ValueError(
            f"{name} was made with loss_scale={optimizer.loss_scale}, and would divide the averaged gradient "
            "after it was clipped: make it with loss_scale=1.0 and pass loss_scale to FusedAccumulator"
        )
    if getattr(optimizer, "use_parallel", False):
        raise ValueError(f"{name} is sharded over devices by MindSpore's parallel optimizer: turn that off")
    found = _FUSED.get(type(optimizer))
    return found(optimizer) if found is not None and _is_plain(optimizer) else None


def same_parameters(optimizer: nn.Cell, parameters: tuple[Parameter, ...]) -> bool:
    """Whether the optimizer still holds these parameters, in this order."""
    now = optimizer.parameters
    return len(now) == len(parameters) and all(a is b for a, b in zip(now, parameters, strict=True))
