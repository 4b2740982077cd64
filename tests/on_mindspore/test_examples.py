"""The README's MindSpore code and the demo run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.mark.skipif(not README.is_file(), reason="runs from a checkout")
def test_the_readmes_code(tmp_path):
    (code,) = re.findall(r"```py\n(.*?)```", README.read_text(), re.DOTALL)
    file = tmp_path / "example.py"  # MindSpore compiles from files
    file.write_text(code + "print(int(optimizer.optimizer.global_step.asnumpy()[0]))\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    done = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"norm of the last window \d+\.\d{3}, skipped 0\n", done.stdout)
    assert done.stdout.endswith("\n6\n")  # three windows each way


def test_the_demo_agrees_with_mindspores_own_accumulation(tmp_path):
    pytest.importorskip("sklearn")
    from fastaccum.mindspore import demo

    assert demo.main(["--quick", "--json", str(tmp_path / "demo.json")]) == 0
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["agreed"] and found["difference"] <= 4 * found["measure"] + 1e-6
    # It learns: ten classes at random have a loss of log(10) = 2.303.
    assert found["trainings"]["fastaccum"]["final loss"] < 2.25


def test_the_demo_tells_when_trainings_differ(monkeypatch, capsys):
    from fastaccum.mindspore import demo

    class Wrong(demo.Fused):
        def run(self, batches):
            return super().run([batches[0]] * len(batches))

    monkeypatch.setitem(demo.WAYS, "fastaccum", Wrong)
    assert demo.main(["--quick"]) == 1
    assert "DISAGREES" in capsys.readouterr().out
