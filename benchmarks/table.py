"""What a person sees: progress while it runs, the table of cases and the table of goals.

Uses `rich` where it is installed and plain lines where it is not.
"""

from __future__ import annotations

import math
import sys
import time

from benchmarks import agreement
from benchmarks.goals import GOALS
from benchmarks.harness import RESIDENT, ROOF

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:
    rich = None


class Progress:
    """Progress over cases and the rounds of the running one."""

    def __init__(self, cases: int) -> None:
        self.cases, self.done, self.started = cases, 0, time.perf_counter()
        self.bar = None

    def __enter__(self) -> Progress:
        if rich is not None and sys.stderr.isatty():
            columns = (
                rich.progress.TextColumn("{task.description:32}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
            )
            console = rich.console.Console(stderr=True)
            self.bar = rich.progress.Progress(*columns, console=console)
            self.bar.start()
            self.all = self.bar.add_task("cases", total=self.cases)
            self.one = self.bar.add_task("", total=1)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on(self, event: dict, allocator: str) -> None:
        """Shows one event of a child."""
        kind = event["event"]
        self.done += kind == "result"
        if self.bar is None:
            if kind == "result":
                self._line(event["result"], allocator)
        elif kind == "start":
            self.bar.reset(self.one, description=event["name"], total=event["rounds"] + 1)
        elif kind == "round":
            self.bar.update(self.one, completed=event["done"] + 1)
        elif kind == "result":
            self.bar.update(self.all, completed=self.done)

    def _line(self, result: dict, allocator: str) -> None:
        seconds = time.perf_counter() - self.started
        place = f"[{self.done}/{self.cases} {seconds:5.0f} s]"
        print(f"{place} {result['name']} ({allocator}): {result['status']}", file=sys.stderr)


def show(report: dict) -> None:
    """Prints the tables of ``report``."""
    facts = report["environment"]
    print("  ".join(f"{name}: {fact}" for name, fact in facts.items()))
    for allocator, results in report["results"].items():
        print_table(
            f"Cases, {allocator} allocator; time / fastaccum's, spread in brackets",
            ["case", "provider", "metric", "median ms", "IQR %", "times ours", "", "GB/s", "share"],
            [row for result in results for row in case_rows(result)],
        )
    rows = goal_rows(report)
    print_table("Goals", ["work", "goal", "measured", "verdict", "default allocator"], rows)


def show_agreement(report: dict, before: dict) -> None:
    """Prints which ratios of two runs differ."""
    rows, words = agreement.rows(report, before)
    header = ["allocator", "case", "provider", "metric", "before", "now", "apart", "spread"]
    if rows:
        print_table("Ratios that differ from the earlier run", header, rows)
    print(f"\n{words}")


def case_rows(result: dict) -> list[list[str]]:
    """Rows of one case: a line per provider and metric, and a line per thing that is missing."""
    if result["status"] != "ok":
        return [[result["name"], f"{result['status']}: {result['reason']}"]]
    rows = []
    for provider, metrics in result["providers"].items():
        if provider == ROOF:
            continue
        for metric, summary in metrics.items():
            against = result["against"].get(provider, {}).get(metric, {})
            share = result["share"].get(provider, {}).get(metric, {})
            rows.append([
                result["name"] if not rows else "",
                provider,
                metric,
                f"{summary['median'] * 1e3:.3f}",
                f"{100 * summary['iqr'] / summary['median']:.1f}",
                _estimate(against),
                against.get("verdict", ""),
                f"{share['GB/s']:.1f}" if share else _rate(result["facts"], summary["median"]),
                _estimate(share),
            ])  # fmt: skip
    for name, peak in result.get("peak", {}).items():
        rows.append([result["name"], name, "bytes", peak["bytes"]["text"], "", _estimate(peak["bytes"])])
    rows += [["", name, f"skipped: {why}"] for name, why in result["missing"].items()]
    if "roofline" in result:
        loops = ", ".join(f"{k} {v:.1f}" for k, v in result["roofline"].items())
        rows.append(["", "GB/s of loops", loops])
    return rows


def _rate(facts: dict, seconds: float) -> str:
    """What a training gets through, in its own unit."""
    return f"{facts['items'] / seconds:,.0f} {facts['unit']}/s" if "items" in facts else ""


def goal_rows(report: dict) -> list[list[str]]:
    """Rows of the goals' table."""
    results = {
        allocator: {result["name"]: result for result in rows}
        for allocator, rows in report["results"].items()
    }
    main, default = results.get(RESIDENT, {}), results.get("default", {})
    rows = []
    for goal in GOALS:
        estimate, other = goal.measured(main), goal.measured(default)
        sign = "≤" if goal.at_most else "≥"
        rows.append([
            goal.work,
            f"{sign} {goal.target:g}",
            _estimate(vars(estimate)) if estimate else "",
            goal.verdict(estimate),
            _estimate(vars(other)) if other else "",
        ])  # fmt: skip
    return rows


def _estimate(found: dict) -> str:
    if not found:
        return ""
    spread = found["spread"]
    return f"{found['value']:.3f}" + (f" ({spread:.3f})" if math.isfinite(spread) else " (?)")


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints one table; a row may be shorter than the header."""
    width = len(header)
    rows = [row + [""] * (width - len(row)) for row in rows]
    if rich is None or not sys.stdout.isatty():
        _plain(title, header, rows)
        return
    grid = rich.table.Table(title=title)
    for name in header:
        grid.add_column(name)
    for row in rows:
        grid.add_row(*row)
    rich.console.Console().print(grid)


def _plain(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their usual cell; a long reason at the end of a row may run over."""
    print(f"\n{title}")
    full = [row for row in [header, *rows] if row[-1] or row[3]] or [header]
    widths = [max(len(row[i]) for row in full) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
