"""Figures that no other process can disturb: `python -m benchmarks.counters [--write]`.

What a window makes PyTorch do (benchmarks/window_counts.py) and how many instructions the CPU core's loops
take per element (benchmarks/hot_loops.py) at the levels avx2 and baseline, as valgrind cannot run AVX-512
code; beside the values stored in benchmarks/results/counters.json. The
exit status is 1 where they are more than 5 % apart, or where a name is measured and not stored or the
reverse. --write stores what was measured; commit first, as the file names the commit.

Compared is what can be: the operators that PyTorch calls in turn are those of its minor version, and the
instructions those of a compiler's major version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks import harness, hot_loops, table

STORED = Path(__file__).resolve().parent / "results/counters.json"
TOLERANCE = 0.05
# What does not depend on the version of PyTorch, for the providers that are ours.
OURS_ALONE = ("fastaccum operators", "allocations", "bytes allocated", "host reads")

Values = dict[str, float]


def flat(windows: dict[str, dict[str, int]]) -> Values:
    """{window: {counter: number}} as {"window: counter": number}."""
    return {f"{window}: {name}": n for window, counts in windows.items() for name, n in counts.items()}


def is_ours_alone(name: str) -> bool:
    """Whether a flat name's number is fastaccum's own doing."""
    window, _, counter = name.partition(": ")
    return window.split("/")[-1].startswith("fastaccum") and counter in OURS_ALONE


def differences(measured: Values, stored: Values, tolerance: float = TOLERANCE) -> list[str]:
    """A line per name that is more than ``tolerance`` off its stored value, or has no partner."""
    found = [f"{name}: measured, not stored" for name in sorted(measured.keys() - stored.keys())]
    found += [f"{name}: stored, not measured" for name in sorted(stored.keys() - measured.keys())]
    for name in sorted(measured.keys() & stored.keys()):
        now, then = measured[name], stored[name]
        if abs(now - then) > tolerance * then:
            change = f" ({100 * (now / then - 1):+.1f} %)" if then else ""
            found.append(f"{name}: {now:g}, stored {then:g}{change}")
    return found


def other_torch(stored: dict) -> str | None:
    """Why PyTorch's own calls cannot be compared, or None."""
    import torch

    minors = [version.split(".")[:2] for version in (torch.__version__, stored["environment"]["torch"])]
    if minors[0] == minors[1]:
        return None
    return f"torch is {torch.__version__}, the stored counts are {stored['environment']['torch']}'s"


def other_code(stored: dict) -> str | None:
    """Why the instructions cannot be compared, or None."""
    now, then = hot_loops.facts(), stored["instructions"]["facts"]
    if now["architecture"] != then["architecture"]:
        return f"this is {now['architecture']}, the stored counts are {then['architecture']}'s"
    if now["compiler"].split(".")[0] != then["compiler"].split(".")[0]:
        return f"the core was compiled by {now['compiler']}, the stored counts are {then['compiler']}'s"
    return None


def measure() -> dict:
    """Everything, in the form of the stored file; without "instructions" where they cannot be counted."""
    from benchmarks import window_counts  # imports torch

    report = {"environment": harness.environment(threads=1), "windows": window_counts.measure_all()}
    if hot_loops.reason_against() is None:
        report["instructions"] = {"facts": hot_loops.facts(), "per element": hot_loops.measure()}
    return report


def compare(report: dict, stored: dict) -> list[str]:
    """What differs among what can be compared; prints what cannot."""
    windows, stored_windows = flat(report["windows"]), flat(stored["windows"])
    if reason := other_torch(stored):
        print(f"PyTorch's own calls are not compared: {reason}")
        windows, stored_windows = (
            {name: n for name, n in values.items() if is_ours_alone(name)}
            for values in (windows, stored_windows)
        )
    found = differences(windows, stored_windows)
    if reason := hot_loops.reason_against() or other_code(stored):
        print(f"instructions are not compared: {reason}")
        return found
    return found + differences(report["instructions"]["per element"], stored["instructions"]["per element"])


def show(report: dict, stored: dict | None) -> None:
    """Prints the tables; a stored value stands in brackets where it is another."""
    facts = report["environment"]
    print("  ".join(f"{name}: {fact}" for name, fact in facts.items()))

    def cell(now: float | None, then: float | None) -> str:
        text = "-" if now is None else str(now) if isinstance(now, int) else f"{now:.4f}"
        return text if stored is None or now == then else f"{text} [{'-' if then is None else f'{then:g}'}]"

    old = stored["windows"] if stored else {}
    names = list(next(iter(report["windows"].values())))
    rows = [
        [window, *(cell(counts[name], old.get(window, {}).get(name)) for name in names)]
        for window, counts in report["windows"].items()
    ]
    table.print_table("One steady window; [stored]", ["window", *names], rows)
    if "instructions" not in report:
        return
    new = report["instructions"]["per element"]
    old = stored["instructions"]["per element"] if stored else {}
    levels = [level for level in hot_loops.LEVELS if any(name.startswith(f"{level}/") for name in new)]
    rows = [
        [loop, *(cell(new.get(f"{level}/{loop}"), old.get(f"{level}/{loop}")) for level in levels)]
        for loop in dict.fromkeys(name.partition("/")[2] for name in new)
    ]
    built = "{compiler}, valgrind {valgrind}, {architecture}".format(**report["instructions"]["facts"])
    table.print_table(f"Instructions per element, {built}; [stored]", ["loop", *levels], rows)


def instructions_counted(report: dict) -> str:
    """The levels; a level that the CPU lacks has none."""
    names = report["instructions"]["per element"]
    levels = [level for level in hot_loops.LEVELS if any(name.startswith(f"{level}/") for name in names)]
    return f"instructions counted: {', '.join(levels)}"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and compares or writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store what was measured")
    options = parser.parse_args(argv)
    # The profiler announces each start and each tensor that it did not see made: 200 lines. Read by torch
    # when it is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    reason = hot_loops.reason_against()
    if options.write and reason:
        print(f"nothing is written, as instructions cannot be counted: {reason}", file=sys.stderr)
        return 1
    report = measure()
    stored = json.loads(STORED.read_text()) if STORED.is_file() else None
    show(report, stored)
    if options.write:
        STORED.write_text(json.dumps(report, indent=1) + "\n")
        return 0
    if stored is None:
        print(f"there are no stored values: run with --write ({STORED.name})", file=sys.stderr)
        return 1
    found = compare(report, stored)
    for line in found:
        print(f"DIFFERS {line}")
    print(f"INSTRUCTIONS NOT COUNTED: {reason}" if reason else instructions_counted(report))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
