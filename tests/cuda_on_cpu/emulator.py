"""The Python side of a library that build.py made: options, buffers as tensors, what was launched."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

ORDERS = {
    "ascending": {"order": 0},
    "descending": {"order": 1},
    "random": {"order": 2, "seed": 1},
    "random2": {"order": 2, "seed": 2},
}


class Emulator:
    """Drives one library. Options stand until they are set again, in the library, not in this object."""

    def __init__(self, path: Path | str):
        self.lib = lib = ctypes.CDLL(str(path))
        size, text, pointer = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p
        for name, result, arguments in (
            ("set", ctypes.c_int, [text, ctypes.c_long]),
            ("allocate", pointer, [size, text, ctypes.c_int]),
            ("free", text, [pointer]),
            ("add_buffer", None, [pointer, size, text, ctypes.c_int]),
            ("drop_buffer", None, [pointer]),
            ("mark_written", None, [pointer, size]),
            ("synchronize", text, []),
            ("count", ctypes.c_long, [text]),
            ("launch_names", text, []),
            ("reset", None, []),
            ("last_error", text, []),
        ):
            function = getattr(lib, f"cuda_on_cpu_{name}")
            function.restype, function.argtypes = result, arguments
        self._live: dict[int, int] = {}  # data_ptr of our tensors: the buffer

    def set(self, **options: int) -> None:
        for name, value in options.items():
            if not self.lib.cuda_on_cpu_set(name.encode(), int(value)):
                raise ValueError(f"no option {name}")

    def count(self, what: str) -> int:
        return self.lib.cuda_on_cpu_count(what.encode())

    @property
    def instrumented(self) -> bool:
        return self.count("instrumented") == 1

    @property
    def launches(self) -> list[str]:
        """The kernels launched since reset()."""
        return self.lib.cuda_on_cpu_launch_names().decode().splitlines()

    @property
    def last_error(self) -> str:
        return self.lib.cuda_on_cpu_last_error().decode()

    def reset(self) -> None:
        self.lib.cuda_on_cpu_reset()

    def synchronize(self) -> None:
        _raise(self.lib.cuda_on_cpu_synchronize())

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.set(capturing=1)
        try:
            yield
        finally:
            self.set(capturing=0)

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype,
        name: str,
        *,
        shift: int = 0,
        written: bool = True,
    ) -> torch.Tensor:
        """A tensor whose last byte lies before an unmapped page; free() it. It starts as 0xFF bytes.

        `shift` elements are left out at its beginning, which makes its address a less aligned one.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count, width = math.prod(shape) + shift, dtype.itemsize
        address = self.lib.cuda_on_cpu_allocate(count * width, name.encode(), int(written))
        if not address:
            raise MemoryError(name)
        if count == shift:
            self.lib.cuda_on_cpu_free(address)
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_char * (count * width)).from_address(address)
        tensor = torch.frombuffer(memory, dtype=dtype, offset=shift * width).view(shape)
        self._live[tensor.data_ptr()] = address
        return tensor

    def copy_of(self, tensor: torch.Tensor, name: str, *, shift: int = 0) -> torch.Tensor:
        return self.empty(tensor.shape, tensor.dtype, name, shift=shift).copy_(tensor)

    def free(self, *tensors: torch.Tensor) -> None:
        """Unmaps tensors of empty() (all without arguments); raises if the bytes next to one were changed."""
        keys = [t.data_ptr() for t in tensors if t.numel()] if tensors else list(self._live)
        errors = [self.lib.cuda_on_cpu_free(self._live.pop(key)) for key in keys]
        for error in errors:
            _raise(error)

    def watch(self, tensor: torch.Tensor, name: str, *, written: bool = True) -> torch.Tensor:
        """Tells a races build of memory that torch owns (all of the tensor's storage)."""
        storage = tensor.untyped_storage()
        self.lib.cuda_on_cpu_add_buffer(storage.data_ptr(), storage.nbytes(), name.encode(), int(written))
        return tensor

    def drop(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.lib.cuda_on_cpu_drop_buffer(tensor.untyped_storage().data_ptr())


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
