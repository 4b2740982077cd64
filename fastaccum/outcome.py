"""What the end of a window decides, on the device: norm, clip factors, skip, how many were skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastaccum.sharding import Sharding
from fastaccum.updates import Counters
from fastaccum.window import Window

_NO_COUNTERS: tuple[Any, ...] = (None, None, None, None, None, [], None)


class Outcome:
    """The decision's tensors, the same ones every window.

    Attributes:
        norm: float32 0-d, before clipping.
        group_norms: float64 ``[n_norm_groups]``.
        factor: float64 ``[n_norm_groups]``: what the window's sum is multiplied by.
        skip: int32 0-d: the update must not happen.
        skipped: int64 0-d: updates skipped for a gradient that was not finite.
        clipped: int64 0-d: updates that a limit has scaled down, among those of :meth:`count_clipped`.
        found_inf: float32 0-d: GradScaler's, summed over the window; 1 after a window that was not finite.
        told: it was told something in this window.
        decided: :meth:`decide` has run in this window.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocates on ``device``."""
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self.skip = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.clipped = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.told = self.decided = False
        # Known to the host, so they travel by value: a fill on a GPU would be a launch each.
        self._divisor = torch.ones((), dtype=torch.float64)
        self._total = torch.ones((), dtype=torch.float64)
        self._limits = torch.zeros(0, dtype=torch.float64)
        self._one = torch.ones((), dtype=torch.float64)
        self._no_limit = torch.full((1,), math.inf, dtype=torch.float64)
        self._quotient: Tensor | None = None
        self._numbers: Tensor | None = None
        self._scratch: tuple[Tensor, ...] | None = None  # outputs of the finish_ that finds a maximum
        self._limits_key: list[float] = []
        self.lay_out([], 1)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.norm.device

    def moved(self, device: torch.device) -> Outcome:
        """The same outcome on another device: the model was moved after wrapping."""
        new = Outcome(device)
        new.norm.copy_(self.norm)
        new.skipped.copy_(self.skipped)
        new.clipped.copy_(self.clipped)
        return new

    def lay_out(
        self,
        spans: Sequence[tuple[int, int, int]],
        n_norm_groups: int,
        sharding: Sharding | None = None,
        kinds: Sequence[int] = (),
    ) -> None:
        """Takes a new layout's norm groups over.

        Args:
            spans: ``(norm group, first chunk, end chunk)``.
            n_norm_groups: how many there are.
            sharding: makes sums over all ranks, or None.
            kinds: each span's, for ``sharding``.
        """
        self._sharding, self._chunks = sharding, (list(spans), list(kinds))
        if sharding is not None:  # by then there is one sum per norm group
            spans = [(group, group, group + 1) for group in range(n_norm_groups)]
        self._spans = torch.tensor(spans, dtype=torch.int64).reshape(-1, 3)
        self._whole: Tensor | None = None  # a span over all chunks
        self.group_norms = torch.zeros(n_norm_groups, dtype=torch.float64, device=self.device)
        self.factor = torch.zeros(n_norm_groups, dtype=torch.float64, device=self.device)

    def tell(self, found_inf: Tensor) -> None:
        """A micro-batch's found_inf: the window's update must not happen if it is not 0."""
        self.told = True
        self.found_inf.add_(found_inf.view(()))

    def numbers(self) -> Tensor:
        """Norm, number of skipped and of clipped updates, float64 ``[3]``, always in the same memory."""
        if self._numbers is None:
            self._numbers = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._numbers[0].copy_(self.norm)
        self._numbers[1].copy_(self.skipped)
        self._numbers[2].copy_(self.clipped)
        return self._numbers

    def count_clipped(self) -> None:
        """Counts the window just decided if a limit scales its update down; the host reads nothing."""
        limits = [(i, limit) for i, limit in enumerate(self._limits_key) if limit < math.inf]
        if limits:
            over = torch.stack([self.group_norms[i] + 1e-6 > limit for i, limit in limits]).any()
            self.clipped.add_(over & (self.skip == 0))

    def forget(self) -> None:
        """The window is over."""
        if self.told or self.decided:
            self.found_inf.zero_()
        self.told = self.decided = False

    def nothing(self) -> None:
        """The window holds no gradient: norm 0, no update."""
        self.norm.zero_()
        self.skip.fill_(1)

    def _divided(self, a: float | Tensor, b: float | Tensor) -> Tensor:
        """The quotient, on the device."""
        assert self._quotient is not None
        # In place: a window allocates nothing.
        self._quotient.copy_(a) if isinstance(a, Tensor) else self._quotient.fill_(a)
        return self._quotient.div_(b)

    def _largest(self, backend: SimpleNamespace, partials: Tensor) -> Tensor:
        """The largest magnitude, from the maxima of all chunks; always in the same memory."""
        assert self._scratch is not None
        one, limit = self._one, self._no_limit
        tables = (partials, self._whole, limit, one, one)
        backend.finish_(*self._scratch, *tables, *_NO_COUNTERS, math.inf, None, False)
        return self._scratch[1][0]

    def _of_all_ranks(self, partials: Tensor, norm_type: float) -> Tensor:
        if self._sharding is None:
            return partials
        return self._sharding.reduced(partials, *self._chunks, len(self.factor), norm_type)

    def prepare(self, limits: Sequence[float], norm_type: float, n_chunks: int) -> None:
        """Makes what :meth:`decide` needs.

        Args:
            limits: max_norm of each norm group; inf does not clip.
            norm_type: p.
            n_chunks: of the window's layout.
        """
        if limits != self._limits_key:
            self._limits = torch.tensor(limits, dtype=torch.float64)
            self._limits_key = list(limits)
        if self._quotient is None:
            self._quotient = torch.ones((), dtype=torch.float64, device=self.device)
        if norm_type in (1.0, 2.0, math.inf):
            return
        if self._scratch is None:
            device = self.device
            double: dict[str, Any] = {"dtype": torch.float64, "device": device}
            self._scratch = (
                torch.zeros((), device=device), torch.zeros(1, **double), torch.zeros(1, **double),
                torch.zeros((), dtype=torch.int32, device=device),
                torch.zeros((), dtype=torch.int64, device=device),
            )  # fmt: skip
        if self._whole is None:
            self._whole = torch.tensor([[0, 0, n_chunks if self._sharding is None else len(self.factor)]])

    def decide(
        self,
        backend: SimpleNamespace,
        window: Window,
        divisor: float | Tensor,
        norm_type: float,
        skip_nonfinite: bool,
        counters: Counters | None,
        wants_found_inf: bool = False,
    ) -> None:
        """Fills the tensors for a window that holds gradients, after :meth:`prepare`.

        Args:
            backend: the ops.
            window: with its total weight.
            divisor: what its sum is divided by.
            norm_type: p.
            skip_nonfinite: whether a gradient that is not finite skips the update.
            wants_found_inf: write ``found_inf``, for a scaler of the wrapper's own.
            counters: step counts of the parameters that are about to be updated, if they are ours.
        """
        scale = None
        if norm_type not in (1.0, 2.0, math.inf):
            # |x / max|^p cannot overflow: the largest magnitude first.
            window.has_partials = False
            window.sum_norm(backend, math.inf)
            scale = self._largest(backend, self._of_all_ranks(window.partials, math.inf))
            window.has_partials = False
        window.sum_norm(backend, norm_type, scale)
        total = window.total
        if isinstance(divisor, Tensor) or isinstance(window.sum_weight, Tensor):
            divisor = self._divided(divisor, window.sum_weight)
        else:
            divisor = divisor / window.sum_weight
        backend.finish_(
            self.norm,
            self.group_norms,
            self.factor,
            self.skip,
            self.skipped,
            self._of_all_ranks(window.partials, norm_type),
            self._spans,
            self._limits,
            total if isinstance(total, Tensor) else self._total.fill_(total),
            divisor if isinstance(divisor, Tensor) else self._divisor.fill_(divisor),
            *(counters or _NO_COUNTERS),
            norm_type,
            scale,
            skip_nonfinite,
            self.found_inf if self.told or wants_found_inf else None,
        )
        self.decided = True
