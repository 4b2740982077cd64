"""A micro-batch that is not the last: forward, backward and what accumulation adds to them.

Plain PyTorch adds into an existing `.grad` during backward; fastaccum adds in `step()`. Here the
hooks run, the gradients are as warm in the cache as backward leaves them, and the window never
closes, so that nothing but the accumulation differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks import models, providers
from benchmarks.case import Case, Prepared
from benchmarks.shapes import many_small

NEVER = 1 << 30  # micro-batches per window: it never closes

Task = tuple[list[torch.nn.Parameter], Callable[[], torch.Tensor]]


def gpt(batch: int = 8, length: int = 128) -> Task:
    """Next-character loss of a small GPT."""
    model = models.GPT()
    tokens = torch.randint(0, 128, (batch, length + 1))

    def loss() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return list(model.parameters()), loss


def resnet50(batch: int = 8, size: int = 224, width: int = 64) -> Task:
    """Classification loss of ResNet-50."""
    model = models.resnet50(width=width)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    return list(model.parameters()), lambda: F.cross_entropy(model(images), labels)


def bare(count: int = 2000, size: int = 512) -> Task:
    """No compute: only the gradients are made."""
    params = [torch.nn.Parameter(p) for p in providers.fill(many_small(count, size), 0.02, 1)]
    templates = [torch.full_like(p, 1e-3, requires_grad=False) for p in params]
    return params, lambda: models.Bare.apply(templates, *params)


class Plain:
    """`loss.backward()` into an existing `.grad`."""

    def __init__(self, task: Callable[[], Task]) -> None:
        torch.manual_seed(3)  # the same model and data for every provider
        self.params, self.loss = task()

    def micro_batch(self) -> None:
        """Forward, backward, and nothing else."""
        self.loss().backward()

    def gradients(self) -> list[torch.Tensor]:
        """What was accumulated, as a sum."""
        return [p.grad for p in self.params]

    def sample(self) -> dict[str, float]:
        """One micro-batch."""
        start = time.perf_counter()
        self.micro_batch()
        return {"micro-batch": time.perf_counter() - start}


class Fused(Plain):
    """The same, closed by `FusedAccumulator.step()`."""

    take = "step"

    def __init__(self, task: Callable[[], Task]) -> None:
        accumulator = providers.require("fastaccum", "FusedAccumulator")
        super().__init__(task)
        try:
            self.optimizer = accumulator(
                torch.optim.AdamW(self.params),
                accumulation_steps=NEVER,
                reduction="sum",
                take=self.take,
                backend="native",
            )
        except (RuntimeError, ValueError) as error:
            raise providers.Unavailable(str(error)) from error

    def micro_batch(self) -> None:
        """Forward, backward, step."""
        self.loss().backward()
        self.optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        """The open window's."""
        return [self.optimizer.grad(p) for p in self.params]


class FusedInBackward(Fused):
    """Gradients taken in the hooks instead."""

    take = "backward"


PROVIDERS = {"fastaccum": Fused, "plain": Plain, "fastaccum take=backward": FusedInBackward}


def prepare(task: Callable[[], Task]) -> Prepared:
    """Three micro-batches on each provider, their sums compared; then the window stays open."""
    made, missing = providers.build(list(PROVIDERS), lambda name: PROVIDERS[name](task))
    for provider in made.values():
        for _ in range(3):
            provider.micro_batch()
    expected = made["plain"].gradients()
    for name, provider in made.items():
        for a, b in zip(provider.gradients(), expected, strict=True):
            scale = float(b.abs().max()) + 1e-12
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * scale), f"sums differ: {name}"
    return Prepared(
        samplers={name: provider.sample for name, provider in made.items()},
        missing=missing,
        facts={"tensors": len(expected), "elements": sum(g.numel() for g in expected)},
    )


def cases() -> list[Case]:
    """The three tasks."""
    return [
        Case("microbatch/gpt", partial(prepare, gpt), 1 << 30, rounds=101, quick=True,
             quick_rounds=7),
        Case("microbatch/resnet50", partial(prepare, resnet50), 4 << 30, rounds=15,
             quick_rounds=3),
        Case("microbatch/2000x512", partial(prepare, bare), 1 << 28, rounds=201, quick=True,
             quick_rounds=11),
    ]  # fmt: skip
