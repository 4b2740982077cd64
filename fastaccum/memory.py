"""Before training: what a training will need at its peak, and which micro-batch fits."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from fastaccum import arguments, pending
from fastaccum.buffers import Buffers
from fastaccum.roster import unique_params
from fastaccum.timeline import Live, Timeline, record, rounded, storage_bytes
from fastaccum.updates import SIXTEEN_BIT, original_step

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Fit:
    """One way to run a virtual batch.

    Attributes:
        micro_batch_size: rows of a micro-batch.
        accumulation_steps: micro-batches of a window.
        peak: predicted bytes.
        fits: whether that is within the limit; None without one.
    """

    micro_batch_size: int
    accumulation_steps: int
    peak: int
    fits: bool | None


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a training needs; all sizes in bytes, on the device of the parameters.

    Attributes:
        rows: rows of the micro-batch that was measured.
        accumulation_steps: of the optimizer that was given.
        parameters: parameters and buffers of the model.
        gradients: one micro-batch's gradients.
        accumulator: the flat buffers; 0 without accumulation.
        optimizer_state: moments and the like, float32 masters included, once training runs.
        activations: what the forward pass saves for backward.
        temporaries: the rest of what is alive at the peak: gradients of activations, kept gradients, …;
            below 0 where the others are not all alive then.
        inputs: the micro-batch.
        peak: the most that is alive at once, of all of these.
        fits: every micro-batch size that divides the virtual batch, the largest first; empty without one.
        limit: bytes that may be used, or None.
    """

    rows: int
    accumulation_steps: int
    parameters: int
    gradients: int
    accumulator: int
    optimizer_state: int
    activations: int
    temporaries: int
    inputs: int
    peak: int
    fits: tuple[Fit, ...]
    limit: int | None
    _predict: Callable[[int, int], int] = dataclasses.field(repr=False, compare=False)

    def peak_for(self, micro_batch_size: int, accumulation_steps: int) -> int:
        """The predicted peak of another micro-batch size and window, in bytes.

        Args:
            micro_batch_size: rows of a micro-batch, at least 1.
            accumulation_steps: micro-batches of a window, at least 1.

        Raises:
            TypeError, ValueError: one of them is not an int of at least 1.
        """
        rows = arguments.whole(micro_batch_size, "micro_batch_size", 1, "rows of one forward pass")
        return self._predict(rows, arguments.accumulation_steps(accumulation_steps))

    @property
    def best(self) -> Fit | None:
        """The largest micro-batch that fits; None if none does."""
        return next((fit for fit in self.fits if fit.fits is not False), None)

    @property
    def micro_batch_size(self) -> int | None:
        """Of :attr:`best`."""
        return None if self.best is None else self.best.micro_batch_size

    def __str__(self) -> str:
        """A table for people, in MiB."""
        names = ("parameters", "gradients", "accumulator", "optimizer_state", "activations", "temporaries")
        lines = [f"{name:<16}{getattr(self, name) / MIB:12.2f} MiB" for name in (*names, "inputs")]
        window = f"{self.rows} rows x {self.accumulation_steps} micro-batches"
        lines.append(f"{'peak':<16}{self.peak / MIB:12.2f} MiB   {window}")
        for fit in self.fits:
            verdict = {True: "   fits", False: "   too much", None: ""}[fit.fits]
            lines.append(
                f"  {fit.micro_batch_size:>6} rows x {fit.accumulation_steps:<6}{fit.peak / MIB:10.2f} MiB"
                f"{verdict}"
            )
        if self.fits and self.best is None:
            lines.append(
                f"nothing fits {self.limit / MIB:.2f} MiB: "  # type: ignore[operator]
                "take='backward', activation checkpointing and 16-bit parameters need less"
            )
        return "\n".join(lines)


def memory_plan(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batch: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    virtual_batch_size: int | None = None,
    limit: int | None = None,
    world_size: int = 1,
) -> MemoryPlan:
    """Predicts the peak memory of a training, and which micro-batch size fits a limit.

    Sizes of parameters, gradients, buffers and optimizer state are computed. Activations are measured: one
    micro-batch runs forward and backward, once as it is and once with half its rows (fewer than four: with
    twice as many), the allocator's reports are read, and each allocation is laid on a straight line over the
    number of rows. Gradients, statistics of BatchNorm, random state and the open window are left as they
    were.

    The peak is that of a training that runs for more than one window: with a
    :class:`~fastaccum.FusedAccumulator` of K > 1 the buffers are there while a micro-batch runs, and with
    ``take="step"`` the first micro-batch's gradients too. With any other optimizer it is the peak of the
    plain loop. Not counted: the fragmentation of a caching allocator, the GPU's context, memory that
    libraries take without asking torch, what the loop itself keeps.

    Args:
        model: the model, as it will be trained.
        optimizer: a FusedAccumulator (its ``accumulation_steps`` counts), or any other optimizer (1).
        micro_batch: a tensor, or tuples, lists and dicts of them; dimension 0 of every tensor that is as long
            as the first one's is the rows.
        loss: ``loss(model, micro_batch)`` runs the model and returns the scalar loss. By default the model is
            called with the micro-batch (a tuple's or list's items, a dict's as keywords), and what it returns
            is the loss, or has it as ``.loss``.
        virtual_batch_size: rows of one update over all ranks: asks for the micro-batch sizes that divide it.
        limit: bytes that may be used, with ``virtual_batch_size``.
        world_size: ranks that share the virtual batch.

    Returns:
        The plan, in bytes of one rank.

    Raises:
        TypeError, ValueError: a wrong argument; parameters on several devices or none that is trained; a
            ``limit`` without a virtual batch. Nothing has changed then.
        RuntimeError: of the model; re-entrant checkpointing cannot be measured (``use_reentrant=False`` can);
            a profiler is running.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (model, micro_batch), got {type(loss).__name__}")
    own = set(map(id, model.parameters()))
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimizer holds no parameter of model: it belongs to another model, or to a copy")
    ranks = arguments.whole(world_size, "world_size", 1, "ranks")
    if limit is not None:
        arguments.whole(limit, "limit", 1, "bytes")
        if virtual_batch_size is None:
            raise ValueError("limit goes with virtual_batch_size: which batch shall fit?")
    if virtual_batch_size is not None:
        arguments.whole(virtual_batch_size, "virtual_batch_size", 1, "rows of one update")
        if virtual_batch_size % ranks:
            raise ValueError(
                f"virtual_batch_size={virtual_batch_size} is not a multiple of world_size={ranks}"
            )
    rows = _rows(micro_batch)
    needs = _Needs(model, optimizer)
    compute = _loss if loss is None else loss
    whole = _measured(model, needs.params, micro_batch, compute)
    # A BatchNorm may refuse a single row, and two points too near each other make a poor line.
    others = rows // 2 if rows >= 4 else 2 * rows
    second = _measured(model, needs.params, _cut(micro_batch, rows, others), compute)

    def at(size: int) -> Timeline:
        return whole if size == rows else whole.scaled(second, size, rows, others)

    def predict(size: int, steps: int) -> int:
        return round(needs.peak(at(size), steps))

    steps = getattr(optimizer, "accumulation_steps", 1)
    fits = []
    share = (virtual_batch_size or 0) // ranks
    for size in (n for n in range(share, 0, -1) if share % n == 0):
        peak = predict(size, share // size)
        fits.append(Fit(size, share // size, peak, None if limit is None else peak <= limit))
    peak, accumulator = predict(rows, steps), needs.accumulator if needs.fused and steps > 1 else 0
    saved = round(whole.saved)
    known = needs.parameters + needs.gradients + accumulator + needs.state + saved + round(whole.inputs)
    return MemoryPlan(
        rows=rows,
        accumulation_steps=steps,
        parameters=needs.parameters,
        gradients=needs.gradients,
        accumulator=accumulator,
        optimizer_state=needs.state,
        activations=saved,
        temporaries=peak - known,
        inputs=round(whole.inputs),
        peak=peak,
        fits=tuple(fits),
        limit=limit,
        _predict=predict,
    )


# ------------------------------------------------------------------------------ what does not vary


class _Needs:
    """What the model and the optimizer need whatever the micro-batch.

    Attributes:
        params: what is trained.
        parameters, gradients, accumulator, state: bytes.
        update: bytes that the optimizer's own ``step()`` needs besides.
        fused: whether it is a FusedAccumulator.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        from fastaccum.accumulator import FusedAccumulator
        from fastaccum.updates import GenericRule

        listed = [param for param, _ in unique_params(optimizer.param_groups)]
        everything = {id(t): t for t in (*model.parameters(), *listed)}.values()
        self.params = [p for p in everything if p.requires_grad]
        if not self.params:
            raise ValueError("no parameter of this model requires a gradient: there is nothing to train")
        _check_plain(everything)
        devices = {p.device for p in everything}
        if len(devices) > 1:
            raise ValueError(f"parameters are on several devices: {', '.join(sorted(map(str, devices)))}")
        (device,) = devices
        self.fused = isinstance(optimizer, FusedAccumulator)
        wrapper: Any = optimizer
        self.take = wrapper._options.take if self.fused else "step"
        trained = [p for p in listed if p.requires_grad]
        self.parameters = storage_bytes([*everything, *(b for b in model.buffers() if b.device == device)])
        self.gradients = sum(_bytes(p, device) for p in self.params)
        self.accumulator = 0
        if self.fused:
            self.accumulator = sum(
                rounded(plan.layout.numel * plan.dtype.itemsize, device) for plan in wrapper._roster.plans
            )
        self.state, self.update = _state(optimizer, trained, device)
        # The fused rules write parameters straight from the sums; others get the finished gradient first.
        if self.fused and not isinstance(wrapper._rule, GenericRule):
            self.update = 0
        elif self.fused:
            self.update += self.gradients

    def peak(self, timeline: Timeline, steps: int) -> float:
        """The most that is alive at once in a window of ``steps`` micro-batches."""
        base = self.parameters + self.state + timeline.inputs
        if steps == 1:
            return base + max(timeline.peak(), self.gradients + self.update)
        if not self.fused:  # .grad is there from the first micro-batch on; what arrives is added and freed
            freed = _sums(timeline.order)
            return base + self.gradients + max(timeline.peak(freed), self.update)
        if self.take == "backward":
            running = timeline.peak(_taken(timeline.order))
            return base + self.accumulator + max(running, self.update)
        # The second micro-batch runs beside the first one's gradients.
        return base + self.accumulator + max(self.gradients + timeline.peak(), self.update)


def _check_plain(params: Iterable[Tensor]) -> None:
    for param in params:
        if is_traceable_wrapper_subclass(param):
            raise ValueError(
                f"a parameter is a {type(param).__name__}, a tensor that wraps others: what its parts need "
                "cannot be predicted"
            )


def _bytes(tensor: Tensor, device: torch.device) -> int:
    return rounded(tensor.numel() * tensor.element_size(), device)


def _sums(sizes: Iterable[int]) -> list[int]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums


def _taken(order: Iterable[int]) -> list[int]:
    """Bytes added into the buffer, and freed, once n gradients have arrived: whole buckets."""
    added, bucket, result = 0, 0, [0]
    for size in order:
        bucket += size
        if bucket >= pending.BUCKET_BYTES:
            added, bucket = added + bucket, 0
        result.append(added)
    return result


def missing_state(optimizer: Optimizer) -> int:
    """Bytes of optimizer state, float32 masters included, that the first updates have yet to make."""
    inner, masters = _inner(optimizer)
    params = [param for param, _ in unique_params(optimizer.param_groups) if param.requires_grad]
    _check_plain(params)
    missing = [p for p in params if p not in inner.state]
    return _made(inner, missing, masters)[0] if missing else 0


def _inner(optimizer: Optimizer) -> tuple[Optimizer, bool]:
    """(the optimizer that holds the state, whether there are masters)."""
    from fastaccum.accumulator import FusedAccumulator

    if isinstance(optimizer, FusedAccumulator):
        return optimizer.optimizer, optimizer._options.master_weights
    return optimizer, False


def _state(optimizer: Optimizer, trained: list[Tensor], device: torch.device) -> tuple[int, int]:
    """(bytes of an optimizer's state, bytes that its own step needs besides)."""
    inner, masters = _inner(optimizer)
    present = [p for p in trained if p in inner.state]
    held = [t for p in present for t in tree_leaves(dict(inner.state[p]))]
    there = storage_bytes(t for t in held if isinstance(t, Tensor) and t.device == device)
    there += _copies(present, masters)
    missing = [p for p in trained if p not in inner.state]
    made = _made(inner, missing, masters)[0] if missing else 0
    try:  # a step that finds its state needs the same besides
        extra = _made(inner, trained, masters)[1]
    except ValueError:
        if missing:
            raise
        extra = 0
    return there + made, extra


def _made(inner: Optimizer, params: list[Tensor], masters: bool) -> tuple[int, int]:
    kept, extra = _by_a_step(inner, params, masters, params[0].device)
    return kept + _copies(params, masters), extra


def _copies(params: list[Tensor], masters: bool) -> int:
    """Bytes of the float32 masters."""
    wide = [p for p in params if masters and p.dtype in SIXTEEN_BIT]
    return sum(rounded(4 * p.numel(), p.device) for p in wide)


class _WithoutValues(Live):
    """For tensors without memory: a number that is read from one is 1, as sizes do not depend on it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return super().__torch_dispatch__(function, types, args, kwargs)


def _by_a_step(
    inner: Optimizer, params: list[Tensor], masters: bool, device: torch.device
) -> tuple[int, int]:
    """The same, of a step of a copy of the optimizer on tensors without memory."""
    meta = torch.device("meta")
    wanted = {id(p) for p in params}
    copy: Any = object.__new__(type(inner))
    copy.__dict__.update(inner.__dict__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(copy, name, OrderedDict())
    copy.state = defaultdict(dict)
    copy.param_groups = []
    fakes: list[Any] = []
    for group in inner.param_groups:
        made = []
        for p in group["params"]:
            if id(p) in wanted:
                wanted.discard(id(p))
                dtype = torch.float32 if masters and p.dtype in SIXTEEN_BIT else p.dtype
                fake = torch.empty_like(p, device=meta, dtype=dtype).requires_grad_(True)
                fake.grad = torch.empty_like(fake)
                made.append(fake)
        fakes += made
        # Kernels of one launch and captured graphs need a real device; what they keep is the same.
        plain: dict[str, bool] = {key: False for key in ("fused", "capturable") if key in group}
        if "foreach" in group and device.type != "cuda":
            plain["foreach"] = bool(group["foreach"])
        copy.param_groups.append({**group, **plain, "params": made})
    live = _WithoutValues(meta, [t for fake in fakes for t in (fake, fake.grad)])
    try:
        with torch.no_grad(), live:
            original_step(copy)()
    # KeyError: one that makes its state in its constructor, as Adagrad before torch 2.13.
    except (KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"the state of {type(inner).__name__} cannot be predicted ({error}): take one step with it "
            "before you plan, then what it holds is counted"
        ) from error
    leaves = [t for entry in copy.state.values() for t in tree_leaves(dict(entry)) if isinstance(t, Tensor)]
    # Step counters are made on the CPU here, and a few bytes anywhere.
    kept = storage_bytes(t for t in leaves if t.device == meta)
    return kept, max(live.peak - kept, 0)


# ------------------------------------------------------------------------------- the micro-batch


def _rows(micro_batch: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(micro_batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors or not len(tensors[0]):
        raise ValueError("micro_batch must hold a tensor whose dimension 0 is the rows")
    return len(tensors[0])


def _cut(micro_batch: Any, rows: int, count: int) -> Any:
    """The first rows of every tensor that has them, or all of them twice, in memory of their own."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows:
            leaf = leaf.detach()
            return leaf[:count].clone() if count <= rows else torch.cat([leaf, leaf])
        return leaf

    return tree_map(cut, micro_batch)


def _loss(model: nn.Module, micro_batch: Any) -> Tensor:
    if isinstance(micro_batch, Mapping):
        result = model(**micro_batch)
    elif isinstance(micro_batch, (tuple, list)):
        result = model(*micro_batch)
    else:
        result = model(micro_batch)
    result = getattr(result, "loss", result)
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise ValueError("the model does not return a loss: pass loss=, a function of (model, micro_batch)")
    return result


def _measured(
    model: nn.Module, params: list[Tensor], micro_batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> Timeline:
    """Runs a micro-batch and puts back what a forward pass changes."""
    device = params[0].device
    buffers = Buffers(model)
    inputs = [leaf for leaf in tree_leaves(micro_batch) if isinstance(leaf, Tensor)]
    known = [*model.parameters(), *model.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            return record(lambda: loss(model, micro_batch), params, known, inputs)
    finally:
        buffers.put_back()
