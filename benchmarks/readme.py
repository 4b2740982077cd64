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

from benchmarks import agreement, goals, plots
from benchmarks.harness import RESIDENT
from benchmarks.stats import CANNOT_TELL, Estimate

ROOT = Path(__file__).resolve().parents[1]
README, RUN = ROOT / "README.md", ROOT / "benchmarks/results/cpu-2-cores.json"
MINDSPORE = ROOT / "benchmarks/results/mindspore-cpu-2-cores.json"
AGAIN = ROOT / "benchmarks/results/cpu-2-cores-again.json"  # some of its cases, run once more
OTHER = ROOT / "benchmarks/results/cpu-2-cores-amd.json"  # the first table's cases on another processor
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


def reports() -> tuple[dict, dict, dict, dict]:
    """The committed run, its repetition, one on another processor, and MindSpore's."""
    return tuple(json.loads(path.read_text()) for path in (RUN, AGAIN, OTHER, MINDSPORE))


def blocks(report: dict, again: dict, other: dict, mindspore: dict) -> dict[str, str]:
    """Name -> text of every block of figures in the README."""
    by_allocator = {
        allocator: {result["name"]: result for result in results if result["status"] == "ok"}
        for allocator, results in report["results"].items()
    }
    resident = by_allocator[RESIDENT]
    return {
        "help": "\n".join(
            [
                *_help(resident),
                "",
                _facts(report, again, resident),
                "",
                _elsewhere(other),
                "",
                _limits(resident),
                "",
                *_trainings(resident),
            ]
        ),
        "goals": "\n".join(_goals(resident, by_allocator.get("default", {}))),
        "mindspore": "\n".join(_mindspore(mindspore)),
    }


def _times(case: dict, provider: str, metric: str) -> str:
    """How many times faster than a provider; with its spread where that is too large to tell."""
    estimate = case["against"].get(provider, {}).get(metric)
    if estimate is None:
        return ""
    if estimate["verdict"] == CANNOT_TELL:
        return f"{estimate['value']:.2f} ± {estimate['spread']:.2f}"
    return f"{estimate['value']:.2f}"


def _help(cases: dict[str, dict]) -> list[str]:
    rows = [
        "| times as fast as PyTorch's best | K = 1 | K = 2 | K = 4 | K = 16 | after the last backward, K = 4 "
        "| than a default `AdamW`, K = 4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, words in WINDOWS:
        four = cases[f"backward/{label}/K=4"]
        cells = _windows(cases, label)
        cells += [_times(four, "stock best", "window end"), _times(four, "stock loop", "window")]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return rows


def _windows(cases: dict[str, dict], label: str) -> list[str]:
    """A shape's figures of the first table at K = 1, 2, 4, 16."""
    return [_times(cases[f"backward/{label}/K={steps}"], "stock best", "window") for steps in (1, 2, 4, 16)]


def _elsewhere(other: dict) -> str:
    facts = other["environment"]
    cases = {result["name"]: result for result in other["results"][RESIDENT]}
    words = [f"{words.split(',')[0]} {', '.join(_windows(cases, label))}" for label, words in WINDOWS]
    return (
        f"On another processor, {facts['cpu']} with {facts['torch cpu capability']} "
        f"([the run](benchmarks/results/{OTHER.name}), commit {facts['commit']}), at K = 1, 2, 4, 16: "
        f"{'; '.join(words)}."
    )


def _facts(report: dict, again: dict, cases: dict[str, dict]) -> str:
    facts = report["environment"]
    agreed, of = agreement.agreed(again, report)
    clips, within = (_times(cases[f"clip/gpt2-124m/{kind}"], "torch", "clip") for kind in ("clips", "within"))
    return (
        "Windows of K micro-batches whose backward only makes the gradients: arithmetic in forward and "
        "backward adds the same time to both sides. PyTorch's best is `clip_grad_norm_` and "
        f"`AdamW(fused=True)`. {facts['cpu']} with {facts['torch cpu capability']}, {facts['threads']} "
        f"threads, float32, PyTorch {facts['torch']}; medians of rounds in which all take turns, ± where "
        f"the difference is below five spreads; commit {facts['commit']} "
        f"([the run](benchmarks/results/{RUN.name}); [a second one](benchmarks/results/{AGAIN.name}): "
        f"{agreed} of {of} ratios within 15 %). `fastaccum.clip_grad_norm_` alone, GPT-2: {clips} where it "
        f"clips, {within} where it need not."
    )


def _limits(cases: dict[str, dict]) -> str:
    many = _times(cases["backward/resnet50/K=16"], "stock best", "window")
    update = _times(cases["op/adamw/bf16"], "torch", "adamw")
    one = _times(cases["window/tensors-1/K=1"], "stock loop", "window")
    return (
        "**Where it will not help:** where forward and backward take nearly all of the time, as in the "
        "demo's two trainings below. With many micro-batches per window on a CPU: PyTorch adds each "
        "gradient right after making it, in the caches if it is small, fastaccum when the micro-batch is "
        f"closed, from memory (ResNet-50, K = 16: {many}). An update of bfloat16 parameters alone ({update} "
        f"times as fast as PyTorch's), or a model of one small tensor ({one})."
    )


def _trainings(cases: dict[str, dict]) -> list[str]:
    rows = [
        "| whole trainings, times as fast as | PyTorch's best | a default `AdamW` | peak memory / loop's |",
        "|---|---|---|---|",
    ]
    for label, words in (("gpt", "a small GPT"), ("cnn", "a small CNN")):
        for steps in (4, 16):
            case = cases[f"training/{label}/K={steps}"]
            median = {name: metrics["window"]["median"] for name, metrics in case["providers"].items()}
            rate = f"{case['facts']['items'] / median['fastaccum']:,.0f} {case['facts']['unit']}/s"
            cells = [_times(case, f"stock {kind}", "window") for kind in ("best", "loop")]
            peak = {name: case["peak"][name]["bytes"]["value"] for name in median}
            rows.append(f"| {words}, K = {steps} ({rate}) | {' | '.join(cells)} | {peak['fastaccum']:.2f} |")
            name = "fastaccum take=backward"
            cells = [f"{median[f'stock {kind}'] / median[name]:.2f}" for kind in ("best", "loop")]
            rows.append(f'| the same, `take="backward"` | {" | ".join(cells)} | {peak[name]:.2f} |')
    return rows


def _mindspore(report: dict) -> list[str]:
    facts = report["environment"]
    rows = ["| MindSpore, times as fast | a micro-batch | the window's end | both |", "|---|---|---|---|"]
    for result in report["results"]:
        found = result["against"]["compiled operators"]
        cells = []
        for metric in ("accumulate", "window end", "both"):
            estimate = Estimate(**found[metric])
            unclear = estimate.against(1.0) == 0
            cells.append(f"{estimate.value:.1f}" + (f" ± {estimate.spread:.1f}" if unclear else ""))
        rows.append(f"| {result['name'].replace('/', ', ')} | {' | '.join(cells)} |")
    words = f"MindSpore {facts['mindspore']}, {facts['cpu']}, {facts['fastaccum threads']} threads"
    return [*rows, "", f"{words}, commit {facts['commit']} ([the run](benchmarks/results/{MINDSPORE.name}))."]


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


def with_figures(text: str, report: dict, again: dict, other: dict, mindspore: dict) -> str:
    """The README's text with the blocks of these reports.

    Raises:
        ValueError: a block has no place in the text.
    """
    for name, block in blocks(report, again, other, mindspore).items():
        begin, end = MARKS[0].format(name), MARKS[1]
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md must have one block that begins with {begin!r}")
        text = pattern.sub(lambda _, b=begin, k=block, e=end: f"{b}\n{k}\n{e}", text)
    return text


def main() -> int:
    """Writes the README and the pictures."""
    report, *others = reports()
    README.write_text(with_figures(README.read_text(), report, *others))
    print(plots.write(report, PICTURES, checksum()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
