"""The roster of slots: follows the parameter groups, which user code may change in any way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastaccum import groups
from fastaccum.sharding import Sharding
from fastaccum.slots import Plan, Slot, make_plans


class Roster:
    """All slots of an optimizer and how they are laid out.

    Attributes:
        slots: each physical parameter once.
        params: their parameters.
        norm_group_of: norm group of each parameter group; 0 is shared by those without a limit.
        limits: each parameter group's own max_norm or None.
        plans: layouts, one per accumulation dtype.
        spans: ``(norm group, first chunk, end chunk)``.
        span_kinds: each span's kind of sharding.
        sharding: how sums are made over all ranks; None where no parameter is a DTensor.
        n_chunks: over all plans.
        contiguous: every slot is, and none is sharded.
    """

    def __init__(self, optimizer: Optimizer, accumulate_dtype: torch.dtype | None) -> None:
        """Starts empty; :meth:`replace` fills it."""
        self._optimizer = optimizer
        self._accumulate_dtype = accumulate_dtype
        self._listed: list[Tensor] = []  # the groups' lists as they were, duplicates included
        self._number_of: dict[int, int] = {}
        self._key: tuple[Any, ...] = ()
        self.slots: list[Slot] = []
        self.params: list[Tensor] = []
        self.norm_group_of: list[int] = []
        self.limits: list[float | None] = []
        self.plans: list[Plan] = []
        self.spans: list[tuple[int, int, int]] = []
        self.span_kinds: list[int] = []
        self.sharding: Sharding | None = None
        self.n_chunks = 0
        self.contiguous = False

    def all_params(self) -> list[Tensor]:
        """Every listed parameter, duplicates included."""
        return list(chain.from_iterable(g["params"] for g in self._optimizer.param_groups))

    @property
    def stale(self) -> bool:
        """Whether the groups list other parameters than the slots stand for."""
        listed = self.all_params()
        return len(listed) != len(self._listed) or not all(map(is_, listed, self._listed))

    def replace(self, watch: Callable[[list[Tensor]], None]) -> None:
        """Makes the slots anew; :meth:`lay_out` must follow.

        Args:
            watch: hooks the parameters; may refuse them, and then nothing has changed.

        Raises:
            ValueError: a parameter cannot be served.
        """
        listed = self.all_params()
        found = unique_params(self._optimizer.param_groups)
        for param, group in found:
            groups.check_param(param, group)
        watch([param for param, _ in found])
        self.slots = [Slot(param, number, group) for number, (param, group) in enumerate(found)]
        self.params = [slot.param for slot in self.slots]
        self.sharding = Sharding(self.params) if any(slot.sharded for slot in self.slots) else None
        self._number_of = {id(slot.param): slot.number for slot in self.slots}
        self._listed = listed
        self._key = ()

    def slot_of(self, param: Tensor) -> Slot | None:
        """The slot of a parameter, or None."""
        number = self._number_of.get(id(param))
        return None if number is None else self.slots[number]

    def lay_out(self, holds_gradients: bool, before: Callable[[], None]) -> bool:
        """Makes new plans if a parameter's dtype, size or memory order or the norm groups changed.

        Args:
            holds_gradients: the window is not empty, so sizes must not change.
            before: called when plans are about to change.

        Returns:
            Whether there are new plans.

        Raises:
            RuntimeError: a parameter was resized inside an open window.
        """
        self.limits = groups.group_max_norms(self._optimizer.param_groups)
        data = self.params if self.sharding is None else [slot.data for slot in self.slots]
        key = (
            [p.dtype for p in self.params],
            [p.numel() for p in data],
            [p.is_contiguous() or p.stride() for p in data],
            [limit is not None for limit in self.limits],
        )
        if key == self._key:
            return False
        before()
        if self._key:  # the same parameters in another guise: dtype, size or memory format
            if key[1] != self._key[1] and holds_gradients:
                raise RuntimeError(
                    "a parameter changed its number of elements inside an open window, whose gradient "
                    "no longer fits: flush() or discard() before resizing it"
                )
            self.slots = [Slot(s.param, s.number, s.group) for s in self.slots]
        self.norm_group_of, own = [], 0
        for limit in self.limits:
            own += limit is not None
            self.norm_group_of.append(own if limit is not None else 0)
        kinds = None if self.sharding is None else self.sharding.kinds
        self.plans, self.spans, self.span_kinds, self.n_chunks = make_plans(
            self.slots, self.norm_group_of, self._accumulate_dtype, kinds
        )
        self.contiguous = self.sharding is None and all(slot.contiguous for slot in self.slots)
        self._key = key
        return True

    def forget_layout(self) -> None:
        """The next :meth:`lay_out` makes new plans (tensors moved to another device)."""
        self._key = ()


def unique_params(param_groups: list[dict[str, Any]]) -> list[tuple[Tensor, int]]:
    """(parameter, group number), each physical parameter once, at its first place."""
    seen: set[int] = set()
    found = []
    for number, group in enumerate(param_groups):
        for param in group["params"]:
            if id(param) not in seen:
                seen.add(id(param))
                found.append((param, number))
    return found
