"""MemoryMonitor: samples held to memory of a known size, a line, a picture."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import fastaccum  # noqa: E402
from fastaccum import MemoryMonitor  # noqa: E402
from fastaccum.monitor import resident_bytes, used_by_nvidia_smi  # noqa: E402
from tests.oracle import fused, parameter, send  # noqa: E402

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the resident memory is Linux's"),
]
MIB = 1 << 20
BLOCK = 192 * MIB  # far above what else comes and goes; glibc maps and unmaps it


def test_the_peak_is_a_block_of_known_size():
    before = resident_bytes()
    with MemoryMonitor(interval=0.01) as monitor:
        time.sleep(0.05)
        block = torch.ones(BLOCK // 4)
        time.sleep(0.1)
        held = time.perf_counter() - monitor._began
        del block
        time.sleep(0.1)
    assert abs(monitor.peak() - before - BLOCK) < BLOCK / 8
    assert abs(monitor.at(held).bytes["rss"] - before - BLOCK) < BLOCK / 8
    assert abs(monitor.samples[-1].bytes["rss"] - before) < BLOCK / 8  # it goes down again
    seconds = [sample.seconds for sample in monitor.samples]
    assert seconds[0] == 0.0 and seconds == sorted(seconds)
    assert 5 <= len(seconds) <= seconds[-1] / 0.01 + 3
    assert monitor.at(-1.0) is monitor.samples[0] and monitor.peak("rss") == monitor.peak()
    assert not [t for t in threading.enumerate() if "memory monitor" in t.name]


def test_resident_memory_is_what_the_kernel_says():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    assert abs(resident_bytes() - int(line.split()[1]) * 1024) < 16 * MIB


def test_as_a_callback():
    monitor = MemoryMonitor()
    p = parameter(0.0)
    optimizer = fused(p, 2)
    optimizer.register_step_post_hook(monitor)
    for _ in range(4):
        send(p, 1.0)
        optimizer.step()
    assert len(monitor.samples) == 2  # one per update
    monitor("the end")
    assert len(monitor.samples) == 3
    assert monitor.marks == [(monitor.samples[-1].seconds, "the end")]


def test_the_picture_is_a_png_that_shows_something(tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib.image

    backend = sys.modules.get("matplotlib.pyplot")
    with MemoryMonitor(interval=0.005) as monitor:
        monitor("start")
        time.sleep(0.05)
    path = monitor.plot(tmp_path / "memory.png", limit=monitor.peak() * 2)
    assert path == tmp_path / "memory.png" and path.read_bytes().startswith(b"\x89PNG\r\n")
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 900 and pixels[..., :3].std() > 0.02
    assert sys.modules.get("matplotlib.pyplot") is backend  # the caller's figures are left alone


def test_the_live_line(capsys):
    pytest.importorskip("rich")
    with MemoryMonitor(interval=0.01, live=True) as monitor:
        time.sleep(0.05)
    shown = capsys.readouterr().out
    assert "cpu: rss" in shown and f"(peak {monitor.peak() / (1 << 30):.3f})" in shown


@pytest.mark.parametrize("package", ["matplotlib", "rich"])
def test_a_missing_library_is_named_with_its_extra(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # Python then finds no such module
    what = "live=True" if package == "rich" else "plot()"
    with pytest.raises(
        ImportError, match=re.escape(f'{what} needs {package}: pip install "fastaccum[plot]"')
    ):
        monitor = MemoryMonitor(live=package == "rich")
        monitor()
        monitor.plot(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_the_blocks_exception_goes_on_and_the_thread_ends():
    with pytest.raises(ValueError, match="mine"):
        with MemoryMonitor(interval=0.01) as monitor:
            raise ValueError("mine")
    assert len(monitor.samples) >= 2
    assert not [t for t in threading.enumerate() if "memory monitor" in t.name]
    with monitor:  # and may be used again, with the time going on
        with pytest.raises(RuntimeError, match="running already"):
            monitor.__enter__()
    assert monitor.samples[-1].seconds > monitor.samples[1].seconds


def test_a_sample_that_fails_is_told_at_the_end(monkeypatch):
    with pytest.raises(RuntimeError, match="the monitor stopped sampling: .*No such file"):
        with MemoryMonitor(interval=0.01):
            from pathlib import Path

            with monkeypatch.context() as patch:
                patch.setattr("fastaccum.monitor._STATUS", Path("/nothing/here"))
                time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "exception", "match"),
    [
        (dict(interval=0), ValueError, "interval must be above 0"),
        (dict(interval=None), TypeError, "interval must be a number"),
        (dict(interval="1"), TypeError, "interval must be a number"),
        (dict(live=1), TypeError, "live must be a bool"),
        (dict(device="meta"), ValueError, "device must be a CPU or a CUDA GPU, got meta"),
        pytest.param(
            dict(device="cuda"), ValueError, "torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, exception, match):
    with pytest.raises(exception, match=match):
        MemoryMonitor(**arguments)


def test_without_a_sample_there_is_no_peak(tmp_path):
    monitor = MemoryMonitor()
    for call in (monitor.peak, lambda: monitor.at(0.0)):
        with pytest.raises(ValueError, match="no sample was taken yet"):
            call()
    monitor()
    with pytest.raises(ValueError, match="source must be one of rss, got 'device'"):
        monitor.peak("device")
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no sample was taken yet"):
        MemoryMonitor().plot(tmp_path / "x.png")
    with pytest.raises(TypeError, match="limit must be an int"):
        monitor.plot(tmp_path / "x.png", limit=1.5)
    assert not (tmp_path / "x.png").exists()


def test_what_nvidia_smi_tells(tmp_path):
    """The program's protocol: its arguments, MiB on one line, an exit status. The program is a stand-in."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\necho " 1234"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert used_by_nvidia_smi(str(program), "GPU-1") == 1234 * MIB
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["--id=GPU-1", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    program.write_text("#!/bin/sh\necho no such GPU >&2\nexit 6\n")
    with pytest.raises(RuntimeError, match="nvidia-smi failed with 6: no such GPU"):
        used_by_nvidia_smi(str(program), "GPU-1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    torch.cuda.init()
    with MemoryMonitor("cuda", interval=0.01) as monitor:
        before = torch.cuda.memory_allocated()
        block = torch.ones(BLOCK // 4, device="cuda")
        torch.cuda.synchronize()
        time.sleep(0.1)
        del block
    assert monitor.peak() == before + BLOCK and monitor.peak("reserved") >= before + BLOCK
    used = torch.cuda.mem_get_info()
    if "device" in monitor.samples[0].bytes:
        assert BLOCK <= monitor.peak("device") <= used[1]


def test_the_name_is_public():
    assert "MemoryMonitor" in fastaccum.__all__ and fastaccum.MemoryMonitor is MemoryMonitor
