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

MAX_NORM = 1.0
# What each update is made with, by the name of its class in torch.optim.
UPDATES: dict[str, dict[str, object]] = {
    "AdamW": {"lr": 1e-4, "weight_decay": 0.01},
    "Adam": {"lr": 1e-4},
    "SGD": {"lr": 1e-2, "momentum": 0.9},  # weight decay would hide in the buffers that are compared
}
# The state that each keeps, and the power of the gradient in it.
STATES = {"AdamW": {"exp_avg": 1, "exp_avg_sq": 2}, "SGD": {"momentum_buffer": 1}}
STATES["Adam"] = STATES["AdamW"]


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
    """One way to train with windows of ``steps`` micro-batches, and to update by ``update``."""

    averages = False  # divides by the number of micro-batches itself
    update, dtype = "AdamW", torch.float32
    own_state = False  # keeps something else than stock's moments: held to its parameters only

    def __init__(
        self, shapes: Shapes, steps: int, update: str = "AdamW", dtype: torch.dtype = torch.float32
    ) -> None:
        self.params = [p.to(dtype).requires_grad_() for p in fill(shapes, 0.02, seed=1)]
        self.backward_order = self.params[::-1]
        self.steps, self.update, self.dtype = steps, update, dtype
        self.optimizer = self.make_optimizer()

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        """The stock optimizer inside."""
        return getattr(torch.optim, self.update)(self.params, **UPDATES[self.update], **options)

    def only(self, update: str, dtype: torch.dtype = torch.float32) -> None:
        """Raises Unavailable for every other update and dtype: the provider has no other."""
        if (self.update, self.dtype) != (update, dtype):
            raise Unavailable(f"has {update} of {dtype} only")

    def arrive(self, fresh: deque[torch.Tensor], index: int) -> None:
        """Takes micro-batch ``index``'s gradients from the list, which is left empty."""
        raise NotImplementedError

    def close(self, index: int) -> None:
        """Everything between the end of backward and the next forward."""
        raise NotImplementedError

    def close_arrived(self, index: int) -> None:
        """The same where a real backward has brought, and stock added, the gradients already."""
        self.close(index)

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

    backend, take = "native", "step"
    averages = True

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        accumulator = require("fastaccum", "FusedAccumulator")
        try:
            return accumulator(
                super().make_optimizer(),
                accumulation_steps=self.steps,
                max_norm=MAX_NORM,
                take=self.take,
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


class FastaccumInBackward(Fastaccum):
    """The same with gradients added while backward runs; needs a real one."""

    take = "backward"


class FastaccumReference(Fastaccum):
    """The same on the plain-PyTorch backend."""

    backend = "reference"


class FastaccumTriton(Fastaccum):
    """The same on the Triton kernels, which need a GPU."""

    backend = "triton"


class StockLoop(WindowProvider):
    """The loop people write: `.grad` accumulates, the default AdamW updates."""

    def arrive(self, fresh: deque[torch.Tensor], index: int) -> None:
        self.pending = fresh
        if index == 0:  # backward hands the first gradient over as it is
            for param in self.backward_order:
                param.grad = fresh.popleft()

    def add(self) -> None:
        """What backward does with the gradients of a later micro-batch; each is freed right after."""
        for param in self.backward_order:
            param.grad.add_(self.pending.popleft())

    def close(self, index: int) -> None:
        if index:
            self.add()
        self.close_arrived(index)

    def close_arrived(self, index: int) -> None:
        if index == self.steps - 1:
            self.end()
            self.optimizer.zero_grad()

    def end(self) -> None:
        """Clip and update."""
        self.total = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()

    def norm(self) -> float:
        return float(self.total)


class StockBest(StockLoop):
    """Stock PyTorch at its best: in-place adds, foreach clipping, the fused update."""

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        # Fused SGD with momentum is wrong for bf16 in torch 2.13: its buffers get foreign values.
        wrong = self.update == "SGD" and self.dtype == torch.bfloat16
        return super().make_optimizer(**{"foreach" if wrong else "fused": True})


class StockForeach(StockLoop):
    """The loop with the foreach update."""

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        return super().make_optimizer(foreach=True)


class StockCompiled(StockForeach):
    """The loop with clip and update compiled as one (the adds are calls of backward)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.compiled = torch.compile(self._end)

    def _end(self) -> torch.Tensor:
        total = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.optimizer.step()
        return total

    def end(self) -> None:
        self.total = self.compiled()


class TorchOptimi(StockLoop):
    """`torch-optimi`, whose AdamW takes the place of stock's; its moments have their bias taken out."""

    own_state = True

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        self.only("AdamW")
        return require("optimi", "AdamW")(self.params, betas=(0.9, 0.999), eps=1e-8, **UPDATES["AdamW"])


class DeepSpeedCPU(StockLoop):
    """`DeepSpeedCPUAdam`, likewise."""

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        self.only("AdamW")
        adam = require("deepspeed.ops.adam", "DeepSpeedCPUAdam")
        try:
            return adam(self.params, **UPDATES["AdamW"])
        except Exception as error:  # it compiles itself here, which fails in many ways
            raise Unavailable(f"DeepSpeedCPUAdam did not build: {error}") from error


class GpuOnly(StockLoop):
    """A peer whose kernels run on a GPU only; gpu_speed.py times it there."""

    def make_optimizer(self, **options: object) -> torch.optim.Optimizer:
        raise Unavailable("runs on a GPU only: make gpu-check times it there")


WINDOW_PROVIDERS: dict[str, type[WindowProvider]] = {
    "fastaccum": Fastaccum,
    "stock best": StockBest,
    "stock loop": StockLoop,
    "stock foreach": StockForeach,
    "stock compiled": StockCompiled,
    "fastaccum reference": FastaccumReference,
    "fastaccum triton": FastaccumTriton,
    "torch-optimi": TorchOptimi,
    "deepspeed": DeepSpeedCPU,
    "apex": GpuOnly,
    "transformer engine": GpuOnly,
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
