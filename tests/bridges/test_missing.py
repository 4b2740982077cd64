"""Importing fastaccum imports no framework; where one is missing, the error names the extra."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
BRIDGES = ("accelerate", "transformers", "lightning")


def python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return result.returncode, result.stdout + result.stderr


def test_importing_fastaccum_imports_no_framework():
    code = "import sys, fastaccum, fastaccum.bridges, fastaccum.accumulator"
    assert python(f"{code}; print([m for m in {BRIDGES} if m in sys.modules])") == (0, "[]\n")


def test_without_torch_that_is_what_is_missing():
    code, output = python("import sys; sys.modules['torch'] = None; import fastaccum; fastaccum.memory_plan")
    assert (
        code == 1 and "ModuleNotFoundError: fastaccum.memory_plan needs PyTorch: pip install torch" in output
    )


@pytest.mark.parametrize("name", BRIDGES)
def test_a_missing_library_is_named_with_its_extra(name):
    hide = f"import sys; sys.modules[{name!r}] = None; import fastaccum.bridges.{name}"
    code, output = python(hide)
    assert code == 1
    assert f"ImportError: fastaccum.bridges.{name} needs {name}" in output
    assert f'pip install "fastaccum[{name}]"' in output
    assert re.search(rf'^{name} = \["{name}\b', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
