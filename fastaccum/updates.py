"""From a finished window to new parameters: the fused rules, and any other optimizer's own step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fastaccum import ops
from fastaccum.slots import Slot
from fastaccum.traffic import size
from fastaccum.window import NOTHING, Finished

DECOUPLED, AMSGRAD, MAXIMIZE, NESTEROV = 1, 2, 4, 8
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_LR_DTYPES = (torch.float32, torch.float64)  # of learning rates that kernels read


def rule_for(optimizer: Optimizer, master_weights: bool = False) -> FusedRule | GenericRule:
    """The fused rule for exactly SGD, Adam and AdamW (a subclass may do anything), else the generic.

    Raises:
        ValueError: ``master_weights`` with an optimizer that updates its parameters itself.
    """
    if type(optimizer) in (Adam, AdamW):
        return AdamRule(optimizer, master_weights)
    if type(optimizer) is SGD:
        return SgdRule(optimizer, master_weights)
    if master_weights:
        raise ValueError(
            f"master_weights=True works with SGD, Adam and AdamW, not with {type(optimizer).__name__}, "
            "whose own step() updates the parameters: keep float32 parameters under autocast"
        )
    return GenericRule(optimizer)


class Counters(NamedTuple):
    """Arguments of ``finish_``, in its order, with which it counts steps."""

    steps: Tensor
    scalars: Tensor
    row: Tensor
    group: Tensor
    hyper: Tensor
    lrs: list[Tensor]
    lr_groups: Tensor


class _Ready(NamedTuple):
    """The tensors of an update, by parameter; all memory that it takes is there."""

    states: list[list[Tensor]]
    grads: list[Tensor]
    params: list[Tensor]
    dense: list[Tensor]  # the same, or a dense copy
    targets: list[Tensor]  # what the update runs on: the same, or a float32 master
    copies: list[Tensor]  # what it writes beside


_NOTHING_READY = _Ready([], [], [], [], [], [])


class Numbers:
    """Options that are tensors, read once per value: reading one on a GPU waits for it."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Tensor, int, float]] = {}

    def of(self, value: Any) -> float:
        """The option as a float."""
        if not isinstance(value, Tensor):
            return float(value)
        known = self._read.get(id(value))
        if known is None or known[0] is not value or known[1] != value._version:
            known = self._read[id(value)] = (value, value._version, float(value))
        return known[2]


class Masters:
    """Float32 copies of 16-bit parameters, on which the update runs.

    A parameter that was written by someone else since is taken over, element by element: where a master still
    rounds to it, the master's lower bits stay.
    """

    def __init__(self) -> None:
        self._masters: WeakTensorKeyDictionary = (
            WeakTensorKeyDictionary()
        )  # (master, version it was written at)

    def of(self, slot: Slot) -> Tensor:
        """A parameter's master, up to date."""
        param = slot.data
        master, version = self._masters.get(slot.param, (None, -1))
        if master is None or master.device != param.device or master.shape != param.shape:
            master = slot.empty().float().copy_(param)
        elif version != param._version:
            wide = param.float()
            master.copy_(torch.where(master.to(param.dtype) == param, master, wide))
        master = slot.ordered(master)
        self._masters[slot.param] = (master, param._version)
        return master

    def targets(self, slots: Sequence[Slot], params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(what the update runs on, what it writes in the same pass)."""
        if not any(slot.param.dtype in SIXTEEN_BIT for slot in slots):
            return params, []
        wide = [self.of(s) if s.param.dtype in SIXTEEN_BIT else p for s, p in zip(slots, params, strict=True)]
        return wide, params

    def written(self, slots: Sequence[Slot]) -> None:
        """The parameters hold what their masters round to."""
        for slot in slots:
            if slot.param in self._masters:
                self._masters[slot.param] = (self._masters[slot.param][0], slot.data._version)

    def export(self, slots: Sequence[Slot]) -> dict[int, Tensor]:
        """Copies, by slot number."""
        with torch.no_grad():
            return {s.number: s.whole(self.of(s).clone()) for s in slots if s.param in self._masters}

    def load(self, slots: Sequence[Slot], masters: dict[int, Tensor]) -> None:
        """Takes copies over."""
        self._masters = WeakTensorKeyDictionary()
        for slot in slots:
            if slot.number in masters:
                saved = slot.local(masters[slot.number])
                master = slot.ordered(saved.to(slot.param.device, torch.float32, copy=True))
                self._masters[slot.param] = (master, -1)  # compared with the parameter at its next use


class FusedRule:
    """Updates parameters and state straight from the window's sums, in one pass.

    Attributes:
        steps: float32 ``[n_slots]``: updates applied to each parameter.
        scalars: float64 ``[n_slots, SCALAR_COLUMNS]``: what ``finish_`` has computed from them.
    """

    def __init__(self, optimizer: Optimizer, master_weights: bool = False) -> None:
        self.optimizer = optimizer
        self._masters = Masters() if master_weights else None
        self._all_slots: Sequence[Slot] = ()
        self._sharded = False
        self.steps = torch.zeros(0)
        self._hyper_key: list[tuple[float, ...]] = []
        self._hyper = torch.zeros(0, ops.HYPER_COLUMNS, dtype=torch.float64)
        self.scalars = torch.zeros(0, ops.SCALAR_COLUMNS, dtype=torch.float64)
        self._lrs: list[Tensor] = []  # learning rates that are tensors on a device
        self._lr_groups = torch.zeros(0, dtype=torch.int64)
        self._lr_of: list[int] = []  # the same as numbers
        self._numbers = Numbers()
        self._seen: list[tuple[list[Tensor], list[int]]] = []
        self._selected = NOTHING.selection
        self._ready = _NOTHING_READY
        self._moved = 0
        self._moved_key: tuple[Any, ...] = ()
        self._made: list[Tensor] = []  # parameters whose state prepare() has made

    # What a concrete rule says.
    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        """lr, beta1, beta2, eps, weight_decay, momentum, dampening, flags."""
        raise NotImplementedError

    def _apply(
        self, backend: SimpleNamespace, params: list[Tensor], states: list[list[Tensor]], *rest: Any
    ) -> None:
        raise NotImplementedError

    def _states(self, slots: Sequence[Slot]) -> list[list[Tensor]]:
        raise NotImplementedError

    def resize(self, slots: Sequence[Slot]) -> None:
        """Makes room for a new list of slots; step counts follow their parameters."""
        device = slots[0].param.device if slots else None
        self.steps = torch.zeros(len(slots), device=device)
        self.scalars = torch.zeros(len(slots), ops.SCALAR_COLUMNS, dtype=torch.float64, device=device)
        self._all_slots = slots
        self._sharded = any(slot.sharded for slot in slots)
        self._seen = []
        self._selected, self._ready = NOTHING.selection, _NOTHING_READY

    def make_state(self, slots: Sequence[Slot]) -> None:
        """Creates the state of parameters without a step, as if they were about to be updated."""
        self._states(slots)

    def _find_lr_tensors(self, synchronous: bool) -> None:
        """Notes the groups whose learning rate lies beside the parameters on a device that must not wait."""
        if synchronous:
            return
        device = self.steps.device
        lrs = [(i, g["lr"]) for i, g in enumerate(self.optimizer.param_groups) if isinstance(g["lr"], Tensor)]
        # Other dtypes are read by the host, as a CPU tensor is.
        here = [lr.device == device and lr.numel() == 1 and lr.dtype in _LR_DTYPES for _, lr in lrs]
        lrs = [pair for pair, yes in zip(lrs, here, strict=True) if yes]
        if [i for i, _ in lrs] != self._lr_of:
            self._lr_of = [i for i, _ in lrs]
            self._lr_groups = torch.tensor(self._lr_of, dtype=torch.int64)
        self._lrs = [lr.detach() for _, lr in lrs]

    def hyper(self, max_value: float | None, norm_group_of: Sequence[int]) -> Tensor:
        """The table of the groups' options, made again only when one of them changed."""
        limit = math.inf if max_value is None else max_value
        key = []
        for i, (group, norm_group) in enumerate(zip(self.optimizer.param_groups, norm_group_of, strict=True)):
            try:
                # A learning rate on the device is read there.
                shown = {**group, "lr": 0.0} if i in self._lr_of else group
                row = tuple(map(float, self._row(shown)))
            except (KeyError, TypeError, ValueError) as error:
                options = {name: value for name, value in group.items() if name != "params"}
                raise ValueError(
                    f"param_groups[{i}] holds an option that cannot be used ({error!r}): {options}. "
                    "Nothing was updated; mend it and call step() or flush() again"
                ) from error
            key.append((*row[:7], limit, float(norm_group), row[7]))
        if key != self._hyper_key:
            self._hyper = torch.tensor(key, dtype=torch.float64)
            self._hyper_key = key
        return self._hyper

    def prepare(
        self,
        backend: SimpleNamespace,
        finished: Finished,
        max_value: float | None,
        norm_group_of: Sequence[int],
    ) -> Counters:
        """Gathers what an update needs, and refuses what cannot be updated before anything changes.

        Args:
            backend: of the update; only a ``synchronous`` one's tensors are read here.
            finished: the window.
            max_value: clamp of the finished gradient, or None.
            norm_group_of: norm group of each parameter group.

        Returns:
            what ``finish_`` needs to count the steps.
        """
        self._find_lr_tensors(backend.synchronous)
        hyper = self.hyper(max_value, norm_group_of)
        chosen = self._selected = finished.selection
        state = self.optimizer.state
        self._made = []
        if len(state) < len(self.steps):
            self._made = [slot.param for slot in chosen.slots if slot.param not in state]
        states = self._states(chosen.slots)
        params = [slot.data if slot.sharded else slot.param for slot in chosen.slots]
        dense = list(params)
        for i in chosen.gaps:  # a dense copy is updated and written back
            dense[i] = params[i].contiguous()
        targets = dense
        copies: list[Tensor] = []
        if self._masters is not None:
            targets, copies = self._masters.targets(chosen.slots, dense)
        self._ready = _Ready(states, finished.grads, params, dense, targets, copies)
        return Counters(self.steps, self.scalars, chosen.row, chosen.group, hyper, self._lrs, self._lr_groups)

    def _empty_state(self, slot: Slot) -> Tensor:
        """A state tensor for a slot: in its parameter's dtype as stock has it, float32 beside a master."""
        if self._masters is not None and slot.param.dtype in SIXTEEN_BIT:
            return slot.empty().float()
        return slot.empty()

    def _local(self, slots: Sequence[Slot], tensors: list[Tensor]) -> list[Tensor]:
        """What kernels see of state tensors."""
        if not self._sharded:
            return tensors
        return [slot.local(tensor) for slot, tensor in zip(slots, tensors, strict=True)]

    @staticmethod
    def _put(slot: Slot, entry: dict[str, Any], key: str, tensor: Tensor) -> None:
        """Stores a state tensor in its parameter's memory order, unless it is the one that is there."""
        if slot.local(entry[key]) is not tensor:
            entry[key] = slot.whole(tensor)

    def export_masters(self) -> dict[int, Tensor]:
        """Copies of the float32 masters by slot number."""
        return {} if self._masters is None else self._masters.export(self._all_slots)

    def load_masters(self, masters: dict[int, Tensor]) -> None:
        """The reverse."""
        if self._masters is not None:
            self._masters.load(self._all_slots, masters)

    def before_saving(self) -> None:
        """Brings the inner optimizer's state into the form that stock PyTorch would save."""

    @property
    def moved(self) -> int:
        """Bytes that the prepared update moves besides the window's sum."""
        ready = self._ready
        key = (self._selected, len(ready.states), len(ready.copies))
        if key != self._moved_key:
            self._moved = 2 * size(ready.targets) + size(ready.copies) + 2 * sum(map(size, ready.states))
            self._moved_key = key
        return self._moved

    def cancel(self) -> None:
        """The window is skipped after all: state that was made for it goes again."""
        for param in self._made:
            self.optimizer.state.pop(param, None)
        self._ready, self._made = _NOTHING_READY, []

    def update(self, backend: SimpleNamespace, factor: Tensor, skip: Tensor) -> None:
        """Applies what was prepared; on the device, ``skip`` decides whether anything is written."""
        chosen, ready = self._selected, self._ready
        tables = (chosen.segments, chosen.index, chosen.group, chosen.row, self._hyper, self.scalars)
        self._apply(backend, ready.targets, ready.states, ready.copies, ready.grads, *tables, factor, skip)
        for i in chosen.gaps:
            ready.params[i].copy_(ready.dense[i])
        torch.autograd.graph.increment_version(ready.params)
        if self._sharded:
            torch.autograd.graph.increment_version([s.param for s in chosen.slots if s.sharded])
        if self._masters is not None:
            self._masters.written(chosen.slots)
        self._ready, self._made = _NOTHING_READY, []

    def _reordered(self, slots: Sequence[Slot], lists: list[list[Tensor]]) -> bool:
        """Brings state tensors into their parameters' memory order, in place in the lists.

        Returns whether it had to look: only when a tensor is not the one seen in the last window.
        """
        # The address too: `state.data = ...` changes it under the same tensor object.
        seen = [(tensors, list(map(Tensor.data_ptr, tensors))) for tensors in lists]
        if len(seen) == len(self._seen) and all(
            now == then and len(a) == len(b) and all(map(is_, a, b))
            for (a, now), (b, then) in zip(seen, self._seen, strict=True)
        ):
            return False
        for tensors in lists:
            for i, (slot, tensor) in enumerate(zip(slots, tensors, strict=True)):
                if tensor.shape != slot.data.shape:
                    raise RuntimeError(
                        f"optimizer state of parameter {slot.number} has shape {list(tensor.shape)}, the "
                        f"parameter has {list(slot.data.shape)}: load the state of the same model"
                    )
                if tensor.device != slot.param.device or tensor.dtype not in ops.DTYPES:
                    raise RuntimeError(
                        f"optimizer state of parameter {slot.number} is {tensor.dtype} on {tensor.device}, "
                        f"the parameter is on {slot.param.device}: state must be float32, bfloat16, float16 "
                        "or float64 beside its parameter (load it again after moving the model)"
                    )
                tensors[i] = slot.ordered(tensor)
        self._seen = [(tensors, list(map(Tensor.data_ptr, tensors))) for tensors in lists]
        return True


class AdamRule(FusedRule):
    """Adam and AdamW with all their options."""

    def resize(self, slots: Sequence[Slot]) -> None:
        """See the base class; here the counters are ``state["step"]``'s own memory."""
        super().resize(slots)
        self._step_views = list(self.steps.unbind()) if len(slots) else []

    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        flags = DECOUPLED * bool(group.get("decoupled_weight_decay")) + AMSGRAD * bool(group["amsgrad"])
        flags += MAXIMIZE * bool(group["maximize"])
        beta1, beta2 = map(self._numbers.of, group["betas"])
        return (
            self._numbers.of(group["lr"]),
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            0.0,
            0.0,
            float(flags),
        )

    def _states(self, slots: Sequence[Slot]) -> list[list[Tensor]]:
        state, groups = self.optimizer.state, self.optimizer.param_groups
        entries = [state[slot.param] for slot in slots]
        views = self._step_views
        for slot, entry in zip(slots, entries, strict=True):
            if entry.get("step") is not views[slot.number]:
                self._adopt(slot, entry)
        lists = [self._local(slots, [e[key] for e in entries]) for key in ("exp_avg", "exp_avg_sq")]
        if any(group["amsgrad"] for group in groups):
            # A list has one tensor per parameter; where amsgrad is off it is not looked at.
            for slot, entry in zip(slots, entries, strict=True):
                if groups[slot.group]["amsgrad"] and "max_exp_avg_sq" not in entry:
                    entry["max_exp_avg_sq"] = slot.whole(self._empty_state(slot).zero_())
            lists.append(self._local(slots, [e.get("max_exp_avg_sq", e["exp_avg_sq"]) for e in entries]))
        if self._reordered(slots, lists):
            self._store(slots, entries, lists)
        return lists

    def _adopt(self, slot: Slot, entry: dict[str, Any]) -> None:
        """Makes a parameter's state, or takes over one that was loaded or set by hand."""
        view = self._step_views[slot.number]
        if "exp_avg" not in entry:
            # Both or none: memory may run out between them.
            both = [slot.whole(self._empty_state(slot).zero_()) for _ in range(2)]
            entry["exp_avg"], entry["exp_avg_sq"] = both
        step = entry.get("step", 0.0)
        view.copy_(step) if isinstance(step, Tensor) else view.fill_(float(step))
        # Order of keys as stock makes them.
        rest = {key: value for key, value in entry.items() if key != "step"}
        entry.clear()
        entry.update({"step": view, **rest})

    def _store(
        self, slots: Sequence[Slot], entries: Sequence[dict[str, Any]], lists: list[list[Tensor]]
    ) -> None:
        for key, tensors in zip(("exp_avg", "exp_avg_sq"), lists, strict=False):
            for slot, entry, tensor in zip(slots, entries, tensors, strict=True):
                self._put(slot, entry, key, tensor)
        if len(lists) == 3:
            for slot, entry, tensor in zip(slots, entries, lists[2], strict=True):
                if self.optimizer.param_groups[slot.group]["amsgrad"]:
                    self._put(slot, entry, "max_exp_avg_sq", tensor)

    def _apply(
        self, backend: SimpleNamespace, params: list[Tensor], states: list[list[Tensor]], *rest: Any
    ) -> None:
        backend.adam_(params, states[0], states[1], states[2] if len(states) == 3 else [], *rest)


class SgdRule(FusedRule):
    """SGD with momentum, dampening, nesterov, weight decay and maximize."""

    def resize(self, slots: Sequence[Slot]) -> None:
        """See the base class."""
        super().resize(slots)
        self._known: dict[int, Tensor] = {}  # momentum buffers whose counter is right
        self._params = {slot.number: slot.param for slot in slots}

    def before_saving(self) -> None:
        """Drops momentum buffers of parameters that were never updated.

        Where the device decides whether to skip, a buffer is made before. Stock has none then, and takes
        one that it finds for a later step's.
        """
        steps = self.steps.tolist()
        for number, buffer in list(self._known.items()):
            param = self._params[number]
            if self.optimizer.state.get(param, {}).get("momentum_buffer") is buffer and not steps[number]:
                del self.optimizer.state[param], self._known[number]

    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        flags = MAXIMIZE * bool(group["maximize"]) + NESTEROV * bool(group["nesterov"])
        decay, momentum, dampening = group["weight_decay"], group["momentum"], group["dampening"]
        return (self._numbers.of(group["lr"]), 0.0, 0.0, 0.0, decay, momentum, dampening, float(flags))

    def _states(self, slots: Sequence[Slot]) -> list[list[Tensor]]:
        state, groups = self.optimizer.state, self.optimizer.param_groups
        if not any(group["momentum"] for group in groups):
            return []
        buffers = []
        for slot in slots:
            if not groups[slot.group]["momentum"]:
                buffers.append(slot.data)  # not looked at
                continue
            entry = state[slot.param]
            buffer = entry.get("momentum_buffer")
            if buffer is None:
                # The first step makes the buffer the gradient; the counter tells the kernel.
                buffer = entry["momentum_buffer"] = slot.whole(self._empty_state(slot).zero_())
                self._known[slot.number] = buffer  # made here, so its counter is right
                self.steps[slot.number] = 0.0
            elif self._known.get(slot.number) is not buffer:
                self.steps[slot.number].clamp_(min=1.0)  # a loaded buffer is not a first step
            buffers.append(slot.local(buffer))
        if self._reordered(slots, [buffers]):
            for slot, tensor in zip(slots, buffers, strict=True):
                if groups[slot.group]["momentum"]:
                    self._put(slot, state[slot.param], "momentum_buffer", tensor)
                    self._known[slot.number] = state[slot.param]["momentum_buffer"]
        return [buffers]

    def _apply(
        self, backend: SimpleNamespace, params: list[Tensor], states: list[list[Tensor]], *rest: Any
    ) -> None:
        backend.sgd_(params, states[0] if states else [], *rest)


class GenericRule:
    """Puts the finished gradient into ``.grad`` and calls the optimizer's own ``step()``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._slots: Sequence[Slot] = ()
        self._ready: tuple[Finished, float, Sequence[int]] = (NOTHING, math.inf, ())

    def resize(self, slots: Sequence[Slot]) -> None:
        """Takes a new list of slots over."""
        self._slots = slots

    def make_state(self, slots: Sequence[Slot]) -> None:
        """Creates state by a step on the gradients in ``.grad`` (zeros, with lr 0)."""
        original_step(self.optimizer)()

    def prepare(
        self,
        backend: SimpleNamespace,
        finished: Finished,
        max_value: float | None,
        norm_group_of: Sequence[int],
    ) -> None:
        """Remembers the window; the inner optimizer counts its own steps."""
        self._ready = (finished, math.inf if max_value is None else max_value, norm_group_of)

    def export_masters(self) -> dict[int, Tensor]:
        """There are none."""
        return {}

    def load_masters(self, masters: dict[int, Tensor]) -> None:
        """There are none."""

    def before_saving(self) -> None:
        """The inner optimizer's state is its own."""

    @property
    def moved(self) -> int:
        """Bytes of the gradients that are written; what the optimizer's own step moves is not known."""
        return sum(s.data.numel() * s.param.element_size() for s in self._ready[0].selection.slots)

    def cancel(self) -> None:
        """The window is skipped after all."""
        self._ready = (NOTHING, math.inf, ())

    def update(self, backend: SimpleNamespace, factor: Tensor, skip: Tensor) -> None:
        """Writes ``.grad``, steps unless the window is skipped, and clears ``.grad``."""
        finished, limit, norm_group_of = self._ready
        self._ready = (NOTHING, math.inf, ())
        if bool(skip):
            return
        # At a flush, a micro-batch may still be pending in .grad: it must come through untouched.
        pending = [(slot.param, slot.param.grad) for slot in self._slots if slot.param.grad is not None]
        try:
            for param, _ in pending:
                param.grad = None
            for plan, places, grads, _ in finished.parts:
                slots = [plan.slots[k] for k in places]
                # float32 for a 16-bit parameter whose grad_dtype says so
                dtypes = [getattr(s.param, "grad_dtype", None) or s.param.dtype for s in slots]
                out = [s.empty().to(dtype) for s, dtype in zip(slots, dtypes, strict=True)]
                which = torch.tensor([norm_group_of[s.group] for s in slots], dtype=torch.int64)
                backend.scale_into_(out, grads, factor, which, limit)
                for slot, grad in zip(slots, out, strict=True):
                    slot.param.grad = slot.whole(grad)
            original_step(self.optimizer)()
        finally:
            for slot in self._slots:
                slot.param.grad = None
            for param, grad in pending:
                param.grad = grad


@contextlib.contextmanager
def _silenced(optimizer: Optimizer) -> Iterator[None]:
    """Holds step hooks back: the accumulator fires them, and a step that calls super()'s would again."""
    hooks: tuple[Any, ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    held = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, mine in zip(hooks, held, strict=True):
            h.update(mine)


def original_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The optimizer's ``step`` without torch's hook wrapper: the accumulator fires the hooks itself."""
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # type: ignore[attr-defined]

    def step() -> Any:
        with _silenced(optimizer):
            return function(optimizer)

    return step
