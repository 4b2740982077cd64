"""`python -m benchmarks`; --help tells its options."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import agreement, harness, table
from benchmarks.case import Case
from benchmarks.goals import GOALS


def all_cases() -> list[Case]:
    """Every case there is."""
    from benchmarks import bench_windows

    modules = [bench_windows]
    for name in (
        "bench_backward",
        "bench_clip",
        "bench_microbatch",
        "bench_training",
        "bench_memory",
        "bench_ops",
    ):
        modules.append(__import__(f"benchmarks.{name}", fromlist=[name]))
    return [case for module in modules for case in module.cases()]


def select(cases: list[Case], only: list[str], quick: bool) -> tuple[list[Case], list[dict]]:
    """The cases to run, and a skipped row for every ``only`` that matches nothing."""
    if not only:
        return [case for case in cases if case.quick or not quick], []
    chosen = [case for case in cases if any(part in case.name for part in only)]
    unknown = [
        {"name": part, "status": "skipped", "reason": "no case has this in its name (see --list)"}
        for part in only
        if not any(part in case.name for case in cases)
    ]
    return chosen, unknown


def earlier(path: Path, option: str) -> dict:
    """An earlier report that an option names.

    Raises:
        SystemExit: it cannot be read, or is none.
    """
    try:
        report = json.loads(path.read_text())
        report["environment"]["commit"], report["results"].items()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{option}: {path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise SystemExit(f"{option}: {path} is not what --json of this command has written") from None
    return report


def number_of_threads(text: str) -> int:
    """An argument that counts threads."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times fastaccum and stock PyTorch side by side in one process.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="cases whose name contains it"
    )
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="these providers only (fastaccum always runs: the others are compared with it)",
    )
    parser.add_argument(
        "--pytest-benchmark-json",
        type=Path,
        metavar="FILE",
        help="write a file for `pytest-benchmark compare`",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="an earlier --json: do its ratios agree with this run's?"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the PNG plots here")
    parser.add_argument(
        "--threads",
        type=number_of_threads,
        help="threads of every provider (default: as many as PyTorch takes)",
    )
    parser.add_argument(
        "--allocator",
        choices=list(harness.ALLOCATORS),
        action="append",
        help="allocator setting (default: the page-fault-free one, and without --quick the C library's own "
        "for the cases of the goals)",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; 1 when a case failed, 130 when interrupted, else 0. Timings never decide."""
    options = parse(argv)
    cases = all_cases()
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.child:
        by_name = {case.name: case for case in cases}
        wanted = [by_name[name] for name in sys.stdin.read().split("\n") if name]
        return harness.child(wanted, options.quick, options.threads, options.provider)
    # What the options name is looked at before anything is timed.
    before = earlier(options.compare, "--compare") if options.compare else None
    for path in (options.json, options.pytest_benchmark_json, options.plots):
        if path is not None and not path.parent.is_dir():
            raise SystemExit(f"{path}: there is no folder {path.parent}")
    chosen, rows = select(cases, options.only, options.quick)
    allocators = options.allocator or list(harness.ALLOCATORS)[: 1 if options.quick else None]
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": options.quick,
        "environment": {},
        "allocators": {name: harness.ALLOCATORS[name] for name in allocators},
        "results": {},
    }
    arguments = ["--quick"] if options.quick else []
    arguments += ["--threads", str(options.threads)] if options.threads else []
    arguments += [word for name in options.provider for word in ("--provider", name)]
    whole = dict(report, results={})  # with the samples
    names = {allocator: [case.name for case in chosen] for allocator in allocators}
    if not options.allocator and "default" in names:  # page faults make it several times slower
        goals = {goal.case for goal in GOALS}
        names["default"] = [name for name in names["default"] if name in goals]
    interrupted = False
    with table.Progress(sum(map(len, names.values()))) as progress:
        try:
            for allocator in allocators:
                results = report["results"][allocator] = list(rows)
                whole["results"][allocator] = []
                for event in harness.run_children(names[allocator], allocator, arguments):
                    if event["event"] == "environment":
                        report["environment"] = event["facts"]
                    elif event["event"] == "result":
                        whole["results"][allocator].append(dict(event["result"]))
                        event["result"].pop("samples", None)
                        results.append(event["result"])
                        if options.json:  # each time: a long run may be killed
                            options.json.write_text(json.dumps(report, indent=1) + "\n")
                    progress.on(event, allocator)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        done = sum(map(len, report["results"].values())) - len(rows) * len(report["results"])
        print(f"\ninterrupted: {done} of {sum(map(len, names.values()))} cases were run", file=sys.stderr)
        if not done:
            return 130
    if before is not None:
        report["agreement"] = {
            "with": before["environment"]["commit"],
            "words": agreement.rows(report, before)[1],
        }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.pytest_benchmark_json:
        from benchmarks.exchange import as_pytest_benchmark

        text = json.dumps(as_pytest_benchmark(whole), indent=1)
        options.pytest_benchmark_json.write_text(text + "\n")
    table.show(report)
    if before is not None:
        table.show_agreement(report, before)
    if options.plots:
        from benchmarks import plots

        print(plots.write(report, options.plots))
    if interrupted:
        return 130
    failed = [r["name"] for rs in report["results"].values() for r in rs if r["status"] == "failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
