"""MindSpore: accumulate, clip, update and clear by its own operators, and by fastaccum's.

Run ``python -m benchmarks.mindspore_bench [--quick] [--json FILE] [--only NAME]`` with a Python that has
MindSpore (`make bench-mindspore`). Providers take turns round by round on the same gradients; one update of
each is compared with float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

import fastaccum
from benchmarks import harness, shapes, stats
from fastaccum.mindspore import FusedAccumulator, library

MICRO_BATCHES = 4
MAX_NORM = 1.0
FLOOR = 2.0**-24  # of an error: the rounding of a parameter of size 1


def lenet5(copies: int) -> shapes.Shapes:
    """LeNet-5's ten tensors, so many times."""
    one = [
        (6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,),
    ]  # fmt: skip
    return one * copies


SHAPES: dict[str, Callable[[], shapes.Shapes]] = {
    "lenet5": lambda: lenet5(1),
    "lenet5-x64": lambda: lenet5(64),
    "gpt2-124m": shapes.gpt2,
    "tiny": lambda: shapes.named("tiny"),
}
OPTIMIZERS: dict[str, Callable[[list[Parameter]], nn.Optimizer]] = {
    "Adam": lambda params: nn.Adam(params, 1e-3),
    "AdamWeightDecay": lambda params: nn.AdamWeightDecay(params, 1e-3, weight_decay=0.01),
    "Momentum": lambda params: nn.Momentum(params, 0.01, 0.9),
}


@dataclass(frozen=True)
class Case:
    """What is timed together."""

    shapes: str
    optimizer: str
    rounds: int
    quick: bool = False
    eager: bool = False  # also op by op, which takes many seconds where there are many tensors

    @property
    def name(self) -> str:
        """Under which it stands in the table."""
        return f"{self.shapes}/{self.optimizer}"


CASES = [
    Case("lenet5", "Adam", 11, eager=True),
    Case("lenet5-x64", "Adam", 7),
    Case("lenet5-x64", "AdamWeightDecay", 7),
    Case("lenet5-x64", "Momentum", 7),
    Case("gpt2-124m", "Adam", 5),
    Case("gpt2-124m", "AdamWeightDecay", 5),
    Case("gpt2-124m", "Momentum", 5),
    Case("tiny", "Adam", 3, quick=True, eager=True),
]


def parameters(sizes: shapes.Shapes, name: str) -> list[Parameter]:
    """Parameters that are the same for every provider."""
    rng = np.random.default_rng(0)
    return [
        Parameter(Tensor(rng.standard_normal(shape, np.float32)), name=f"{name}{i}")
        for i, shape in enumerate(sizes)
    ]


def gradients(sizes: shapes.Shapes) -> list[Tensor]:
    """A micro-batch's gradients, the same for every provider."""
    rng = np.random.default_rng(1)
    return [Tensor(0.01 * rng.standard_normal(shape, np.float32)) for shape in sizes]


def _sum_of_squares(x: Tensor) -> Tensor:
    return ops.reduce_sum(ops.square(x))


class Operators(nn.Cell):
    """MindSpore's way of accumulating, by its own operators.

    Each method body is what stands in tutorials; :class:`Compiled` makes graphs of them.
    """

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.sums = optimizer.parameters.clone(prefix="sum", init="zeros")
        self.zeros = ParameterTuple(optimizer.parameters).clone(prefix="zero", init="zeros")
        self.map = ops.HyperMap()
        self.average = ops.partial(ops.mul, Tensor(1.0 / MICRO_BATCHES, mindspore.float32))

    def last(self) -> Parameter:
        """What is written last."""
        return self.sums[len(self.sums) - 1]

    def accumulate(self, *grads: Tensor) -> bool:
        """Adds a micro-batch."""
        return self.map(ops.assign_add, self.sums, grads)

    def finished(self) -> tuple[Tensor, ...]:
        """Averages and clips."""
        return ops.clip_by_global_norm(self.map(self.average, self.sums), MAX_NORM)

    def clear(self) -> bool:
        """Empties the sums."""
        return self.map(ops.assign, self.sums, self.zeros)

    def end(self) -> None:
        """Averages, clips, updates (the optimizers of MindSpore are compiled themselves) and clears."""
        # As variables: a plain tuple is a constant, for which the optimizer would be compiled every time.
        self.optimizer(mindspore.mutable(self.finished()))
        self.clear()


class Compiled(Operators):
    """The same in graphs."""

    @mindspore.jit
    def accumulate(self, *grads: Tensor) -> bool:
        """Adds a micro-batch."""
        return self.map(ops.assign_add, self.sums, grads)

    @mindspore.jit
    def finished(self) -> tuple[Tensor, ...]:
        """Averages and clips; ``ops.clip_by_global_norm`` would be compiled anew at every call."""
        norm = ops.sqrt(ops.addn(self.map(_sum_of_squares, self.sums))) / MICRO_BATCHES
        factor = ops.minimum(MAX_NORM / (norm + 1e-6), 1.0) / MICRO_BATCHES
        return self.map(ops.partial(ops.mul, factor), self.sums)

    @mindspore.jit
    def clear(self) -> bool:
        """Empties the sums."""
        return self.map(ops.assign, self.sums, self.zeros)


class Fused:
    """fastaccum."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        self.accumulator = FusedAccumulator(optimizer, MICRO_BATCHES + 1, max_norm=MAX_NORM)
        self.optimizer = optimizer

    def last(self) -> Parameter:
        """What is written last."""
        return self.accumulator.sum.window

    def accumulate(self, *grads: Tensor) -> None:
        """Adds a micro-batch, and checks its arguments."""
        self.accumulator.step(grads)

    def end(self) -> None:
        """Averages, clips, updates and clears."""
        self.accumulator.flush()


PROVIDERS = {"fastaccum": Fused, "compiled operators": Compiled, "eager operators": Operators}


def finish(provider: Operators | Fused) -> None:
    """Waits until everything that was launched has run: reading the last result comes last in the queue."""
    provider.last().asnumpy()


def window(provider: Operators | Fused, grads: list[Tensor]) -> dict[str, float]:
    """One window; seconds of an accumulation, of the window's end, and of one of each."""
    for _ in range(MICRO_BATCHES - 1):
        provider.accumulate(*grads)
    finish(provider)
    start = time.perf_counter()
    provider.accumulate(*grads)
    finish(provider)
    middle = time.perf_counter()
    provider.end()
    finish(provider)
    done = time.perf_counter()
    return {"accumulate": middle - start, "window end": done - middle, "both": done - start}


def exact(name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
    """A parameter after its first update, in float64; ``g`` is the finished gradient."""
    m, root_v = 0.1 * g, np.sqrt(0.001 * g * g)
    if name == "Adam":
        return p - 1e-3 * np.sqrt(0.001) / 0.1 * m / (root_v + 1e-8)
    if name == "AdamWeightDecay":
        return p * (1 - 1e-3 * 0.01) - 1e-3 * m / (root_v + 1e-6)
    return p - 0.01 * g


def errors(case: Case, sizes: shapes.Shapes, grads: list[Tensor], found: dict[str, nn.Optimizer]) -> dict:
    """The largest error of each provider's parameters after one window, against float64."""
    largest = dict.fromkeys(found, 0.0)
    norm = np.sqrt(sum(float(np.square(g.asnumpy(), dtype=np.float64).sum()) for g in grads))
    clip = min(1.0, MAX_NORM / (norm + 1e-6))
    rng = np.random.default_rng(0)  # as in parameters(), one tensor at a time
    for i, (shape, grad) in enumerate(zip(sizes, grads, strict=True)):
        before = rng.standard_normal(shape, np.float32).astype(np.float64)
        wanted = exact(case.optimizer, before, clip * grad.asnumpy().astype(np.float64))
        for name, optimizer in found.items():
            error = np.abs(optimizer.parameters[i].asnumpy() - wanted)
            largest[name] = max(largest[name], float(error.max()))
    return largest


def run(case: Case) -> dict[str, object]:
    """Compares the results of the first window, then times; the case's record."""
    sizes = SHAPES[case.shapes]()
    grads = gradients(sizes)
    providers = {
        name: make(OPTIMIZERS[case.optimizer](parameters(sizes, "p")))
        for name, make in PROVIDERS.items()
        if case.eager or make is not Operators
    }
    for provider in providers.values():
        window(provider, grads)
    found = errors(case, sizes, grads, {name: p.optimizer for name, p in providers.items()})
    if not found["fastaccum"] <= 2 * found["compiled operators"] + FLOOR:
        raise AssertionError(f"{case.name}: too far from float64: {found}")
    samples = harness.interleave(
        {name: lambda p=provider: window(p, grads) for name, provider in providers.items()}, case.rounds
    )
    mine = samples["fastaccum"]
    return {
        "name": case.name,
        "tensors": len(sizes),
        "elements": shapes.numel(sizes),
        "errors against float64": found,
        "providers": {
            name: {metric: stats.summary(seconds) for metric, seconds in metrics.items()}
            for name, metrics in samples.items()
        },
        "against": {
            name: {metric: vars(stats.ratio(seconds, mine[metric])) for metric, seconds in metrics.items()}
            for name, metrics in samples.items()
            if name != "fastaccum"
        },
    }


def environment() -> dict[str, object]:
    """What a reader must know to believe a figure."""
    return {
        **harness.machine(),
        "mindspore": mindspore.__version__,
        "numpy": np.__version__,
        "fastaccum": fastaccum.__version__,
        "fastaccum threads": library.threads(),
        "instruction level": library.instruction_level(),
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the cases and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mindspore_bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name contains it")
    options = parser.parse_args(argv)
    chosen = [case for case in CASES if case.quick == options.quick and options.only in case.name]
    if not chosen:
        print(
            f"no case has {options.only!r} in its name; there are {[c.name for c in CASES]}", file=sys.stderr
        )
        return 2
    records = []
    print(f"{'case':<28}{'provider':<22}{'accumulate':>12}{'window end':>12}{'both':>12}   times faster")
    for case in chosen:
        record = run(case)
        records.append(record)
        for name, metrics in record["providers"].items():
            cells = "".join(
                f"{1e3 * metrics[m]['median']:>9.2f} ms" for m in ("accumulate", "window end", "both")
            )
            ratio = record["against"].get(name, {}).get("both")
            shown = f"{ratio['value']:.2f} ± {ratio['spread']:.2f}" if ratio else ""
            print(f"{case.name:<28}{name:<22}{cells}   {shown}", flush=True)
    if options.json:
        document = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "environment": environment(),
            "micro-batches per window": MICRO_BATCHES,
            "results": records,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
