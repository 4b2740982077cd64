"""Which gradients DDP has not reduced yet.

Under ``no_sync()`` DDP leaves a micro-batch's gradients as they are on this rank, and the next backward
that it synchronises reduces what lies in ``.grad`` then: their sum. So they must still lie there. A
micro-batch that was not reduced therefore stays in ``.grad``, *held*, and enters the window together with
the one that was. FSDP2 keeps such gradients to itself (see ``fsdp.py``). Everywhere else a micro-batch is
taken by its own ``step()``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.modules.module import register_module_module_registration_hook

from fastaccum import fsdp

Weight = tuple[str, "float | Tensor"]  # (kind, items)
Stamps = Sequence[tuple[Any, list[int]]]

# Every DDP module of this process. torch keeps no list of them, and the user need not tell the wrapper.
_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_DDP: Any = torch.nn.parallel.DistributedDataParallel if distributed.is_available() else ()


def _note(module: Any, name: str, submodule: Any) -> None:
    if isinstance(module, _DDP):
        _modules.add(module)


if distributed.is_available():
    # From the import on: gc cannot find objects that were frozen (gc.freeze()) before find_copies() looks.
    register_module_module_registration_hook(_note)


def find_copies() -> None:
    """Finds DDP modules that came without a registration: copies and unpickled ones."""
    if distributed.is_available() and distributed.is_initialized():
        # `type`, as an isinstance() of anybody's object may run its code.
        _modules.update(found for found in gc.get_objects() if issubclass(type(found), _DDP))


class Replicas:
    """What DDP and FSDP2 do with the parameters of one wrapper.

    Attributes:
        held: parameters whose ``.grad`` holds closed micro-batches that were not reduced, by ``id``, with it.
        inside: closed micro-batches that FSDP2 holds.
        weight: (kind, items) of those micro-batches, which is the same for all of them.
    """

    def __init__(self) -> None:
        find_copies()
        self.held: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}
        self.inside: fsdp.Marks = {}
        self.weight: Weight | None = None
        # What each module did in the last backward that brought something, and when it last reduced.
        self._reduced: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._stamps: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._looked: weakref.WeakSet[Any] = weakref.WeakSet()  # since the last micro-batch was closed
        self._key: Any = None
        self._covered: list[tuple[weakref.ref[Any], set[int]]] = []

    @property
    def holds(self) -> bool:
        """Whether closed micro-batches wait anywhere."""
        return bool(self.inside or self.held)

    # -------------------------------------------------------------------------------------------- DDP

    def covering(self, params: Sequence[Tensor]) -> list[tuple[Any, set[int]]]:
        """(DDP module, ids of those parameters that it reduces), of this wrapper's parameters."""
        if not _modules:
            return []
        modules = list(_modules)
        key = (list(map(id, modules)), list(map(id, params)))
        if key != self._key or any(reference() is None for reference, _ in self._covered):
            ours = set(key[1])
            pairs = [(module, ours & _reduced_by(module)) for module in modules]
            self._covered = [(weakref.ref(module), ids) for module, ids in pairs if ids]
            self._key = key
            for module, _ in pairs:  # what was reduced before this wrapper saw the module is no news
                self._stamps.setdefault(module, list(module.reducer.get_backward_stats()))
        pairs = [(reference(), ids) for reference, ids in self._covered]
        return [(module, ids) for module, ids in pairs if module is not None]

    def stamps(self, params: Sequence[Tensor]) -> Stamps:
        """When each module's gradients became ready to be reduced, lately; taken as a backward begins."""
        return [(module, list(module.reducer.get_backward_stats())) for module, _ in self.covering(params)]

    def look(self, params: Sequence[Tensor], arrived: Iterable[Tensor], begun: Stamps = ()) -> None:
        """Notes which modules have reduced what a backward has just brought.

        Args:
            params: the wrapper's.
            arrived: those that the backward is known to have reached.
            begun: the stamps as it began, where that is known. Backward calls may be nested (checkpointing),
                so what was seen last may be of its own middle.
        """
        brought: set[int] | None = None
        before = {id(module): stamps for module, stamps in begun}
        for module, ids in self.covering(params):
            if self._has_reduced(module, before.get(id(module))):
                self._reduced[module] = True
                self._looked.add(module)
                continue
            brought = set(map(id, arrived)) if brought is None else brought
            if brought & ids:
                self._reduced[module] = False
                self._looked.add(module)

    def _has_reduced(self, module: Any, before: list[int] | None = None) -> bool:
        """Whether DDP has reduced since then, or the last look: it stamps gradients that are ready for it."""
        stamps = list(module.reducer.get_backward_stats())
        before = self._stamps[module] if before is None else before
        self._stamps[module] = stamps
        # The first backward of a static graph leaves no stamps, and cannot be under no_sync().
        return stamps != before or (module.static_graph and not any(stamps))

    def unreduced(self, params: Sequence[Tensor], arrived: Sequence[Tensor]) -> set[int]:
        """Ids of the parameters whose gradient is not reduced.

        Args:
            params: the wrapper's.
            arrived: those that the pending micro-batch has reached.
        """
        covering = self.covering(params)
        if not covering and not self.held:
            return set()
        unseen = [ids for module, ids in covering if module not in self._looked]
        rest = [param for param in arrived if any(id(param) in ids for ids in unseen)] if unseen else []
        self.look(params, rest)
        result: set[int] = set()
        elsewhere = set(self.held)
        for module, ids in covering:
            elsewhere -= ids
            if module not in self._looked:  # nothing arrived there: what waits goes on waiting
                result |= ids & self.held.keys()
            elif not self._reduced.get(module, True):
                result |= ids
        if not arrived:  # without a module (a copy, a reload) they wait for the next gradients
            result |= elsewhere
        return result

    def check_held(self, params: Sequence[Tensor]) -> None:
        """Raises RuntimeError if a gradient that waits was cleared or replaced."""
        views = {
            key for module, ids in self.covering(params) if module.gradient_as_bucket_view for key in ids
        }
        for key, (param, held) in self.held.items():
            grad = param.grad
            # DDP may put its bucket's view there; these two accumulate out of place.
            free = grad is not None and (key in views or grad.is_sparse or grad.requires_grad)
            if grad is None or (grad is not held() and not free):
                raise RuntimeError(
                    f"a gradient (of a parameter of shape {list(param.shape)}) that waits for DDP to reduce "
                    "it (no_sync()) is gone from .grad: something cleared or replaced it, such as "
                    "model.zero_grad(). discard() drops the window; do not clear .grad, or reduce every "
                    "micro-batch"
                )

    def refuse_backward(self, params: Sequence[Tensor]) -> None:
        """Raises RuntimeError if DDP would look for gradients that take="backward" has taken."""
        if self.covering(params):
            raise RuntimeError(
                "take='backward' takes each gradient out of .grad before DDP has reduced it: use take='step' "
                "with DDP. Nothing was updated; discard() the window"
            )

    # ------------------------------------------------------------------------------------ micro-batches

    def check(self, weight: Weight | None, told_by_scaler: bool, drops: bool, holds: bool) -> None:
        """Raises if a micro-batch cannot join those held, or cannot be held itself.

        Args:
            weight: (kind, items) of the pending micro-batch, None without a backward.
            told_by_scaler: ``scaler.step(wrapper)`` closes it.
            drops: ``nonfinite_micro_batch="drop"``.
            holds: it is not reduced either.
        """
        if holds and drops:
            raise RuntimeError(
                "nonfinite_micro_batch='drop' cannot take a micro-batch out again that ran under no_sync(): "
                "its gradients were added to earlier ones that wait to be reduced. Reduce every micro-batch, "
                "or use nonfinite_micro_batch='keep'"
            )
        if told_by_scaler and (holds or self.holds):
            raise RuntimeError(
                "scaler.step(optimizer) cannot close a micro-batch whose gradients were not reduced "
                "(no_sync()): each rank's scale would follow its own. Give the wrapper scaler=, or reduce "
                "every micro-batch"
            )
        if weight is None or self.weight is None or weight[0] != "weight":
            return
        same = not isinstance(weight[1], Tensor) and not isinstance(self.weight[1], Tensor)
        if not same or weight != self.weight:
            raise ValueError(
                "micro-batches under no_sync() are added up before they are reduced, so weight= must be "
                f"the same number for all of them: got {weight[1]} after {self.weight[1]}. Use count= with "
                "a loss that is a sum, or reduce every micro-batch"
            )

    def check_inside(self, what: str) -> None:
        """Raises RuntimeError if FSDP2 holds closed micro-batches, which the wrapper cannot reach.

        Args:
            what: cannot be done.
        """
        if self.inside:
            raise RuntimeError(_INSIDE.format(what=what))

    def refuse_inside(self, what: str) -> None:
        """The same where it is known."""
        raise RuntimeError(_INSIDE.format(what=what))

    def check_all_inside(self, params: Sequence[Tensor], what: str) -> None:
        """The same for whatever FSDP2 holds, pending or closed."""
        if fsdp.unreduced(params):
            raise RuntimeError(_INSIDE.format(what=what))

    def check_pending_inside(self, params: Sequence[Tensor], what: str) -> None:
        """The same for the pending micro-batch."""
        if fsdp.unreduced(params) != self.inside:
            raise RuntimeError(_INSIDE.format(what=what))

    def hold(self, params: Iterable[Tensor], weight: Weight | None) -> None:
        """Notes gradients that stay in ``.grad``.

        Args:
            params: theirs.
            weight: of the micro-batch that was just added to them, or None.
        """
        for param in params:
            if param.grad is not None:
                self.held[id(param)] = (param, weakref.ref(param.grad))
        if self.held and weight is not None:
            self.weight = weight

    def closed(self, unreduced: set[int], inside: fsdp.Marks, weight: Weight | None) -> None:
        """A micro-batch is closed: what is not unreduced was taken out of ``.grad``.

        Args:
            unreduced: ids of the parameters whose gradients stay there.
            inside: what FSDP2 holds.
            weight: the micro-batch's, or None without a backward.
        """
        self._looked.clear()
        if inside != self.inside:
            self.inside = inside
            self.weight = weight if inside and weight is not None else self.weight
        if self.held:
            self.held = {key: pair for key, pair in self.held.items() if key in unreduced}
        if not self.holds:
            self.weight = None

    def drop(self) -> None:
        """The window is dropped, and with it what is held in ``.grad``; a pending micro-batch stays."""
        for param, _ in self.held.values():
            param.grad = None
        self.held = {}
        if not self.inside:
            self.weight = None

    def drop_pending(self) -> None:
        """The pending micro-batch is dropped, and with it what its backward calls have reduced."""
        self._looked.clear()


_INSIDE = (
    "{what}: FSDP2 holds gradients that it has not reduced (set_requires_gradient_sync(False)), where the "
    "wrapper cannot reach them. Run a micro-batch with set_requires_gradient_sync(True) first; the last one "
    "of a window (optimizer.micro_step + 1 == optimizer.accumulation_steps) and the last before flush() must "
    "be so"
)


def _reduced_by(module: Any) -> set[int]:
    ignored = set(getattr(module, "parameters_to_ignore", ()))
    return {id(param) for name, param in module.module.named_parameters() if name not in ignored}
