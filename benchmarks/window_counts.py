"""Counts what a window makes PyTorch do: calls, allocations, reads by the host. No clock is looked at.

PyTorch's profiler is used and not a TorchDispatchMode: the dispatch mode sees what Python calls, the profiler
also what a C++ op calls in turn (`_foreach_norm` of 161 tensors on the CPU is one call to the mode, and 162
more to the profiler). It reports every allocation of the CPU allocator, too. Counted is what `close` does,
in the second window, as the first makes the optimizer's state, the buffers and the tables.

The windows of TRAINED run a backward, so that what hooks and buckets do counts as well. Gradients come one
by one from a chain (bench_memory.chain_loss); what the chain does with plain parameters is taken off, which
leaves the wrapper's part.

* operators: `aten::` and `fastaccum::` calls, nested ones as well.
* fastaccum operators: of these, ours. On a GPU each is one kernel launch.
* allocations, bytes allocated: of PyTorch's allocator. A table that a C++ op keeps in a std::vector while it
  runs is not among them.
* host reads: a value that Python or C++ asks of a tensor, and tensors that `cpu`, `tolist` or `numpy` bring
  to the host. On a GPU each makes the host wait if the tensor lies there. (A CPU cannot tell whether
  `to(device)` would be such a copy: it is not counted.)

With take="backward" a host read is also what the window asks of its own tables, which lie on the host.

Of the host reads here, stock's are those of its step counts, one per parameter: on a GPU they lie on the
host, or the fused kernel reads them. Ours is one per window, whether to skip, asked where the answer is there
already; "fastaccum, as on a GPU" has a backend that says that it is not, so that the device decides.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks import bench_memory, providers
from benchmarks.shapes import Shapes, named

SHAPES = ("resnet50", "2000x512")
STEPS = (1, 4)
OURS = "fastaccum"
AS_ON_GPU = "fastaccum, as on a GPU"
NAMES = (OURS, AS_ON_GPU, "stock best", "stock loop")
# {name: take}; at TRAINED_AT only.
TRAINED = {f"fastaccum, trained, take={take}": take for take in ("step", "backward")}
TRAINED_AT = ("resnet50", 4)
# Each read of one value ends in _local_scalar_dense: to count item and is_nonzero, through which it may have
# come, would make three of it.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
# They read memory that lies on the host, and dispatch nothing there, so the profiler cannot see them.
COPIES_TO_HOST = ("tolist", "numpy", "cpu", "__array__")


class HostCopies(TorchFunctionMode):
    """Counts what copies to the host wherever the tensor lies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in COPIES_TO_HOST
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """The native CPU ops behind a backend that the host may not ask for results."""
    from fastaccum import dispatch

    load = dispatch.load

    def patched(name: str, device: torch.device = dispatch.CPU) -> Any:
        return SimpleNamespace(**{**vars(load(name, device)), "synchronous": False})

    dispatch.load = patched
    try:
        yield
    finally:
        dispatch.load = load


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch allocates a buffer per thread where it sums a large tensor with several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def events_of(run: Any) -> tuple[Counter[str], list[int]]:
    """Calls by name, and the sizes of the allocations, that ``run()`` makes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    calls: Counter[str] = Counter()
    sizes = []
    for event in profile.profiler.kineto_results.events():
        if event.name() != "[memory]":
            calls[event.name()] += 1
        elif event.nbytes() > 0:  # a release is negative
            sizes.append(event.nbytes())
    return calls, sizes


def measure(name: str, shapes: Shapes, steps: int) -> dict[str, int]:
    """The counts of one steady window of a provider.

    Raises:
        providers.Unavailable: it cannot run here.
    """
    templates = providers.fill(shapes, 1e-3, seed=2)
    with one_thread(), as_on_gpu() if name == AS_ON_GPU else contextlib.nullcontext():
        provider = providers.WINDOW_PROVIDERS[OURS if name == AS_ON_GPU else name](shapes, steps)
        provider.sample(templates)
        calls: Counter[str] = Counter()
        sizes: list[int] = []
        copies = HostCopies()
        for index in range(steps):
            provider.arrive(providers.make_fresh(templates, 1.0), index)
            with copies:
                more, allocated = events_of(lambda index=index: provider.close(index))
            calls += more
            sizes += allocated
    return _counts(calls, sizes, copies)


def _counts(calls: Counter[str], sizes: list[int], copies: HostCopies) -> dict[str, int]:
    return {
        "operators": sum(n for call, n in calls.items() if call.startswith(("aten::", "fastaccum::"))),
        "fastaccum operators": sum(n for call, n in calls.items() if call.startswith("fastaccum::")),
        "allocations": len(sizes),
        "bytes allocated": sum(sizes),
        "host reads": sum(calls[read] for read in READS) + copies.count,
    }


def measure_trained(take: str, shapes: Shapes, steps: int) -> dict[str, int]:
    """The counts of one steady window with its backwards, less those of the backwards alone."""
    params = [p.requires_grad_() for p in providers.fill(shapes, 0.02, seed=1)]

    def alone() -> None:
        for _ in range(steps):
            bench_memory.chain_loss(params).backward()
            for p in params:
                p.grad = None

    bare = counted(alone)
    optimizer = providers.require("fastaccum", "FusedAccumulator")(
        torch.optim.AdamW(params), accumulation_steps=steps, max_norm=1.0, take=take, backend="native"
    )

    def window() -> None:
        for _ in range(steps):
            bench_memory.chain_loss(params).backward()
            optimizer.step()

    window()
    found = counted(window)
    return {name: n - bare[name] for name, n in found.items()}


def counted(run: Any) -> dict[str, int]:
    """The counts of ``run()``."""
    copies = HostCopies()
    with one_thread(), copies:
        calls, sizes = events_of(run)
    return _counts(calls, sizes, copies)


def measure_all(names: Iterable[str] = (*NAMES, *TRAINED)) -> dict[str, dict[str, int]]:
    """The counts of every shape, window size and provider: {shape/K=steps/provider: counts}."""
    found = {}
    for label, steps, name in itertools.product(SHAPES, STEPS, tuple(names)):
        window = f"{label}/K={steps}/{name}"
        if name not in TRAINED:
            found[window] = measure(name, named(label), steps)
        elif (label, steps) == TRAINED_AT:
            found[window] = measure_trained(TRAINED[name], named(label), steps)
    return found
