"""The whole check of the GPU kernels, in under 8 minutes on one GPU: `make gpu-check [ARGS=...]`.

On a fresh machine, which may have no network:

1.  It must have: Linux on x86-64, a GPU of compute capability 8.0 or more, Python >= 3.10, torch >= 2.11
    (a CUDA 13 build; Triton comes with it), nvcc >= 13.0 (CUDA_HOME or PATH), g++.
    For the build also setuptools >= 77, pybind11 and ninja. Where those are missing, have them travel:
        python3 -m pip install --target build/gpu-check/site setuptools pybind11 ninja     (with network)
    and copy that folder along; it is found. numpy, pytest and hypothesis are not needed; rich is used
    for the table if it is there; compute-sanitizer (of the toolkit) is used if it is found.
2.  Run, from the root of the repository:
        make gpu-check            with the Python of .venv if there is one, else PYTHON (python3)
        python3 -m benchmarks.gpu_check [--report FILE]                          the same without make
    It builds the package first, for this GPU alone: `pip install --no-build-isolation --no-deps -e .` in
    that Python, or, where there is no pip or pip refuses to (PEP 668), `setup.py build_ext --inplace`,
    which will do here. --no-build takes what is there.
3.  Read the table, or benchmarks/results/gpu-<name>.json, which is written after every result: a run that
    is cut short has lost nothing. --list names the parts, --only picks some, --budget is in seconds.

Exit status: 0, no proof failed; 1, one did, or took too long, or the build failed; 77, there is no GPU.
Times decide nothing. Each part has a limit; those for which no time is left are skipped. The parts run in
a process of their own, which is started anew behind a part that kills it, or hangs.

--emulated shows on the CPU that this script works: the same parts at tiny sizes, with the emulated CUDA
kernels (and the Triton kernels, if TRITON_INTERPRET=1 and Triton is installed); see gpu_machine.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
CARRIED = ROOT / "build/gpu-check/site"  # build requirements that came along with the repository
NO_GPU = 77
BUDGET = 470.0
BUILD_LIMIT = 200.0
BUILD = "build"
OLDEST_SETUPTOOLS = 77  # the first that knows pyproject.toml's form of a licence
PIP = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", ".")
IN_PLACE = ("setup.py", "build_ext", "--inplace")
ENVIRONMENT = "environment"
SHOWN = 60  # characters of a note in the table


def parts() -> list[Any]:
    """Every part, in order: proofs of the CUDA kernels and the main times first."""
    from benchmarks import gpu_proofs, gpu_speed

    return [*gpu_proofs.PARTS, *gpu_speed.PARTS, *gpu_proofs.LATE_PARTS, *gpu_speed.LATE_PARTS]


# ----------------------------------------------------------------------------------------- the worker


def worker(names: Sequence[str], emulated: bool, shard: tuple[int, int]) -> int:
    """Runs parts in this process and prints one JSON line per event."""
    out, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not break the stream
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(event), file=out, flush=True)

    try:
        return _run_parts(names, emulated, shard, emit)
    finally:
        sys.stdout = out


def _run_parts(names: Sequence[str], emulated: bool, shard: tuple[int, int], emit: Any) -> int:
    from benchmarks import gpu_part, gpu_proofs
    from benchmarks.gpu_machine import Skip, machine

    known = {part.name: part for part in [*parts(), *gpu_proofs.HIDDEN_PARTS]}
    here = machine(emulated)
    # Each round of a timing collects garbage first; what is there now never becomes any.
    gc.collect()
    gc.freeze()
    for name in names:
        part, started = known[name], time.perf_counter()
        emit({"event": "start", "part": name})
        log = gpu_part.Log(emit, shard)
        status, reason, lost = "passed" if part.kind == gpu_part.PROOF else "done", "", False
        try:
            part.run(here, log)
            here.synchronize()
        except Skip as skip:
            status, reason = "skipped", str(skip)
        except Exception as error:
            traceback.print_exc()
            status, reason = "failed", f"{type(error).__name__}: {error}"[:500]
            lost = gpu_part.is_lost(error)
        if log.failed:
            status = "failed"
        seconds = round(time.perf_counter() - started, 2)
        emit({"event": "end", "part": name, "status": status, "reason": reason, "seconds": seconds})
        if lost:
            return 3  # the parent goes on behind this part, in a new process
    return 0


# ----------------------------------------------------------------------------------------- the parent


class Report:
    """What has been found so far, always on disk."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            ENVIRONMENT: facts,
            "parts": {},
        }

    def part(self, name: str) -> dict[str, Any]:
        """A part's record."""
        empty = {"status": "running", "checks": 0, "failures": [], "rows": [], "notes": []}
        return self.data["parts"].setdefault(name, empty)

    def on(self, name: str, event: dict[str, Any]) -> None:
        """Takes an event of a part."""
        record = self.part(name)
        match event["event"]:
            case "check":
                record["checks"] += 1
                return  # hundreds of them: not worth writing each
            case "row":
                record["rows"].append(event["row"])
            case "note":
                record["notes"].append(event["text"])
            case "failure":
                record["failures"].append({"what": event["what"], "text": event["text"]})
            case "end":
                record |= {k: event[k] for k in ("status", "reason", "seconds")}
        self.write()

    def write(self) -> None:
        """Writes the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        beside.replace(self.path)


def environment_of_children() -> dict[str, str]:
    """Ours, and the build requirements that came along."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if CARRIED.is_dir():
        paths = [str(CARRIED), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["PATH"] = os.pathsep.join([str(CARRIED / "bin"), environment.get("PATH", "")])
    return environment


def missing() -> list[str]:
    """What the build needs and this machine has not."""
    from benchmarks import toolkit

    needed = ("setuptools", "pybind11", "ninja")
    lacks = [m for m in needed if not importlib.util.find_spec(m) and not (CARRIED / m).is_dir()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("setuptools")
        if int(found.split(".")[0]) < OLDEST_SETUPTOOLS and not (CARRIED / "setuptools").is_dir():
            lacks.append(f"setuptools >= {OLDEST_SETUPTOOLS} (it is {found})")
    return lacks + ([] if toolkit.find("nvcc") else ["nvcc"])


def build(report: Report, arch: str, limit: float) -> None:
    """Compiles and installs the package for this GPU."""
    started, lacks = time.perf_counter(), missing()
    if lacks:
        text = f"missing: {', '.join(lacks)} (the script's docstring says how to bring it)"
        report.on(BUILD, {"event": "note", "text": text})
    environment = environment_of_children() | {"FASTACCUM_NATIVE": "1", "FASTACCUM_CUDA": "1"}
    environment.setdefault("FASTACCUM_CUDA_ARCHS", arch)
    status, reason = "passed", ""
    for command in (PIP, IN_PLACE):
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=max(limit - (time.perf_counter() - started), 1),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            status, reason = "failed", f"took more than {limit:.0f} s"
            break
        text = done.stdout + done.stderr
        status, reason = ("failed", text[-3000:]) if done.returncode else ("passed", " ".join(command))
        if not done.returncode or not re.search("No module named pip|externally-managed", text):
            break
    seconds = round(time.perf_counter() - started, 2)
    report.on(BUILD, {"event": "end", "status": status, "reason": reason, "seconds": seconds})


class Worker:
    """A process that runs parts; its events come with a time limit."""

    def __init__(self, names: Sequence[str], emulated: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--worker"]
        command += [word for name in names for word in ("--only", name)] + ["--emulated"] * emulated
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment_of_children(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event, or None at the end.

        Raises:
            queue.Empty: none came in time.
        """
        line = self.lines.get(timeout=max(seconds, 0.01))
        return None if line is None else json.loads(line)

    def end(self) -> int:
        """Ends the process; its status."""
        if self.process.poll() is None:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """Ends the process and those that it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_all(
    report: Report, chosen: Sequence[Any], emulated: bool, deadline: float, start_up: float = 60
) -> None:
    """Runs the parts, each within its limit, as long as there is time."""
    left = list(chosen)
    while left and deadline - time.monotonic() > 0:
        process = Worker([part.name for part in left], emulated)
        _follow(report, process, left, deadline, start_up)
    for part in left:
        report.on(part.name, _end("skipped", "no time was left"))


def _end(status: str, reason: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"event": "end", "status": status, "reason": reason, "seconds": round(seconds, 2)}


def _follow(report: Report, process: Worker, left: list[Any], deadline: float, start_up: float) -> None:
    """One process, until it has run what is left, or has been ended; at least one part is done then."""
    running, began, until = left[0], time.monotonic(), time.monotonic() + start_up
    try:
        while True:
            try:
                event = process.next(min(until, deadline) - time.monotonic())
            except queue.Empty:
                seconds = time.monotonic() - began
                process.kill()
                late = until <= deadline
                text = f"ended after {seconds:.0f} s: {'its limit' if late else 'no time was left'}"
                event = _end("failed" if late else "cut short", text, seconds)
                report.on(left.pop(0).name, event)
                return
            if event is None:
                break
            if event["event"] == "start":
                running, began = left[0], time.monotonic()
                until = began + running.limit
                assert event["part"] == running.name
                report.part(running.name)
                continue
            report.on(running.name, event)
            if event["event"] == "end":
                left.pop(0)
                until = time.monotonic() + start_up
                if not left:
                    return
    finally:
        code = process.end()
    if code != 3 or (report.data["parts"].get(left[0].name, {}).get("status") == "running"):
        report.on(left.pop(0).name, _end("failed", f"its process ended with status {code}"))


def failed(report: Report, chosen: Sequence[Any]) -> list[str]:
    """The proofs that did not hold; what failed in one that was cut short counts."""
    proofs = {BUILD, *(part.name for part in chosen if part.kind == "proof")}
    return [
        name for name, record in report.data["parts"].items()
        if name in proofs and (record["status"] == "failed" or record["failures"])
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- the table


def cells(report: Report, chosen: Sequence[Any]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table: part or measurement, result, goal, remark."""
    goals, noted = {part.name: part.goal for part in chosen}, set()
    for name, record in report.data["parts"].items():
        checks = f", {record['checks']} checks" if record["checks"] else ""
        result = f"{record['status']}{checks}, {record.get('seconds', 0):.1f} s"
        yield name, result, goals.get(name, ""), (record.get("reason") or "")[-SHOWN:].replace("\n", " ")
        for failure in record["failures"]:
            yield f"  {failure['what']}", "FAILED", "", failure["text"][:SHOWN].replace("\n", " ")
        for note in record["notes"]:
            if note not in noted:  # why a backend is skipped is the same everywhere
                yield "  note", "", "", note
            noted.add(note)
        for row in record["rows"]:
            value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g}"
            remark = f"{row['share']:.2f} of the copy" if "share" in row else row.get("verdict", "")
            yield f"  {row['what']}", f"{value} {row['unit']}", row.get("goal", ""), remark


def show(report: Report, chosen: Sequence[Any]) -> None:
    """Prints the table."""
    header, table = ("what", "result", "goal", "remark"), list(cells(report, chosen))
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
        for row in (header, *table):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    shown = Table(*header)
    for row in table:
        shown.add_row(*map(Text, row))
    # A log has no width of its own.
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


# ---------------------------------------------------------------------------------------------- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--emulated", "--dry-run", action="store_true", help="on the CPU, to prove the script")
    add("--no-build", action="store_true", help="take what is installed")
    add("--only", action="append", default=[], metavar="PART", help="may be given several times")
    add("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for everything")
    add("--report", type=Path, metavar="FILE", help="instead of benchmarks/results/gpu-NAME.json")
    add("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="0/1", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def environment_facts(emulated: bool) -> dict[str, Any]:
    """What a reader must know to believe a figure."""
    import platform

    import torch

    from benchmarks import toolkit

    facts: dict[str, Any] = {"gpu": "emulated", "compute capability": "none"}
    if not emulated:
        gpu = torch.cuda.get_device_properties(0)
        facts = {
            "gpu": gpu.name,
            "compute capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory GiB": round(gpu.total_memory / 2**30, 1),
            "torch's CUDA": torch.version.cuda,
        }
    facts |= {"nvcc": "missing", "python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(Exception):
        facts["nvcc"] = toolkit.version()
    for module in ("triton", "numpy", "pytest"):
        found = importlib.util.find_spec(module) is not None
        facts[module] = getattr(importlib.import_module(module), "__version__", "?") if found else "missing"
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check. See the module for what is returned."""
    began, options = time.monotonic(), parse(argv)
    if options.worker:
        first, step = map(int, options.shard.split("/"))
        return worker(options.only, options.emulated, (first, step))
    import torch

    if not (options.emulated or options.list) and not torch.cuda.is_available():
        print("no GPU: torch sees none (--emulated tries the script itself)")
        return NO_GPU
    if CARRIED.is_dir():
        sys.path.append(str(CARRIED))
    if options.list:
        print("\n".join(part.name for part in parts()))
        return 0
    facts = environment_facts(options.emulated)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    report = Report(options.report or RESULTS / f"gpu-{slug}.json", facts)
    if not (options.emulated or options.no_build):
        # Before the package is imported: a library that is in use should not be written.
        build(report, facts["compute capability"], min(BUILD_LIMIT, options.budget))
    unknown = set(options.only) - {part.name for part in parts()}
    if unknown:
        print(f"no part is called {', '.join(sorted(unknown))} (see --list)")
        return 2
    chosen = [part for part in parts() if not options.only or part.name in options.only]
    if options.emulated or options.no_build:
        why = "emulated: the host's compiler compiles the kernels" if options.emulated else "--no-build"
        report.on(BUILD, _end("skipped", why))
    run_all(report, chosen, options.emulated, began + options.budget, 400 if options.emulated else 60)
    report.data["seconds"] = round(time.monotonic() - began, 1)
    report.data["failed"] = failed(report, chosen)
    report.write()
    show(report, chosen)
    print(f"{report.data['seconds']} s; {report.path}")
    for name, record in report.data["parts"].items():
        if record["status"] == "cut short":
            print(f"NOT FINISHED: {name}")
    for name in report.data["failed"]:
        print(f"FAILED: {name}")
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
