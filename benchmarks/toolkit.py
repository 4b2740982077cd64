"""Finds the CUDA toolkit's programs: CUDA_HOME, PATH, then PyPI's packages (requirements/cuda.txt)."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

PACKAGES = "pip install -r requirements/cuda.txt"


@functools.cache
def find(program: str) -> str | None:
    """Returns the path of nvcc, nvdisasm or cuobjdump, or None.

    Toolkits need not be complete, so each program is looked for on its own.
    """
    home = os.environ.get("CUDA_HOME")
    if home and Path(home, "bin", program).is_file():
        return str(Path(home, "bin", program))
    if found := shutil.which(program):
        return found
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for folder in sorted(folders):
        for path in sorted(Path(folder).glob(f"nvidia/cu*/bin/{program}"), reverse=True):
            return str(path)
    return None


def need(program: str) -> str:
    """Returns the path of a program, or raises."""
    if path := find(program):
        return path
    raise FileNotFoundError(f"{program} is on neither CUDA_HOME nor PATH: `{PACKAGES}` brings it")


@functools.cache
def version() -> str:
    """Returns nvcc's version, like 13.0.88."""
    text = subprocess.run([need("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", text)[1]
