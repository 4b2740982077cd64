"""FusedAccumulator: an optimizer wrapper that accumulates N micro-batches and updates once.

It decides when; the window holds gradients, the rules update, the ops do the maths.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from fastaccum import (
    arguments,
    checkpoint,
    dispatch,
    fsdp,
    gradients,
    groups,
    observe,
    pending,
    scaling,
    sharding,
)  # fmt: skip
from fastaccum.advice import Advice
from fastaccum.observer import Observer
from fastaccum.options import Options
from fastaccum.outcome import Outcome
from fastaccum.pending import Pending
from fastaccum.replicas import Replicas
from fastaccum.roster import Roster, unique_params
from fastaccum.slots import Slot, accumulation_dtype
from fastaccum.updates import Counters, rule_for
from fastaccum.window import Entry, Finished, Window

_GLOBAL_HOOKS: dict[str, dict[int, Any]] = {
    "pre": torch_optimizer._global_optimizer_pre_hooks,
    "post": torch_optimizer._global_optimizer_post_hooks,
}

# step() and step(closure=None) are told apart: see FusedAccumulator._asks_for_state.
_NOT_GIVEN: Any = object()


def _part(tensor: Tensor) -> Tensor:
    return sharding.local(tensor) if sharding.is_sharded(tensor) else tensor


class _Closing(NamedTuple):
    """What closing a window takes, ready before anything changes."""

    backend: Any
    finished: Finished
    counters: Counters | None


class FusedAccumulator(Optimizer):
    """Accumulates gradients over micro-batches and updates once per window, fused.

    Wraps a ``torch.optim.Optimizer`` and is one. SGD, Adam and AdamW run in a fused update that folds
    in averaging and clipping; every other optimizer gets the finished gradient in ``.grad`` and runs
    its own ``step()``::

        optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters()), accumulation_steps=4,
                                     max_norm=1.0)
        for inputs, labels in loader:
            criterion(model(inputs), labels).backward()   # no division by 4
            optimizer.step()                              # updates on every 4th
        optimizer.flush()                                 # and with what is left

    A *micro-batch* is one or more backward calls closed by one ``step()``; a *window* is
    ``accumulation_steps`` micro-batches. The window's gradient is ``sum(w * g) / sum(w)``, w = 1 unless
    ``backward()`` or ``step()`` is given a weight or a count.

    Args:
        optimizer: the optimizer to wrap. Refused: LBFGS, SparseAdam, ``differentiable=True``.
        accumulation_steps: micro-batches per update, at least 1. May be assigned between windows.
        model: not supported yet.
        max_norm: clip the finished gradient to this norm over all parameters, as
            ``torch.nn.utils.clip_grad_norm_`` does: factor min(1, max_norm / (norm + 1e-6)). A group's
            own ``"max_norm"`` clips that group by its own norm. None: no clipping.
        norm_type: p of that norm, above 0, or inf.
        max_value: clamp each element of the finished gradient, as ``clip_grad_value_`` does. Not
            together with ``max_norm``.
        reduction: ``"mean"`` divides by the window's total weight; ``"sum"`` does not divide (the loss
            was divided already).
        take: ``"step"``: gradients stay in ``.grad`` until ``step()``; ``"backward"``: they are added
            into the buffer while backward runs and ``.grad`` is None afterwards, which saves up to two
            gradients of memory; not under DDP or FSDP2, which look for them in ``.grad``. What works on
            ``.grad`` does nothing then: ``model.zero_grad()`` does not drop a micro-batch (this wrapper's
            ``zero_grad()`` does), foreign clipping does not clip.
        nonfinite: what to do when the finished gradient holds inf or NaN: ``"skip"`` the update and
            count it, ``"propagate"`` as stock PyTorch does, or raise an ``"error"`` before anything
            changes (this one waits for the device).
        nonfinite_micro_batch: ``"drop"`` looks at each micro-batch before it is added and leaves one that
            is not finite out, with its weight (4 [2] bytes more are read per element); not with
            ``take="backward"``. ``"keep"`` does not look.
        accumulate_dtype: dtype of the buffers; None is float32 for 16- and 32-bit parameters and
            float64 for float64.
        master_weights: 16-bit parameters are updated as float32 copies, which ``state_dict()`` holds in its
            ``"fastaccum"`` entry, and written in the same pass; SGD, Adam and AdamW only.
        scaler: a ``torch.amp.GradScaler`` that this wrapper alone scales with (in ``backward(loss)``) and
            updates (once per window). Without it the explicit protocol works, called once per micro-batch:
            ``scaler.scale(loss).backward()``, ``scaler.step(optimizer)``, ``scaler.update()``.
        process_group: not supported yet.
        shard_optimizer: not supported yet.
        wire_dtype: not supported yet.
        fuse_weight_gradients: not supported yet.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message says what was expected.
        NotImplementedError: an argument asks for what is not built yet.
        RuntimeError: ``backend`` cannot run here; the message gives the reasons.
    """

    _Options = Options
    # What owns its parameters, to a second wrapper that would.
    _known_as = "another FusedAccumulator; delete that one first"

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation_steps: int = 1,
        *,
        model: torch.nn.Module | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        max_value: float | None = None,
        reduction: str = "mean",
        take: str = "step",
        nonfinite: str = "skip",
        nonfinite_micro_batch: str = "keep",
        accumulate_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        scaler: Any = None,
        process_group: Any = None,
        shard_optimizer: bool = False,
        wire_dtype: torch.dtype | None = None,
        fuse_weight_gradients: bool = False,
        backend: str = "auto",
    ) -> None:
        # Optimizer.__init__ is not called: it would make state and groups of its own.
        if isinstance(optimizer, FusedAccumulator):
            raise TypeError("optimizer is a FusedAccumulator already: wrap the optimizer inside it once")
        groups.check_optimizer(optimizer)
        for name, flag in (
            ("shard_optimizer", shard_optimizer), ("fuse_weight_gradients", fuse_weight_gradients)
        ):  # fmt: skip
            arguments.boolean(flag, name)
        synchronise = "leave it out and use DDP or FSDP2 with their own reduction, for now"
        arguments.not_yet(
            model=(model, None, synchronise),
            process_group=(process_group, None, synchronise),
            shard_optimizer=(shard_optimizer, False, "leave it False"),
            wire_dtype=(wire_dtype, None, "leave it None"),
            fuse_weight_gradients=(fuse_weight_gradients, False, "leave it False"),
        )
        options = self._Options.checked(
            accumulation_steps=accumulation_steps,
            max_norm=max_norm,
            norm_type=norm_type,
            max_value=max_value,
            reduction=reduction,
            take=take,
            nonfinite=nonfinite,
            accumulate_dtype=accumulate_dtype,
            nonfinite_micro_batch=nonfinite_micro_batch,
            master_weights=master_weights,
            backend=backend,
        )
        scaling.check_scaler(scaler)
        groups.check_limits(optimizer.param_groups, options.max_value)
        groups.check_take(optimizer.param_groups, options.take)
        dispatch.choose(backend, groups.device_of(optimizer.param_groups))
        self._start(optimizer, options, scaler)

    def _start(self, optimizer: Optimizer, options: Options, scaler: Any = None) -> None:
        """Everything that a new, copied or unpickled wrapper has in common."""
        self._scaling = scaling.Scaling(self, scaler)
        self._options = options
        self._inner = optimizer
        self._rule = rule_for(optimizer, options.master_weights)
        self._roster = Roster(optimizer, options.accumulate_dtype)
        self._window = Window()
        self._replicas = Replicas()
        self._backends: dict[torch.device, Any] = {}
        self._micro_step = 0
        self._updated = False
        self._weight_kind: str | None = None  # of the open window: "plain", "weight" or "count"
        self._clip_once: float | None = None
        self._stays_open = False  # while micro-batch sizes are tried
        self._observer = Observer()
        self._advice = Advice()
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._step_failure_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"
        device = groups.device_of(optimizer.param_groups)
        self._outcome = Outcome(torch.device("cpu") if device.type == "meta" else device)
        self._pending = Pending(self, options.take)
        self._pending.arrivals.check([param for param, _ in unique_params(self.param_groups)])
        self._sync_slots()

    # ------------------------------------------------------------------ what the inner optimizer owns

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer."""
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer; its gradients count from now on, in an open window too.

        Args:
            param_group: as ``torch.optim.Optimizer.add_param_group`` takes it; ``"max_norm"`` clips the group
                by its own norm.

        Raises:
            TypeError, ValueError: the optimizer does not take it, or it cannot be served: a dtype, a layout,
                a second device, a ``"max_norm"`` beside ``max_value``. Nothing has changed then.
        """
        listed = self.param_groups
        before = len(listed)
        self._inner.add_param_group(param_group)
        try:
            groups.check_group(listed[-1], before)
            groups.check_limits(listed, self._options.max_value)
            groups.check_take(listed, self._options.take)
            groups.device_of(listed)
            self._pending.arrivals.check([p for p in listed[-1]["params"]])
            self._sync_slots()
        except BaseException:
            del listed[before:]
            raise

    # -------------------------------------------------------------------------------------- reading

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per update; may be assigned between windows.

        Raises:
            TypeError, ValueError: what is assigned is not an int of at least 1.
            RuntimeError: a window is open.
        """
        return self._options.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        value = arguments.accumulation_steps(value)
        if self._micro_step or self._pending.in_window:
            raise RuntimeError(
                f"accumulation_steps cannot change inside an open window ({self._micro_step} of "
                f"{self.accumulation_steps} micro-batches are in): flush() or discard() it first"
            )
        self._options.accumulation_steps = value

    @property
    def max_norm(self) -> float | None:
        """The limit for the global norm of groups without their own; may be assigned at any time.

        Raises:
            TypeError, ValueError: what is assigned is neither None nor a number above 0, or the wrapper has
                ``max_value``.
        """
        return self._options.max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        value = arguments.max_norm(value)
        if value is not None and self._options.max_value is not None:
            raise ValueError("max_norm and max_value exclude each other: this wrapper clips by value")
        self._options.max_norm = value

    @property
    def micro_step(self) -> int:
        """Micro-batches held in the open window."""
        return self._micro_step

    @property
    def updated(self) -> bool:
        """Whether the last ``step()`` or ``flush()`` closed a window."""
        return self._updated

    @property
    def stepped(self) -> bool:
        """Whether that window's update was applied. Reads a flag from the device."""
        return self._updated and not bool(self._outcome.skip)

    @property
    def norm(self) -> Tensor:
        """The last window's global norm before clipping: 0-d float32, the same tensor every window."""
        return self._outcome.norm

    @property
    def skipped(self) -> Tensor:
        """Updates skipped for a gradient that was not finite: 0-d int64, the same tensor always."""
        return self._outcome.skipped

    def grad(self, param: Tensor) -> Tensor | None:
        """The open window's gradient of one parameter so far, averaged, in its shape; None if none.

        Args:
            param: one of the optimizer's parameters.

        Raises:
            ValueError: the parameter is not in any group.
            RuntimeError: FSDP2 holds closed micro-batches that it has not reduced.
        """
        self._sync_slots()
        self._replicas.check_inside("grad() lacks a part")
        slot = self._roster.slot_of(param)
        if slot is None or slot.param is not param:
            raise ValueError("grad() was given a tensor that is in no parameter group of this optimizer")
        unclosed = (self._pending.weight or ("plain", 1.0))[1] if self._pending.added else 0.0
        divisor = self._divide_by(unclosed)
        if isinstance(divisor, Tensor) and not bool(divisor > 0.0):
            return None  # nothing was weighed
        total = self._window.gradient(slot, divisor)
        if id(param) not in self._replicas.held or param.grad is None:
            return total
        # This rank's part, which DDP has yet to reduce.
        kind, items = self._replicas.weight or ("plain", 1.0)
        scale, _ = self._scaling.of_micro_batch()
        factor = scaling.unscaled(items if kind == "weight" else 1.0, scale, synchronous=True)
        held = param.grad.detach().to(accumulation_dtype(param.dtype, self._options.accumulate_dtype))
        held = held * (factor / divisor)
        return held if total is None else total + held

    def track(self, *, parameter_norms: bool = False, noise_scale: bool = False) -> None:
        """Chooses what is measured besides, from the next window on.

        Args:
            parameter_norms: norms per parameter and per group (:attr:`parameter_norms`,
                :attr:`group_norms`); a pass over the finished gradient.
            noise_scale: the gradient noise scale (McCandlish et al. 2018, "An Empirical Model of Large-Batch
                Training", appendix A.1), in :meth:`stats`; a pass over each micro-batch's gradients. Not with
                ``take="backward"``, which has no micro-batch to look at.

        Raises:
            TypeError: an argument is not a bool.
            ValueError: ``noise_scale`` with ``take="backward"``.
        """
        if noise_scale and self._options.take == "backward":
            raise ValueError("noise_scale=True needs whole micro-batches: use take='step'")
        self._observer.track(
            arguments.boolean(parameter_norms, "parameter_norms"),
            arguments.boolean(noise_scale, "noise_scale"),
            self._outcome.device,
        )

    @property
    def parameter_norms(self) -> dict[Tensor, Tensor]:
        """The last window's norm per parameter before clipping, float64; see :meth:`track`."""
        return dict(self._observer.norms)

    @property
    def group_norms(self) -> dict[int, Tensor]:
        """The last window's norm per parameter group before clipping, float64; see :meth:`track`."""
        norms = self._observer.norms
        slots = [slot for slot in self._roster.slots if slot.param in norms]
        return observe.group_norms(slots, [norms[slot.param] for slot in slots], self._options.norm_type)

    def stats(self) -> dict[str, float]:
        """Numbers for a logger, of the last window whose numbers have arrived; never waits for a GPU.

        Returns:
            ``window``: how many windows were closed when the numbers were taken, those before a resume
            included; ``norm``: before clipping; ``skipped``: updates skipped so far. From the first window
            closed after the first call on ``clip_share``: the share of the windows since then whose update
            ``max_norm`` scaled down (not with ``max_value``), and ``bytes_moved``: the bytes that the last
            window moved between memory and processor, from sizes alone (:mod:`fastaccum.traffic`). With
            ``track(noise_scale=True)`` also ``noise_scale``, in micro-batches (McCandlish et al. 2018; this
            one reads the device), and ``recommended_accumulation_steps``: the smallest window that is not
            below it.
        """
        return self._observer.stats(self._outcome, counts_clipped=self._options.max_value is None)

    def log(self, writer: Any, step: int | None = None, prefix: str = "fastaccum/") -> None:
        """Writes :meth:`stats` with ``writer.add_scalar(name, value, step)``, as TensorBoard's has it.

        Args:
            writer: what has ``add_scalar``.
            step: None: the number of windows closed; it travels in :meth:`state_dict`, so curves go on.
            prefix: of the names.

        Raises:
            TypeError: ``writer`` is no writer.
        """
        observe.check_writer(writer)
        self._observer.log(writer, self.stats(), step, prefix)

    def memory(self) -> dict[str, int]:
        """Bytes of gradient memory held now, by kind: buffer, kept, partials."""
        return self._window.memory()

    def __repr__(self) -> str:
        """The wrapper's options around the inner optimizer's."""
        return f"{type(self).__name__}({self._options})\n{self._inner!r}"

    # ------------------------------------------------------------------------------------ the loop

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        count: float | Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """``loss.backward()`` for a micro-batch that does not count as 1.

        Args:
            loss: the loss, never multiplied by anything here.
            weight: the loss is a mean over this many items (tokens, rows).
            count: the loss is a sum over this many items; may be given to ``step()`` instead.
            **kwargs: for ``Tensor.backward``.

        Raises:
            ValueError: both were given, or another backward of this micro-batch carried another weight,
                or the window is weighted otherwise.
        """
        self._pending.check_whole()
        before = self._pending.weight
        self._pending.begin_backward(self._given(weight, count), self._weight_kind)
        self._pending.scaled = True
        try:
            self._scaling.scaled(loss).backward(**kwargs)
        except BaseException:
            self._pending.weight = before
            raise

    def step(
        self,
        closure: Callable[[], Any] | None = _NOT_GIVEN,
        *,
        weight: float | Tensor | None = None,
        count: float | Tensor | None = None,
    ) -> Any:
        """Closes the micro-batch; on the ``accumulation_steps``-th, updates the parameters.

        Args:
            closure: run first, with gradients enabled; its result is returned.
            weight: the micro-batch's loss is a mean over this many items. Not with ``take="backward"``.
            count: its loss is a sum over this many items.

        Returns:
            The closure's result, or None.

        Raises:
            RuntimeError: a gradient that had arrived is gone from ``.grad``; or ``nonfinite="error"``
                and the window's gradient is not finite.
            ValueError: weights that do not agree. Nothing has changed then.
        """
        if closure is None and self._asks_for_state():
            with torch.no_grad():
                self._make_state()
            return None
        loss = None
        if closure is not None and closure is not _NOT_GIVEN:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), self._told_of_failure():
            self._close_micro_batch(weight, count)
        return loss

    def _asks_for_state(self) -> bool:
        """Whether ``step(closure=None)`` comes from torch.distributed.checkpoint.

        It makes an optimizer create its state by a step on zero gradients with every lr at 0.
        """
        if self._inner.state or self._micro_step or self._pending.arrivals.noted:
            return False
        grads = [param.grad for param in self._roster.all_params() if param.grad is not None]
        return (
            bool(grads)
            and all(float(group["lr"]) == 0.0 for group in self.param_groups if "lr" in group)
            and not any(bool(_part(grad).any()) for grad in grads)
        )

    def _make_state(self) -> None:
        self._sync_slots()
        slots = [slot for slot in self._roster.slots if slot.param.grad is not None]
        self._rule.make_state(slots)
        for slot in slots:
            slot.param.grad = None

    def flush(self) -> bool:
        """Closes a partial window with its true divisor.

        A pending micro-batch (a backward without a ``step()``) is not part of the window and stays.

        Returns:
            Whether there was a window to close.

        Raises:
            RuntimeError: with ``take="backward"``, the pending gradients were already added to those of
                earlier micro-batches; ``nonfinite="error"`` and the window's gradient is not finite; or FSDP2
                holds closed micro-batches that it has not reduced.
        """
        if self._stays_open:
            raise RuntimeError(
                "find_micro_batch_size() is trying sizes, and what they leave in the window is dropped: its "
                "step_fn must not call flush()"
            )
        self._pending.check_whole()
        self._pending.check_apart(self._micro_step, "flush() cannot leave the pending micro-batch out")
        self._check_held_apart("flush() cannot leave the pending micro-batch out")
        self._replicas.check_inside("flush() cannot close the window")
        self._updated = False
        if self._micro_step == 0:
            return False
        with torch.no_grad(), self._told_of_failure():
            self._replicas.check_held(self._roster.params)
            self._run_hooks("pre")
            self._sync_slots()
            self._lay_out()
            kind, items = self._replicas.weight or ("plain", 1.0)
            held = self._held_slots()
            entries = self._entries(held, gradients.of([slot.param for slot in held]))
            if entries:
                self._advice.give("unreduced")
            prepared = self._prepare(entries)
            self._enter(entries, items if kind == "weight" else 1.0, self._scaling.of_micro_batch()[0], True)
            self._close_window(prepared)
        return True

    def discard(self) -> None:
        """Drops the open window, its pending micro-batch included; parameters stay as they are.

        Raises:
            RuntimeError: FSDP2 holds gradients that it has not reduced.
        """
        if self._roster.sharding is not None:
            self._replicas.check_all_inside(self._roster.params, "discard() cannot drop the window")
        for param in self._roster.params:
            param.grad = None
        self._pending.clear()
        self._replicas.drop_pending()
        self._drop_window()

    def _drop_window(self) -> None:
        """Forgets the window; what is pending in ``.grad`` stays, with its weight."""
        self._pending.drop_with_window()
        self._observer.dropped()
        self._reset_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the pending micro-batch: what arrived since the last ``step()``.

        Closed micro-batches stay (:meth:`discard` drops them).

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.

        Raises:
            RuntimeError: with ``take="backward"``, the pending gradients were already added to those of
                earlier micro-batches; or FSDP2 holds gradients that it has not reduced.
        """
        if self._pending.in_window or self._pending.broken:
            self._pending.check_apart(self._micro_step, "zero_grad() cannot drop the pending micro-batch")
            self._window.reset()
            self._weight_kind = None
        self._check_held_apart("zero_grad() cannot drop the pending micro-batch")
        if self._roster.sharding is not None:
            what = "zero_grad() cannot drop the pending micro-batch"
            self._replicas.check_pending_inside(self._roster.params, what)
        with profiler.record_function(self._zero_grad_profile_name):
            for param in self._roster.all_params():
                if param.grad is None or id(param) in self._replicas.held:
                    continue
                if set_to_none:
                    param.grad = None
                else:
                    if param.grad.grad_fn is not None:
                        param.grad.detach_()
                    else:
                        param.grad.requires_grad_(False)
                    param.grad.zero_()
        self._pending.clear()
        self._replicas.drop_pending()

    def clip_next(self, max_norm: float) -> Tensor:
        """Clips the window that closes next to ``max_norm``, instead of the wrapper's own limit.

        What ``fastaccum.clip_grad_norm_(optimizer, max_norm)`` calls.

        Args:
            max_norm: the largest norm, above 0.

        Returns:
            :attr:`norm`, which holds the window's norm once it is closed.

        Raises:
            TypeError, ValueError: ``max_norm`` is not a number above 0, or the wrapper has ``max_value``.
        """
        limit = arguments.max_norm(max_norm)
        if limit is None:
            raise TypeError("max_norm must be a number, got None")
        if self._options.max_value is not None:
            raise ValueError("max_norm and max_value exclude each other: this wrapper clips by value")
        self._clip_once = limit
        return self._outcome.norm

    # --------------------------------------------------------------------------------- micro-batch

    def _close_micro_batch(self, weight: Any, count: Any) -> None:
        self._pending.check_whole()
        if self._micro_step >= self.accumulation_steps:
            raise RuntimeError(
                f"the window already holds its {self.accumulation_steps} micro-batches and could not be "
                "closed: flush() tries it again, discard() drops it"
            )
        given = self._given(weight, count)
        self._pending.check_step(given, self._weight_kind)
        self._pending.check_scaled(self._scaling.scaler is not None)
        scale, found_inf = self._scaling.of_micro_batch()
        if found_inf is not None and self._options.take == "backward":
            raise RuntimeError(
                "scaler.step(optimizer) came too late with take='backward': the gradients were added while "
                "backward ran, still scaled. Give the wrapper scaler=, or use take='step'"
            )
        params = self._roster.params
        grads = gradients.of(params)
        self._check_complete(grads)
        self._advice.look_for_clip(self._pending.arrivals)
        closing = self._micro_step + 1 == self.accumulation_steps
        if closing:  # hooks may change gradients and options: what they leave counts
            grads = []  # and what they replace is freed
            self._run_hooks("pre")
        self._sync_slots()
        if closing or self._roster.params is not params:
            grads = gradients.of(self._roster.params)
        if closing and (self._micro_step or self._pending.in_window):
            self._lay_out()  # the update needs the parameters as they lie now
        slots, grads = self._arrived(grads)
        inside = self._inside()
        had_backward = self._had_backward(slots, inside)
        kind, items = self._weigh(given, had_backward)
        weighed = (kind, items) if kind is not None and had_backward else None
        unreduced = self._unreduced(weighed, closing, inside, found_inf is not None)
        if had_backward:
            self._advice.look_at(self._pending.arrivals, self.accumulation_steps)
        entries: list[Entry] = []
        # A weight of 0 selects nothing: 0 * NaN, the mean over no items, would still be NaN. What is held
        # has a weight of its own.
        if not pending.selects_nothing(items) or self._replicas.held:
            if unreduced:
                taken = [id(slot.param) not in unreduced for slot in slots]
                slots, grads = list(compress(slots, taken)), list(compress(grads, taken))
            # After an error the window stays open, so what it keeps must be its own then, too.
            stays = not closing or self._options.nonfinite == "error"
            entries = self._pending.taken + self._entries(slots, grads, owned=stays and self._may_keep())
        factor: float | Tensor = items if kind == "weight" else 1.0
        entries, factor, items, found_inf = self._judged(entries, kind, factor, items, scale, found_inf)
        prepared = self._prepare(entries) if closing else None
        # From here on nothing may fail that can be foreseen.
        if found_inf is not None:
            self._outcome.tell(found_inf)
        self._enter(entries, factor, scale, closing)
        # What was added must not be alive beside the temporaries of an inner optimizer's step.
        del entries, grads
        self._clear_grads(unreduced, weighed, inside)
        if self._weight_kind is None:
            self._weight_kind = kind
        self._window.count(items)
        self._micro_step += 1
        self._updated = False
        if closing:
            self._close_window(prepared)

    def _given(self, weight: Any, count: Any) -> pending.Weight | None:
        """The weight, checked. A tensor beside the gradients on a GPU is not read: that would wait."""
        device = self._outcome.device
        tensors = [value for value in (weight, count) if isinstance(value, Tensor) and value.device == device]
        on_device = bool(tensors) and not self._backend_on(device).synchronous
        return pending.given(weight, count, on_device)

    def _arrived(self, grads: list[Any]) -> tuple[list[Slot], list[Tensor]]:
        """Slots with something in ``.grad``, and what; ``grads`` has an entry for every slot."""
        slots = self._roster.slots
        if not gradients.gone(grads):
            return slots, grads
        there = [grad is not None for grad in grads]
        return list(compress(slots, there)), list(compress(grads, there))

    def _check_complete(self, grads: list[Any]) -> None:
        """Raises RuntimeError if the pending micro-batch, or what waits for DDP, is not whole."""
        self._pending.check_arrived(self._roster.slots, grads, apart=not self._replicas.held)
        self._replicas.check_held(self._roster.params)

    def _inside(self) -> fsdp.Marks:
        """What FSDP2 holds of the parameters."""
        return fsdp.unreduced(self._roster.params) if self._roster.sharding is not None else {}

    def _had_backward(self, slots: Sequence[Slot], inside: fsdp.Marks) -> bool:
        """Whether anything arrived since the last ``step()``: what waits in ``.grad`` did before."""
        replicas = self._replicas
        if self._pending.in_window or self._pending.arrivals.noted or inside != replicas.inside:
            return True
        return any(id(slot.param) not in replicas.held for slot in slots)

    def _weigh(self, given: pending.Weight | None, had_backward: bool) -> tuple[str | None, float | Tensor]:
        """(kind of weight, items) of the pending micro-batch."""
        kind, items = given or self._pending.weight or (None, 1.0)
        if not had_backward and self._pending.weight is None:
            items = 0.0  # a step without a backward has no weight, whatever it is given
        if kind is None and had_backward:
            kind = "plain"
            self._pending.agree((kind, 1.0), self._weight_kind)
        return kind, items

    def _unreduced(
        self, weight: pending.Weight | None, closing: bool, inside: fsdp.Marks, told: bool
    ) -> set[int]:
        """Ids of the parameters whose gradients must stay in ``.grad``, as DDP has yet to reduce them.

        Args:
            weight: (kind, items) of the pending micro-batch; None without a backward.
            closing: the window closes with it, so nothing may stay.
            inside: what FSDP2 holds.
            told: ``scaler.step(wrapper)`` closes it.
        """
        if self._options.take == "backward":
            return set()
        replicas, params = self._replicas, self._roster.params
        unreduced = replicas.unreduced(params, self._pending.arrivals.noted)
        spread = self._roster.sharding is not None or replicas.covering(params)
        if weight is not None and weight[0] != "plain" and spread:
            self._advice.give("weights")
        if inside and closing:
            replicas.refuse_inside("the window cannot be closed")
        if replicas.holds or unreduced or inside:
            drops = self._options.drops
            replicas.check(weight, told, drops, bool(inside) or (bool(unreduced) and not closing))
        if not closing:
            return unreduced
        if unreduced:
            self._advice.give("unreduced")
        return set()

    def _entries(self, slots: Sequence[Slot], grads: list[Tensor], owned: bool = False) -> list[Entry]:
        """Gradients as they go into the window.

        Args:
            slots: theirs.
            grads: what lies in ``.grad``; no other list may hold them.
            owned: those that others could still write to are replaced in ``grads`` by copies.
        """
        if owned and self._roster.sharding is None:
            gradients.own(grads)
        if self._roster.contiguous and gradients.ordinary(grads):
            return list(zip(slots, grads, strict=True))
        entries = []
        for slot, grad in zip(slots, grads, strict=True):
            if (
                slot.sharded
                or grad.layout != torch.strided
                or not (slot.contiguous and grad.is_contiguous())
                or grad.is_neg()
            ):
                grad = slot.taken(grad)
            if grad.requires_grad:  # of backward(create_graph=True): its graph must not live on with it
                grad = grad.detach()
            entries.append((slot, grad))
        if owned and self._roster.sharding is not None:  # parts of a buffer of FSDP's
            entries = [(slot, grad.clone(memory_format=torch.preserve_format)) for slot, grad in entries]
        return entries

    def _may_keep(self) -> bool:
        return self._window.empty and (self._options.take == "step" or self.accumulation_steps == 1)

    def _judged(
        self,
        entries: list[Entry],
        kind: str | None,
        factor: float | Tensor,
        items: float | Tensor,
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> tuple[list[Entry], float | Tensor, float | Tensor, Tensor | None]:
        """(entries, factor, items, found_inf) after a look at the gradients, where that was asked for."""
        sharding = self._roster.sharding
        if entries and self._options.drops:
            device = entries[0][1].device
            good = self._window.finite(self._backend_on(device), entries)
            if sharding is not None:
                bad = sharding.any(1.0 - good if isinstance(good, Tensor) else not good, device)
                good = 1.0 - bad if isinstance(good, Tensor) else not bool(bad)
            if isinstance(good, Tensor):  # on a GPU: 0 or 1, and a weight of 0 selects nothing
                factor, items = good * factor, good * items
                found_inf = found_inf if found_inf is None else found_inf * good
            elif not good:
                entries, items, found_inf = [], 0.0, None
        if entries and self._observer.noise is not None:
            divisor = items if kind == "count" else 1.0
            backend = self._backend_on(entries[0][1].device)
            one = scaling.unscaled(1.0, scale, backend.synchronous)
            self._observer.noise.micro_batch(entries, divisor / one, sharding)
        return entries, factor, items, found_inf

    def _enter(
        self, entries: list[Entry], factor: float | Tensor, scale: Tensor | None, closing: bool
    ) -> None:
        """Moves gradients into the window."""
        if entries:
            in_pass = closing and self._options.norm_type in (1.0, 2.0, math.inf)
            self._add(entries, factor, scale=scale, keep=self._may_keep(), partials=in_pass)

    def _clear_grads(self, unreduced: set[int], weight: pending.Weight | None, inside: fsdp.Marks) -> None:
        """The micro-batch is closed: ``.grad`` goes, but for what DDP has yet to reduce."""
        if unreduced or inside:
            self._observer.mixed()
        if unreduced:
            self._replicas.hold([p for p in self._roster.params if id(p) in unreduced], weight)
        for param in self._roster.params:
            if not unreduced or id(param) not in unreduced:
                param.grad = None
        self._replicas.closed(unreduced, inside, weight)
        self._pending.clear()

    def _add(
        self,
        entries: list[Entry],
        factor: float | Tensor,
        *,
        scale: Tensor | None = None,
        keep: bool = False,
        partials: bool = False,
    ) -> None:
        backend = self._backend_on(entries[0][1].device)
        factor = scaling.unscaled(factor, scale, backend.synchronous)
        norm_type = self._options.norm_type
        self._window.add(backend, entries, factor, keep=keep, partials=partials, norm_type=norm_type)

    def _backend_on(self, device: torch.device) -> Any:
        if device != self._outcome.device:
            self._outcome = self._outcome.moved(device)
            self._roster.forget_layout()
            self._lay_out()
        if device not in self._backends:
            self._backends[device] = dispatch.load(dispatch.choose(self._options.backend, device), device)
        return self._backends[device]

    # GradScaler.step() sets `grad_scale` and `found_inf` on an optimizer that says so, instead of unscaling.
    _step_supports_amp_scaling = True

    def _held_slots(self) -> list[Slot]:
        return [slot for slot in self._roster.slots if id(slot.param) in self._replicas.held]

    def _check_held_apart(self, what: str) -> None:
        """Raises RuntimeError if a pending gradient has been added to those that DDP has not reduced yet."""
        held = self._replicas.held
        if held and any(id(param) in held for param in self._pending.arrivals.noted):
            raise RuntimeError(
                f"{what}: under DDP's no_sync() its gradients were added to earlier ones in .grad, where "
                "they wait to be reduced. Call step() first, or discard() the window"
            )

    def _divide_by(self, unclosed: float | Tensor = 0.0) -> float | Tensor:
        """What the window's sum is divided by; ``unclosed`` is weight that was added but not closed."""
        if self._options.reduction == "sum":
            return 1.0
        total = self._window.total
        if isinstance(total, Tensor) or isinstance(unclosed, Tensor):
            return total + unclosed if self._pending.added else total
        return total + unclosed or 1.0

    # ---------------------------------------------------------------------------------------- window

    def _prepare(self, entries: list[Entry]) -> _Closing | None:
        """Makes and checks all that closing the window takes, with these gradients added to it.

        Memory may run out here and an option may be refused; no number has changed then.

        Returns:
            None where there is no gradient to update with.
        """
        window, options = self._window, self._options
        if window.empty and not entries:
            return None
        keep = self._may_keep()
        device = entries[0][1].device if entries else window.device
        backend = self._backend_on(device)
        shared = self._clip_once if self._clip_once is not None else options.max_norm
        limits = [math.inf if shared is None else shared]
        limits += [limit for limit in self._roster.limits if limit is not None]
        finished = window.finished(entries, keep)
        try:
            counters = self._rule.prepare(backend, finished, options.max_value, self._roster.norm_group_of)
            self._outcome.prepare(limits, options.norm_type, self._roster.n_chunks)
        except BaseException:
            self._rule.cancel()
            raise
        return _Closing(backend, finished, counters)

    def _close_window(self, prepared: _Closing | None) -> None:
        if not profiler._is_profiler_enabled:  # an idle record_function costs as much as the norm
            return self._finish_window(prepared)
        with profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
            self._finish_window(prepared)

    def _finish_window(self, prepared: _Closing | None) -> None:
        window, options, outcome = self._window, self._options, self._outcome
        if prepared is None or pending.selects_nothing(window.total):
            self._rule.cancel()
            outcome.nothing()
            self._observer.empty()
            self._end_window()
            return
        backend, finished = prepared.backend, prepared.finished
        divisor = self._divide_by()
        norm_type = options.norm_type
        found = self._scaling.scaler is not None
        # A scaler that searches its scale finds it by skipping.
        skip_nonfinite = options.nonfinite != "propagate" or found
        # Before the steps are counted, as memory may run out here.
        self._observer.complete(
            window,
            finished,
            divisor,
            self._roster.sharding,
            micro_batches=self._micro_step,
            take=options.take,
            norm_type=norm_type,
            rule=self._rule,
        )
        outcome.decide(backend, window, divisor, norm_type, skip_nonfinite, prepared.counters, found)
        # A total weight of 0 skips as well, and is no error; on a device it was not known before.
        if options.nonfinite == "error" and bool(outcome.skip) and bool(window.total > 0.0):
            outcome.skipped.sub_(1)
            self._rule.cancel()
            raise RuntimeError(
                f"the window's gradient is not finite (norm {float(outcome.norm)}) and nonfinite='error': "
                "parameters and optimizer state are unchanged and the window is still open. Look for the "
                "cause, then discard() the window, or use nonfinite='skip'"
            )
        self._observer.decided(outcome)
        # On the CPU the flag is at hand; a GPU must not be waited for, there the kernels read it.
        if backend.synchronous and bool(outcome.skip):
            self._rule.cancel()
            # A scaler that searches its scale skips updates as a matter of course.
            unexpected = not found and not outcome.told
            self._end_window()
            if unexpected:
                self._advice.give("skipped")
            return
        self._rule.update(backend, outcome.factor, outcome.skip)
        self._end_window()

    def _end_window(self) -> None:
        outcome = self._outcome
        # The window is over whatever fails from here on, or a second try would update twice.
        try:
            if outcome.decided:
                self._scaling.end_window(outcome.found_inf, bool(self._pending.arrivals.noted))
        finally:
            self._reset_window()
        self._updated = True
        # What torch's schedulers look at to see that the optimizer has stepped.
        self._inner._opt_called = True  # type: ignore[attr-defined]
        self._observer.closed(outcome)
        self._run_hooks("post")

    def _reset_window(self) -> None:
        self._window.reset()
        self._replicas.drop()
        self._outcome.forget()
        self._micro_step = 0
        self._weight_kind = None
        self._clip_once = None

    def _run_hooks(self, when: str) -> None:
        """Hooks of the wrapper, the inner optimizer and the global ones, each once per closed window."""
        attribute = f"_optimizer_step_{when}_hooks"
        own_hooks = getattr(self, attribute).values()
        inner_hooks = getattr(self._inner, attribute).values()
        global_hooks = _GLOBAL_HOOKS[when].values()
        for owner, hooks in ((self, own_hooks), (self._inner, inner_hooks), (self._inner, global_hooks)):
            for hook in list(hooks):
                result = hook(owner, (), {})
                if (
                    when == "pre"
                    and result is not None
                    and not (isinstance(result, tuple) and len(result) == 2)
                ):
                    raise RuntimeError(
                        f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {result}."
                    )

    def register_step_failure_hook(self, hook: Callable[[], None]) -> RemovableHandle:
        """``hook()`` is called when ``step()`` or ``flush()`` raises, perhaps after the step pre-hooks.

        A step pre-hook that changes something until the post-hook puts it back needs it, as an update that
        raises has no post-hook.

        Args:
            hook: called without arguments.

        Returns:
            A handle whose ``remove()`` takes the hook away.
        """
        handle = RemovableHandle(self._step_failure_hooks)
        self._step_failure_hooks[handle.id] = hook
        return handle

    @contextlib.contextmanager
    def _told_of_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for hook in list(self._step_failure_hooks.values()):
                hook()
            raise

    # ----------------------------------------------------------------------------------------- slots

    def _sync_slots(self) -> None:
        """Follows the parameter groups, which may have changed in any way since the last call."""
        if self._roster.stale:
            self._replace_slots()
        elif self._micro_step == 0 and not self._pending.in_window:
            self._lay_out()

    def _replace_slots(self) -> None:
        self._pending.add_taken()  # what has arrived is numbered by the old slots
        self._roster.replace(self._pending.arrivals.watch)
        self._rule.resize(self._roster.slots)
        self._replicas.covering(self._roster.params)  # what DDP has reduced before is no news
        self._lay_out()

    def _lay_out(self) -> None:
        """New layouts when a parameter's dtype or memory order or the norm groups changed."""
        roster = self._roster
        slots = roster.slots
        if roster.lay_out(not self._window.empty, self._pending.add_taken):
            self._window.lay_out(roster.plans, roster.n_chunks, self._outcome.device)
            norm_groups = max(roster.norm_group_of, default=0) + 1
            self._outcome.lay_out(roster.spans, norm_groups, roster.sharding, roster.span_kinds)
            if roster.slots is not slots:
                self._rule.resize(roster.slots)

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's ``state_dict`` plus the entry ``"fastaccum"``: counters, open window.

        The stock optimizer loads it too. Every tensor owns its memory.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._rule.before_saving()
        result = checkpoint.steps_on_cpu(checkpoint.owned(self._inner.state_dict()))
        result["fastaccum"] = self.window_state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            if changed is not None:
                result = changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or the stock optimizer's gave.

        Without a ``"fastaccum"`` entry the open window is dropped.

        Args:
            state_dict: what is loaded; it stays as it is.

        Raises:
            TypeError: it is not a dict.
            ValueError: it does not fit these parameters; nothing has changed then.
            RuntimeError: FSDP2 holds gradients that it has not reduced.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        state_dict = dict(state_dict)
        entry = state_dict.pop("fastaccum", None)
        if self._roster.sharding is not None:
            self._replicas.check_all_inside(self._roster.params, "the open window cannot be replaced")
        checkpoint.check_groups(state_dict, self.param_groups)
        if entry is not None:
            checkpoint.check_window(entry, self._roster.params, self.accumulation_steps)
        # torch's load_state_dict takes tensors over where no conversion is needed: copy them first.
        state_dict["state"] = copy.deepcopy(state_dict["state"])
        self._inner.load_state_dict(state_dict)
        checkpoint.keep_dtypes(state_dict, self._inner)
        self._drop_window()
        self._replace_slots()
        if entry is not None:
            self.load_window_state_dict(entry)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def window_state_dict(self) -> dict[str, Any]:
        """The open window and the counters: what ``state_dict()["fastaccum"]`` holds.

        A pending micro-batch (a backward without a ``step()``) is not part of it.

        Raises:
            RuntimeError: with ``take="backward"``, the pending gradients were already added to those of
                earlier micro-batches; or FSDP2 holds gradients that it has not reduced.
        """
        self._pending.check_whole()
        self._pending.check_apart(
            self._micro_step, "the open window cannot be saved without the pending micro-batch"
        )
        self._check_held_apart("the open window cannot be saved without the pending micro-batch")
        self._replicas.check_inside("the open window cannot be saved")
        kept, sums = (False, {}) if self._pending.added else self._window.export()
        held = self._held_slots()
        return {
            "version": checkpoint.VERSION,
            "accumulation_steps": self.accumulation_steps,
            "micro_step": self._micro_step,
            "weight_kind": self._weight_kind,
            "total_weight": float(self._window.total),
            "kept": kept,
            "kept_weight": float(self._window.kept_weight),
            "gradients": sums,
            "windows": self._observer.count,
            "skipped": self._outcome.skipped.clone(),
            "found_inf": self._outcome.told and bool(self._outcome.found_inf),
            "master_weights": self._rule.export_masters(),
            # Of this rank, waiting in .grad for DDP to reduce them.
            "unreduced": {s.number: s.param.grad.clone() for s in held if s.param.grad is not None},
            "unreduced_weight": self._replicas.weight,
        }

    def load_window_state_dict(self, entry: dict[str, Any]) -> None:
        """Loads :meth:`window_state_dict`; the open window is replaced.

        Args:
            entry: what is loaded.

        Raises:
            ValueError: it does not fit these parameters; nothing has changed then.
            RuntimeError: FSDP2 holds gradients that it has not reduced.
        """
        self._sync_slots()
        checkpoint.check_window(entry, self._roster.params, self.accumulation_steps)
        if self._roster.sharding is not None:
            self._replicas.check_all_inside(self._roster.params, "the open window cannot be replaced")
        self._drop_window()
        self._lay_out()
        self._window.restore(entry["kept"], dict(entry["gradients"]), self._outcome.device)
        self._window.kept_weight = float(entry["kept_weight"])
        self._window.total = float(entry["total_weight"])
        self._micro_step = int(entry["micro_step"])
        self._weight_kind = entry["weight_kind"]
        self._outcome.skipped.copy_(entry["skipped"])
        # Only shown: what stats() has watched so far, and what is on its way from a GPU, counts from 0.
        if "windows" in entry:  # older versions did not count
            self._observer.windows_before = entry["windows"] - self._observer.windows
        if entry.get("found_inf"):
            self._outcome.tell(torch.ones_like(self._outcome.found_inf))
        self._rule.load_masters(entry.get("master_weights") or {})
        unreduced = entry.get("unreduced") or {}
        for number, grad in unreduced.items():
            param = self._roster.params[number]
            param.grad = grad.to(param.device, copy=True)
        if unreduced:
            kind, items = entry["unreduced_weight"]
            self._replicas.hold([self._roster.params[n] for n in unreduced], (kind, float(items)))

    def __getstate__(self) -> dict[str, Any]:
        """What ``pickle`` and ``deepcopy`` carry: the inner optimizer, options, scaler, the open window."""
        return {
            "inner": self._inner,
            "options": dict(vars(self._options)),
            "scaler": self._scaling.scaler,
            "late": self._scaling.late,
            "window": self.window_state_dict(),
            "norm": self._outcome.norm.clone(),
            "updated": self._updated,
            "skip": self._outcome.skip.clone(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Builds an independent wrapper: own buffers, own hooks. Step hooks are dropped, as in stock."""
        if "inner" not in state:  # torch's own protocol: new groups and state for the inner optimizer
            self._inner.__setstate__(state)
            return
        self._start(state["inner"], self._Options(**state["options"]), state.get("scaler"))
        self._scaling.catch_up(state.get("late"))
        self.load_window_state_dict(state["window"])
        self._outcome.norm.copy_(state["norm"])
        self._outcome.skip.copy_(state["skip"])
        self._updated = state["updated"]


# torch patches `step` of Optimizer subclasses to run hooks on every call; here they run per window.
FusedAccumulator.step.hooked = True  # type: ignore[attr-defined]
