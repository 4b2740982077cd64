"""The contract as a slow loop: a stock optimizer, a dictionary of sums, and nothing clever.

It is written from what a user is promised, not from how fastaccum does it, so a test can drive both
with the same calls and compare. Gradients are handed in; there is no autograd here.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Weight = tuple[str, float]  # ("weight", n): a mean over n items; ("count", n): a sum over n
Range = tuple[Tensor, Tensor]  # a value in float64, and how far roundings of the gradient move it


class ContractModel:
    """What ``FusedAccumulator`` promises, for one process.

    Attributes:
        pending: with ``take="backward"``, gradients of the pending micro-batch; else they are in
            ``.grad``.
        arrived: parameters whose gradient came since the last ``step()`` or ``zero_grad()``.
        sums: the closed micro-batches' sum of w * g, in the accumulator's dtype.
        windows: windows closed so far.
        updates: those that were applied.
        told: a GradScaler found inf in the open window.
        scale: of the wrapper's own scaler; 1 without one.
        norms: the last finished gradient's norm, per parameter.
        exact: what the last update makes of each parameter in float64, by :func:`exactly`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation_steps: int = 1,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        max_value: float | None = None,
        reduction: str = "mean",
        take: str = "step",
        nonfinite: str = "skip",
        nonfinite_micro_batch: str = "keep",
        master_weights: bool = False,
        scaler: tuple[float, int] | None = None,
    ) -> None:
        """Wraps ``optimizer``.

        With ``master_weights`` its 16-bit parameters are float32 ones here. ``scaler`` is (first scale,
        windows without inf after which it doubles).
        """
        self.optimizer = optimizer
        self.steps = accumulation_steps
        self.max_norm, self.norm_type, self.max_value = max_norm, norm_type, max_value
        self.reduction, self.take, self.nonfinite = reduction, take, nonfinite
        self.updated = self.stepped = self.broken = False
        self.drops = nonfinite_micro_batch == "drop"
        self.scale, self.growth_interval = scaler or (1.0, 0)
        self.good_windows = 0
        self.norms: dict[Tensor, float] = {}
        self.norm, self.skipped, self.windows, self.updates = 0.0, 0, 0, 0
        self.exact: dict[Tensor, dict[str, Range]] = {}
        self.late: list[bool] = []  # windows flushed beside a pending micro-batch, which has the old scale
        self._forget_pending()
        self._forget_window()

    # --------------------------------------------------------------------------------- what is held

    def _forget_pending(self) -> None:
        self.pending: dict[Tensor, Tensor] = {}
        self.arrived: set[Tensor] = set()
        self.pending_weight: Weight | None = None
        for is_finite in self.late:
            self._adapt_scale(is_finite)
        self.late = []
        self.taken_plain = False  # take="backward": some were added before a weight was known

    def _forget_window(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.total = 0.0
        self.kind: str | None = None  # "plain", "weight" or "count"
        self.micro_step = 0
        self.clip_once: float | None = None
        self.told = False

    @property
    def params(self) -> list[Tensor]:
        """Every parameter, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def is_pending(self) -> bool:
        """Something of a micro-batch that is not closed is held."""
        return bool(
            self.pending or self.arrived or self.pending_weight
            or any(p.grad is not None for p in self.params)
        )  # fmt: skip

    @property
    def is_stuck(self) -> bool:
        """The full window could not be closed (``nonfinite="error"``)."""
        return self.micro_step >= self.steps

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per window."""
        return self.steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        if self.micro_step or self.pending:
            raise RuntimeError("inside an open window")
        self.steps = value

    # ------------------------------------------------------------------------------------ weights

    @staticmethod
    def _given(weight: float | None, count: float | None) -> Weight | None:
        if weight is not None and count is not None:
            raise ValueError("both")
        if weight is not None:
            return "weight", float(weight)
        return None if count is None else ("count", float(count))

    def _agree(self, given: Weight) -> None:
        if self.pending_weight is not None and self.pending_weight != given:
            raise ValueError("one micro-batch, one weight")
        if self.kind is not None and self.kind != given[0]:
            raise ValueError("a window is weighted throughout or not at all")

    # ----------------------------------------------------------------------------------- the loop

    def backward(
        self,
        grads: dict[Tensor, Tensor],
        weight: float | None = None,
        count: float | None = None,
        raises: bool = False,
        by_wrapper: bool = True,
    ) -> None:
        """Lets gradients arrive; with ``raises``, as a backward that fails after they did.

        Only a call of the wrapper's own ``backward()`` shows that it carries no weight.
        """
        if self.broken:
            raise RuntimeError("an earlier backward failed")
        given = self._given(weight, count)
        if given is not None:
            self._agree(given)
            if given[0] == "weight" and self.taken_plain:
                raise ValueError("too late: gradients were added without a weight")
            if not raises:
                self.pending_weight = given
        elif by_wrapper and self.pending_weight is not None:
            raise ValueError("one micro-batch, one weight")
        for param, grad in grads.items():
            if not param.requires_grad:
                continue
            self.arrived.add(param)
            grad = grad.to(param.dtype) * self.scale
            if self.take == "step":
                param.grad = grad.clone() if param.grad is None else param.grad + grad
            else:
                grad = grad.to(self._sum_dtype(param)) / self.scale
                if param.grad is not None:  # put there by hand: it is part of what arrives
                    grad = grad + param.grad.to(grad.dtype)
                    param.grad = None
                self.pending[param] = self.pending[param] + grad if param in self.pending else grad
                self.taken_plain |= self.pending_weight is None
        if raises:
            self.broken = self.take == "backward" and bool(self.pending)
            raise ArithmeticError("this backward was told to fail")

    def step(self, weight: float | None = None, count: float | None = None, found_inf: bool = False) -> None:
        """Closes the micro-batch, and every so often the window.

        ``found_inf`` is what a GradScaler of the loop's own has found in the micro-batch.
        """
        if self.broken or self.is_stuck:
            raise RuntimeError("discard() it")
        given = self._given(weight, count)
        if given is not None:
            if given[0] == "weight" and self.take == "backward":
                raise ValueError("too late")
            self._agree(given)
        if self.take == "step" and any(p.grad is None for p in self.arrived):
            raise RuntimeError("a gradient vanished")
        held = dict(self.pending)
        for param in self.params:
            if param.grad is not None:
                grad = param.grad.to(self._sum_dtype(param)) / self.scale
                held[param] = held[param] + grad if param in held else grad
        kind, items = given or self.pending_weight or ("plain", 1.0 if held else 0.0)
        if not held and self.pending_weight is None:
            items = 0.0  # no backward, no weight
        if kind == "plain" and held:
            self._agree((kind, 1.0))

        # From here on nothing raises but nonfinite="error".
        if self.drops and items > 0.0 and not all(bool(grad.isfinite().all()) for grad in held.values()):
            items, found_inf = 0.0, False  # gone, and what the scaler has found with it
        self.told |= found_inf
        if items > 0.0:  # a weight of 0 selects nothing, not even 0 * NaN
            for param, grad in held.items():
                add = items * grad if kind == "weight" else grad
                self.sums[param] = self.sums[param] + add if param in self.sums else add
        if self.kind is None and (kind != "plain" or held):
            self.kind = kind
        self.total += items
        self._forget_pending()
        for param in self.params:
            param.grad = None
        self.micro_step += 1
        self.updated = self.stepped = False
        if self.micro_step == self.steps:
            self._close_window()

    def flush(self) -> bool:
        """Closes a partial window; a pending micro-batch is not part of it."""
        if self.broken:
            raise RuntimeError("discard() it")
        if self.micro_step and self.pending:
            raise RuntimeError("the pending micro-batch is in the sums already")
        self.updated = self.stepped = False
        if not self.micro_step:
            return False
        pending = {p: p.grad for p in self.params}
        self._close_window()
        for param, grad in pending.items():
            param.grad = grad
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the pending micro-batch."""
        if self.pending and self.micro_step:
            raise RuntimeError("added already")
        for param in self.params:
            if param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)
        self._forget_pending()

    def discard(self) -> None:
        """Drops the open window and what is pending."""
        for param in self.params:
            param.grad = None
        self.broken = False
        self._forget_pending()
        self._forget_window()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds a group; its gradients count from now on."""
        if self.max_value is not None and group.get("max_norm") is not None:
            raise ValueError("by value or by norm")
        self.optimizer.add_param_group(group)

    def clip(self, max_norm: float) -> None:
        """Clips the window that closes next."""
        if self.max_value is not None:
            raise ValueError("by value or by norm")
        self.clip_once = max_norm

    # --------------------------------------------------------------------------------------- window

    @staticmethod
    def _sum_dtype(param: Tensor) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def _divisor(self) -> float:
        return 1.0 if self.reduction == "sum" else self.total or 1.0

    def grad(self, param: Tensor) -> Tensor | None:
        """The closed micro-batches' gradient, averaged."""
        return self.sums[param] / self._divisor() if param in self.sums else None

    def _norm_of(self, grads: list[Tensor]) -> float:
        values = torch.cat([g.double().flatten() for g in grads]) if grads else torch.zeros(1)
        return float(torch.linalg.vector_norm(values, self.norm_type)) if values.numel() else 0.0

    def _close_window(self) -> None:
        finished = {p: total.double() / self._divisor() for p, total in self.sums.items()}
        if not finished or not self.total > 0.0:
            self.norm = 0.0
            self._end_window(stepped=False)
            return
        self.norm = self._norm_of(list(finished.values()))
        is_finite = all(bool(g.isfinite().all()) for g in finished.values())
        judges = (
            self.nonfinite != "propagate" or self.growth_interval
        )  # a scaler of its own skips in any case
        skips = self.told or (judges and not is_finite)
        if skips and self.nonfinite == "error":
            raise RuntimeError("not finite")
        self.norms = {p: self._norm_of([g]) for p, g in finished.items()}
        if self.arrived:
            self.late.append(is_finite)
        else:
            self._adapt_scale(is_finite)
        if skips:
            self.skipped += 1
            self._end_window(stepped=False)
            return
        shared: list[Tensor] = []
        for group in self.optimizer.param_groups:
            here = [finished[p] for p in group["params"] if p in finished]
            if group.get("max_norm") is None:
                shared += here
            else:
                self._clip(here, group["max_norm"])
        self._clip(shared, self.clip_once if self.clip_once is not None else self.max_norm)
        if self.max_value is not None:
            for grad in finished.values():
                grad.clamp_(-self.max_value, self.max_value)
        self.exact = exactly(self.optimizer, finished)
        for param in self.params:
            param.grad = finished[param].to(param.dtype) if param in finished else None
        self.optimizer.step()
        for param in self.params:
            param.grad = None
        self._end_window(stepped=True)

    def _adapt_scale(self, is_finite: bool) -> None:
        """torch.amp.GradScaler.update(), with its factors of 2 and 1/2."""
        if not self.growth_interval:
            return
        self.good_windows = self.good_windows + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self.good_windows == self.growth_interval:
            self.scale, self.good_windows = self.scale * 2, 0

    def _clip(self, grads: list[Tensor], max_norm: float | None) -> None:
        if max_norm is None:
            return
        factor = max_norm / (self._norm_of(grads) + 1e-6)
        for grad in grads:
            grad.mul_(1.0 if factor > 1.0 else factor)  # NaN stays NaN

    def _end_window(self, stepped: bool) -> None:
        self._forget_window()
        self.updated, self.stepped = True, stepped
        self.windows += 1
        self.updates += stepped

    # ---------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and the open window by the parameters' numbers."""
        if self.pending and self.micro_step:
            raise RuntimeError("the pending micro-batch is in the sums already")
        window = {
            "sums": {_index(self.params, p): g.clone() for p, g in self.sums.items()},
            "total": self.total, "kind": self.kind, "micro_step": self.micro_step,
            "skipped": self.skipped, "told": self.told,
        }  # fmt: skip
        return {**copy.deepcopy(self.optimizer.state_dict()), "window": window}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces state and open window; without a window in it, the open one is dropped."""
        state_dict = copy.deepcopy(state_dict)
        window = state_dict.pop("window", None)
        self.optimizer.load_state_dict(state_dict)
        if self.take == "backward":
            self._forget_pending()
        self._forget_window()
        if window is not None:
            self.sums = {self.params[i]: g for i, g in window["sums"].items()}
            self.total, self.kind = window["total"], window["kind"]
            self.micro_step, self.skipped = window["micro_step"], window["skipped"]
            self.told = window["told"]


def _index(params: list[Tensor], param: Tensor) -> int:
    return next(i for i, p in enumerate(params) if p is param)


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def exactly(optimizer: Optimizer, grads: dict[Tensor, Tensor]) -> dict[Tensor, dict[str, Range]]:
    """One step in float64 from the present state: per parameter its "value" and state, each with its range.

    Near a zero of ``g + weight_decay * p`` a step of Adam is lr times little more than the sign of a sum
    that has cancelled, so no bound relative to the result can hold: the roundings of the two terms decide
    that sign, in any arithmetic. The range is what they can do. The exact step is taken thrice, for the
    gradient and for the gradient moved up and down by

        4 u (|g| + |weight_decay * p|),

    u the unit roundoff of the arithmetic: the factor, the product with it, weight_decay * p and the sum
    round once each. An optimizer with a step of its own gets the gradient rounded to the parameter's dtype,
    where roundings before it may tip the balance: there u is that dtype's.
    """
    fused = type(optimizer) in FUSED

    def stepped(direction: float) -> dict[Tensor, dict[str, Tensor]]:
        twins = {p: p.detach().double().clone().requires_grad_() for p in grads}
        groups = []
        for group in optimizer.param_groups:
            members = [p for p in group["params"] if p in grads]
            for p in members:
                grad = grads[p] if fused else grads[p].to(p.dtype).double()
                wide = fused and p.dtype != torch.float64
                unit = torch.finfo(torch.float32 if wide else p.dtype).eps / 2
                decay = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
                twins[p].grad = grad + direction * 4 * unit * (grad.abs() + (decay * twins[p].detach()).abs())
            groups.append({**copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
                           "params": [twins[p] for p in members]})  # fmt: skip
        other = type(optimizer)(groups)
        for p, twin in twins.items():
            state = optimizer.state.get(p, {})
            other.state[twin] = {
                k: v.double().clone() if torch.is_tensor(v) and k != "step" else copy.deepcopy(v)
                for k, v in state.items()
            }  # fmt: skip
        other.step()
        return {
            p: {"value": twin.detach()} | {k: v for k, v in other.state[twin].items() if torch.is_tensor(v)}
            for p, twin in twins.items()
        }

    middle, low, high = stepped(0.0), stepped(-1.0), stepped(1.0)
    return {
        p: {
            k: (v, torch.maximum((high[p][k] - v).abs(), (low[p][k] - v).abs()).nan_to_num(0.0, 0.0))
            for k, v in values.items()
        }
        for p, values in middle.items()
    }


def same_number(a: float, b: float, tolerance: float) -> bool:
    """Equal up to a relative error; NaN equals NaN, inf equals inf."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or (math.isfinite(b) and abs(a - b) <= tolerance * abs(b))
