"""The emulation that runs kernel files on the CPU: it runs right ones, and reports each planted mistake.

A mistake is planted in a program of its own (-DBUG_...), in each mode that has to catch it.
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cuda_on_cpu.build import AVAILABLE, HERE, MODES, build

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs a C++ compiler")

WRONG = "wrong numbers"
DIVERGENT = r"divergent barrier: .*:\d+ while thread .* waits at .*:\d+"
RETURNED = "1 threads returned without the barrier"
UNWRITTEN = "never written: 4 bytes .* of shared memory 'warp_sums'"
LINE = r"selftest_accumulate.cu:\d+"
RACE = f"data race: .* of buffer '{{}}' .*{LINE}, unordered with the earlier .* at {LINE}"
# What each mode must say; a mode that cannot see the mistake is left out.
BUGS = {
    "NONE": dict.fromkeys(MODES, "^ok"),
    "NO_SYNC": {"plain": WRONG, "sanitize": WRONG, "races": UNWRITTEN},
    "NO_SECOND_SYNC": {
        "races": f"data race: .* of shared memory 'warp_sums' .*{LINE}, unordered with .* at {LINE}"
    },
    "OUT_OF_BOUNDS": {
        "plain": f"{WRONG}|invalid access .*",
        "sanitize": "AddressSanitizer: .*",
        "races": "out of bounds: read of 16 bytes .* of buffer 'grad0' .*accumulate.cu:",
    },
    "MISALIGNED": {
        "plain": r"accumulate_kernel<256>, .*: invalid access to a null, misaligned or wild pointer",
        "sanitize": r"selftest_accumulate.cu:\d+:\d+: runtime error: .* misaligned address",
        "races": r"misaligned 16-byte read, .* of buffer 'acc' .*accumulate.cu:\d+",
    },
    "REDUCE_OFFSET": dict.fromkeys(MODES, WRONG),
    "UNWRITTEN_SHARED": {"plain": WRONG, "sanitize": WRONG, "races": UNWRITTEN},
    "MASK": dict.fromkeys(MODES, r"deadlock; .* wait in a shuffle with mask ffffffff at .*:\d+"),
    "DIVERGENT_BARRIER": dict.fromkeys(MODES, DIVERGENT),
    "NO_FENCE_BEFORE": {"races": RACE.format("partials")},
    "NO_FENCE_AFTER": {"races": RACE.format("partials")},
    "TICKET_NOT_RESET": dict.fromkeys(MODES, WRONG),
    "SHARED_OUT_OF_BOUNDS": {
        "sanitize": "runtime error: index 8 out of bounds",
        "races": f"out of bounds: read of 4 bytes at {LINE}; the nearest below is 'warp_sums'",
    },
    "EARLY_RETURN": dict.fromkeys(MODES, RETURNED),
    "PLAIN_WORD": {"races": RACE.format("norm")},
    "SAME_CHUNK": {"plain": WRONG, "sanitize": WRONG, "races": RACE.format("acc")},
}
PAIRS = [(bug, mode) for bug, modes in BUGS.items() for mode in modes]
QUICK = [pytest.param(mode, marks=pytest.mark.quick) if mode != "sanitize" else mode for mode in MODES]


def program(bug: str, mode: str, ucontext: bool = False):
    """The self-test's program with a mistake in the accumulation."""
    return build(
        [HERE / "selftest.cpp", HERE / "selftest.cu", (HERE / "selftest_accumulate.cu", [f"BUG_{bug}"])],
        mode,
        f"selftest/{mode}-{bug}{'-ucontext' * ucontext}",
        ucontext=ucontext,
    )


def run(path, what: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    done = subprocess.run([path, what], capture_output=True, text=True, timeout=120, env=environment)
    done.text = done.stdout + done.stderr
    return done


def by_name(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


@pytest.fixture(scope="module")
def bug_runs():
    """Every pair of a mistake and a mode, built and run; two at a time on two cores."""

    def one(pair):
        return pair, run(program(*pair), "accumulate")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(pool.map(one, PAIRS))


@pytest.mark.parametrize(("bug", "mode"), PAIRS)
def test_every_planted_mistake_is_reported(bug_runs, bug, mode):
    done = bug_runs[bug, mode]
    assert (done.returncode == 0) == (bug == "NONE"), done.text
    assert re.search(BUGS[bug][mode], done.text, re.MULTILINE), done.text


def test_races_checks_accesses_and_the_other_modes_do_not(bug_runs):
    for mode in MODES:
        checked = int(re.search(r"ok: (\d+) accesses", bug_runs["NONE", mode].text)[1])
        assert (checked > 100_000) == (mode == "races") and (checked == 0) == (mode != "races")


@pytest.mark.parametrize("mode", QUICK)
def test_the_language_and_the_host_calls(mode):
    done = run(program("NONE", mode), "language")
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.text


@pytest.mark.parametrize("what", ["accumulate", "language", "mistakes"])
def test_fibers_of_other_processors(what):
    path = program("NONE", "plain", ucontext=True)
    done = run(path, what)
    assert done.returncode == 0 and "FAIL" not in done.text, done.text
    symbols = subprocess.run(["nm", path], capture_output=True, text=True).stdout
    assert "swapcontext" in symbols and "cuda_on_cpu_switch" not in symbols


@pytest.mark.parametrize("mode", QUICK)
def test_mistakes_that_end_in_an_error(mode):
    done = run(program("NONE", mode), "mistakes")
    assert done.returncode == 0 and "FAIL" not in done.text, done.text
    said = by_name(done.stdout)
    line = r"selftest.cu:\d+"
    expected = {
        "outside a mask": rf"vote_kernel, .* thread \(0,0,0\): .*does not name the calling lane at {line}",
        "reads outside": f"a shuffle reads a lane that is not in the mask or has returned at {line}",
        "different intrinsics": f"a shuffle at {line}, but other lanes wait in a vote at {line}",
        "different masks": f"disagree: ffff00ff at {line}, but other lanes wait with 00ffffff at {line}",
        "wide": rf"wide_kernel, .* thread \(0,0,0\): misaligned vector access at {line}",
        "nested": "nested_kernel, .*: a launch inside a kernel$",
        "no threads": "features_kernel: invalid block of 0 threads",
        "too many threads": "features_kernel: invalid block of 1025 threads",
        "capture": "cudaMemcpyAsync while a graph is being captured",
        "long copy": r"a copy of 132 bytes to byte 0 runs past buffer 'in' \(128 bytes\)",
        "foreign": "free of a pointer that is no buffer",
        "no __syncwarp": "^nothing",
        "no __syncwarp, race": "^nothing",
        "shared memory": "NaN again" if mode == "plain" else "as it was",
        "unwritten": "^nothing",
        "other stack": "^nothing",
    }
    if mode == "races":
        expected |= {
            "other stack": rf"thread \(1,0,0\): access to another thread's stack at {line}",
            "no __syncwarp": f"never written: 4 bytes at byte 4 of shared memory 'values' .* at {line}",
            "no __syncwarp, race": f"data race: write of 4 bytes .* at {line}, unordered .* at {line}",
            "unwritten": f"never written: 4 bytes at byte 0 of buffer 'in' .* at {line}",
        }
    for name, pattern in expected.items():
        assert re.search(pattern, said[name]), f"{name}: {said[name]}"


SCATTER = r"scatter_kernel, block \(0,0,0\), thread \(3,0,0\): "
ENDS = {
    # a fault, with the kernel, the thread and the buffer
    ("plain", "past"): SCATTER + r"invalid access to 0x\w+\n  byte 4128 of buffer 'out' \(4128 bytes\)",
    ("plain", "below"): SCATTER + r"invalid access to 0x\w+\n.*  byte -20000 of buffer 'out'",
    ("plain", "null"): SCATTER + "invalid access to a null, misaligned or wild pointer",
    ("sanitize", "past"): SCATTER + r"invalid access to 0x\w+\n  byte 4128 of buffer 'out'",
    ("sanitize", "null"): r"selftest.cu:\d+:\d+: runtime error: store to null pointer",
    ("sanitize", "freed"): "heap-use-after-free",
    ("sanitize", "wide"): r"selftest.cu:\d+:\d+: .*misaligned address .* requires 32 byte alignment",
    ("races", "wide"): r"misaligned 32-byte read, 32 bytes at byte 16 of buffer 'in' .* at selftest.cu:\d+",
    ("races", "past"): SCATTER + r"out of bounds: read of 4 bytes at selftest.cu:\d+; .* 'out', 0 bytes past",
    ("races", "below"): SCATTER + r"out of bounds: write of 4 bytes at selftest.cu:\d+;",
    ("races", "null"): SCATTER + "out of bounds: .*no buffer is below it",
    # between the end of a buffer and its unmapped page
    ("plain", "padding"): "bytes next to buffer 'padded' were overwritten",
    ("sanitize", "padding"): r"WRITE of size 4 .*\n +#0 \S+ in scatter_kernel",
    ("races", "padding"): "out of bounds: write of 4 bytes .* the nearest below is 'padded', 0 bytes past",
}


@pytest.mark.parametrize(("mode", "what"), ENDS)
def test_mistakes_that_end_the_process(mode, what):
    done = run(program("NONE", mode), what)
    assert done.returncode != 0 and re.search(ENDS[mode, what], done.text, re.DOTALL), done.text


@pytest.fixture(scope="module")
def library():
    """The kernels as torch ops in this process, with every access checked."""
    torch = pytest.importorskip("torch")
    folder = Path(torch.__file__).parent
    path = build(
        [HERE / "selftest_op.cpp", HERE / "selftest.cu"],
        "races",
        "selftest/op-races.so",
        includes=[folder / "include"],
        defines=["TORCH_TARGET_VERSION=0x020b000000000000ULL"],
        extra=[f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"],
    )
    from tests.cuda_on_cpu.emulator import Emulator

    torch.ops.load_library(path)
    return Emulator(path), torch.ops.cuda_on_cpu_selftest


@pytest.fixture
def emulator(library):
    emulator, _ = library
    yield emulator
    emulator.set(capturing=0, unknown_memory=0, init_check=1)
    emulator.free()
    emulator.reset()


@pytest.fixture
def ops(library):
    return library[1]


def test_ops_run_and_their_launches_are_counted(emulator, ops):
    import torch

    assert emulator.instrumented and emulator.launches == []
    source = emulator.copy_of(torch.arange(40.0).view(5, 8), "source")
    target = emulator.empty((5, 8), torch.float32, "target", written=False)
    assert source.data_ptr() % 16 == 0 and target.isnan().all()
    ops.copy(source, target, 40)
    ops.copy(source, target, 40)
    assert torch.equal(source, target) and emulator.launches == ["copy_kernel"] * 2
    emulator.reset()
    assert emulator.launches == [] and emulator.count("launches") == 0


def test_errors_of_ops_are_python_errors(emulator, ops):
    import torch

    source = emulator.empty(40, torch.float32, "source", written=False)
    target = emulator.empty(39, torch.float32, "target", shift=1)
    assert target.data_ptr() % 16 == 4
    with pytest.raises(RuntimeError, match="never written: 4 bytes at byte 0 of buffer 'source'"):
        ops.copy(source, target, 40)
    emulator.set(init_check=0)
    with pytest.raises(
        RuntimeError, match="write of 4 bytes .*; the nearest below is 'target', 0 bytes"
    ) as e:
        ops.copy(source, target, 40)
    assert emulator.last_error in str(e.value)
    ops.copy(source, target, 39)  # an error leaves nothing behind
    target.as_strided((1,), (1,), 0)  # the tensor is still there
    memory = torch.zeros(40)
    with pytest.raises(RuntimeError, match="out of bounds: read of 4 bytes"):
        ops.copy(memory, source, 40)
    emulator.watch(memory, "memory")
    ops.copy(memory, source, 40)
    emulator.drop(memory)
    with pytest.raises(RuntimeError, match="out of bounds: read of 4 bytes"):
        ops.copy(memory, source, 40)
    emulator.set(unknown_memory=1)
    ops.copy(memory, source, 40)
    with pytest.raises(ValueError, match="no_such"):
        emulator.set(no_such=1)


def test_another_thread_has_shared_memory_of_its_own(emulator, ops):
    import torch

    out = emulator.empty(32, torch.float32, "out", written=False)
    expected = (torch.arange(32) ^ 1).float()

    def works():
        out.zero_()
        ops.exchange(out, True)
        return torch.equal(out, expected)

    def fails():
        with pytest.raises(RuntimeError, match="never written: 4 bytes .* of shared memory 'values'"):
            ops.exchange(out, False)
        return True

    assert works() and fails()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(works).result() and pool.submit(fails).result() and pool.submit(works).result()
    assert works()


def test_two_libraries_of_one_process_share_nothing():
    from tests.cuda_on_cpu.emulator import Emulator

    sources = [HERE / "selftest.cu", HERE / "selftest_accumulate.cu"]
    paths = [build(sources, mode, f"selftest/{mode}.so") for mode in ("plain", "races")]
    first, second = map(Emulator, paths)
    assert (first.instrumented, second.instrumented) == (False, True)
    for path in paths:  # "u": one for the whole process
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
        assert "::warp_sums" in symbols and not re.search(" u .*::warp_sums", symbols), symbols


def test_a_staging_buffer_must_live_until_the_next_launch(emulator, ops):
    import torch

    staging = torch.ones(8)
    source = emulator.empty(8, torch.float32, "source", written=False)
    target = emulator.empty(8, torch.float32, "target", written=False)
    ops.upload(staging, source)
    assert source.isnan().all() and emulator.count("waiting_copies") == 1
    staging.fill_(2.0)
    ops.copy(source, target, 8)
    assert (target == 2.0).all() and emulator.count("waiting_copies") == 0
    ops.upload(staging.fill_(3.0), source)
    emulator.synchronize()
    assert (source == 3.0).all() and (target == 2.0).all()
    with emulator.capturing(), pytest.raises(RuntimeError, match="while a graph is being captured"):
        ops.upload(staging, source)
    ops.upload(torch.zeros(9), source)
    with pytest.raises(RuntimeError, match="a copy of 36 bytes .* runs past buffer 'source'"):
        emulator.synchronize()


def test_memory_next_to_a_tensor_is_looked_at_when_it_is_freed(emulator):
    import ctypes

    import torch

    tensor = emulator.empty(3, torch.float32, "short")
    ctypes.memset(tensor.data_ptr() + 12, 0, 1)
    with pytest.raises(RuntimeError, match="bytes next to buffer 'short' were overwritten"):
        emulator.free(tensor)
    assert emulator.empty((0, 4), torch.float32, "none").shape == (0, 4)


def test_a_rebuild_compiles_only_what_changed(tmp_path, monkeypatch):
    from tests.cuda_on_cpu import build as module

    for name, text in {
        "value.h": "#define VALUE 1",
        "a.cu": '#include "value.h"\nint a() { return VALUE; }',
        "b.cpp": "int a();\nint main() { return a(); }",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    made = []
    make = module._make
    monkeypatch.setattr(module, "_make", lambda c, t: (made.append(t.name.split("-")[0]), make(c, t)))
    # a run in another place must not find what this one has left
    monkeypatch.setattr(module, "RUNTIME", [])
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")

    def result():
        made.clear()
        path = module.build([tmp_path / "a.cu", tmp_path / "b.cpp"], "plain", "program")
        return subprocess.run([path]).returncode, sorted(made)

    assert result() == (1, ["a", "b", "program"])
    assert result() == (1, [])
    (tmp_path / "value.h").write_text("#define VALUE 22\n")
    assert result() == (22, ["a", "program"])
    (tmp_path / "b.cpp").write_text("int a();\nint main() { return 3 + a(); }\n")
    assert result() == (25, ["b", "program"])
    (tmp_path / "a.cu").write_text("int a() { return }\n")
    with pytest.raises(RuntimeError, match=r"a.cu:1:\d+: error"):
        result()
