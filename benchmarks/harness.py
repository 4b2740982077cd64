"""Runs cases: providers interleaved round by round, one process per allocator setting.

The parent starts the child (`python -m benchmarks --child`), which prints one JSON line per event
on stdout; the parent draws progress and gathers the results. A child that dies (out of memory) is
started again behind the case that killed it, which is reported as failed.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import stats
from benchmarks.case import Case, Prepared

ROOT = Path(__file__).resolve().parents[1]

# glibc unmaps large tensors when they are freed and maps them anew; the page faults of that cost
# more than the work itself. These settings (read when the process starts) keep the memory.
RESIDENT = "resident"
ALLOCATORS: dict[str, dict[str, str]] = {
    RESIDENT: {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
        "MALLOC_TOP_PAD_": str(1 << 30),
    },
    "default": {},
}
ROOF = "roofline"
BESIDE = 1 << 30  # memory left to everybody else


def run_case(
    case: Case,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
    only: Sequence[str] = (),
) -> dict[str, object]:
    """Prepares ``case``, times it (the subject and the providers ``only``, if any) and returns its record."""
    free = available_memory()
    if not fits(case, free):
        need = (case.memory + BESIDE) / 2**30
        return _skipped(case, f"needs {need:.1f} GiB of memory, {free / 2**30:.1f} are free")
    prepared = case.prepare()
    if not prepared.samplers and not prepared.sections:
        reasons = "; ".join(f"{name}: {why}" for name, why in prepared.missing.items())
        return _skipped(case, reasons or "no provider can run it")
    samplers = dict(prepared.samplers)
    if only:
        wanted = {prepared.subject, *only}
        samplers = {name: sampler for name, sampler in samplers.items() if name in wanted}
        for name in set(only) - samplers.keys() - prepared.missing.keys():
            prepared.missing[name] = "this case has no provider of that name"
    if case.roofline:
        samplers[ROOF] = _roofline()
    samples = interleave(samplers, rounds, on_round)
    return {**record(case, prepared, samples), "samples": samples}


def fits(case: Case, free: int) -> bool:
    """Whether a case can run in that many bytes."""
    return case.memory + BESIDE <= free


def _roofline() -> Callable[[], dict[str, float]]:
    from benchmarks.roofline import Roofline  # imports torch, which the parent never needs

    return Roofline().sample


def _skipped(case: Case, reason: str) -> dict[str, object]:
    return {"name": case.name, "status": "skipped", "reason": reason}


def interleave(
    samplers: dict[str, Callable[[], dict[str, float]]],
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, list[float]]]:
    """Samples every provider once per round; provider -> metric -> seconds by round.

    The order turns by one each round, so that nobody always runs behind the same neighbour. One
    round before the first is thrown away.
    """
    names = list(samplers)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    collecting = gc.isenabled()
    try:
        for done in range(rounds + 1 if names else 0):
            shift = done % len(names)
            gc.collect()
            gc.disable()  # a collection inside a sample would be charged to one provider
            for name in names[shift:] + names[:shift]:
                for metric, seconds in samplers[name]().items():
                    if done:
                        found[name].setdefault(metric, []).append(seconds)
            gc.enable()
            on_round(done)
    finally:
        (gc.enable if collecting else gc.disable)()
    return found


def record(case: Case, prepared: Prepared, samples: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    """The JSON of one case: medians, IQRs, ratios with spread, bandwidth and its share."""
    roof = samples.get(ROOF, {})
    result: dict[str, object] = {
        "name": case.name,
        "status": "ok",
        "missing": prepared.missing,
        "facts": prepared.facts,
        "providers": {},
        "against": {},  # somebody's time / ours
        "over": {},  # our time / somebody's
        "share": {},
        **prepared.sections,
    }
    for name, metrics in samples.items():
        result["providers"][name] = {m: stats.summary(s) for m, s in metrics.items()}
    ours = samples.get(prepared.subject, {})
    for name, metrics in samples.items():
        if name in (prepared.subject, ROOF):
            continue
        for metric in metrics.keys() & ours.keys():
            theirs, mine = metrics[metric], ours[metric]
            against = result["against"].setdefault(name, {})
            against[metric] = _estimate(stats.ratio(theirs, mine))
            result["over"].setdefault(name, {})[metric] = vars(stats.ratio(mine, theirs))
    if roof:
        result["roofline"] = _bandwidths(roof)
        best = min(roof["triad"], roof["triad in place"], key=statistics.median)
        for name, metrics in prepared.bytes.items():
            result["share"][name] = {
                metric: _share(moved, samples[name][metric], best)
                for metric, moved in metrics.items()
                if metric in samples.get(name, {})
            }
    return result


def _estimate(estimate: stats.Estimate) -> dict[str, object]:
    return {
        "value": estimate.value,
        "spread": estimate.spread,
        "verdict": stats.speed_words(estimate),
    }


def _bandwidths(roof: dict[str, list[float]]) -> dict[str, float]:
    from benchmarks.roofline import ELEMENTS, LOOPS

    return {name: per * ELEMENTS / statistics.median(roof[name]) / 1e9 for name, per in LOOPS.items()}


def _share(moved: int, seconds: list[float], triad: list[float]) -> dict[str, float]:
    """Bandwidth of a provider, and its share of the faster triad loop's."""
    from benchmarks.roofline import ELEMENTS, LOOPS

    share = stats.ratio(triad, seconds).scaled(moved / (LOOPS["triad"] * ELEMENTS))
    rate = moved / statistics.median(seconds) / 1e9
    return {"value": share.value, "spread": share.spread, "bytes": moved, "GB/s": rate}


def available_memory() -> int:
    """Bytes that can be allocated without swapping; a large number where that is unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def total_memory() -> int:
    """Bytes of memory that the machine has; a large number where that is unknown."""
    return _meminfo("MemTotal") or 1 << 62


def machine() -> dict[str, object]:
    """The machine, the system and the commit."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory GiB": round(_meminfo("MemTotal") / 2**30, 1),
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def environment(threads: int) -> dict[str, object]:
    """What a reader must know to believe a figure."""
    import torch

    facts = {
        **machine(),
        "threads": threads,
        "torch": torch.__version__,
        "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
    }
    try:
        import fastaccum

        facts["fastaccum"] = getattr(fastaccum, "__version__", "unknown")
    except Exception as error:
        facts["fastaccum"] = f"not importable: {error}"
    return facts


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _meminfo(key: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Commit of the checkout, marked when its working tree differs from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip()[:12] + ("+" if dirty.stdout.strip() else "")


# --- the child ---------------------------------------------------------------------------------


def child(cases: list[Case], quick: bool, threads: int | None, only: Sequence[str] = ()) -> int:
    """Runs ``cases`` in this process and prints one JSON line per event."""
    out, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not break the stream

    def emit(**event: object) -> None:
        print(json.dumps(event), file=out, flush=True)

    import torch

    if threads:
        torch.set_num_threads(threads)
    emit(event="environment", facts=environment(torch.get_num_threads()))
    for number, case in enumerate(cases):
        if number and not fits(case, available_memory()):
            emit(event="again")  # what the earlier cases have freed stays with this process
            return 0
        rounds = case.quick_rounds if quick else case.rounds
        emit(event="start", name=case.name, rounds=rounds)
        started = time.perf_counter()
        try:
            result = run_case(case, rounds, lambda done: emit(event="round", done=done), only)
        except Exception as error:  # one broken case must not hide the others
            import traceback

            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            result = {"name": case.name, "status": "failed", "reason": reason}
        result["seconds"] = round(time.perf_counter() - started, 2)
        gc.collect()
        emit(event="result", result=result)
    return 0


# --- the parent --------------------------------------------------------------------------------


def run_children(names: list[str], allocator: str, arguments: list[str]) -> Iterator[dict]:
    """Yields the events of children that run the cases ``names`` under ``allocator``.

    A child keeps the memory of its cases (see `ALLOCATORS`): one that does not fit there gets a new child.
    """
    left = list(names)
    while left:
        command = [sys.executable, "-m", "benchmarks", "--child", *arguments]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **ALLOCATORS[allocator]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running, again = None, False
        try:
            process.stdin.write("\n".join(left))
            process.stdin.close()
            for line in process.stdout:
                event = json.loads(line)
                again = event["event"] == "again"
                if event["event"] == "start":
                    running = event["name"]
                elif event["event"] == "result":
                    left.remove(running)
                    running = None
                yield event
        except BaseException:  # nobody reads what it says any more
            process.kill()
            process.wait()
            raise
        code = process.wait()
        if again:
            continue
        if running is None:
            if left:
                raise RuntimeError(f"the benchmark process ended early with status {code}")
            return
        left.remove(running)
        reason = f"its process ended with status {code} (-9: out of memory)"
        yield {
            "event": "result",
            "result": {"name": running, "status": "failed", "reason": reason, "seconds": 0.0},
        }
