"""The native library whose functions MindSpore runs as operators."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

NAME = "libfastaccum_mindspore.so"
FOLDER = Path(__file__).resolve().parent.parent


@functools.cache
def path() -> str:
    """Where the library is.

    Raises:
        ImportError: the package was built without native code, or the library cannot be loaded.
    """
    found = FOLDER / NAME
    advice = (
        "install fastaccum on Linux where a C++ compiler is found: pip install 'fastaccum[mindspore]' "
        "(without torch: its wheel with pip install --no-deps, then mindspore and 'numpy<2')"
    )
    if not found.is_file():
        note = FOLDER / "_build_note.txt"
        reason = note.read_text().strip() if note.is_file() else "no reason is known"
        raise ImportError(
            f"fastaccum.mindspore needs its native library {NAME}, which is not in {FOLDER} ({reason}): "
            f"{advice}"
        )
    try:
        ctypes.CDLL(str(found))
    except OSError as error:
        raise ImportError(f"fastaccum.mindspore cannot load {found} ({error}): {advice}") from error
    return str(found)


def last_refusal() -> str:
    """What an operator that failed has said; empty if none has."""
    text = ctypes.create_string_buffer(1024)
    ctypes.CDLL(path()).fastaccum_last_refusal(text, ctypes.c_size_t(len(text)))
    return text.value.decode()


def threads() -> int:
    """Threads that the operators use: ``FASTACCUM_THREADS``, else as many as the process may run on."""
    return int(ctypes.CDLL(path()).fastaccum_threads())


def instruction_level() -> str:
    """The level in use: baseline, avx2 or avx512."""
    function = ctypes.CDLL(path()).fastaccum_instruction_level
    function.restype = ctypes.c_char_p
    return function().decode()
