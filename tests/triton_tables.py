"""Tables of pointers for the Triton launchers, as the backend makes them, in a few lines."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fastaccum.layout import STRAND, STRANDS_PER_CHUNK, Layout

TAGS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
PRESENT = 1 << 62
MISALIGNED = 1 << 61
HAS_TRITON = importlib.util.find_spec("triton") is not None


def kernel_package() -> ModuleType:
    """The kernels of the source tree beside the tests, else the installed ones."""
    beside = (Path(__file__).resolve().parent.parent / "kernels").is_dir()
    return importlib.import_module("kernels" if beside else "fastaccum.kernels")


def entry(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    return address | TAGS[tensor.dtype] << 56 | (MISALIGNED if address % 16 else 0)


def entries(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.tensor([entry(t) for t in tensors], dtype=torch.int64)


def tags(*columns: Sequence[Tensor | None] | Tensor) -> tuple[set[int], ...]:
    return tuple({TAGS[t.dtype] for t in column if t is not None} for column in columns)


def aligned(*columns: Sequence[Tensor | None]) -> bool:
    return not any(entry(t) & MISALIGNED for column in columns for t in column)


def tables(layout: Layout) -> tuple[Tensor, Tensor]:
    """The segment of each strand, and the segments."""
    strands = torch.full((layout.n_chunks * STRANDS_PER_CHUNK,), -1, dtype=torch.int32)
    for k, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        strands[offset // STRAND : offset // STRAND + -(-numel // STRAND)] = k
    rows = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)), dtype=torch.int64)
    return strands, rows.view(-1, 2)


def words(active: Sequence[bool]) -> Tensor:
    """A bit mask in int64 words."""
    bits = sum(1 << i for i, on in enumerate(active) if on)
    chunks = [bits >> shift & (1 << 64) - 1 for shift in range(0, len(active), 64)]
    return torch.tensor([w - (1 << 64) if w >> 63 else w for w in chunks], dtype=torch.int64)


_KEPT_ALIVE: list[mmap.mmap] = []


def _protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection) == 0


def guarded(values: Tensor) -> Tensor:
    """A copy that ends where a page begins that cannot be touched, and begins not far behind another."""
    size = values.numel() * values.element_size()
    pages = -(-max(size, 1) // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    _KEPT_ALIVE.append(area)
    every = torch.frombuffer(area, dtype=torch.uint8)
    end = (pages + 1) * mmap.PAGESIZE
    copy = every[end - size : end].view(values.dtype) if size else values.clone()
    copy.copy_(values)
    for guard in (every.data_ptr(), every.data_ptr() + end):
        _protect(guard, mmap.PAGESIZE, 0)  # PROT_NONE
    return copy


def read_only(values: Tensor) -> Tensor:
    """A copy on pages that cannot be written."""
    copy = guarded(values)
    if copy.numel():
        first = copy.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = copy.data_ptr() + copy.numel() * copy.element_size() - first
        _protect(first, size, 1)  # PROT_READ
    return copy
