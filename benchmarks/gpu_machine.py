"""What the checks of benchmarks/gpu_check.py run on: a GPU, or a stand-in on the CPU that proves the script.

The stand-in has the emulated CUDA kernels (and Triton's interpreter, with TRITON_INTERPRET=1) in the place
of the GPU's. Its clock is the host's, it has one stream, and its graphs call their function again; so its
timings mean nothing, and every result says that it is emulated.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fastaccum
from fastaccum import dispatch, gpu, launchers

Call = Callable[[], Any]
CPU = torch.device("cpu")
BACKENDS = ("native", "triton")
# Kernels wait behind this much idle work of the GPU, so that the time of launching them does not show.
IDLE_CYCLES = 4_000_000  # about 2 ms


class Skip(Exception):  # noqa: N818
    """Something that cannot be checked here; the message is the reason."""


class Gpu:
    """The first GPU.

    Attributes:
        emulated: whether this is the stand-in.
        every: of many like jobs, each so-many-th is done.
    """

    emulated = False
    every = 1
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.cuda.set_device(self.device)

    def reason(self, backend: str) -> str:
        """Why a backend cannot run here; empty if it can."""
        return "; ".join(dispatch.reasons_against(backend, self.device))

    def make(self, backend: str) -> gpu.Backend:
        """A new backend, with tables of its own."""
        kind = launchers.CudaLauncher if backend == "native" else launchers.TritonLauncher
        return gpu.Backend(kind(self.device), self.device)

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Within, an accumulator's ``backend`` is this machine's."""
        yield

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def free_memory(self) -> int:
        """Bytes that can be allocated."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def start_peak(self) -> None:
        """Begins to watch the memory in use."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Most bytes that were in use at once since then."""
        return torch.cuda.max_memory_allocated()

    def seconds(self, call: Call, repeat: int = 1) -> float:
        """The device's time for one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(IDLE_CYCLES)
        start.record()
        for _ in range(repeat):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeat

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """A stream of its own, which begins after what was queued and is waited for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, call: Call) -> Any:
        """The call as a graph, captured on the current stream; it has not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="global"):
            call()
        return graph

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Within, what makes the host wait for the device raises."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def launches(self, call: Call) -> tuple[list[str], list[str]]:
        """The names of the kernels, and of the copies, that a call launches."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            torch.zeros(1, device=self.device)  # shows whether kernels are seen at all
            self.synchronize()
            call()
            self.synchronize()
        # The range of a profiled step() and the profiler's own doings are shown among the kernels.
        others = ("Optimizer.", " Sync", "Buffer Request")
        seen = [
            event.name
            for event in profiled.events()
            if event.device_type == DeviceType.CUDA and not any(word in event.name for word in others)
        ]
        if not seen:
            raise Skip("torch.profiler sees no kernels here (CUPTI may not be permitted)")
        names = seen[1:]
        copies = [name for name in names if name.lower().startswith("mem")]
        return [name for name in names if name not in copies], copies


class HostGraph:
    """Stands for a CUDA graph: a replay calls the function again, as if it were being captured."""

    def __init__(self, call: Call, switch: Callable[[bool], None]) -> None:
        self.call, self.switch = call, switch
        self.run()
        self.fresh = True  # a captured graph has not run: the first replay is the capture's own run

    def run(self) -> None:
        """One run within a capture."""
        self.switch(True)
        try:
            self.call()
        finally:
            self.switch(False)

    def replay(self) -> None:
        """Like CUDAGraph.replay."""
        if not self.fresh:
            self.run()
        self.fresh = False


class Emulated(Gpu):
    """The stand-in on the CPU."""

    emulated = True
    every = 23
    device = CPU

    def __init__(self) -> None:
        from tests import emulated

        torch.set_num_threads(1)  # tiny tensors gain nothing from threads
        self.kernels = emulated
        self.why_not = emulated.reason_against() or ""
        if not self.why_not:
            self.emulator = emulated.emulator()
        self.made: dict[str, gpu.Backend] = {}

    def reason(self, backend: str) -> str:
        """See Gpu."""
        if backend == "native":
            return self.why_not
        return "; ".join(dispatch.reasons_against(backend, CPU))

    def make(self, backend: str) -> gpu.Backend:
        """See Gpu."""
        if backend == "native":
            return self.kernels.backend()
        return gpu.Backend(launchers.TritonLauncher(CPU), CPU)

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """See Gpu."""
        made = self.made.setdefault(backend, self.make(backend))
        load = mock.patch.object(dispatch, "load", lambda name, device=CPU: made)
        choose = mock.patch.object(dispatch, "choose", lambda name, device: backend)
        with load, choose:
            yield

    def synchronize(self) -> None:
        """See Gpu."""
        self.emulator.synchronize()

    def free_memory(self) -> int:
        """See Gpu."""
        from benchmarks import harness

        return harness.available_memory()

    def start_peak(self) -> None:
        """Nothing: the host's memory is not watched."""

    def peak(self) -> int:
        """Always 0."""
        return 0

    def seconds(self, call: Call, repeat: int = 1) -> float:
        """The host's time."""
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - start) / repeat

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """The only stream there is."""
        yield

    def capture(self, call: Call) -> HostGraph:
        """See HostGraph."""

        def switch(on: bool) -> None:
            self.made["native"]._launcher.graph = on

        return HostGraph(call, switch)

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Within, an op that reads a value raises."""
        from tests import no_sync

        with no_sync.Forbid(no_sync.READS):
            yield

    def launches(self, call: Call) -> tuple[list[str], list[str]]:
        """See Gpu; of the emulated CUDA kernels only."""
        from tests.cuda_checks import families

        self.emulator.reset()
        call()
        return families(self.emulator), []


def _find_kernels() -> None:
    """Lets Triton's kernels be imported from the source tree where the package is not installed."""
    if importlib.util.find_spec("fastaccum.kernels") is None:
        folder = Path(__file__).resolve().parents[1] / "kernels"
        spec = importlib.util.spec_from_file_location(
            "fastaccum.kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["fastaccum.kernels"] = fastaccum.kernels = module
        spec.loader.exec_module(module)


def machine(emulated: bool) -> Gpu:
    """The machine to check.

    Raises:
        Skip: there is no GPU.
    """
    _find_kernels()
    if emulated:
        return Emulated()
    if not torch.cuda.is_available():
        raise Skip("no GPU: torch sees none")
    return Gpu()
