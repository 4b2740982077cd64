"""The CUDA kernels as a backend on the CPU: compiled by the host's compiler, run by tests/cuda_on_cpu."""

from __future__ import annotations

import functools
from pathlib import Path

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


@functools.cache
def library(mode: str = "plain", entries: int = 4080) -> Path:
    """The kernels and their torch ops, with tables by value of up to so many entries."""
    torch_folder = Path(torch.__file__).parent
    return build.build(
        SOURCES,
        mode,
        f"fastaccum-{mode}-{entries}.so",
        includes=[ROOT / "csrc", torch_folder / "include"],
        defines=["TORCH_TARGET_VERSION=0x020b000000000000ULL", f"FASTACCUM_TABLE_ENTRIES={entries}"],
        extra=[f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"],
    )


@functools.cache
def emulator(mode: str = "plain", entries: int = 4080) -> Emulator:
    """Loads the library: its ``launch_*`` ops are now those of CPU tensors. One per process."""
    path = library(mode, entries)
    torch.ops.load_library(path)
    return Emulator(path)


def backend() -> gpu.Backend:
    """A new backend over the library that was loaded."""
    emulator()
    return gpu.Backend(launchers.CudaLauncher(CPU), CPU)
