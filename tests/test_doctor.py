"""``python -m fastaccum``: what the doctor says, and how the other commands are reached."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import fastaccum  # noqa: E402
from fastaccum import __main__ as command  # noqa: E402
from fastaccum import dispatch, doctor, ops, reference  # noqa: E402

pytestmark = pytest.mark.quick
ROOT = Path(fastaccum.__file__).resolve().parent.parent


def test_the_doctor_tells_what_runs_and_tests_it(capsys):
    assert command.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"fastaccum {fastaccum.__version__}   Python {sys.version.split()[0]}")
    assert f"torch      {torch.__version__}" in said and "FASTACCUM_BACKEND" in said
    chosen = dispatch.choose("auto", torch.device("cpu"))
    assert f"\ncpu: backend 'auto' is {chosen}\n" in said
    assert all(f"  {op:<12} {chosen}\n" in said for op in ops.NAMES)
    for name, reasons in dispatch.backends("cpu")["cpu"].items():
        if reasons:
            assert f"  {name:<10} no: {'; '.join(reasons)}\n" in said
        else:
            assert f"  {name:<10} yes; self-test passed (error " in said
    module, _ = dispatch.native_module()
    assert ("native library:\n" in said) == (module is not None)
    assert "FAILED" not in said


def doctor_says(capsys):
    """What it prints where it finds a fault; with backends loaded anew, as a test has changed one."""
    dispatch.load.cache_clear()
    try:
        assert doctor.main([]) == 1
    finally:
        dispatch.load.cache_clear()
    return capsys.readouterr().out


def test_a_backend_that_computes_wrongly_is_told_of(monkeypatch, capsys):
    def wrong(params, *rest):
        reference_adam(params, *rest)
        params[0].add_(1e-5)

    reference_adam = reference.adam_
    monkeypatch.setattr(reference, "adam_", wrong)
    said = doctor_says(capsys)
    assert "  reference  yes; self-test FAILED (error 1.0" in said
    assert said.count("FAILED") == 1


def test_a_self_test_that_raises_leaves_the_other_backends_their_lines(monkeypatch, capsys):
    def broken(*args):
        raise OSError("no such kernel")

    monkeypatch.setattr(reference, "adam_", broken)
    monkeypatch.setattr(dispatch, "NAMES", ("reference", "native", "triton"))
    said = doctor_says(capsys)
    assert "  reference  yes; self-test FAILED (OSError: no such kernel)\n  native " in said
    assert "\n  triton " in said


@pytest.mark.parametrize("asked, reason", [
    ("nosuch", "backend must be one of auto, native, triton, reference, got 'FASTACCUM_BACKEND=nosuch'"),
    ("triton", "backend 'FASTACCUM_BACKEND=triton' cannot run on cpu: Triton kernels run "),
])  # fmt: skip
def test_a_switch_that_asks_for_what_cannot_run_is_told_of(asked, reason, monkeypatch, capsys):
    against = dispatch.reasons_against
    monkeypatch.setattr(
        dispatch,
        "reasons_against",
        lambda name, device: ["Triton kernels run elsewhere"] if name == "triton" else against(name, device),
    )
    monkeypatch.setenv("FASTACCUM_BACKEND", asked)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert f"\ncpu: backend 'auto' is none: {reason}" in said
    assert "native library:" in said and "  triton     no: Triton kernels run elsewhere\n" in said
    assert "  reference  yes; self-test passed (error " in said
    assert f"\ncpu: backend 'auto' is none: {reason}" in fastaccum.report()


def test_the_report_is_what_the_doctor_prints_without_the_self_test(monkeypatch, capsys):
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    monkeypatch.setattr(doctor, "_self_test", lambda *_: pytest.fail("the report tests nothing"))
    report = fastaccum.report()
    assert report == re.sub(r"; self-test passed \(.*\)", "", said).removesuffix("\n")
    module, _ = dispatch.native_module()
    assert module is None or f"  {'in use':<14} {module.isa()} (this CPU has: " in report


def test_a_missing_native_library_comes_with_its_reason_and_a_way_to_build_it(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "native_module", lambda: (None, "no C++ compiler was found"))
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "native library: missing: no C++ compiler was found\n" in said
    assert "pip install --no-build-isolation --force-reinstall fastaccum" in said
    assert "cpu: backend 'auto' is reference" in said


def test_without_torch_the_doctor_says_so():
    folder = Path(importlib.util.find_spec("fastaccum").origin).parent.parent
    runs = "import fastaccum, fastaccum.doctor as d; print(fastaccum.report()); sys.exit(d.main([]))"
    if (folder / "torch").is_dir():
        pytest.skip("torch is installed beside fastaccum, so one is not found without the other")
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); {runs}"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert result.stdout.count("\ntorch is missing: pip install torch") == 2
    assert "torch      not importable (No module named 'torch')" in result.stdout


def test_a_torch_that_is_broken_is_told_of(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fastaccum; print(fastaccum.report())"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert "torch      not importable (libgomp.so.1: cannot open)\n" in result.stdout, result.stderr
    assert "torch is missing" in result.stdout


def test_commands(capsys):
    assert command.main(["--help"]) == 0 and "doctor   versions" in capsys.readouterr().out
    for unknown in ([], ["doktor"]):
        assert command.main(unknown) == 2
        assert capsys.readouterr().err.startswith("usage: python -m fastaccum COMMAND")


def test_the_benchmarks_need_a_checkout(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benchmarks.__main__", None)
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    assert command.main(["bench"]) == 2
    assert "run this from the root of a checkout" in capsys.readouterr().err


def test_the_benchmarks_of_another_project_are_not_run(tmp_path):
    """Neither where one is in the current folder, nor where one was installed beside fastaccum."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (tmp_path / "benchmarks" / name).write_text("print('theirs'); main = print")
    (tmp_path / "site" / "fastaccum").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "_version.py"):
        (tmp_path / "site" / "fastaccum" / name).write_text((ROOT / "fastaccum" / name).read_text())
    shutil.copytree(tmp_path / "benchmarks", tmp_path / "site" / "benchmarks")
    for folder, package in ((tmp_path, ROOT), (tmp_path / "site", tmp_path / "site")):
        result = subprocess.run(
            [sys.executable, "-m", "fastaccum", "bench", "--help"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(package)}, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 2 and "theirs" not in result.stdout, result.stderr
        assert "run this from the root of a checkout" in result.stderr


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the source tree is not beside the package")
def test_the_benchmarks_of_the_checkout_are_run():
    command = [sys.executable, "-m", "fastaccum", "bench", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("usage: "), result.stderr
