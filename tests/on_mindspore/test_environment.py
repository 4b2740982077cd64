"""What importing costs and needs: no torch, ever; a clear word where the native library is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fastaccum

PACKAGE = Path(fastaccum.__file__).resolve().parent

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("there is no torch here", name=name)

sys.meta_path.insert(0, Refuse())
import numpy as np
from mindspore import Parameter, Tensor, nn
from fastaccum.mindspore import FusedAccumulator

parameter = Parameter(Tensor(np.zeros(3, np.float32)), name="p")
accumulator = FusedAccumulator(nn.Momentum([parameter], 1.0, 0.9), 2)
for value in (1.0, 2.0):
    accumulator.step((Tensor(np.full(3, value, np.float32)),))
print(parameter.asnumpy().tolist(), "torch" in sys.modules)
"""


def run(code, folder, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "GLOG_v": "3", **environment},
        capture_output=True,
        text=True,
    )


def test_it_works_where_torch_cannot_be_imported():
    done = run(WITHOUT_TORCH, PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[-1.5, -1.5, -1.5] False")


def test_importing_fastaccum_does_not_import_mindspore():
    done = run("import sys, fastaccum; print('mindspore' in sys.modules)", PACKAGE.parent)
    assert done.stdout.strip() == "False", done.stderr


def copy_without_libraries(tmp_path, note=None):
    shutil.copytree(PACKAGE, tmp_path / "fastaccum", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if note:
        (tmp_path / "fastaccum/_build_note.txt").write_text(note + "\n")
    code = """
import numpy as np
from mindspore import Parameter, Tensor, nn
from fastaccum.mindspore import FusedAccumulator

parameter = Parameter(Tensor(np.zeros(3, np.float32)), name="p")
FusedAccumulator(nn.SGD([parameter], 1.0), 2)
"""
    return run(code, tmp_path)


def test_a_missing_library_is_named_with_the_extra(tmp_path):
    done = copy_without_libraries(tmp_path, note="no C++ compiler was found when the package was built")
    assert done.returncode != 0
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(
        "ImportError: fastaccum.mindspore needs its native library libfastaccum_mindspore.so"
    )
    assert "(no C++ compiler was found when the package was built)" in error
    assert "pip install 'fastaccum[mindspore]'" in error


def test_a_library_that_does_not_load_is_named(tmp_path):
    (tmp_path / "broken").mkdir()
    target = tmp_path / "broken"
    shutil.copytree(PACKAGE, target / "fastaccum", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(PACKAGE / "libfastaccum_mindspore.so", target / "fastaccum")  # without the core beside it
    done = run("from fastaccum.mindspore import library; library.path()", target)
    error = done.stderr.strip().splitlines()[-1]
    assert "cannot load" in error and "libfastaccum_core.so" in error and "fastaccum[mindspore]" in error
