"""The ops alone, each beside the calls of PyTorch that give the same result, with their bytes.

The bytes are those of the table of ops, tests/cases.py. Per element, where a gradient or a parameter
takes e bytes (float32: 4, bf16: 2) and the buffer is float32:

    gather first    fresh read, buffer written                      e + 4
    gather second   kept and fresh read, buffer written            2e + 4
    gather later    fresh read, buffer read and written             e + 8
    gather last     likewise; the norm's partial sums are free      e + 8
    norm            gradients read                                  e
    scale           gradients read and written                     2e
    sgd             gradient read; parameter, momentum both ways   5e
    adam, adamw     gradient read; parameter, two moments          7e
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.sgd import sgd

from benchmarks import providers
from benchmarks.case import Case, Prepared
from benchmarks.shapes import Shapes, named, numel

LR, BETAS, EPS, DECAY, MOMENTUM = 1e-4, (0.9, 0.999), 1e-8, 0.01, 0.9
DECOUPLED = 1  # flag of the hyper-parameter table

# What is timed: the op, and the options with which the table of ops tells its bytes.
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "gather first": ("gather_", {"states": "o"}),
    "gather second": ("gather_", {"states": "b"}),
    "gather later": ("gather_", {"states": "a"}),
    "gather last": ("gather_", {"states": "a"}),
    "norm": ("norm_", {}),
    "scale": ("scale_", {}),
    "sgd": ("sgd_", {"rows": [{"momentum": MOMENTUM}]}),
    "adam": ("adam_", {}),
    "adamw": ("adam_", {}),
}


def moved(name: str, elements: int, dtype: torch.dtype) -> int:
    """Bytes that an op has to read and write."""
    # Here, as the table needs fastaccum, without which stock PyTorch can still be listed and timed.
    table = providers.require("tests.cases", "BY_NAME")
    op, options = TIMED[name]
    return round(table[op].bytes(elements, dtype, **options))


class Data:
    """The tensors one provider works on; the same values for each provider."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        def made(scale: float, seed: int) -> list[torch.Tensor]:
            return [t.to(dtype) for t in providers.fill(shapes, scale, seed)]

        self.params, self.fresh, self.kept = made(0.02, 1), made(1e-3, 2), made(1e-3, 3)
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p) for p in self.params]
        self.norm = torch.zeros((), dtype=torch.float64)


class Native(Data):
    """fastaccum's ops as the accumulator calls them, without the public functions' checks."""

    backend = "native"

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        super().__init__(shapes, dtype)
        choose, load = (providers.require("fastaccum.dispatch", name) for name in ("choose", "load"))
        layout = providers.require("fastaccum.layout", "Layout").of([numel([s]) for s in shapes])
        try:
            self.ops = load(choose(self.backend, torch.device("cpu")))
        except RuntimeError as error:
            raise providers.Unavailable(str(error)) from error
        count = len(shapes)
        self.index = torch.arange(count)
        self.none = self.index[:0]
        rows = list(zip(layout.offsets, layout.numels, strict=True))
        self.segments = torch.tensor(rows, dtype=torch.int64)
        self.flat = torch.zeros(layout.numel)
        self.buffer = [self.flat[o : o + n].view(s) for (o, n), s in zip(rows, shapes, strict=True)]
        self.present = torch.zeros(count, dtype=torch.uint8)
        self.partials = torch.zeros(2, layout.n_chunks, dtype=torch.float64)
        self.group = torch.zeros(count, dtype=torch.int64)
        self.steps = torch.zeros(count)
        self.scalars = torch.zeros(
            count, providers.require("fastaccum.ops", "SCALAR_COLUMNS"), dtype=torch.float64
        )
        self.factor = torch.ones(1, dtype=torch.float64)
        self.half = torch.full((1,), 0.5, dtype=torch.float64)
        self.skip = torch.zeros((), dtype=torch.int32)

    def gather(self, kept: bool, present: bool, norm: bool) -> Callable[[], None]:
        """One micro-batch into the buffer."""
        partials = self.partials if norm else None
        kept_list, kept_index = (self.kept, self.index) if kept else ([], self.none)

        def call() -> None:
            self.ops.gather_(
                self.flat, self.present, partials, self.segments, self.fresh, self.index,
                kept_list, kept_index, None, None, 2.0,
            )  # fmt: skip

        self.present.fill_(present)
        return call

    def update(self, name: str) -> Callable[[], None]:
        """One update; its bias corrections are computed once, outside the clock."""
        decay = 0.0 if name == "adam" else DECAY
        flags = DECOUPLED if name == "adamw" else 0
        row = [LR, *BETAS, EPS, decay, MOMENTUM, 0.0, float("inf"), 0.0, flags]
        hyper = torch.tensor([row], dtype=torch.float64)
        double = {"dtype": torch.float64}
        one = torch.ones((), **double)
        self.ops.finish_(
            torch.zeros(()), torch.zeros(1, **double), torch.zeros(1, **double), self.skip,
            torch.zeros((), dtype=torch.int64), self.partials, torch.zeros(0, 3, dtype=torch.int64),
            torch.full((1,), float("inf"), **double), one, one,
            self.steps, self.scalars, self.index, self.group, hyper, [], None, 2.0, None, True,
        )  # fmt: skip
        tables = (
            self.segments,
            self.index,
            self.group,
            self.index,
            hyper,
            self.scalars,
            self.factor,
            self.skip,
        )
        if name == "sgd":
            return lambda: self.ops.sgd_(self.params, self.exp_avgs, [], self.fresh, *tables)
        lists = (self.params, self.exp_avgs, self.exp_avg_sqs, [], [], self.fresh)
        return lambda: self.ops.adam_(*lists, *tables)

    def body(self, name: str) -> Callable[[], None]:
        """The call to time."""
        if name == "norm":
            return lambda: self.ops.norm_(self.partials, self.segments, self.fresh, self.index, 2.0, None)
        if name == "scale":
            return lambda: self.ops.scale_(self.fresh, self.half, self.group, float("inf"))
        if name == "gather first":
            call = self.gather(kept=False, present=False, norm=False)
        elif name == "gather second":
            call = self.gather(kept=True, present=False, norm=False)
        elif name.startswith("gather"):
            return self.gather(kept=False, present=True, norm=name == "gather last")
        else:
            return self.update(name)

        def overwrite() -> None:
            self.present.zero_()
            call()

        return overwrite

    def result(self, name: str) -> list[torch.Tensor]:
        """What the op wrote."""
        if name == "norm":
            return [self.partials[0].sum().sqrt()]
        if name == "scale":
            return self.fresh
        return self.buffer if name.startswith("gather") else [*self.params, *self.exp_avgs]


class Reference(Native):
    """The same ops in plain PyTorch."""

    backend = "reference"


class Torch(Data):
    """Stock PyTorch: a call per tensor where there is no better, else foreach or fused."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        super().__init__(shapes, dtype)
        self.buffer = [torch.zeros(s) for s in shapes]
        self.steps = [torch.ones(()) for _ in shapes]

    def each(self, call: Callable) -> Callable[[], None]:
        """``call(accumulator, fresh, kept)`` for every tensor."""

        def run() -> None:
            for tensors in zip(self.buffer, self.fresh, self.kept, strict=True):
                call(*tensors)

        return run

    def body(self, name: str) -> Callable[[], None]:
        """The call to time."""
        if name == "norm":

            def norm() -> None:
                norms = torch.stack(torch._foreach_norm(self.fresh))
                self.norm = torch.linalg.vector_norm(norms, dtype=torch.float32)

            return norm
        if name == "sgd" and self.params[0].dtype == torch.bfloat16:
            # Fused SGD with momentum is wrong here in torch 2.13: its buffers get foreign values.
            return lambda: sgd(
                self.params, self.fresh, self.exp_avgs, lr=LR, momentum=MOMENTUM, dampening=0.0,
                weight_decay=DECAY, nesterov=False, maximize=False, foreach=True,
            )  # fmt: skip
        if name == "sgd":
            return lambda: torch._fused_sgd_(
                self.params, self.fresh, self.exp_avgs, lr=LR, momentum=MOMENTUM, dampening=0.0,
                weight_decay=DECAY, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        if name in ("adam", "adamw"):
            update = torch._fused_adamw_ if name == "adamw" else torch._fused_adam_
            return lambda: update(
                self.params, self.fresh, self.exp_avgs, self.exp_avg_sqs, [], self.steps, lr=LR,
                beta1=BETAS[0], beta2=BETAS[1], eps=EPS, amsgrad=False, maximize=False,
                weight_decay=DECAY if name == "adamw" else 0.0,
            )  # fmt: skip
        return {
            "gather first": self.each(lambda acc, fresh, kept: acc.copy_(fresh)),
            "gather second": self.each(lambda acc, fresh, kept: acc.copy_(kept).add_(fresh)),
            "gather later": self.each(lambda acc, fresh, kept: acc.add_(fresh)),
            "gather last": self.each(lambda acc, fresh, kept: acc.add_(fresh)),
            "scale": lambda: torch._foreach_mul_(self.fresh, 0.5),
        }[name]

    def result(self, name: str) -> list[torch.Tensor]:
        """What the op wrote."""
        if name == "norm":
            return [self.norm]
        if name == "scale":
            return self.fresh
        return self.buffer if name.startswith("gather") else [*self.params, *self.exp_avgs]


# The reference is a specification and takes seconds here; the tests run it at tiny shapes.
PROVIDERS = {"fastaccum": Native, "torch": Torch}


def timed(call: Callable[[], None], metric: str) -> dict[str, float]:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return {metric: time.perf_counter() - start}


def prepare(
    name: str, shapes: Shapes, dtype: torch.dtype, who: dict[str, type[Data]] = PROVIDERS
) -> Prepared:
    """Runs the op once on every provider and compares what it wrote."""
    made, missing = providers.build(list(who), lambda p: who[p](shapes, dtype))
    bodies = {provider: data.body(name) for provider, data in made.items()}
    for call in bodies.values():
        call()
    expected = made["torch"].result(name)
    # PyTorch sums a norm in float32, and rounds the steps of a bf16 update in other places.
    rough = name == "norm" or (dtype == torch.bfloat16 and not name.startswith("gather"))
    rtol, floor = (2e-2, 1e-2) if rough else (1e-5, 1e-6)
    for provider, data in made.items():
        for a, b in zip(data.result(name), expected, strict=True):
            a, b = a.float(), b.float()
            atol = floor * float(b.abs().max())
            assert torch.allclose(a, b, rtol=rtol, atol=atol), f"{name}: {provider} / torch"
    return Prepared(
        samplers={p: partial(timed, call, name) for p, call in bodies.items()},
        bytes={p: {name: moved(name, numel(shapes), dtype)} for p in bodies},
        missing=missing,
        facts={"tensors": len(shapes), "elements": numel(shapes), "dtype": str(dtype)},
    )


def cases(shapes: Shapes | None = None, who: dict[str, type[Data]] = PROVIDERS) -> list[Case]:
    """One case per op and dtype, at ResNet-50's shapes unless others are given."""
    shapes = shapes or named("resnet50")
    return [
        Case(
            name=f"op/{name.replace(' ', '-')}/{label}",
            prepare=partial(prepare, name, shapes, dtype, who),
            memory=4 * numel(shapes) * 8 * len(who),
            rounds=15,
            roofline=True,
        )
        for name in TIMED
        for dtype, label in ((torch.float32, "float32"), (torch.bfloat16, "bf16"))
    ]
