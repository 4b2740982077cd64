"""Whole trainings, end to end: forward, backward, and all that accumulation and the update cost.

The demo's two models, a window again and again. This is where fastaccum helps least: what it saves is a
part of the window's end, and of small models with much arithmetic the end is a small part. Every provider
repeats the same window on its own copy of the model. Peak memory is what the first two windows allocate
beside the parameters (gradients, buffers, optimizer state, activations), by the profiler as in
bench_memory.py.
"""

from __future__ import annotations

import itertools
import time
from functools import partial

import torch

from benchmarks import providers
from benchmarks.bench_memory import peak_bytes
from benchmarks.case import Case, Prepared

STEPS = (1, 4, 16)


class Plain:
    """The loop people write, right for token weights, with the default AdamW."""

    options: dict[str, object] = {}

    def __init__(self, task, steps: int) -> None:
        self.task, self.steps, self.model = task, steps, task.model()
        self.params = list(self.model.parameters())
        self.batches = list(itertools.islice(itertools.cycle(task.epochs[0]), steps))
        self.items = sum(batch.items for batch in self.batches)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The stock optimizer inside."""
        return torch.optim.AdamW(self.params, lr=self.task.lr, **self.options)

    def window(self) -> None:
        """All micro-batches of a window, and its update."""
        task, total = self.task, sum(map(self.task.weight, self.batches))
        for batch in self.batches:
            loss = task.loss(self.model, batch, "sum" if task.weighted else "mean")
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(self.params, task.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sample(self) -> dict[str, float]:
        """Seconds of a window."""
        start = time.perf_counter()
        self.window()
        return {"window": time.perf_counter() - start}

    @torch.no_grad()
    def loss(self) -> float:
        """What the training has come to, on its first micro-batch."""
        return float(self.task.loss(self.model, self.batches[0]))


class Best(Plain):
    """The same with the fused AdamW."""

    options = {"fused": True}


class Fused(Plain):
    """`FusedAccumulator` around the same optimizer."""

    take = "step"

    def make_optimizer(self) -> torch.optim.Optimizer:
        accumulator = providers.require("fastaccum", "FusedAccumulator")
        inner = super().make_optimizer()
        try:
            return accumulator(
                inner,
                self.steps,
                max_norm=self.task.max_norm,
                take=self.take,
                backend="native",
            )
        except (RuntimeError, ValueError) as error:
            raise providers.Unavailable(str(error)) from error

    def window(self) -> None:
        """The micro-batches; the last `step()` updates."""
        for batch in self.batches:
            loss = self.task.loss(self.model, batch)
            if self.task.weighted:
                self.optimizer.backward(loss, weight=batch.items)
            else:
                loss.backward()
            self.optimizer.step()


class FusedInBackward(Fused):
    """Gradients added during backward, which needs less memory."""

    take = "backward"


PROVIDERS = {
    "fastaccum": Fused,
    "fastaccum take=backward": FusedInBackward,
    "stock best": Best,
    "stock loop": Plain,
}


def prepare(name: str, steps: int) -> Prepared:
    """Two windows of every provider, its peak taken; after them all must have the same loss."""
    task = providers.require("fastaccum.demo.tasks", name)(quick=True)
    made, missing = providers.build(list(PROVIDERS), lambda who: PROVIDERS[who](task, steps))

    def two(training: Plain) -> None:
        training.window()
        training.window()

    peaks = {who: peak_bytes(partial(two, training)) for who, training in made.items()}
    losses = {who: training.loss() for who, training in made.items()}
    plain = losses["stock loop"]
    for who, loss in losses.items():
        assert abs(loss - plain) <= 1e-4 * abs(plain), f"the loss after two windows: {who}: {loss} / {plain}"
    first = next(iter(made.values()))
    return Prepared(
        samplers={who: training.sample for who, training in made.items()},
        missing=missing,
        sections={
            "peak": {
                who: {
                    "bytes": {
                        "value": peak / peaks["stock loop"],
                        "spread": 0.0,
                        "bytes": peak,
                        "text": f"{peak / 2**20:.2f} MiB",
                    }
                }
                for who, peak in peaks.items()
            }
        },
        facts={
            "tensors": len(first.params),
            "elements": sum(p.numel() for p in first.params),
            "items": first.items,
            "unit": task.unit,
        },
    )


def cases() -> list[Case]:
    """Both trainings at every window size."""
    return [
        Case(
            f"training/{label}/K={steps}",
            partial(prepare, name, steps),
            memory=1 << 29,
            rounds={1: 51, 4: 21, 16: 9}[steps],
            quick=steps == 4,
            quick_rounds=3,
        )
        for label, name in (("gpt", "docstrings_task"), ("cnn", "digits_task"))
        for steps in STEPS
    ]
