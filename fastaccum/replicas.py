"""Which gradients DDP or FSDP2 have not reduced yet.

Under ``no_sync()`` DDP leaves a micro-batch's gradients as they are on this rank, and the next backward
that it synchronises reduces what lies in ``.grad`` then: their sum. So they must still lie there. A
micro-batch that was not reduced therefore stays in ``.grad``, *held*, and enters the window together with
the one that was. FSDP2 (``set_requires_gradient_sync(False)``) keeps such gradients to itself, where nobody
else sees them; they arrive with the next ones. Everywhere else a micro-batch is taken by its own ``step()``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.modules.module import register_module_module_registration_hook

from fastaccum.arrivals import backward_calls

# Every DDP module of this process. torch keeps no list of them, and the user need not tell the wrapper.
_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_watching = False


def watch() -> None:
    """Notes the DDP modules that exist and those that will be made; later calls do nothing."""
    global _watching
    if _watching or not distributed.is_available():
        return
    _watching = True
    kind = torch.nn.parallel.DistributedDataParallel

    def note(module: Any, name: str, submodule: Any) -> None:
        if isinstance(module, kind):
            _modules.add(module)

    register_module_module_registration_hook(note)
    if distributed.is_initialized():  # before that there cannot be one
        # `type`, as an isinstance() of anybody's object may run its code.
        _modules.update(found for found in gc.get_objects() if issubclass(type(found), kind))


class Replicas:
    """What DDP does with the parameters of one wrapper.

    Attributes:
        held: parameters whose ``.grad`` holds closed micro-batches that were not reduced, by ``id``.
        inside: FSDP2 holds closed micro-batches.
        weight: (kind, items) of those micro-batches, which is the same for all of them.
    """

    def __init__(self) -> None:
        watch()
        self.held: dict[int, Tensor] = {}
        self.inside = False
        self._calls: int | None = None  # backward calls up to the last step
        self.weight: tuple[str, float | Tensor] | None = None
        self._reduces: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._begun = False  # a backward of the pending micro-batch has told what it reduces
        self._key: Any = None
        self._covered: list[tuple[weakref.ref[Any], set[int]]] = []

    def covering(self, params: Sequence[Tensor]) -> list[tuple[Any, set[int]]]:
        """(DDP module, ids of those parameters that it reduces), of this wrapper's parameters."""
        if not _modules:
            return []
        modules = list(_modules)
        key = ([id(module) for module in modules], list(map(id, params)))
        if key != self._key:
            ours = set(key[1])
            pairs = [(module, ours & _reduced_by(module)) for module in modules]
            self._covered = [(weakref.ref(module), ids) for module, ids in pairs if ids]
            self._key = key
        pairs = [(reference(), ids) for reference, ids in self._covered]
        return [(module, ids) for module, ids in pairs if module is not None]

    def backward_begins(self, params: Sequence[Tensor]) -> None:
        """Notes, while a backward runs, whether the modules will reduce what it brings."""
        for module, _ in self.covering(params):
            self._reduces[module] = _synchronises(module)
            self._begun = True

    def refuse_backward(self, params: Sequence[Tensor]) -> None:
        """Raises RuntimeError if DDP would look for gradients that take="backward" has taken."""
        if self.covering(params):
            raise RuntimeError(
                "take='backward' takes each gradient out of .grad before DDP has reduced it: use take='step' "
                "with DDP. Nothing was updated; discard() the window"
            )

    def unreduced(self, params: Sequence[Tensor], arrived: Iterable[Tensor]) -> set[int]:
        """Ids of the parameters whose gradient is not reduced: the last backward was under ``no_sync()``."""
        result: set[int] = set()
        brought: set[int] | None = None
        for module, ids in self.covering(params):
            if not self._begun:  # none of the watched parameters took part
                brought = set(map(id, arrived)) if brought is None else brought
                if brought & ids:
                    self._reduces[module] = _synchronises(module)
            if not self._reduces.get(module, True):
                result |= ids
        return result

    def check(
        self,
        weight: tuple[str, float | Tensor] | None,
        told_by_scaler: bool,
        drops: bool,
        holds: bool,
    ) -> None:
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

    @property
    def holds(self) -> bool:
        """Whether closed micro-batches wait anywhere."""
        return self.inside or bool(self.held)

    def backward_ran(self) -> bool:
        """Whether a backward began since the last micro-batch; if nothing arrived, FSDP2 has it."""
        return self._calls is not None and backward_calls() > self._calls + 1

    def check_inside(self, what: str, also: bool = False) -> None:
        """Raises RuntimeError if FSDP2 holds gradients that the wrapper cannot reach.

        Args:
            what: cannot be done.
            also: it holds the pending micro-batch's.
        """
        if self.inside or also:
            raise RuntimeError(
                f"{what}: FSDP2 holds gradients of closed micro-batches that it has not reduced "
                "(set_requires_gradient_sync(False)). Run the window's last micro-batch with "
                "set_requires_gradient_sync(True): the one with optimizer.micro_step + 1 == "
                "optimizer.accumulation_steps, and the last before flush()"
            )

    def hold_inside(self, weight: tuple[str, float | Tensor]) -> None:
        """Notes a micro-batch that FSDP2 holds."""
        self.inside, self.weight = True, weight

    def hold(self, params: Iterable[Tensor], weight: tuple[str, float | Tensor]) -> None:
        """Notes gradients that stay in ``.grad``."""
        self.held.update((id(param), param) for param in params)
        if self.held:
            self.weight = weight

    def closed(self, unreduced: set[int], inside: bool = False) -> None:
        """A micro-batch is closed: what is not unreduced was taken out of ``.grad``.

        Args:
            unreduced: ids of the parameters whose gradients stay there.
            inside: FSDP2 still holds some.
        """
        self._begun = False
        self.inside = inside
        if self.held:
            self.held = {key: param for key, param in self.held.items() if key in unreduced}
        if not self.holds:
            self.weight = None

    def count_backward_calls(self) -> None:
        """The next :meth:`backward_ran` looks from here on."""
        self._calls = backward_calls()

    def drop(self) -> None:
        """The window is dropped, and with it what is held in ``.grad``."""
        for param in self.held.values():
            param.grad = None
        self.closed(set())


def _synchronises(module: Any) -> bool:
    # Set by each forward: what the backward that follows it will do.
    return bool(getattr(module, "require_forward_param_sync", True))


def _reduced_by(module: Any) -> set[int]:
    ignored = set(getattr(module, "parameters_to_ignore", ()))
    return {id(param) for name, param in module.module.named_parameters() if name not in ignored}
