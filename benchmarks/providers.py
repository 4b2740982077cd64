"""Who is timed: fastaccum, stock PyTorch at its best, stock PyTorch as people write it, peers.

A window provider is handed one micro-batch after another. `arrive` (not timed) puts gradients
where backward would leave them; `close` (timed) is all that the accumulation costs from there on.
Each provider owns its parameters, so that results can be compared before anything is timed.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable

import torch

from benchmarks.shapes import Shapes, numel

LR, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0


class Unavailable(Exception):
    """A provider or a case that cannot run here; the message is the reason shown in the table."""


def fill(shapes: Shapes, scale: float, seed: int) -> list[torch.Tensor]:
    """Random tensors of ``shapes``; repeats one block of noise, as fresh noise takes seconds."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(min(numel(shapes), 1_000_003), generator=generator) * scale
    period = noise.numel()
    twice = noise.repeat(2)  # every rotation is a slice: making each anew took 29 s for 2000 small tensors
    tensors = []
    for index, shape in enumerate(shapes):
        count = numel([shape])
        start = -index % period
        tiled = twice[start : start + period]
        if count > period:
            tiled = tiled.repeat(-(-count // period))
        tensors.append(tiled[:count].reshape(shape).clone())
    return tensors


def make_fresh(templates: list[torch.Tensor], scale: float) -> deque[torch.Tensor]:
    """New gradients, made in the order in which backward makes them: last parameter first."""
    return deque(template * scale for template in reversed(templates))


class WindowProvider:
    """One way to train with windows of ``steps`` micro-batches."""

    averages = False  # divides by the number of micro-batches itself

    def __init__(self, shapes: Shapes, steps: int) -> None:
        self.params = [p.requires_grad_() for p in fill(shapes, 0.02, seed=1)]
        self.backward_order = self.params[::-1]
        self.steps = steps
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The stock optimizer inside."""
        return torch.optim.AdamW(self.params, lr=LR, weight_decay=WEIGHT_DECAY)

    def arrive(self, fresh: deque[torch.Tensor], index: int) -> None:
        """Takes micro-batch ``index``'s gradients from the list, which is left empty."""
        raise NotImplementedError

    def close(self, index: int) -> None:
        """Everything between the end of backward and the next forward."""
        raise NotImplementedError

    def norm(self) -> float:
        """Norm of the last window's gradient before clipping."""
        raise NotImplementedError

    def state(self, key: str) -> list[torch.Tensor]:
        """One of the optimizer's state tensors, per parameter."""
        return [self.optimizer.state[p][key] for p in self.params]

    def sample(self, templates: list[torch.Tensor]) -> dict[str, float]:
        """Runs one window; seconds of the whole of it and of its last `close`."""
        total = last = 0.0
        scale = 1.0 if self.averages else 1.0 / self.steps  # the loop divides its loss
        for index in range(self.steps):
            self.arrive(make_fresh(templates, scale), index)
            start = time.perf_counter()
            self.close(index)
            last = time.perf_counter() - start
            total += last
        return {"window": total, "window end": last}


class Fastaccum(WindowProvider):
    """`fastaccum.FusedAccumulator` around the same optimizer."""

    backend = "native"
    averages = True

    def make_optimizer(self) -> torch.optim.Optimizer:
        accumulator = require("fastaccum", "FusedAccumulator")
        try:
            return accumulator(
                super().make_optimizer(),
                accumulation_steps=self.steps,
                max_norm=MAX_NORM,
                backend=self.backend,
            )
        except (RuntimeError, ValueError) as error:
            raise Unavailable(f"backend {self.backend}: {error}") from error

    def arrive(self, fresh: deque[torch.Tensor], index: int) -> None:
        for param in self.backward_order:
            param.grad = fresh.popleft()

    def close(self, index: int) -> None:
        self.optimizer.step()

    def norm(self) -> float:
        return float(self.optimizer.norm)


class FastaccumReference(Fastaccum):
    """The same on the plain-PyTorch backend."""

    backend = "reference"


class StockLoop(WindowProvider):
    """The loop people write: `.grad` accumulates, the default AdamW updates."""

    def arrive(self, fresh: deque[torch.Tensor], index: int) -> None:
        self.pending = fresh
        if index == 0:  # backward hands the first gradient over as it is
            for param in self.backward_order:
                param.grad = fresh.popleft()

    def close(self, index: int) -> None:
        if index:
            for param in self.backward_order:  # each is freed right after it was added
                param.grad.add_(self.pending.popleft())
        if index == self.steps - 1:
            self.total = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def norm(self) -> float:
        return float(self.total)


class StockBest(StockLoop):
    """Stock PyTorch at its best: in-place adds, foreach clipping, fused AdamW."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


class TorchOptimi(StockLoop):
    """`torch-optimi`, whose AdamW takes the place of stock's."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return require("optimi", "AdamW")(self.params, lr=LR, weight_decay=WEIGHT_DECAY)


class DeepSpeedCPU(StockLoop):
    """`DeepSpeedCPUAdam`, likewise."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        adam = require("deepspeed.ops.adam", "DeepSpeedCPUAdam")
        try:
            return adam(self.params, lr=LR, weight_decay=WEIGHT_DECAY)
        except Exception as error:  # it compiles itself here, which fails in many ways
            raise Unavailable(f"DeepSpeedCPUAdam did not build: {error}") from error


WINDOW_PROVIDERS: dict[str, type[WindowProvider]] = {
    "fastaccum": Fastaccum,
    "stock best": StockBest,
    "stock loop": StockLoop,
    "fastaccum reference": FastaccumReference,
    "torch-optimi": TorchOptimi,
    "deepspeed": DeepSpeedCPU,
}


def require(module: str, attribute: str) -> Callable:
    """``module.attribute``, or one line that says why it cannot be had.

    Raises:
        Unavailable: with the reason.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a broken peer must not take the run down
        raise Unavailable(f"no {module}.{attribute} ({type(error).__name__}: {error})") from error


def build(names: list[str], make: Callable[[str], object]) -> tuple[dict[str, object], dict[str, str]]:
    """Makes the named providers; those that cannot run come back with their reason instead."""
    made, missing = {}, {}
    for name in names:
        try:
            made[name] = make(name)
        except Unavailable as reason:
            missing[name] = str(reason)
    return made, missing
