"""The README's figures, made from a committed run: `python -m benchmarks.readme`.

Writes the tables between the marks in README.md and the pictures beside the run. Each picture keeps the
run's checksum, so that tests/test_figures.py can tell whether text and pictures belong to it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

from benchmarks import goals, plots
from benchmarks.harness import RESIDENT
from benchmarks.stats import CANNOT_TELL

ROOT = Path(__file__).resolve().parents[1]
README, RUN = ROOT / "README.md", ROOT / "benchmarks/results/cpu-2-cores.json"
PICTURES = ROOT / "benchmarks/results"
MARKS = ("<!-- figures of {}: made by python -m benchmarks.readme -->", "<!-- end -->")

WINDOWS = (
    ("gpt2-124m", "GPT-2, 124 M in 148 tensors"),
    ("resnet50", "ResNet-50, 26 M in 161 tensors"),
    ("2000x512", "2000 tensors of 512"),
)


def checksum(run: Path = RUN) -> str:
    """What the pictures keep of the run that they were made from."""
    return hashlib.sha256(run.read_bytes()).hexdigest()


def blocks(report: dict) -> dict[str, str]:
    """Name -> text of every block of figures in the README."""
    by_allocator = {
        allocator: {result["name"]: result for result in results if result["status"] == "ok"}
        for allocator, results in report["results"].items()
    }
    resident = by_allocator[RESIDENT]
    return {
        "help": "\n".join([*_help(resident), "", _facts(report), "", _trainings(resident)]),
        "goals": "\n".join(_goals(resident, by_allocator.get("default", {}))),
    }


def _times(case: dict, provider: str, metric: str) -> str:
    """How many times faster than a provider, in words that claim no more than was seen."""
    estimate = case["against"].get(provider, {}).get(metric)
    if estimate is None:
        return ""
    if estimate["verdict"] == CANNOT_TELL and abs(estimate["value"] - 1.0) > 0.1:
        return f"{estimate['value']:.1f} ± {estimate['spread']:.1f}"
    return f"{estimate['value']:.2f}" if estimate["value"] < 9.95 else f"{estimate['value']:.0f}"


def _help(cases: dict[str, dict]) -> list[str]:
    rows = [
        "| times as fast, from the end of backward on | K = 1 | K = 2 | K = 4 | K = 16 "
        "| the loop with a default `AdamW`, K = 4 |",
        "|---|---|---|---|---|---|",
    ]
    for label, words in WINDOWS:
        found = [cases.get(f"window/{label}/K={steps}") for steps in (1, 2, 4, 16)]
        cells = [_times(case, "stock best", "window") if case else "" for case in found]
        loop = _times(found[2], "stock loop", "window") if found[2] else ""
        rows.append(f"| {words} | {' | '.join(cells)} | {loop} |")
    clips = [cases[f"clip/gpt2-124m/{kind}"] for kind in ("clips", "within")]
    ratios = [_times(case, "torch", "clip") for case in clips]
    words = f"{ratios[0]} where it clips, {ratios[1]} where it need not"
    return [*rows, f"| `clip_grad_norm_` alone, GPT-2 | {words} | | | | |"]


def _facts(report: dict) -> str:
    facts = report["environment"]
    return (
        "K micro-batches per window; against PyTorch's best (in-place adds, `clip_grad_norm_`, "
        f"`AdamW(fused=True)`) on {facts['cpu']} with {facts['torch cpu capability']}, {facts['threads']} "
        f"threads, float32, PyTorch {facts['torch']}; medians of rounds in which all take "
        f"turns, commit {facts['commit']} ([the run](benchmarks/results/{RUN.name}))."
    )


def _trainings(cases: dict[str, dict]) -> str:
    parts = []
    for label, words in (("gpt", "a small GPT"), ("cnn", "a small CNN")):
        case = cases[f"training/{label}/K=4"]
        seconds = case["providers"]["fastaccum"]["window"]["median"]
        peak = case["peak"]["fastaccum"]["bytes"]["value"]
        less = case["peak"]["fastaccum take=backward"]["bytes"]["value"]
        best, loop = (_times(case, f"stock {kind}", "window") for kind in ("best", "loop"))
        rate = f"{case['facts']['items'] / seconds:,.0f} {case['facts']['unit']}/s"
        memory = f'peak memory {peak:.2f} times, with `take="backward"` {less:.2f}'
        parts.append(f"{words} {best} against PyTorch's best, {loop} against the loop ({rate}; {memory})")
    return (
        "**Where it will not help:** where forward and backward take nearly all of the time. Whole trainings "
        f"of the demo are so many times as fast, K = 4: {'; '.join(parts)}. Nor with many micro-batches per "
        "window, whose adds both sides do at the speed of the memory."
    )


def _goals(resident: dict[str, dict], default: dict[str, dict]) -> list[str]:
    rows = ["| work | goal | measured | | default allocator |", "|---|---|---|---|---|"]
    for goal in goals.GOALS:
        estimate, other = goal.measured(resident), goal.measured(default)
        sign = "≤" if goal.at_most else "≥"
        rows.append(
            f"| {goal.work} | {sign} {goal.target:g} | {_value(estimate)} | {goal.verdict(estimate)} | "
            f"{_value(other)} |"
        )
    return rows


def _value(estimate) -> str:
    return f"{estimate.value:.2f} ± {estimate.spread:.2f}" if estimate else ""


def with_figures(text: str, report: dict) -> str:
    """The README's text with the blocks of a report.

    Raises:
        ValueError: a block has no place in the text.
    """
    for name, block in blocks(report).items():
        begin, end = MARKS[0].format(name), MARKS[1]
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md must have one block that begins with {begin!r}")
        text = pattern.sub(lambda _, b=begin, k=block, e=end: f"{b}\n{k}\n{e}", text)
    return text


def main() -> int:
    """Writes the README and the pictures."""
    report = json.loads(RUN.read_text())
    README.write_text(with_figures(README.read_text(), report))
    print(plots.write(report, PICTURES, checksum()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
