"""The CUDA kernels as a backend on the CPU: compiled by the host's compiler, run by tests/cuda_on_cpu."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fastaccum import gpu, launchers
from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.emulator import Emulator

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [*sorted((ROOT / "csrc").glob("*.cu")), ROOT / "csrc/binding_gpu.cpp"]
CPU = torch.device("cpu")


def reason_against() -> str | None:
    """Why the kernels cannot be emulated here."""
    if not (ROOT / "csrc").is_dir():
        return "the CUDA sources are not beside the tests"
    return None if build.AVAILABLE else "no C++ compiler"


def built(sources: Iterable[Path], mode: str, name: str, entries: int) -> Path:
    """A library of kernels and their torch ops, with tables by value of up to so many entries."""
    torch_folder = Path(torch.__file__).parent
    # Guards of static variables in host code would be atomics that the hooks of "races" do not know.
    extra = ["-fno-threadsafe-statics"] if mode == "races" else []
    return build.build(
        sources,
        mode,
        f"{name}-{mode}-{entries}.so",
        includes=[ROOT / "csrc", torch_folder / "include"],
        defines=["TORCH_TARGET_VERSION=0x020b000000000000ULL", f"FASTACCUM_TABLE_ENTRIES={entries}"],
        extra=[*extra, f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"],
    )


@functools.cache
def library(mode: str = "plain", entries: int = 4080) -> Path:
    """The kernels and their torch ops, with tables by value of up to so many entries."""
    return built(SOURCES, mode, "fastaccum", entries)


_loaded: dict[Path, Emulator] = {}


def load(path: Path) -> Emulator:
    """Loads a library: its ``launch_*`` ops are now those of CPU tensors. One per process."""
    if path not in _loaded:
        assert not _loaded, f"this process has the ops of {next(iter(_loaded))}"
        torch.ops.load_library(path)
        _loaded[path] = Emulator(path)
    return _loaded[path]


def emulator(mode: str = "plain", entries: int = 4080) -> Emulator:
    """The library of that kind, loaded."""
    return load(library(mode, entries))


def backend(watched: bool = False) -> gpu.Backend:
    """A new backend over the library that was loaded; ``watched``: see :class:`Launcher`."""
    if not _loaded:
        emulator()
    return gpu.Backend(Launcher(watched), CPU)


class Launcher(launchers.CudaLauncher):
    """The emulated kernels.

    Attributes:
        graph: whether a graph is being captured, as torch would say it of a GPU.
    """

    def __init__(self, watched: bool = False) -> None:
        super().__init__(CPU)
        self.graph = False
        if watched:
            self._ops = _WatchedOps(self._ops)

    def capturing(self, device: torch.device) -> bool:
        """See Uploader."""
        return self.graph


class _WatchedOps:
    """Tells a races build of the memory of every tensor that a launch is given.

    So an access outside of what the launch knows is reported; what tables point to, tests tell themselves.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        op, (emulator,) = getattr(self._ops, name), _loaded.values()

        def call(*args: Any) -> Any:
            tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.numel()}
            watched = {i: t for i, t in tensors.items() if t.data_ptr() not in emulator._live}
            for i, tensor in watched.items():
                emulator.watch(tensor, f"{name}[{i}]")
            try:
                return op(*args)
            finally:
                emulator.drop(*watched.values())

        return call
