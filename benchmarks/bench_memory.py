"""Peak gradient memory of each mode against its documented formula.

How it is measured: PyTorch's profiler reports every allocation and release of the CPU allocator,
whoever makes it (a Python call, a C++ op, the autograd engine), so the running sum is exact where
a walk over Python objects would miss what lives only inside an op. Parameters are made before the
profile begins and the optimizer (SGD without momentum) has no state, so what is left is gradients
and the window's buffers. The backward makes one gradient at a time, as a real one does.

Formulas, in bytes, with S the sum of the gradients, P the sum padded as the buffer is, L the
largest gradient:

    K=1       S                   one set of gradients, no buffer
    step      2 S + P             at the second step(): kept first, fresh second, buffer
    backward  P + max(bucket, L)  the buffer, and what waits in a bucket or is being made
"""

from __future__ import annotations

import itertools
from functools import partial

import torch

from benchmarks import models, providers
from benchmarks.case import Case, Prepared
from benchmarks.shapes import named, numel

STRAND = 512  # elements: every tensor's place in the buffer starts on a multiple of it


def chain_loss(params: list[torch.Tensor]) -> torch.Tensor:
    """A scalar whose backward makes gradients of ones, one by one."""
    return models.chain_loss(params, lambda index: torch.ones(params[index].shape))


def peak_bytes(run) -> int:
    """Largest number of bytes alive at once among those that ``run()`` allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


def formula(mode: str, shapes) -> int:
    """Documented peak of a mode, in bytes."""
    plain = 4 * numel(shapes)
    padded = sum(4 * -(-numel([s]) // STRAND) * STRAND for s in shapes)
    largest = 4 * max(numel([s]) for s in shapes)
    if mode == "K=1":
        return plain
    if mode == "step":
        return 2 * plain + padded
    bucket = providers.require("fastaccum.pending", "BUCKET_BYTES")
    return padded + max(min(bucket, plain), largest)


def measure(mode: str, shapes, windows: int = 2) -> tuple[int, dict[str, int]]:
    """Peak bytes of ``windows`` windows, and what the wrapper itself reports."""
    accumulator = providers.require("fastaccum", "FusedAccumulator")
    params = [p.requires_grad_() for p in providers.fill(shapes, 0.02, seed=1)]
    steps = 1 if mode == "K=1" else 3
    optimizer = accumulator(
        torch.optim.SGD(params, lr=0.1),
        accumulation_steps=steps,
        max_norm=1.0,
        take="backward" if mode == "backward" else "step",
    )

    def run() -> None:
        for _ in range(windows * steps):
            chain_loss(params).backward()
            optimizer.step()

    return peak_bytes(run), optimizer.memory()


def measure_stock(shapes) -> int:
    """Peak bytes of the plain loop: one gradient set and the gradient in flight."""
    params = [p.requires_grad_() for p in providers.fill(shapes, 0.02, seed=1)]
    optimizer = torch.optim.SGD(params, lr=0.1)

    def run() -> None:
        for _ in range(2):
            for _ in range(3):
                chain_loss(params).backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return peak_bytes(run)


def prepare(mode: str, shapes) -> Prepared:
    """Measures; there is nothing to time."""
    try:
        measured, reported = measure(mode, shapes)
    except providers.Unavailable as reason:
        return Prepared({}, missing={"fastaccum": str(reason)})
    expected = formula(mode, shapes)
    text = f"{measured / 2**20:.1f} MiB of {expected / 2**20:.1f}"
    peak = {"value": measured / expected, "spread": 0.0, "text": text}
    stock = measure_stock(shapes)
    return Prepared(
        samplers={},
        sections={"peak": {"measured / formula": {"bytes": peak}}},
        facts={"measured": measured, "formula": expected, "stock": stock, "reported": reported},
    )


def cases() -> list[Case]:
    """Every mode, at ResNet-50's shapes and (full runs) at GPT-2's."""
    return [
        Case(f"memory/{label}/{mode}", partial(prepare, mode, named(label)),
             memory=16 * 4 * numel(named(label)) // 3, rounds=0, quick_rounds=0,
             quick=label == "resnet50")
        for label in ("resnet50", "gpt2-124m")
        for mode in ("K=1", "step", "backward")
    ]  # fmt: skip
