"""Times of the GPU's kernels beside stock PyTorch's and beside a plain copy; no time decides anything.

The yardstick is a copy from device to device, timed in the same rounds as what it is held against.
Bytes per element: add 12 (bf16 gradients 10), norm 4, AdamW 28, SGD with momentum 20.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench_windows, harness, models, providers, shapes, stats
from benchmarks.gpu_machine import Gpu, Skip
from benchmarks.gpu_part import SPEED, Log, Part, backends_of, is_lost
from fastaccum.layout import Layout
from tests.cases import hyper_row

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
COPY = "copy"
Sampler = Callable[[], dict[str, float]]


def rounds(machine: Gpu, count: int = 15) -> int:
    """Samples per provider."""
    return 3 if machine.emulated else count


def sizes_of(machine: Gpu, name: str = "gpt2-124m") -> list[int]:
    """Elements per tensor."""
    return [shapes.numel([s]) for s in shapes.named("tiny" if machine.emulated else name)]


class Copy:
    """The yardstick."""

    def __init__(self, machine: Gpu) -> None:
        elements = 1 << (16 if machine.emulated else 28)
        self.source = torch.ones(elements, device=machine.device)
        self.target = torch.empty_like(self.source)
        self.bytes = 8 * elements

    def __call__(self) -> None:
        self.target.copy_(self.source)


def compare(
    machine: Gpu, log: Log, calls: Mapping[str, Callable[[], Any]], moved: Mapping[str, int] | None = None,
    goal: str = "", repeat: int = 3, count: int = 15,
) -> dict[str, list[float]]:  # fmt: skip
    """Times calls on the device, interleaved with the copy; a row for each.

    Args:
        moved: bytes that each has to move; its share of the copy's bandwidth is shown.
        goal: shown in the rows of fastaccum that have a share.
    """
    copy = Copy(machine)
    samplers: dict[str, Sampler] = {
        name: lambda c=call: {"device": machine.seconds(c, repeat)}
        for name, call in {**calls, COPY: copy}.items()
    }
    found = {name: t["device"] for name, t in harness.interleave(samplers, rounds(machine, count)).items()}
    for name in calls:
        more: dict[str, Any] = {}
        if moved and name in moved:
            share = stats.ratio(found[COPY], found[name]).scaled(moved[name] / copy.bytes)
            more = {"share": share.value, "spread": share.spread, "bytes": moved[name]}
            more["GB/s"] = moved[name] / statistics.median(found[name]) / 1e9
            if goal and not name.startswith("torch"):
                more["goal"] = goal
        log.row(name, statistics.median(found[name]) * 1e3, "ms", **stats.summary(found[name]), **more)
    return found


def ratio(log: Log, what: str, theirs: Sequence[float], mine: Sequence[float], goal: str = "") -> None:
    """A row: somebody's time over ours."""
    estimate = stats.ratio(theirs, mine)
    verdict = stats.speed_words(estimate)
    log.row(what, estimate.value, "x", spread=estimate.spread, goal=goal, verdict=verdict)


# --------------------------------------------------------------------------------------- single ops


class Ours:
    """fastaccum's ops on a device, called as the accumulator calls them."""

    def __init__(
        self, machine: Gpu, backend: str, sizes: Sequence[int], grad_dtype: torch.dtype = F32,
        lean: bool = False,
    ) -> None:  # fmt: skip
        device, count = machine.device, len(sizes)
        layout = Layout.of(sizes)
        self.ops, self.count = machine.make(backend), count
        self.rows = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)))
        self.index, self.zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        self.buffer = torch.zeros(layout.numel, device=device)
        self.present = torch.ones(count, dtype=torch.uint8)
        self.partials = torch.zeros(2, layout.n_chunks, dtype=F64, device=device)
        self.spans = torch.tensor(layout.spans).view(-1, 3)
        self.fresh = [torch.full((n,), 1e-3, dtype=grad_dtype, device=device) for n in sizes]
        self.views = [self.buffer[o : o + n] for o, n in zip(layout.offsets, sizes, strict=True)]
        if not lean:
            self.params, self.first, self.second = (
                [torch.full((n,), v, device=device) for n in sizes] for v in (0.02, 0.0, 1e-4)
            )
        self.outcome = [
            torch.zeros((), device=device), torch.zeros(1, dtype=F64, device=device),
            torch.ones(1, dtype=F64, device=device), torch.zeros((), dtype=torch.int32, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        ]  # fmt: skip
        self.limit, self.one = torch.ones(1, dtype=F64), torch.ones((), dtype=F64)
        self.steps = torch.zeros(count, device=device)
        self.scalars = torch.zeros(count, 4, dtype=F64, device=device)
        row = hyper_row(lr=1e-4, weight_decay=0.01, decoupled=True, momentum=0.9)
        self.hyper = torch.tensor([row], dtype=F64)
        self.finish()

    def add(self, norm: bool = True) -> None:
        """One micro-batch into the buffer."""
        self.ops.gather_(
            self.buffer, self.present, self.partials if norm else None, self.rows, self.fresh, self.index, [],
            self.index[:0], None, None, 2.0,
        )  # fmt: skip

    def norm(self) -> None:
        """The norm's partial sums."""
        self.ops.norm_(self.partials, self.rows, self.fresh, self.index, 2.0, None)

    def finish(self) -> None:
        """The end of a window."""
        self.ops.finish_(
            *self.outcome, self.partials, self.spans, self.limit, self.one, self.one, self.steps,
            self.scalars, self.index, self.zero, self.hyper, [], None, 2.0, None, True,
        )  # fmt: skip

    def _tables(self) -> tuple[Any, ...]:
        _, _, factor, skip, _ = self.outcome
        return self.rows, self.index, self.zero, self.index, self.hyper, self.scalars, factor, skip

    def adamw(self) -> None:
        """The update."""
        self.ops.adam_(self.params, self.first, self.second, [], [], self.views, *self._tables())

    def sgd(self) -> None:
        """The update with momentum."""
        self.ops.sgd_(self.params, self.first, [], self.views, *self._tables())

    def end(self) -> None:
        """Finish and update."""
        self.finish()
        self.adamw()

    def last_add_and_end(self) -> None:
        """The last micro-batch too."""
        self.add()
        self.end()


class Stock:
    """Stock PyTorch on the same tensors."""

    def __init__(self, machine: Gpu, sizes: Sequence[int], grad_dtype: torch.dtype = F32) -> None:
        def full(value: float, dtype: torch.dtype = F32) -> list[Tensor]:
            return [torch.full((n,), value, dtype=dtype, device=machine.device) for n in sizes]

        self.sums, self.fresh = full(0.0), full(1e-3, grad_dtype)
        self.params = [torch.nn.Parameter(p) for p in full(0.02)]
        for p, g in zip(self.params, self.sums, strict=True):
            p.grad = g
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    def loop_add(self) -> None:
        """A call per tensor."""
        for total, fresh in zip(self.sums, self.fresh, strict=True):
            total.add_(fresh)

    def foreach_add(self) -> None:
        """All tensors in few launches."""
        torch._foreach_add_(self.sums, self.fresh)

    def norm(self) -> None:
        """The norm as clip_grad_norm_ computes it."""
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.fresh)))

    def step(self, kind: str, how: str) -> Callable[[], Any]:
        """An optimizer's step: how is ``fused`` or ``foreach``."""
        make = {
            "adamw": lambda **o: torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.01, **o),
            "sgd": lambda **o: torch.optim.SGD(self.params, lr=1e-4, momentum=0.9, **o),
        }[kind]
        return make(**{how: True}).step

    def clip(self) -> None:
        """The clip that ends a window."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)


def bandwidth(machine: Gpu, log: Log) -> None:
    """The copy itself."""
    copy = Copy(machine)
    found = [machine.seconds(copy, 5) for _ in range(rounds(machine, 30))]
    rate = copy.bytes / statistics.median(found) / 1e9
    log.row("copy, device to device", rate, "GB/s", **stats.summary(found))


def single_ops(machine: Gpu, log: Log) -> None:
    """Each op beside stock's, at GPT-2's shapes."""
    sizes = sizes_of(machine)
    n = sum(sizes)
    log.note(f"{len(sizes)} tensors, {n / 1e6:.1f} M elements")
    made = list(backends_of(machine, log))
    for dtype, label in ((F32, "fp32"), (BF16, "bf16")):
        ours = {b: Ours(machine, b, sizes, dtype, lean=dtype is BF16) for b in made}
        stock = Stock(machine, sizes, dtype)
        calls = {f"{b} add with norm, {label}": o.add for b, o in ours.items()}
        calls |= {f"{b} add without norm, {label}": lambda o=o: o.add(norm=False) for b, o in ours.items()}
        moved = dict.fromkeys(calls, n * (8 + dtype.itemsize))
        calls[f"torch add, loop, {label}"] = stock.loop_add
        calls[f"torch add, foreach, {label}"] = stock.foreach_add
        moved |= {name: n * (8 + dtype.itemsize) for name in calls}
        compare(machine, log, calls, moved, ">= 0.85 of the copy")
        calls = {f"{b} norm, {label}": o.norm for b, o in ours.items()}
        calls[f"torch norm, foreach, {label}"] = stock.norm
        compare(machine, log, calls, {name: n * dtype.itemsize for name in calls}, ">= 0.85 of the copy")
        del stock
    ours = {b: Ours(machine, b, sizes) for b in made}
    compare(machine, log, {f"{b} finish": o.finish for b, o in ours.items()}, repeat=5)
    for kind, per in (("adamw", 28), ("sgd", 20)):
        calls = {f"{b} {kind}": getattr(o, kind) for b, o in ours.items()}
        for how in ("fused", "foreach"):
            calls[f"torch {kind}, {how}"] = Stock(machine, sizes).step(kind, how)
        goal = ">= 0.85 of the copy" if kind == "adamw" else ""
        compare(machine, log, calls, {name: n * per for name in calls}, goal)


def window_end(machine: Gpu, log: Log) -> None:
    """Finish and update against clip and fused AdamW; then with the last add on both sides."""
    sizes = sizes_of(machine)
    stock = Stock(machine, sizes)
    step = stock.step("adamw", "fused")

    def clip_and_step() -> None:
        stock.clip()
        step()

    def add_clip_and_step() -> None:
        stock.foreach_add()
        clip_and_step()

    for backend in backends_of(machine, log):
        ours = Ours(machine, backend, sizes)
        for what, mine, theirs, per, goal in (
            ("finish + update", ours.end, clip_and_step, (28, 40), ">= 1.4 x"),
            ("last add + finish + update", ours.last_add_and_end, add_clip_and_step, (40, 52), ">= 1.25 x"),
        ):
            names = (f"{backend} {what}", f"torch clip + fused AdamW for {what}")
            moved = {name: sum(sizes) * b for name, b in zip(names, per, strict=True)}
            found = compare(machine, log, dict(zip(names, (mine, theirs), strict=True)), moved)
            ratio(log, f"{backend} {what}, against clip_grad_norm_ + AdamW(fused)", found[names[1]],
                  found[names[0]], goal)  # fmt: skip


# ------------------------------------------------------------------------------------ whole windows


class OnDevice(providers.WindowProvider):
    """A window provider whose parameters lie on the machine's device."""

    def __init__(self, machine: Gpu, which: shapes.Shapes, steps: int) -> None:
        self.machine, self.steps = machine, steps
        self.params = [p.to(machine.device).requires_grad_() for p in providers.fill(which, 0.02, seed=1)]
        self.backward_order = self.params[::-1]
        self.optimizer = self.make_optimizer()

    def _one(self, templates: list[Tensor], timed: Callable[[Callable[[], None]], float]) -> list[float]:
        scale = 1.0 if self.averages else 1.0 / self.steps
        found = []
        for index in range(self.steps):
            self.arrive(providers.make_fresh(templates, scale), index)
            self.machine.synchronize()
            found.append(timed(lambda i=index: self.close(i)))
        return found

    def sample(self, templates: list[Tensor]) -> dict[str, float]:
        """Three windows: the device's time, the host's with the device's, and the host's alone."""

        def both(call: Callable[[], None]) -> float:
            start = time.perf_counter()
            call()
            self.machine.synchronize()
            return time.perf_counter() - start

        def host(call: Callable[[], None]) -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        device, wall, alone = (self._one(templates, t) for t in (self.machine.seconds, both, host))
        return {
            "device, window": sum(device), "device, end": device[-1], "wall, window": sum(wall),
            "wall, end": wall[-1], "host, end": alone[-1], "host, window": sum(alone),
        }  # fmt: skip


class Native(OnDevice, providers.Fastaccum):
    """fastaccum with the CUDA kernels."""

    def close(self, index: int) -> None:
        with self.machine.using(self.backend):
            super().close(index)


class Triton(Native):
    """fastaccum with the Triton kernels."""

    backend = "triton"


class Best(OnDevice, providers.StockBest):
    """Stock: foreach adds and clip, fused AdamW."""

    def close(self, index: int) -> None:
        if index:
            grads = [p.grad for p in self.backward_order]
            torch._foreach_add_(grads, list(self.pending))
            self.pending = deque()
        if index == self.steps - 1:
            self.total = self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def clip(self) -> Tensor:
        """Clips; the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.params, providers.MAX_NORM, foreach=True)


class Loop(OnDevice, providers.StockLoop):
    """Stock as people write it: an add per tensor, the default AdamW."""


class Peer(Best):
    """Stock with a peer's `FusedAdam` in the place of AdamW."""

    module: str

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        adam = providers.require(self.module, "FusedAdam")
        return adam(self.params, adam_w_mode=True, betas=(0.9, 0.999), eps=1e-8, **providers.UPDATES["AdamW"])


class Apex(Peer):
    """Apex's, behind Apex's own clip if it is there."""

    module = "apex.optimizers"
    own_clip: Callable[..., Tensor] | None = None

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        with contextlib.suppress(providers.Unavailable):
            self.own_clip = providers.require("apex.contrib.clip_grad", "clip_grad_norm_")
        return super().make_optimizer(**options)

    def clip(self) -> Tensor:
        return self.own_clip(self.params, providers.MAX_NORM) if self.own_clip else super().clip()


class TransformerEngine(Peer):
    """Transformer Engine's; it has no clip."""

    module = "transformer_engine.pytorch.optimizers"


PEERS: dict[str, type[OnDevice]] = {"apex": Apex, "transformer engine": TransformerEngine}
WHO = {"torch best": Best, "torch loop": Loop, "native": Native, "triton": Triton, **PEERS}


def make_providers(
    machine: Gpu, log: Log, which: shapes.Shapes, steps: int, templates: list[Tensor]
) -> dict[str, OnDevice]:
    """Those that run here and have the results of "torch best"; the report says why another is left out."""
    ours = list(backends_of(machine, log))
    made: dict[str, OnDevice] = {}
    for who, kind in WHO.items():
        if issubclass(kind, Native) and who not in ours:
            continue
        try:
            with machine.using(who) if who in ours else contextlib.nullcontext():
                provider = kind(machine, which, steps)
            provider.sample(templates)  # warms up
        except Exception as error:
            # A peer may be built for another GPU or another torch: it must not take the others down.
            if who not in PEERS or is_lost(error):
                raise
            known = isinstance(error, providers.Unavailable)
            log.note(f"{who}: skipped: {error if known else repr(error)[:300]}")
            continue
        shown = f"fastaccum, {who}" if who in ours else who
        try:
            bench_windows.assert_agree({**dict(list(made.items())[:1]), shown: provider}, templates)
        except AssertionError as error:
            log.fail(who, error)
            continue
        if isinstance(provider, Apex):
            log.note(f"{who}: clip_grad_norm_ is {'of Apex' if provider.own_clip else 'of PyTorch'}")
        made[who] = provider
    return made


def windows(machine: Gpu, log: Log, name: str, steps: int, count: int, goal: str = "") -> None:
    """Whole windows of every provider."""
    which = shapes.named("tiny" if machine.emulated else name)
    scale = 10.0 / shapes.numel(which) ** 0.5  # norm 10: it clips
    templates = [t.to(machine.device) for t in providers.fill(which, scale, seed=2)]
    made = make_providers(machine, log, which, steps, templates)
    found = harness.interleave(
        {who: lambda p=p: p.sample(templates) for who, p in made.items()}, rounds(machine, count)
    )
    for who, metrics in found.items():
        for metric, samples in metrics.items():
            log.row(f"{who}: {metric}", statistics.median(samples) * 1e3, "ms", **stats.summary(samples))
    ours = [who for who, provider in made.items() if isinstance(provider, Native)]
    for who in ours:
        for theirs in (name for name in made if name not in ours):
            for metric in ("device, window", "wall, window", "device, end", "wall, end"):
                wanted = goal if (theirs, metric) == ("torch best", "wall, window") else ""
                both = found[theirs][metric], found[who][metric]
                ratio(log, f"{who}, {metric}, against {theirs}", *both, wanted)


def many_small(machine: Gpu, log: Log) -> None:
    """2000 tensors of 512: launches and the host decide."""
    windows(machine, log, "2000x512", 1, 25, ">= 5 x")


def single_windows(machine: Gpu, log: Log) -> None:
    """K = 1 at GPT-2's shapes: norm, clip and update of everybody."""
    windows(machine, log, "gpt2-124m", 1, 9)


def whole_windows(machine: Gpu, log: Log) -> None:
    """K = 4 at GPT-2's shapes; ``host`` is what a ``step()`` costs the CPU while the device works."""
    windows(machine, log, "gpt2-124m", 4, 9)


# ------------------------------------------------------------------------------- questions to decide


def tables(machine: Gpu, log: Log) -> None:
    """The add's time over the number of tensors: tables by value in 4 KB and in 32 KB, and on the device."""
    total = 1 << (16 if machine.emulated else 26)
    counts = (10, 490, 510) if machine.emulated else (16, 148, 490, 510, 1000, 2000, 4000, 4200, 8000)
    for backend in backends_of(machine, log):
        for count in counts:
            ours = Ours(machine, backend, [total // count] * count, lean=True)
            name, moved = f"{backend} add, {count} tensors", 12 * (total // count) * count
            compare(machine, log, {name: ours.add}, {name: moved}, count=7)
            start = time.perf_counter()
            for _ in range(5):
                ours.add()
            log.row(f"{name}, host alone", (time.perf_counter() - start) / 5e-3, "ms")
            machine.synchronize()


def finish_times(machine: Gpu, log: Log) -> None:
    """The time of finish over the number of elements; it runs in one block."""
    for backend in backends_of(machine, log):
        for chunks in (16, 128) if machine.emulated else (16, 1024, 15_200, 183_000, 855_000):
            ours = Ours(machine, backend, [8192], lean=True)
            ours.partials = torch.zeros(2, chunks, dtype=F64, device=machine.device)
            ours.spans = torch.tensor([[0, 0, chunks]])
            name = f"{backend} finish, {chunks * 8192 / 1e6:.1f} M elements"
            compare(machine, log, {name: ours.finish}, {name: 16 * chunks}, count=7)


def taking(machine: Gpu, log: Log) -> None:
    """take="backward" against take="step": a GPT's whole window of 4, and its peak of memory."""
    from fastaccum import FusedAccumulator

    small = {"vocab": 64, "width": 16, "layers": 2, "heads": 2, "context": 16}
    big = {"vocab": 50257, "width": 768, "layers": 12, "heads": 12, "context": 256}
    size = small if machine.emulated else big
    batch = torch.arange(4 * size["context"], device=machine.device).view(4, -1) % size["vocab"]
    for backend in backends_of(machine, log):
        for take in ("step", "backward", "torch"):
            torch.manual_seed(0)
            model = models.GPT(**size).to(machine.device)
            inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=take == "torch" or None)
            with machine.using(backend):
                wrapped = inner
                if take != "torch":
                    wrapped = FusedAccumulator(inner, 4, max_norm=1.0, take=take, backend=backend)

                def window(model: Any = model, optimizer: Any = wrapped, take: str = take) -> None:
                    for _ in range(4):
                        logits = model(batch).flatten(0, 1)
                        loss = torch.nn.functional.cross_entropy(logits, batch.flatten())
                        (loss / 4 if take == "torch" else loss).backward()
                        if take != "torch":
                            optimizer.step()
                    if take == "torch":
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()

                for _ in range(2):
                    window()
                machine.synchronize()
                machine.start_peak()
                times = []
                for _ in range(rounds(machine, 8)):
                    start = time.perf_counter()
                    window()
                    machine.synchronize()
                    times.append(time.perf_counter() - start)
            what = "torch: clip + fused AdamW" if take == "torch" else f"{backend}, take={take}"
            log.row(f"{what}: window of 4", statistics.median(times) * 1e3, "ms", **stats.summary(times))
            log.row(f"{what}: peak memory", machine.peak() / 2**20, "MiB")
            del model, inner, wrapped, window
            machine.free_memory()


def compiled(machine: Gpu, log: Log) -> None:
    """torch.compile of stock's add and of its window end."""
    if machine.emulated:
        raise Skip("emulated: compiling takes a minute and shows nothing")
    sizes = sizes_of(machine)
    stock = Stock(machine, sizes)
    step = stock.step("adamw", "foreach")

    def end() -> None:
        stock.clip()
        step()

    ours = Ours(machine, "native" if not machine.reason("native") else "triton", sizes)
    for name, call, mine in (
        ("torch add, compiled", stock.foreach_add, ours.add),
        ("torch clip + AdamW, compiled", end, ours.end),
    ):
        start = time.perf_counter()
        fast = torch.compile(call)
        fast()
        machine.synchronize()
        log.row(f"{name}: compiling", time.perf_counter() - start, "s")
        found = compare(machine, log, {name: fast, f"fastaccum beside {name}": mine})
        ratio(log, f"fastaccum against {name}", found[name], found[f"fastaccum beside {name}"])


def undecided(machine: Gpu, log: Log) -> None:
    """What only a recompilation with another design would tell."""
    raise Skip(
        "needs kernels compiled otherwise: strands against a linear map, streaming against plain loads and "
        "stores, vectors of 4 against 8 on compute capability 10"
    )


PARTS = [
    Part("bandwidth", SPEED, 20, bandwidth),
    Part("single ops", SPEED, 60, single_ops, ">= 0.85 of the copy's bandwidth"),
    Part("window end", SPEED, 40, window_end, ">= 1.4 x; with the last add >= 1.25 x"),
    Part("2000 x 512", SPEED, 40, many_small, ">= 5 x"),
    Part("windows, K=4", SPEED, 60, whole_windows),
    Part("windows, K=1", SPEED, 40, single_windows),
]
LATE_PARTS = [
    Part("number of tensors", SPEED, 40, tables),
    Part("finish over N", SPEED, 20, finish_times),
    Part("take", SPEED, 40, taking),
    Part("compiled", SPEED, 60, compiled),
    Part("recompiled variants", SPEED, 1, undecided),
]
