"""``python -m fastaccum``: what the doctor says, and how the other commands are reached."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import fastaccum  # noqa: E402
from fastaccum import __main__ as command  # noqa: E402
from fastaccum import dispatch, doctor, ops, reference  # noqa: E402

pytestmark = pytest.mark.quick


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


def test_a_backend_that_computes_wrongly_is_told_of(monkeypatch, capsys):
    def wrong(params, *rest):
        reference_adam(params, *rest)
        params[0].add_(1e-5)

    reference_adam = reference.adam_
    monkeypatch.setattr(reference, "adam_", wrong)
    dispatch.load.cache_clear()
    try:
        assert doctor.main([]) == 1
    finally:
        dispatch.load.cache_clear()
    said = capsys.readouterr().out
    assert "  reference  yes; self-test FAILED (error 1.0" in said
    assert said.count("FAILED") == 1


def test_a_missing_native_library_comes_with_its_reason_and_a_way_to_build_it(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "native_module", lambda: (None, "no C++ compiler was found"))
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "native library: missing: no C++ compiler was found\n" in said
    assert "pip install --no-build-isolation --force-reinstall fastaccum" in said
    assert "cpu: backend 'auto' is reference" in said


def test_without_torch_the_doctor_says_so():
    folder = Path(importlib.util.find_spec("fastaccum").origin).parent.parent
    runs = "from fastaccum import doctor; sys.exit(doctor.main([]))"
    if (folder / "torch").is_dir():
        pytest.skip("torch is installed beside fastaccum, so one is not found without the other")
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); {runs}"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert result.returncode == 1 and "torch is missing: pip install torch" in result.stdout, result.stderr
    assert "torch      not importable (No module named 'torch')" in result.stdout


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
