"""Batch size and learning rate: how many micro-batches make a virtual batch, and what it means for lr."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from fastaccum import arguments

RULES = ("linear", "sqrt")

# Where schedulers keep learning rates: attributes of their own, and keys that they add to the groups.
_ATTRIBUTES = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
_GROUP_KEYS = {OneCycleLR: ("max_lr", "min_lr"), SWALR: ("swa_lr",)}


# ------------------------------------------------------------------------------------- batch size


def accumulation_steps_for(
    virtual_batch_size: int, micro_batch_size: int, world_size: int = 1, *, uneven: bool = False
) -> int:
    """How many micro-batches of each rank make one virtual batch.

    Args:
        virtual_batch_size: rows that one update averages over, on all ranks together.
        micro_batch_size: rows of one forward and backward pass on one rank.
        world_size: ranks, each with micro-batches of its own.
        uneven: allow the last micro-batch to hold fewer rows than the others (those that
            ``rows.split(micro_batch_size)`` gives). Say what each holds, then:
            ``optimizer.backward(loss, weight=len(rows))``.

    Returns:
        ``accumulation_steps``: ``virtual_batch_size / (micro_batch_size * world_size)``, rounded up if
        ``uneven``.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1, or they do not divide; the message offers the nearest that do.
    """
    rows = arguments.whole(virtual_batch_size, "virtual_batch_size", 1, "rows of one update")
    micro = arguments.whole(micro_batch_size, "micro_batch_size", 1, "rows of one forward pass")
    ranks = arguments.whole(world_size, "world_size", 1, "ranks")
    arguments.boolean(uneven, "uneven")
    steps, rest = divmod(rows, micro * ranks)
    if rest == 0:
        return steps
    if uneven and rows % ranks == 0:
        return steps + 1
    raise ValueError(
        f"virtual_batch_size={rows} is not a multiple of micro_batch_size={micro} x world_size={ranks} = "
        f"{micro * ranks}. " + _nearest(rows, micro, ranks)
    )


def _nearest(rows: int, micro: int, ranks: int) -> str:
    """What one could ask for instead."""
    steps, each = rows // (micro * ranks), micro * ranks
    totals = [f"{n * each} ({n} micro-batches)" for n in (steps, steps + 1) if n]
    offers = [f"virtual_batch_size={' or '.join(totals)}"]
    if rows % ranks == 0:
        share = rows // ranks
        sizes = sorted(_divisors(share))
        near = [
            max((n for n in sizes if n < micro), default=0),
            min((n for n in sizes if n > micro), default=0),
        ]
        offers.append(f"micro_batch_size={' or '.join(str(n) for n in near if n)}")
        offers.append(f"uneven=True, where the last micro-batch holds {share % micro} rows")
    else:
        lower = rows // ranks * ranks
        nearest = [n for n in (lower, lower + ranks) if n]
        offers.append(f"with uneven=True a multiple of world_size, {' or '.join(map(str, nearest))}")
    return "Nearest: " + "; or ".join(offers)


def _divisors(number: int) -> set[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}


# ---------------------------------------------------------------------------------- learning rate


def scale_lr(
    optimizer: Optimizer,
    batch_size_ratio: float,
    rule: str = "linear",
    *,
    scheduler: LRScheduler | Iterable[LRScheduler] | None = None,
    warmup_steps: int = 0,
    warmup_start: float | None = None,
) -> WarmUp | None:
    """Multiplies the learning rates for a batch that has become ``batch_size_ratio`` times as large.

    ``"linear"`` multiplies by the ratio (Goyal et al. 2017, for SGD), ``"sqrt"`` by its square root
    (Krizhevsky 2014; for Adam, Malladi et al. 2022, who change betas and eps as well: this does not).
    Tensor learning rates are written in place.

    A scheduler made afterwards starts from the new learning rates. Those made before are given as
    ``scheduler``; their own rates are multiplied too (``base_lrs``, ``eta_min``, ``min_lrs``, the peak of
    OneCycleLR, …), so that every later learning rate is the factor times what it would have been.

    Args:
        optimizer: a FusedAccumulator or any other optimizer.
        batch_size_ratio: new virtual batch size over the old one, above 0.
        rule: ``"linear"`` or ``"sqrt"``.
        scheduler: schedulers that exist already: one or several (a SequentialLR or ChainedScheduler stands
            for its own); ``()`` says that there is none.
        warmup_steps: updates over which the learning rate rises to its value; see :class:`WarmUp`.
        warmup_start: the share of it that the first update uses; by default what makes it the learning
            rate from before this call.

    Returns:
        The warm-up, or None if ``warmup_steps`` is 0. It works by itself; keep it for its state.

    Raises:
        TypeError, ValueError: a wrong argument; a group without a learning rate; a parameter group says
            that it has a scheduler and none was given. Nothing has changed then.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if batch_size_ratio is None:
        raise TypeError("batch_size_ratio must be a number, got None")
    advice = "it is the new virtual batch size over the old one"
    ratio = arguments.positive(batch_size_ratio, "batch_size_ratio", advice) or 0.0
    if not math.isfinite(ratio):
        raise ValueError(f"batch_size_ratio must be finite, got {ratio}; {advice}")
    factor = ratio if arguments.choice(rule, "rule", RULES) == "linear" else math.sqrt(ratio)
    steps = arguments.whole(warmup_steps, "warmup_steps", 0, "updates; 0 is no warm-up")
    if steps and warmup_start is None:
        if factor <= 1.0:
            raise ValueError(
                f"the warm-up starts from the old learning rate, and {factor:g} times that is not above it: "
                "leave warmup_steps at 0, or give warmup_start, the share to start at"
            )
        warmup_start = 1.0 / factor
    if steps:
        _check_warm_up(optimizer, warmup_start)
    schedulers = _given_schedulers(optimizer, scheduler)
    for number, group in enumerate(optimizer.param_groups):
        lr = group.get("lr")
        if not (isinstance(lr, Tensor) or arguments.is_number(lr)):
            raise ValueError(f"param_groups[{number}]['lr'] must be a number or a tensor, got {lr!r}")
        if "initial_lr" in group and scheduler is None:
            raise ValueError(
                f"param_groups[{number}] has an 'initial_lr': a scheduler was made on this optimizer, and it "
                "would undo the change. Pass it as scheduler=, or scheduler=() if it is gone"
            )
    _multiply(optimizer, schedulers, factor)
    return WarmUp(optimizer, steps, warmup_start) if steps else None  # type: ignore[arg-type]


def _given_schedulers(optimizer: Optimizer, given: Any) -> list[LRScheduler]:
    """The schedulers, those inside others included, checked."""
    found = list(given) if isinstance(given, Iterable) else [given] if given is not None else []
    for scheduler in found:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"scheduler must be a torch.optim.lr_scheduler.LRScheduler, got {type(scheduler).__name__}"
            )
    everyone = [member for scheduler in found for member in _with_inner(scheduler)]
    for scheduler in everyone:
        # A wrapper shares its groups with the optimizer inside, and schedulers may sit on either.
        if getattr(scheduler, "optimizer", optimizer).param_groups is not optimizer.param_groups:
            raise ValueError(f"scheduler {type(scheduler).__name__} belongs to another optimizer")
    return everyone


def _with_inner(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)


def _multiply(optimizer: Optimizer, schedulers: list[LRScheduler], factor: float) -> None:
    """Multiplies every learning rate once, also where two places hold the same tensor."""
    done: dict[int, Tensor] = {}  # the tensors themselves keep their ids from being used again

    def scaled(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in done:
                done[id(value)] = value.mul_(factor)
            return value
        if isinstance(value, list):
            value[:] = [scaled(item) for item in value]
            return value
        return value if value is None else value * factor

    keys = {"lr", "initial_lr"}
    for kind, extra in _GROUP_KEYS.items():
        if any(isinstance(scheduler, kind) for scheduler in schedulers):
            keys.update(extra)
    for group in optimizer.param_groups:
        for key in keys & group.keys():
            group[key] = scaled(group[key])
    lists: dict[int, list[Any]] = {}
    for scheduler in schedulers:
        attributes: tuple[str, ...] = _ATTRIBUTES
        if isinstance(scheduler, ReduceLROnPlateau):
            attributes += ("eps",)  # the smallest change of a learning rate that it makes
        for name in attributes:
            value = vars(scheduler).get(name)
            # A SequentialLR shows its inner scheduler's list as its own.
            if value is None or id(value) in lists:
                continue
            if isinstance(value, list):
                lists[id(value)] = value
            setattr(scheduler, name, scaled(value))


# ---------------------------------------------------------------------------------------- warm-up


_warming_up: weakref.WeakKeyDictionary[Optimizer, WarmUp] = weakref.WeakKeyDictionary()


def _check_warm_up(optimizer: Optimizer, start: Any) -> None:
    if not arguments.is_number(start):
        raise TypeError(f"the warm-up's start must be a number, got {start!r} of type {type(start).__name__}")
    if not 0.0 <= start < 1.0:
        raise ValueError(
            f"the warm-up's start is a share of the learning rate, from 0 to below 1, got {start}"
        )
    # A wrapper shares its groups with the optimizer inside: two warm-ups would multiply.
    if any(other.param_groups is optimizer.param_groups for other in _warming_up):
        raise ValueError("this optimizer has a warm-up already: remove() it first")


class WarmUp:
    """Lets the first updates use a smaller learning rate, whatever else sets it.

    Update number i (from 0) uses ``factor`` times the learning rate, ``factor = start + (1 - start) * i /
    steps`` and 1 from ``i = steps`` on (the gradual warm-up of Goyal et al. 2017).

    The learning rate is lowered just before an update and put back just after it, so what schedulers see
    and set is the full one: any scheduler works, made before or after, stepped on a metric or not at
    all, and nothing has to be composed. For a FusedAccumulator an update is a closed window. After an
    update that raised the full rate is there again too; with another optimizer not at once, but in its
    ``state_dict()`` and at the next update.

    Args:
        optimizer: a FusedAccumulator or any other optimizer; it holds the warm-up.
        steps: updates until the full learning rate, at least 1.
        start: the share of the learning rate that the first update uses, from 0 to below 1.

    Attributes:
        updates: updates made so far.

    Raises:
        TypeError, ValueError: a wrong argument, or the optimizer has a warm-up already.
    """

    def __init__(self, optimizer: Optimizer, steps: int, start: float) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.steps = arguments.whole(steps, "steps", 1, "updates until the full learning rate")
        _check_warm_up(optimizer, start)
        self.start = float(start)
        self.updates = 0
        self._full: list[tuple[dict[str, Any], Any]] = []  # group, its learning rate before it was lowered
        self._handles: tuple[Any, ...] = (
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._raise),
            optimizer.register_state_dict_pre_hook(lambda _: self._restore()),
        )
        on_failure = getattr(optimizer, "register_step_failure_hook", None)  # a FusedAccumulator's
        if on_failure is not None:
            self._handles += (on_failure(self._restore),)
        _warming_up[optimizer] = self

    @property
    def factor(self) -> float:
        """What the next update's learning rate is multiplied by."""
        if self.updates >= self.steps:
            return 1.0
        return self.start + (1.0 - self.start) * self.updates / self.steps

    def remove(self) -> None:
        """Ends the warm-up: the next update uses the full learning rate."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        for optimizer in [one for one, warm_up in _warming_up.items() if warm_up is self]:
            del _warming_up[optimizer]

    def state_dict(self) -> dict[str, float]:
        """``updates``, ``steps`` and ``start``."""
        return {"updates": self.updates, "steps": self.steps, "start": self.start}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Goes on where :meth:`state_dict` was taken.

        Args:
            state_dict: of a WarmUp; its ``steps`` and ``start`` replace this one's.

        Raises:
            ValueError: it is another thing's state.
        """
        if set(state_dict) != {"updates", "steps", "start"}:
            raise ValueError(f"state_dict must hold updates, steps and start, got {sorted(state_dict)}")
        self.updates = int(state_dict["updates"])
        self.steps, self.start = int(state_dict["steps"]), float(state_dict["start"])

    def _lower(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # the last update may have raised in between
        factor = self.factor
        if factor == 1.0:
            return
        lowered: set[int] = set()  # groups may share one tensor
        for group in optimizer.param_groups:
            lr = group["lr"]
            if not isinstance(lr, Tensor):
                self._full.append((group, lr))
                group["lr"] = lr * factor
            elif id(lr) not in lowered:
                lowered.add(id(lr))
                self._full.append((group, lr.clone()))
                lr.mul_(factor)

    def _raise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        self.updates += 1

    def _restore(self) -> None:
        for group, lr in self._full:
            if isinstance(lr, Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr
        self._full.clear()
