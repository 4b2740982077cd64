"""The GPU's results are the CPU's, bit for bit; and nothing waits, races, or is launched without need."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import toolkit
from benchmarks.gpu_machine import CPU, Gpu, Skip
from benchmarks.gpu_part import PROOF, Log, Part, backends_of
from fastaccum import FusedAccumulator, dispatch
from fastaccum.layout import CHUNK, Layout
from tests.bits import assert_same, clone, different, whole
from tests.cases import BY_NAME, CASES, F32, F64, OpCase, Variant, hyper_row

ROOT = Path(__file__).resolve().parents[1]
BF16, F16 = torch.bfloat16, torch.float16
# Arguments that the host reads: see fastaccum/gpu.py.
HOST = {
    *("present", "segments", "fresh_index", "kept_index", "index", "spans", "max_norm"),
    *("group", "row", "hyper", "factor_index", "lr_groups"),
}
EITHER = {"weight", "kept_weight", "divisor"}  # from the host by value, or read where they lie

# ------------------------------------------------------------------------------------------- every op


def moved(value: Any, device: torch.device) -> Any:
    """A copy of nested arguments on a device, whole storages included."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(copied(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        old = value.untyped_storage()
        if old._cdata not in storages:
            storages[old._cdata] = whole(value).to(device, copy=True).untyped_storage()
        new = torch.empty(0, dtype=value.dtype, device=device)
        return new.set_(storages[old._cdata], value.storage_offset(), value.shape, value.stride())

    return copied(value)


def cpu_backend() -> Any:
    """The CPU's native kernels, which the tests hold to the reference; else the reference itself."""
    return dispatch.load(dispatch.choose("auto", CPU))


class Ops:
    """Runs cases on a machine and on the CPU."""

    def __init__(self, machine: Gpu, backend: str) -> None:
        self.machine, self.backend = machine, backend
        self.made: dict[torch.dtype, Any] = {}
        self.expected = cpu_backend()

    def backend_for(self, dtype: torch.dtype) -> Any:
        """One per dtype: Triton's kernels are compiled for every dtype that a backend has seen."""
        key = dtype if self.backend == "triton" else F32
        if key not in self.made:
            self.made[key] = self.machine.make(self.backend)
        return self.made[key]

    def check(
        self, case: OpCase, variant: Variant, dtype: torch.dtype, n: Any, number: int, **where: Any
    ) -> None:
        """Every bit of every argument is as on the CPU afterwards, and so are the canaries around it."""
        args, kwargs = case.make("cpu", dtype, n, number, **variant.options, **where)
        wanted = case.named(args, kwargs)
        stay = HOST | (EITHER if number % 2 else set())
        mine = {
            name: clone(value) if name in stay else moved(value, self.machine.device)
            for name, value in wanted.items()
        }
        args, kwargs = case.split(mine)
        getattr(self.backend_for(dtype), case.name)(*args, **kwargs)
        self.machine.synchronize()
        args, kwargs = case.split(wanted)
        getattr(self.expected, case.name)(*args, **kwargs)
        mine = {name: moved(value, CPU) for name, value in mine.items()}
        note = f"{self.backend}, {case.name}, {variant.desc}, {dtype}, {n}, {where}"
        assert_same(mine, wanted, note, variant.exact)


def jobs_of(machine: Gpu, backend: str, sizes: Sequence[int]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every case, variant and dtype, first those that are the most used."""
    ops = Ops(machine, backend)
    table = [(case, i, variant, d) for case in CASES for i, variant in enumerate(case.variants)
             for d in case.dtypes]  # fmt: skip
    table.sort(key=lambda job: job[1] > 0)
    for number, (case, i, variant, dtype) in enumerate(table):
        n = 1500 if case.unit == "chunks" else list(sizes)
        where = {"shift": number % 4} if i else {}
        what = f"{backend}: {case.name}, {variant.desc}, {dtype}"

        def job(
            case: OpCase = case, variant: Variant = variant, dtype: torch.dtype = dtype, n: Any = n,
            number: int = number, where: Mapping[str, Any] = where,
        ) -> None:  # fmt: skip
            ops.check(case, variant, dtype, n, number, **where)

        yield what, job


SIZES = (0, 600, 8193, 33, 0, 512, 100_003, 0)
SMALL = (600, 0, 33)


def native_ops(machine: Gpu, log: Log) -> None:
    """Every case of the CUDA kernels."""
    if reason := machine.reason("native"):
        raise Skip(reason)
    sizes = SMALL if machine.emulated else SIZES
    log.checks(itertools.islice(jobs_of(machine, "native", sizes), 0, None, machine.every))
    for order in ("columns", "channels_last"):
        ops = Ops(machine, "native")
        jobs = [
            (f"native: {case.name}, {order}, {dtype}",
             lambda c=case, d=dtype, o=order, p=ops: p.check(c, c.variants[0], d, [24, 8264, 8], 1, order=o))
            for case in CASES if case.unit != "chunks" for dtype in case.dtypes
        ]  # fmt: skip
        log.checks(jobs[:: machine.every])


def triton_ops(machine: Gpu, log: Log) -> None:
    """Every case of the Triton kernels; in processes of their own, because each compiles for seconds."""
    if reason := machine.reason("triton"):
        raise Skip(reason)
    if log.shard == (0, 1):
        count = 2 if machine.emulated else min(12, os.cpu_count() or 1)
        return in_shards(log, "ops triton", count, machine.emulated)
    sizes, every = SMALL if machine.emulated else SIZES, machine.every * 3 if machine.emulated else 1
    first, step = log.shard
    log.checks(itertools.islice(jobs_of(machine, "triton", sizes), first, None, step * every))


def in_shards(log: Log, part: str, count: int, emulated: bool) -> None:
    """A part in several processes at once, each of which does its share."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--worker", "--only", part]
    command += ["--emulated"] * emulated
    children = [
        subprocess.Popen(
            [*command, "--shard", f"{i}/{count}"], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    finished = 0
    try:
        for line in _lines(children):
            event = json.loads(line)
            if event["event"] == "end":
                finished += event["status"] in ("passed", "failed")
                if event["status"] not in ("passed", "failed"):
                    log.fail("a process of it", event.get("reason", "ended early"))
            elif event["event"] != "start":
                log.failed += event["event"] == "failure"
                log.emit(event)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    if finished != count:
        log.fail(part, f"{count - finished} of {count} processes did not finish")


def _lines(children: Sequence[subprocess.Popen]) -> Iterator[str]:
    """The lines of several processes as they come."""
    import selectors

    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                # A line is written at once and is short, so reading it waits for nothing.
                if line := key.fileobj.readline():
                    yield line
                else:
                    selector.unregister(key.fileobj)


# ----------------------------------------------------------------------------------------- trainings

KINDS: dict[str, Callable[[Any, torch.device], torch.optim.Optimizer]] = {
    "adamw": lambda groups, device: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adamw, lr a tensor": lambda groups, device: torch.optim.AdamW(
        groups, lr=torch.tensor(0.01, device=device)
    ),
    "adam, amsgrad, maximize": lambda groups, device: torch.optim.Adam(
        groups, lr=0.01, eps=1e-3, amsgrad=True, maximize=True
    ),
    "sgd, nesterov": lambda groups, device: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "sgd": lambda groups, device: torch.optim.SGD(groups, lr=0.01, weight_decay=0.1),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "1-norm": {"max_norm": 5.0, "norm_type": 1.0},
    "inf-norm": {"max_norm": 0.1, "norm_type": float("inf")},
    "clamped": {"max_value": 0.01},
    "sum": {"reduction": "sum", "max_norm": 1.0},
    "bf16 sums": {"accumulate_dtype": BF16},
}
USUAL_SIZES = (600, 9000, 33, 513, 1, 70_001, 8192)


class Training:
    """A training whose gradients are the same on every device: the loss is a sum of ``p * g``.

    Args:
        device: of the parameters.
        backend: of the accumulator.
        kind: of KINDS.
        dtypes: of the parameters in turn.
        sizes: of the parameters.
        steps: micro-batches a window.
        options: of the accumulator.
    """

    def __init__(
        self, device: torch.device, backend: str, kind: str, dtypes: Sequence[torch.dtype],
        sizes: Sequence[int], steps: int, **options: Any,
    ) -> None:  # fmt: skip
        self.random = torch.Generator().manual_seed(11)
        self.device, self.steps = device, steps
        self.params = [
            torch.nn.Parameter(torch.randn(n, generator=self.random).to(device, dtype))
            for n, dtype in zip(sizes, itertools.cycle(dtypes), strict=False)
        ]
        half = len(self.params) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:], "weight_decay": 0.01}]
        self.optimizer = FusedAccumulator(KINDS[kind](groups, device), steps, backend=backend, **options)
        self.norms: list[Tensor] = []

    def gradients(self) -> list[Tensor]:
        """The next micro-batch's, from the host."""
        return [
            torch.randn(p.numel(), generator=self.random).to(p.dtype).to(self.device) for p in self.params
        ]

    def loss(self, gradients: Sequence[Tensor], without: int | None = None) -> Tensor:
        """A loss with these gradients; every so-many-th parameter may have none."""
        pairs = [
            (p, g) for k, (p, g) in enumerate(zip(self.params, gradients, strict=True))
            if without is None or k % 3 != without
        ]  # fmt: skip
        return torch.stack([(p * g).sum().float() for p, g in pairs]).sum()

    def run(self, windows: int, *, missing: bool = False, weights: bool = False, flush: int = 0) -> Training:
        """Whole windows, and then a window of ``flush`` micro-batches."""
        for i in range(windows * self.steps + flush):
            loss = self.loss(self.gradients(), i % 4 if missing else None)
            self.optimizer.backward(loss, **({"weight": float(1 + i % 3)} if weights else {}))
            self.optimizer.step()
            if self.optimizer.updated:
                self.norms.append(self.optimizer.norm.clone())
        if flush:
            assert self.optimizer.flush()
            self.norms.append(self.optimizer.norm.clone())
        return self

    def result(self) -> dict[str, Tensor]:
        """Parameters, state and norms on the host."""
        found = {f"norm {i}": norm for i, norm in enumerate(self.norms)}
        found["skipped"] = self.optimizer.skipped
        for k, p in enumerate(self.params):
            found[f"parameter {k}"] = p.detach()
            state = self.optimizer.state.get(p, {})
            found |= {f"{key} {k}": v for key, v in state.items() if isinstance(v, Tensor)}
        return {name: value.to(CPU, copy=True) for name, value in found.items()}


def assert_equal(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert got.keys() == wanted.keys(), f"one has {got.keys() ^ wanted.keys()}"
    for name, value in wanted.items():
        bad = different(got[name], value)
        assert not bad.any(), f"{name} differs in {int(bad.sum())} of {bad.numel()} places"


def _train(
    machine: Gpu, backend: str, kind: str, dtypes: Sequence[torch.dtype], sizes: Sequence[int], steps: int,
    options: Mapping[str, Any], **run: Any,
) -> None:  # fmt: skip
    with machine.using(backend):
        got = Training(machine.device, backend, kind, dtypes, sizes, steps, **options).run(3, **run).result()
    wanted = Training(CPU, dispatch.choose("auto", CPU), kind, dtypes, sizes, steps, **options)
    assert_equal(got, wanted.run(3, **run).result())


def trainings(machine: Gpu, log: Log) -> None:
    """Whole trainings of the accumulator: K, take, clipping, weights, missing gradients, dtypes, flush."""
    for backend in backends_of(machine, log, interpreted=True):
        table = [
            *((kind, option, 2, "step") for kind in KINDS for option in ("plain", "clipped")),
            *(("adamw", option, 3, take) for option in OPTIONS for take in ("step", "backward")),
            *(("adamw", "clipped", steps, "step") for steps in (1, 4)),
        ]
        dtypes = ([F32], [F32, BF16], [F64, F32], [F16, BF16, F32])
        jobs = []
        sizes = USUAL_SIZES
        if machine.emulated:
            table, sizes = table[::3], USUAL_SIZES[:4]
        if machine.emulated and backend == "triton":
            table, sizes = table[:1], USUAL_SIZES[:1]
        for number, (kind, option, steps, take) in enumerate(table):
            some, run = dtypes[number % 4], {"missing": number % 3 == 1, "weights": number % 3 == 2}
            options = {**OPTIONS[option], "take": take}
            jobs.append((
                f"{backend}: {kind}, {option}, K={steps}, {take}, {some}, {run}",
                lambda k=kind, s=steps, o=options, d=some, r=run, b=backend, n=sizes: _train(
                    machine, b, k, d, n, s, o, flush=0 if s == 1 else 1, **r
                ),
            ))  # fmt: skip
        log.checks(jobs)


def long_tables(machine: Gpu, log: Log) -> None:
    """More tensors than fit by value, of several dtypes: their table goes through pinned memory."""
    count = 4100 if machine.emulated else 5000
    sizes = [1 + k * 7 % 90 for k in range(count)]
    for backend in backends_of(machine, log):
        for dtypes in [[F32], [F32, BF16, F64]][int(machine.emulated) :]:
            what = f"{backend}: {count} tensors, {dtypes}"
            log.checks([(what, lambda d=dtypes, b=backend: _train(
                machine, b, "adamw", d, sizes, 2, {"max_norm": 1.0}, missing=True))])  # fmt: skip


# ------------------------------------------------------------------------- streams, graphs, waiting


def streams(machine: Gpu, log: Log) -> None:
    """A training on a side stream is the one on the default stream."""

    def job(backend: str, take: str) -> None:
        results = []
        for side in (False, True):
            with machine.using(backend):
                make = (machine.device, backend, "adamw", [F32, BF16], USUAL_SIZES, 2)
                if side:
                    with machine.stream():
                        training = Training(*make, take=take, max_norm=0.5).run(4, flush=1)
                else:
                    training = Training(*make, take=take, max_norm=0.5).run(4, flush=1)
                machine.synchronize()
                results.append(training.result())
        assert_equal(results[1], results[0])

    for backend in backends_of(machine, log):
        log.checks([(f"{backend}: {t}", lambda t=t, b=backend: job(b, t)) for t in ("step", "backward")])


class Replayed:
    """One training whose windows are replays of a graph, and its twin that runs them."""

    def __init__(self, machine: Gpu, kind: str, steps: int, closed: int, **options: Any) -> None:
        self.machine, self.closed = machine, closed
        make = (machine.device, "native", kind, [F32, BF16], USUAL_SIZES[:5], steps)
        self.twins = [Training(*make, **options) for _ in range(2)]
        self.inputs = [[[torch.zeros_like(p) for p in t.params] for _ in range(closed)] for t in self.twins]

    def window(self, twin: int) -> None:
        """The micro-batches of one window, flushed if they are fewer than it holds."""
        training = self.twins[twin]
        for given in self.inputs[twin]:
            training.loss(given).backward()
            training.optimizer.step()
        if self.closed < training.steps:
            training.optimizer.flush()

    def feed(self) -> None:
        """New gradients, and a new learning rate."""
        for given in self.inputs[0]:
            for tensor, new in zip(given, self.twins[0].gradients(), strict=True):
                tensor.copy_(new.detach())
        for mine, theirs in zip(*self.inputs, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                b.copy_(a)
        for training in self.twins:
            for group in training.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.9)

    def warm_up(self) -> None:
        """Two windows of each; and what the third reads."""
        for _ in range(2):
            self.feed()
            self.window(0)
            self.window(1)
        self.feed()
        self.machine.synchronize()

    def check(self) -> None:
        """Two windows to warm up, then one capture and five replays."""
        machine = self.machine
        with machine.stream():
            self.warm_up()
            graph = machine.capture(lambda: self.window(0))
            for _ in range(5):
                graph.replay()
                self.window(1)
                machine.synchronize()
                assert_equal(self.twins[0].result(), self.twins[1].result())
                self.feed()
        moved_on = self.twins[0].optimizer.state[self.twins[0].params[0]]
        assert int(moved_on.get("step", torch.tensor(7.0))) == 7, "replays have not counted their steps"


def graphs(machine: Gpu, log: Log) -> None:
    """Whole windows in CUDA graphs, captured so that any synchronisation or copy raises."""
    if machine.reason("native"):
        raise Skip(f"native: {machine.reason('native')}; Triton's tables cannot be uploaded in a capture")
    lr = "adamw, lr a tensor"
    table = [
        ("K=2", 2, 2, {}), ("K=2, clipped", 2, 2, {"max_norm": 0.5}), ("K=1", 1, 1, {"max_norm": 0.5}),
        ("K=2, taken in backward", 2, 2, {"take": "backward", "max_norm": 0.5}),
        ("a flush of 2 of 4", 4, 2, {"max_norm": 0.5}), ("a flush of 1 of 4", 4, 1, {"max_norm": 0.5}),
    ]  # fmt: skip
    with machine.using("native"):
        log.checks(
            (what, lambda k=steps, c=closed, o=options: Replayed(machine, lr, k, c, **o).check())
            for what, steps, closed, options in table
        )
        log.checks([("a learning rate that is a number is refused", lambda: _float_lr(machine))])


def _float_lr(machine: Gpu) -> None:
    replayed = Replayed(machine, "adamw", 2, 2)
    with machine.stream():
        replayed.warm_up()
        try:
            machine.capture(lambda: replayed.window(0))
        except RuntimeError as error:
            assert "make lr a tensor" in str(error), str(error)
        else:
            raise AssertionError("it was captured")


def no_waiting(machine: Gpu, log: Log) -> None:
    """From the second window on, nothing between backward and the next forward waits for the device."""

    def job(backend: str, kind: str, take: str, **run: Any) -> None:
        with machine.using(backend):
            training = Training(
                machine.device, backend, kind, [F32, BF16], USUAL_SIZES, 2, max_norm=0.5, take=take
            )
            training.run(1, flush=1, **run)
            given = [training.gradients() for _ in range(7)]  # from the host: that waits
            machine.synchronize()
            weights = run.get("weights", False)
            with machine.no_waiting():
                for i, gradients in enumerate(given):
                    loss = training.loss(gradients)
                    training.optimizer.backward(loss, **({"weight": 1.0 + i % 3} if weights else {}))
                    training.optimizer.step()
                training.optimizer.flush()
            assert int(training.optimizer.skipped) == 0

    for backend in backends_of(machine, log):
        log.checks(
            (f"{backend}: {kind}, {take}, weights: {weights}",
             lambda b=backend, k=kind, t=take, w=weights: job(b, k, t, weights=w))
            for kind in ("adamw", "adamw, lr a tensor", "sgd, nesterov")
            for take in ("step", "backward") for weights in (False, True)
        )  # fmt: skip


def launches(machine: Gpu, log: Log) -> None:
    """A window ends with three launches; of one micro-batch with a fourth, which stores new addresses."""

    def job(backend: str, steps: int, wanted: int) -> None:
        with machine.using(backend):
            training = Training(machine.device, backend, "adamw", [F32], USUAL_SIZES, steps, max_norm=0.5)
            training.run(3)
            for _ in range(steps - 1):
                training.loss(training.gradients()).backward()
                training.optimizer.step()
            training.loss(training.gradients()).backward()
            kernels, copies = machine.launches(training.optimizer.step)
        log.row(f"{backend}, K={steps}", len(kernels), "launches", goal=f"<= {wanted}", kernels=kernels,
                copies=len(copies))  # fmt: skip
        assert len(kernels) <= wanted, f"{len(kernels)} launches: {kernels}"

    for backend in backends_of(machine, log):
        for steps, most in ((1, 4), (2, 3)):
            log.checks([(f"{backend}, K={steps}", lambda b=backend, k=steps, n=most: job(b, k, n))])


# --------------------------------------------------------------------------------- beyond 32 bits


def large(machine: Gpu, log: Log) -> None:
    """More than 2^31 elements: add with norm, norm, and AdamW; both ends and what lies behind the giant."""
    giant = (2 if machine.emulated else 2**18 + 2) * CHUNK
    need = giant * (4 + 4 + 2 + 2 * 2) + (4 << 30)  # sums, their making, parameters, states; and the rest
    if machine.free_memory() < need:
        raise Skip(f"{need / 2**30:.0f} GiB are needed, {machine.free_memory() / 2**30:.0f} are free")
    log.note(f"{giant} elements")
    for backend in backends_of(machine, log, interpreted=True):
        log.checks([(backend, lambda b=backend: _large(machine, b, giant))])
        machine.free_memory()


def _large(machine: Gpu, backend: str, giant: int) -> None:
    sizes, ops, cpu, device = [giant, 70_001], machine.make(backend), cpu_backend(), machine.device
    layout = Layout.of(sizes)
    rows = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)))
    index = torch.arange(2)
    pieces = (slice(0, 5000), slice(giant - 5001, giant))  # of the giant: elements are independent

    def filled(n: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        values = torch.randn(min(n, 1 << 16), generator=random).to(dtype).to(device)
        return values.repeat(-(-n // len(values)))[:n]  # cheap, and the ends differ

    buffer = torch.zeros(layout.numel, device=device)
    buffer[: sizes[0]] = filled(giant, 1, F32)
    buffer[layout.offsets[1] : layout.offsets[1] + sizes[1]] = filled(sizes[1], 2, F32)
    grads = [filled(n, 3 + i) for i, n in enumerate(sizes)]
    before = _ends(buffer, layout, pieces, sizes)
    partials = torch.full((2, layout.n_chunks), float("nan"), dtype=F64, device=device)
    present = torch.ones(2, dtype=torch.uint8)
    ops.gather_(buffer, present, partials, rows, grads, index, [], index[:0], None, None, 2.0)
    after = _ends(buffer, layout, pieces, sizes)
    added = [*(grads[0][p].cpu() for p in pieces), grads[1].cpu()]
    for got, old, grad in zip(after, before, added, strict=True):
        assert torch.equal(got, old + grad.float()), "the sums are not the CPU's"
    last = -(-sizes[1] // CHUNK)
    wanted = torch.full((2, last), float("nan"), dtype=F64)
    alone = torch.tensor([[0, sizes[1]]])
    cpu.norm_(wanted, alone, [after[2]], index[:1], 2.0, None)
    assert torch.equal(partials[:, -last:].cpu(), wanted), "the last partials are not the CPU's"
    again = torch.full_like(partials, float("nan"))
    views = [buffer[o : o + n] for o, n in zip(layout.offsets, sizes, strict=True)]
    ops.norm_(again, rows, views, index, 2.0, None)
    assert torch.equal(again, partials), "norm_ and gather_ do not agree"
    exact = sum(float(part.double().square().sum()) for part in buffer.split(1 << 28))
    assert abs(float(partials[0].sum()) / exact - 1) < 1e-9 and not partials[1].any()
    del again, views
    _large_update(machine, ops, cpu, buffer, grads, rows, pieces, layout, sizes)


def _ends(buffer: Tensor, layout: Layout, pieces: Sequence[slice], sizes: Sequence[int]) -> list[Tensor]:
    at = layout.offsets[1]
    return [buffer[p].to(CPU, copy=True) for p in (*pieces, slice(at, at + sizes[1]))]


def _large_update(
    machine: Gpu, ops: Any, cpu: Any, buffer: Tensor, params: list[Tensor], rows: Tensor,
    pieces: Sequence[slice], layout: Layout, sizes: Sequence[int],
) -> None:  # fmt: skip
    device, index = machine.device, torch.arange(2)
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    double = {"dtype": F64}
    hyper = torch.tensor([hyper_row(weight_decay=0.1, decoupled=True)], **double)
    scalars = torch.tensor([[0.1, 30.0, 1.0, 0.01]] * 2, **double)
    factor, skip = torch.full((1,), 0.3, **double), torch.zeros((), dtype=torch.int32)

    def ends(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.to(CPU, copy=True) for t in (*(tensors[0][p] for p in pieces), tensors[1])]

    old, sums = ends(params), _ends(buffer, layout, pieces, sizes)
    grads = [buffer[o : o + n] for o, n in zip(layout.offsets, sizes, strict=True)]
    zero = torch.zeros(2, dtype=torch.int64)
    on_device = (scalars.to(device), factor.to(device), skip.to(device))
    ops.adam_(params, *states, [], [], grads, rows, index, zero, index, hyper, *on_device)
    machine.synchronize()
    for i, (param, total) in enumerate(zip(old, sums, strict=True)):
        mine = [torch.zeros_like(param) for _ in range(2)]
        one = torch.tensor([[0, param.numel()]])
        cpu.adam_(
            [param], [mine[0]], [mine[1]], [], [], [total], one, index[:1], zero[:1], index[:1], hyper,
            scalars, factor, skip,
        )  # fmt: skip
        for name, got, wanted in (
            ("parameters", ends(params)[i], param),
            ("exp_avg", ends(states[0])[i], mine[0]),
            ("exp_avg_sq", ends(states[1])[i], mine[1]),
        ):
            assert torch.equal(got, wanted), f"{name}, place {i}, are not the CPU's"


# ----------------------------------------------------------------------------------- the sanitizer


def reduced_variants() -> list[tuple[OpCase, Variant]]:
    """The usual variant of every op, and those that take in many of its ways."""
    return [
        (case, variant)
        for case in CASES
        for at, variant in enumerate(case.variants)
        if at == 0 or "every" in variant.desc or "three" in variant.desc
    ]


def reduced(machine: Gpu, log: Log) -> None:
    """What runs under compute-sanitizer: few and small cases of every op, and one window."""
    if reason := machine.reason("native"):
        raise Skip(reason)
    ops = Ops(machine, "native")
    jobs = []
    for case, variant in reduced_variants():
        n = 70 if case.unit == "chunks" else [600, 0, 33, 8193]
        jobs.append((
            f"{case.name}, {variant.desc}",
            lambda c=case, v=variant, n=n: ops.check(c, v, c.dtypes[0], n, 1, shift=1),
        ))  # fmt: skip
    log.checks(jobs)
    case, states = BY_NAME["gather_"], "ab-okp"
    sizes = [1 + k % 3 for k in range(4100)]
    variant = Variant("a long table", {"states": states, "weight": 0.3})
    if not machine.emulated:
        log.checks([("a long table", lambda: ops.check(case, variant, F32, sizes, 1))])


def sanitizer(machine: Gpu, log: Log) -> None:
    """compute-sanitizer's memcheck and racecheck over :func:`reduced`."""
    if reason := machine.reason("native"):
        raise Skip(reason)
    if machine.emulated:
        log.note("emulated: the reduced set runs in this process, without a sanitizer")
        return reduced(machine, log)
    program = toolkit.find("compute-sanitizer")
    if program is None:
        raise Skip("compute-sanitizer is not on this machine")
    children, only = {}, _filter(program)
    worker = [sys.executable, "-m", "benchmarks.gpu_check", "--worker", "--only", "reduced"]
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "86", *only, *worker]
        # Torch's memory pool would hide an access beside a tensor.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        children[tool] = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        log.checks((tool, lambda t=tool, c=child: _judge(t, c)) for tool, child in children.items())
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()


def _filter(program: str) -> list[str]:
    """Looks at our kernels only, as torch's take minutes; the option has had two names."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60).stdout
    names = [name for name in ("--kernel-name", "--kernel-regex") if re.search(rf"{name}\b(?!-)", text)]
    return [names[0], "kns=fastaccum"] if names else []


def _judge(tool: str, child: subprocess.Popen) -> None:
    text, _ = child.communicate()
    verdict = [line for line in text.splitlines() if "SUMMARY" in line]
    done = any('"event": "end"' in line and '"passed"' in line for line in text.splitlines())
    assert child.returncode == 0 and done, f"status {child.returncode}, {verdict}: {text[-1500:]}"


PARTS = [
    Part("ops native", PROOF, 90, native_ops, "every bit is the CPU's"),
    Part("trainings", PROOF, 90, trainings, "every bit is the CPU's"),
    Part("no waiting", PROOF, 40, no_waiting, "zero synchronisations"),
    Part("graphs", PROOF, 40, graphs, "replays are eager windows, bit for bit"),
    Part("streams", PROOF, 20, streams, "every bit is the default stream's"),
    Part("launches", PROOF, 30, launches, "3 per window end"),
    Part("long tables", PROOF, 40, long_tables, "every bit is the CPU's"),
    Part("large", PROOF, 60, large, "beyond 2^31 elements"),
]
LATE_PARTS = [
    Part("ops triton", PROOF, 240, triton_ops, "every bit is the CPU's"),
    Part("sanitizer", PROOF, 90, sanitizer, "no error, no race"),
]
HIDDEN_PARTS = [Part("reduced", PROOF, 90, reduced)]
