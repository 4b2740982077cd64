"""Whole windows with a real backward: what a training saves at most.

`bench_windows.py` times what happens after backward, with gradients that lie ready and are not in the caches.
In a training autograd adds each later gradient to `.grad` right after it was made, while it is in the caches
if it is small, and fastaccum's hooks run meanwhile. So here a real backward makes the gradients one by one,
and nothing else: one pass that reads a template and writes the gradient. Three metrics:

    window        K backward calls and all that follows them
    accumulation  the same less K backward calls alone, which keep nothing: what accumulating, norm, clip and
                  update cost this training, wherever they run
    window end    from the end of the last backward on
"""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks import models, providers
from benchmarks.bench_windows import assert_agree
from benchmarks.case import Case, Prepared
from benchmarks.shapes import Shapes, named, numel

PROVIDERS = {
    "fastaccum": providers.Fastaccum,
    "fastaccum take=backward": providers.FastaccumInBackward,
    "stock best": providers.StockBest,
    "stock loop": providers.StockLoop,
}


class Window:
    """One provider's window."""

    def __init__(
        self,
        provider: providers.WindowProvider,
        templates: list[torch.Tensor],
        leaves: list[torch.Tensor],
    ) -> None:
        """Takes a provider.

        Args:
            provider: who accumulates.
            templates: the gradients.
            leaves: of the same shapes, for the backward alone: nobody's hooks are on them.
        """
        self.provider, self.leaves = provider, leaves
        scale = 1.0 if provider.averages else 1.0 / provider.steps  # the loop divides its loss
        self.make = lambda index: templates[index] * scale

    def alone(self) -> float:
        """Seconds of as many backward calls, whose gradients are dropped outside the clock."""
        seconds = 0.0
        for _ in range(self.provider.steps):
            start = time.perf_counter()
            models.chain_loss(self.leaves, self.make).backward()
            seconds += time.perf_counter() - start
            for leaf in self.leaves:
                leaf.grad = None
        return seconds

    def sample(self) -> dict[str, float]:
        """One window, after its backward calls alone."""
        provider, alone = self.provider, self.alone()
        start = end = time.perf_counter()
        for index in range(provider.steps):
            models.chain_loss(provider.params, self.make).backward()
            end = time.perf_counter()
            provider.close_arrived(index)
        now = time.perf_counter()
        return {"window": now - start, "accumulation": now - start - alone, "window end": now - end}


def prepare(shapes: Shapes, steps: int, names: list[str]) -> Prepared:
    """Builds the providers, runs one window on each and compares the results."""
    templates = providers.fill(shapes, 10.0 / numel(shapes) ** 0.5, seed=2)  # norm 10: it clips
    leaves = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    made, missing = providers.build(names, lambda name: PROVIDERS[name](shapes, steps))
    windows = {name: Window(provider, templates, leaves) for name, provider in made.items()}
    for window in windows.values():
        window.sample()
    assert_agree(made, templates)
    return Prepared(
        samplers={name: window.sample for name, window in windows.items()},
        missing=missing,
        facts={
            "tensors": len(shapes),
            "elements": numel(shapes),
            "update": "AdamW",
            "dtype": "torch.float32",
        },
    )


def cases() -> list[Case]:
    """The goals' shapes at every K."""
    rounds = {
        "gpt2-124m": {1: 15, 2: 11, 4: 9, 16: 5},
        "resnet50": {1: 31, 2: 31, 4: 21, 16: 9},
        "2000x512": {1: 31, 2: 25, 4: 15, 16: 7},
    }
    return [
        Case(
            f"backward/{label}/K={steps}",
            partial(
                prepare, named(label), steps, list(PROVIDERS) if steps in (1, 4) else list(PROVIDERS)[:3]
            ),
            memory=4 * numel(named(label)) * (3 * len(PROVIDERS) + 7),
            rounds=number,
            quick=label == "resnet50" and steps == 4,
            quick_rounds=3,
        )
        for label, by_steps in rounds.items()
        for steps, number in by_steps.items()
    ]
