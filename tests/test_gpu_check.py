"""The script that checks a GPU, tried without one: everything in it but the calls of torch.cuda runs here."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from benchmarks import gpu_check, gpu_machine, gpu_part, gpu_proofs, gpu_speed  # noqa: E402
from benchmarks.gpu_machine import Skip  # noqa: E402
from tests import emulated  # noqa: E402
from tests.cases import BY_NAME, F32  # noqa: E402

needs_kernels = pytest.mark.skipif(
    emulated.reason_against() is not None, reason=str(emulated.reason_against())
)
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(*arguments, **environment):
    command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, arguments)]
    return subprocess.run(
        command, cwd=gpu_check.ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )


def kept(log_events, kind):
    return [event for event in log_events if event["event"] == kind]


@pytest.fixture
def log():
    events = []
    made = gpu_part.Log(events.append)
    made.events = events
    return made


@pytest.fixture
def here():
    threads = torch.get_num_threads()
    yield gpu_machine.Emulated()
    torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------- the whole script


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A dry run: the process, and its report."""
    emulated.emulator()  # compiled here, outside of the script's limits
    path = tmp_path_factory.mktemp("gpu") / "report.json"
    done = run("--emulated", "--report", path, TRITON_INTERPRET="")
    return done, json.loads(path.read_text())


@needs_kernels
def test_a_dry_run_passes(whole):
    done, report = whole
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["failed"] == [] and report["seconds"] > 0
    assert list(report["parts"]) == ["build", *(part.name for part in gpu_check.parts())]
    for name, record in report["parts"].items():
        assert record["status"] in ("passed", "done", "skipped"), (name, record)
        assert not record["failures"]
        assert record["status"] != "skipped" or record["reason"]
    skipped = {name for name, record in report["parts"].items() if record["status"] == "skipped"}
    assert skipped == {"build", "ops triton", "compiled", "recompiled variants"}


@needs_kernels
@pytest.mark.parametrize("part", gpu_proofs.PARTS, ids=lambda part: part.name)
def test_every_proof_has_checked_something(whole, part):
    _, report = whole
    assert report["parts"][part.name]["checks"] >= 1


@needs_kernels
@pytest.mark.parametrize("part", gpu_speed.PARTS, ids=lambda part: part.name)
def test_every_measurement_has_numbers(whole, part):
    _, report = whole
    rows = report["parts"][part.name]["rows"]
    assert rows and all(row["value"] > 0 for row in rows)


@needs_kernels
def test_goals_stand_beside_the_numbers(whole):
    done, report = whole
    goals = {row["goal"] for record in report["parts"].values() for row in record["rows"] if row.get("goal")}
    assert goals == {">= 0.85 of the copy", ">= 1.4 x", ">= 1.25 x", ">= 5 x", "<= 3", "<= 4"}
    for goal in goals:
        assert goal in done.stdout
    launches = report["parts"]["launches"]["rows"]
    assert [row["kernels"][-3:] for row in launches][1] == ["gather", "finish", "update"]


@needs_kernels
@pytest.mark.parametrize("part", ["2000 x 512", "windows, K=4", "windows, K=1"])
@pytest.mark.parametrize("peer", gpu_speed.PEERS)
def test_a_peer_is_timed_or_the_report_says_why_not(whole, part, peer):
    _, report = whole
    record = report["parts"][part]
    timed = any(row["what"] == f"{peer}: device, end" for row in record["rows"])
    assert timed or any(note.startswith(f"{peer}: skipped: ") for note in record["notes"])


@needs_none
def test_without_a_gpu_it_says_so_and_leaves():
    done = run()
    assert done.returncode == 77
    assert done.stdout.startswith("no GPU: torch sees none")


@needs_none
def test_a_worker_without_a_gpu_does_not_start(capsys):
    with pytest.raises(Skip, match="no GPU: torch sees none"):
        gpu_check.main(["--worker", "--only", "graphs"])


def test_its_parts_are_listed(capsys):
    assert gpu_check.main(["--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["ops native", "trainings"]
    assert gpu_check.main(["--emulated", "--only", "no such part"]) == 2
    assert "no part is called no such part" in capsys.readouterr().out


def test_names_of_parts_are_unique():
    names = [part.name for part in gpu_check.parts()]
    assert len(set(names)) == len(names)
    assert sum(part.limit for part in gpu_proofs.PARTS) <= gpu_check.BUDGET < 480


# ------------------------------------------------------------------------------- faults that are planted


@needs_kernels
@pytest.mark.parametrize("what", ["a bit", "a canary", "a source"])
def test_a_wrong_bit_is_found(here, what):
    ops = gpu_proofs.Ops(here, "native")
    case = BY_NAME["gather_"]
    right = ops.backend_for(F32).gather_

    def wrong(buffer, present, partials, segments, fresh, *rest, **options):
        right(buffer, present, partials, segments, fresh, *rest, **options)
        target = {"a bit": buffer, "a canary": torch.as_strided(buffer, (1,), (1,), 3), "a source": fresh[1]}
        target[what].view(torch.int32)[0] ^= 1

    ops.backend_for(F32).gather_ = wrong
    with pytest.raises(AssertionError, match="fresh" if what == "a source" else "buffer"):
        ops.check(case, case.variants[0], F32, [600, 33], 0)


@needs_kernels
def test_a_wrong_training_is_found(here, log, monkeypatch):
    original, calls = gpu_proofs.Training.result, []

    def result(self):
        found = original(self)
        calls.append(self)
        if len(calls) == 1:
            found["parameter 0"][0] += 1e-3
        return found

    monkeypatch.setattr(gpu_proofs.Training, "result", result)
    gpu_proofs.trainings(here, log)
    (failure,) = kept(log.events, "failure")
    assert "parameter 0 differs in 1 of 600 places" in failure["text"]


@needs_kernels
def test_a_read_of_the_device_is_found(here, log, monkeypatch):
    from fastaccum.outcome import Outcome

    original = Outcome.decide

    def reading(self, *args):
        original(self, *args)
        bool(self.skip)

    monkeypatch.setattr(Outcome, "decide", reading)
    gpu_proofs.no_waiting(here, log)
    failures = kept(log.events, "failure")
    assert len(failures) == 12 and "_local_scalar_dense" in failures[0]["text"]


@needs_kernels
def test_a_window_that_a_graph_does_not_repeat_is_found(here, log, monkeypatch):
    monkeypatch.setattr(gpu_machine.HostGraph, "replay", lambda self: None)
    gpu_proofs.graphs(here, log)
    assert len(kept(log.events, "failure")) == 6


@needs_kernels
def test_a_launch_too_many_is_found(here, log, monkeypatch):
    monkeypatch.setattr(here, "launches", lambda call: (call(), (["a", "b", "c", "d"], []))[1])
    gpu_proofs.launches(here, log)
    (failure,) = kept(log.events, "failure")
    assert "K=2" in failure["what"] and "4 launches" in failure["text"]


@needs_kernels
def test_a_gpu_without_enough_memory_is_a_reason(here, log, monkeypatch):
    monkeypatch.setattr(here, "free_memory", lambda: 1 << 20)
    with pytest.raises(Skip, match="GiB are needed"):
        gpu_proofs.large(here, log)


@pytest.mark.parametrize("part", [*gpu_proofs.PARTS, *gpu_proofs.LATE_PARTS], ids=lambda part: part.name)
def test_a_part_without_a_backend_is_skipped(part, log):
    class Nothing:
        emulated = False

        def reason(self, backend):
            return "none here"

        def free_memory(self):
            return 1 << 60

    with pytest.raises(Skip):
        part.run(Nothing(), log)


# ---------------------------------------------------------------------------------------------- peers

APEX, TRANSFORMER_ENGINE = "apex.optimizers", "transformer_engine.pytorch.optimizers"


@pytest.fixture
def install(monkeypatch):
    """Puts a module in place of a peer's; its parents, too."""

    def put(name, **attributes):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(attributes)

    return put


class FusedAdam(torch.optim.AdamW):
    """As a peer's is called."""

    def __init__(self, params, lr, betas, eps, adam_w_mode, weight_decay):
        assert adam_w_mode
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def windows_with_peers(machine, log):
    gpu_speed.windows(machine, log, "tiny", 2, 3)
    return {event["row"]["what"] for event in kept(log.events, "row")}, [
        event["text"] for event in kept(log.events, "note")
    ]


@needs_kernels
@pytest.mark.parametrize(("peer", "module"), [("apex", APEX), ("transformer engine", TRANSFORMER_ENGINE)])
def test_an_installed_peer_is_timed(here, log, install, peer, module):
    install(module, FusedAdam=FusedAdam)
    rows, notes = windows_with_peers(here, log)
    assert {f"{peer}: device, end", f"{peer}: wall, window"} <= rows
    assert f"native, device, end, against {peer}" in rows
    assert not any(note.startswith(f"{peer}: skipped") for note in notes)
    assert not log.failed


@needs_kernels
@pytest.mark.parametrize("own", [True, False])
def test_apex_clips_with_its_own_if_it_is_there(here, log, install, own):
    called = []

    def clip(params, max_norm):
        called.append(max_norm)
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    install(APEX, FusedAdam=FusedAdam)
    if own:
        install("apex.contrib.clip_grad", clip_grad_norm_=clip)
    rows, notes = windows_with_peers(here, log)
    assert "apex: device, end" in rows and bool(called) == own
    assert f"apex: clip_grad_norm_ is {'of Apex' if own else 'of PyTorch'}" in notes


@needs_kernels
def test_a_peer_that_is_broken_is_a_reason(here, log, install):
    def broken(*_, **__):
        raise RuntimeError("built for another torch")

    install(APEX, FusedAdam=broken)
    rows, notes = windows_with_peers(here, log)
    assert not any("apex" in row for row in rows) and "native: device, end" in rows and not log.failed
    assert "apex: skipped: RuntimeError('built for another torch')" in notes


@needs_kernels
def test_a_peer_that_loses_the_device_ends_the_part(here, log, install):
    def lost(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    install(APEX, FusedAdam=lost)
    with pytest.raises(RuntimeError, match="illegal memory"):
        windows_with_peers(here, log)


@needs_kernels
def test_a_peer_with_other_results_is_not_timed(here, log, install):
    class Wrong(FusedAdam):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].grad.mul_(1.01)
            super().step(closure)

    install(APEX, FusedAdam=Wrong)
    rows, _ = windows_with_peers(here, log)
    (failure,) = kept(log.events, "failure")
    assert failure["what"] == "apex" and "exp_avg: apex / torch best" in failure["text"]
    assert not any("apex" in row for row in rows) and "native: device, end" in rows


# ------------------------------------------------------------------------------------- many processes


@needs_kernels
def test_shards_are_gathered(log):
    gpu_proofs.in_shards(log, "reduced", 2, emulated=True)
    assert not log.failed and len(kept(log.events, "check")) == 2 * len(gpu_proofs.reduced_variants())


def test_a_shard_that_dies_is_a_failure(log):
    gpu_proofs.in_shards(log, "no such part", 1, emulated=True)
    (failure,) = kept(log.events, "failure")
    assert failure["text"] == "1 of 1 processes did not finish"


# ------------------------------------------------------------------------------------------ the parent


def part(name, kind="proof", limit=10.0):
    return SimpleNamespace(name=name, kind=kind, limit=limit, goal="")


def events(name, status="passed", *more):
    end = {"event": "end", "part": name, "status": status, "reason": "", "seconds": 0.1}
    return [{"event": "start", "part": name}, *more, end]


def parent(monkeypatch, tmp_path, parts, *processes, budget=60.0):
    """Runs parts in processes that say what they are told to; the last word is a status, or "hang"."""
    left, ended = list(processes), []

    class Worker:
        def __init__(self, names, emulated):
            *self.events, self.last = left.pop(0)
            self.process = SimpleNamespace(pid=0)

        def next(self, seconds):
            if self.events:
                return self.events.pop(0)
            if self.last == "hang":
                raise queue.Empty
            return None

        def kill(self):
            ended.append(self)

        def end(self):
            return self.last

    monkeypatch.setattr(gpu_check, "Worker", Worker)
    report = gpu_check.Report(tmp_path / "report.json", {})
    gpu_check.run_all(report, parts, False, gpu_check.time.monotonic() + budget)
    assert not left
    assert json.loads(report.path.read_text())["parts"].keys() == {p.name for p in parts}
    return report, ended


def statuses(report):
    return {name: record["status"] for name, record in report.data["parts"].items()}


def test_a_part_that_ends_its_process_is_passed_over(monkeypatch, tmp_path):
    parts = [part("a"), part("b"), part("c")]
    first = [*events("a"), {"event": "start", "part": "b"}, -11]
    report, _ = parent(monkeypatch, tmp_path, parts, first, [*events("c"), 0])
    assert statuses(report) == {"a": "passed", "b": "failed", "c": "passed"}
    assert report.part("b")["reason"] == "its process ended with status -11"
    assert gpu_check.failed(report, parts) == ["b"]


def test_a_part_that_loses_the_device_costs_no_other(monkeypatch, tmp_path):
    parts = [part("a"), part("b")]
    failure = {"event": "failure", "what": "x", "text": "illegal memory access"}
    report, _ = parent(monkeypatch, tmp_path, parts, [*events("a", "failed", failure), 3], [*events("b"), 0])
    assert statuses(report) == {"a": "failed", "b": "passed"}


def test_a_part_that_hangs_is_ended_and_has_failed(monkeypatch, tmp_path):
    parts = [part("a"), part("b", limit=0.0), part("c")]
    row = {"event": "row", "row": {"what": "w", "value": 1.0, "unit": "ms"}}
    first = [*events("a"), {"event": "start", "part": "b"}, row, "hang"]
    report, ended = parent(monkeypatch, tmp_path, parts, first, [*events("c"), 0])
    assert statuses(report) == {"a": "passed", "b": "failed", "c": "passed"} and len(ended) == 1
    assert report.part("b")["rows"] == [row["row"]], "what it had found is lost"


def test_a_process_that_never_starts_a_part(monkeypatch, tmp_path):
    report, _ = parent(monkeypatch, tmp_path, [part("a")], [1])
    assert statuses(report) == {"a": "failed"}


def test_the_budget_skips_what_is_left(monkeypatch, tmp_path):
    parts = [part("a"), part("b")]
    report, _ = parent(monkeypatch, tmp_path, parts, budget=-1.0)
    assert statuses(report) == {"a": "skipped", "b": "skipped"}
    assert gpu_check.failed(report, parts) == []


def test_times_decide_nothing(monkeypatch, tmp_path):
    parts = [part("a", "speed")]
    report, _ = parent(monkeypatch, tmp_path, parts, [*events("a", "failed"), 0])
    assert gpu_check.failed(report, parts) == []


def test_a_failure_is_the_exit_status(monkeypatch, tmp_path, capsys):
    def run_all(report, chosen, *rest):
        for event in events(chosen[0].name, "failed", {"event": "failure", "what": "x", "text": "y\nz"}):
            report.on(chosen[0].name, event)
        report.on(chosen[1].name, gpu_check._end("cut short", "no time"))

    monkeypatch.setattr(gpu_check, "run_all", run_all)
    path = tmp_path / "report.json"
    arguments = ["--emulated", "--only", "graphs", "--only", "streams", "--report", str(path)]
    assert gpu_check.main(arguments) == 1
    text = capsys.readouterr().out
    assert "FAILED: " in text and "NOT FINISHED: " in text


def test_a_real_worker_is_ended_with_what_it_has_started():
    worker = gpu_check.Worker([], True)
    worker.process.kill()
    worker.process.wait()
    worker.kill()
    assert worker.end() == -9


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access was encountered", "Misaligned address"]
)
def test_a_lost_device_ends_the_part(text, log):
    def job():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError):
        log.checks([("a", job), ("b", job)])
    assert [event["what"] for event in kept(log.events, "failure")] == ["a"]


def test_checks_go_on_behind_a_failure_and_a_skip(log):
    def fail():
        raise ValueError("no")

    def skip():
        raise Skip("not here")

    log.checks([("a", fail), ("b", skip), ("c", lambda: None)])
    assert log.failed == 1 and "ValueError: no (test_gpu_check.py:" in log.events[0]["text"]
    assert kept(log.events, "note") == [{"event": "note", "text": "b: skipped: not here"}]


# -------------------------------------------------------------------------------------------- the build


@pytest.fixture
def commands(monkeypatch):
    """What is run for the build, and the answers to it."""
    seen, answers = [], []

    def run(command, **options):
        seen.append((command[1:], options["env"]))
        code, text = answers.pop(0)
        if code == "late":
            raise subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(returncode=code, stdout=text, stderr="")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check, "missing", lambda: ["ninja"])
    monkeypatch.delenv("FASTACCUM_CUDA_ARCHS", raising=False)
    return seen, answers


@pytest.mark.parametrize(
    ("given", "status", "count"),
    [
        ([(0, "")], "passed", 1),
        ([(1, "error: externally-managed-environment"), (0, "")], "passed", 2),
        ([(1, "/usr/bin/python3: No module named pip"), (1, "no nvcc")], "failed", 2),
        ([(1, "an error in gather.cu")], "failed", 1),
        ([("late", "")], "failed", 1),
    ],
)
def test_the_build(commands, tmp_path, given, status, count):
    seen, answers = commands
    answers += given
    report = gpu_check.Report(tmp_path / "report.json", {})
    gpu_check.build(report, "9.0", 100.0)
    record = report.part("build")
    assert record["status"] == status and len(seen) == count
    assert record["notes"][0].startswith("missing: ninja")
    command, environment = seen[0]
    assert command[:3] == ["-m", "pip", "install"] and "--no-build-isolation" in command
    assert environment["FASTACCUM_CUDA"] == "1" and environment["FASTACCUM_CUDA_ARCHS"] == "9.0"
    assert gpu_check.failed(report, []) == (["build"] if status == "failed" else [])


def test_what_came_along_is_used(monkeypatch, tmp_path):
    (tmp_path / "pybind11").mkdir()
    monkeypatch.setattr(gpu_check, "CARRIED", tmp_path)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_check.importlib.metadata, "version", lambda name: "68.1.2")
    lacks = [m for m in gpu_check.missing() if m != "nvcc"]
    assert lacks == ["setuptools", "ninja", "setuptools >= 77 (it is 68.1.2)"]
    environment = gpu_check.environment_of_children()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


@needs_none
def test_it_is_built_before_it_is_imported(monkeypatch, tmp_path, capsys):
    properties = SimpleNamespace(
        name="Some GPU", major=9, minor=0, multi_processor_count=4, total_memory=1 << 33
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path)
    steps = []
    monkeypatch.setattr(gpu_check, "build", lambda report, arch, limit: steps.append(("build", arch)))
    monkeypatch.setattr(gpu_check, "parts", lambda: steps.append("parts") or [part("a")])
    monkeypatch.setattr(gpu_check, "run_all", lambda *args: steps.append("run"))
    assert gpu_check.main([]) == 0
    assert steps[0] == ("build", "9.0") and steps[-1] == "run"
    assert json.loads((tmp_path / "gpu-some-gpu.json").read_text())["environment"]["gpu"] == "Some GPU"
    assert gpu_check.main(["--no-build"]) == 0 and steps.count(("build", "9.0")) == 1


def test_the_table_without_rich(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report = gpu_check.Report(tmp_path / "report.json", {})
    row = {"what": "add", "value": 2.0, "unit": "ms", "share": 0.9}
    for event in events("a", "passed", {"event": "row", "row": row}):
        report.on("a", event)
    gpu_check.show(report, [part("a")])
    assert "0.90 of the copy" in capsys.readouterr().out


# ------------------------------------------------------------------------- the GPU, as torch describes it


@pytest.fixture
def gpu(monkeypatch):
    """The GPU's side, with torch.cuda's calls recorded; names that torch has not would raise."""
    called = []

    class Recorded:
        def __init__(self, *args, **options):
            called.append((type(self).__name__, options))

        def __enter__(self):
            called.append("enter")

        def __exit__(self, *_):
            called.append("exit")

        def elapsed_time(self, other):
            return 6.0

        def record(self):
            called.append("record")

        def wait_stream(self, other):
            called.append("wait")

        synchronize = record

    def answer(name, value=None):
        return lambda *args, **options: (called.append((name, args)), value)[1]

    for name in ("Event", "Stream", "CUDAGraph", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, type(name, (Recorded,), {}))
    for name in ("set_device", "_sleep", "synchronize", "set_sync_debug_mode", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, answer(name))
    monkeypatch.setattr(torch.cuda, "current_stream", answer("current_stream", Recorded()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer("mem_get_info", (5, 6)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", answer("reset_peak_memory_stats"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", answer("max_memory_allocated", 7))
    made = gpu_machine.Gpu()
    called.clear()
    return made, called


def test_time_is_the_devices(gpu):
    machine, called = gpu
    assert machine.seconds(lambda: called.append("call"), 3) == pytest.approx(0.002)
    assert called[2:] == [("_sleep", (4_000_000,)), "record", "call", "call", "call", "record", "record"]


def test_a_capture_is_global_and_on_the_current_stream(gpu):
    machine, called = gpu
    with machine.stream():
        machine.capture(lambda: called.append("call"))
    (options,) = [call[1] for call in called if call[0] == "graph"]
    assert options["capture_error_mode"] == "global" and options["stream"] is not None
    assert called.count("wait") == 2 and called.index("enter") < called.index("call")


def test_waiting_is_forbidden_and_then_allowed_again(gpu):
    machine, called = gpu
    with pytest.raises(KeyError), machine.no_waiting():
        raise KeyError
    assert called == [("set_sync_debug_mode", ("error",)), ("set_sync_debug_mode", ("default",))]


def test_memory(gpu):
    machine, _ = gpu
    machine.start_peak()
    assert (machine.free_memory(), machine.peak()) == (5, 7)
    with machine.using("native"):
        machine.synchronize()
    assert machine.reason("native") or torch.cuda.is_available()


@pytest.mark.parametrize("seen", [True, False])
def test_launches_are_kernels_and_copies(gpu, monkeypatch, seen):
    from torch.autograd import DeviceType

    machine, _ = gpu
    names = ["fill", "gather_kernel", "Memcpy HtoD", "Optimizer.step#F", "Stream Sync", "finish_kernel"]
    kind = DeviceType.CUDA if seen else DeviceType.CPU

    class Profile:
        def __init__(self, **options):
            assert torch.profiler.ProfilerActivity.CUDA in options["activities"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            return [SimpleNamespace(name=name, device_type=kind) for name in names]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(machine, "device", torch.device("cpu"), raising=False)
    if seen:
        assert machine.launches(lambda: None) == (["gather_kernel", "finish_kernel"], ["Memcpy HtoD"])
    else:
        with pytest.raises(Skip, match="sees no kernels"):
            machine.launches(lambda: None)


# -------------------------------------------------------------------------------- compute-sanitizer


@pytest.fixture
def sanitizer(monkeypatch, tmp_path):
    """Runs the part with a program in the sanitizer's place."""

    def make(script):
        program = tmp_path / "compute-sanitizer"
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        monkeypatch.setattr(gpu_proofs.toolkit, "find", lambda name: str(program))
        return SimpleNamespace(emulated=False, reason=lambda backend: "")

    return make


HELP = (
    'if [ "$1" = --help ]; then echo "  --kernel-name-exclude arg"; echo "  --kernel-regex arg"; exit; fi\n'
)
END = """echo '{"event": "end", "part": "reduced", "status": "passed"}'\n"""


def test_the_sanitizer_looks_at_our_kernels(sanitizer, log):
    machine = sanitizer(HELP + 'case "$*" in *"--kernel-regex kns=fastaccum"*) ;; *) exit 5;; esac\n' + END)
    gpu_proofs.sanitizer(machine, log)
    assert not log.failed and len(kept(log.events, "check")) == 2


@pytest.mark.parametrize("script", [END + "exit 86\n", "echo nothing ran\n"])
def test_what_the_sanitizer_finds_is_a_failure(sanitizer, log, script):
    gpu_proofs.sanitizer(sanitizer(HELP + script), log)
    assert log.failed == 2


def test_no_sanitizer_is_a_reason(sanitizer, log, monkeypatch):
    machine = sanitizer("")
    monkeypatch.setattr(gpu_proofs.toolkit, "find", lambda name: None)
    with pytest.raises(Skip, match="compute-sanitizer is not on this machine"):
        gpu_proofs.sanitizer(machine, log)
