"""The table, on the screen and as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from fastaccum import dispatch

from .compare import RULE
from .meter import ACCUMULATION, STAGES, WINDOW_END

if TYPE_CHECKING:
    from .run import Result

NOTE = f"fastaccum's last add also yields the norm and belongs to the {WINDOW_END}."
PACKAGES = ("fastaccum", "torch", "numpy", "scikit-learn", "matplotlib")


def overhead(milliseconds: dict[str, float]) -> float:
    """What a window costs beyond forward and backward."""
    return milliseconds[ACCUMULATION] + milliseconds[WINDOW_END]


def show_setting(console: Console) -> None:
    """Prints in one line what the figures will belong to."""
    found = versions()
    console.print(
        f"fastaccum {found['fastaccum'] or '(not installed)'} with its {backend()} backend, "
        f"torch {found['torch']} with {torch.get_num_threads()} threads"
    )
    if backend() == "reference":
        console.print(
            "[yellow]The reference backend is there to be read, not to be fast: "
            "`python -m fastaccum doctor` says why the native one is not used."
        )


def show(console: Console, result: Result) -> None:
    """Prints one training's table and verdict."""
    task, runs, verdict = result.task, result.runs, result.verdict
    table = Table(
        title=f"{task.title}: {result.parameters / 1e6:.2f} M parameters, {task.windows} windows "
        f"of {task.accumulation_steps} micro-batches (the last of an epoch is shorter)",
        title_justify="left",
        caption=f"Times: medians over full windows. {NOTE}",
        caption_justify="left",
    )
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")

    def row(label: str, cells: list[str], last: bool = False) -> None:
        table.add_row(label, *cells, end_section=last)

    row("final loss", [f"{run.losses[-1]:.6f}" for run in runs.values()])
    row(
        "largest loss difference from plain",
        [f"{run.difference:.1e}" for run in runs.values()],
        last=task.held_out is None,
    )
    if task.held_out:
        row("held-out accuracy", [f"{run.accuracy:.2%}" for run in runs.values()], last=True)
    for stage in STAGES:
        row(f"{stage}, ms", [f"{run.milliseconds[stage]:.2f}" for run in runs.values()])
    costs = [overhead(run.milliseconds) for run in runs.values()]
    row(f"{ACCUMULATION} + {WINDOW_END}, ms", [f"{cost:.2f}" for cost in costs])
    row("  times faster than the plain loop", [f"{costs[0] / cost:.2f} x" for cost in costs], True)
    row(
        "peak memory of gradients, MiB",
        [f"{run.gradient_bytes / 2**20:.2f}" for run in runs.values()],
    )
    console.print()
    console.print(table)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in verdict.stock_errors.items())
    colour, word = ("green", "AGREES") if verdict.agreed else ("red", "DISAGREES")
    span = "all" if verdict.windows == task.windows else "the first"
    console.print(
        f"[bold {colour}]{word}[/]: over {span} {verdict.windows} of {task.windows} windows, the "
        f"largest error of the loss against a float64 run is {verdict.error:.1e} "
        f"(limit {verdict.limit:.1e}; {errors})."
    )


def write_json(path: Path, results: list[Result], seconds: float) -> None:
    """Writes the table with versions and hardware."""
    document = {
        "versions": versions(),
        "backend": backend(),
        "hardware": hardware(),
        "seconds": seconds,
        "rule": RULE,
        "agreed": all(result.verdict.agreed for result in results),
        "trainings": {result.task.name: training(result) for result in results},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def training(result: Result) -> dict[str, Any]:
    """One training's table, as it goes into the JSON file."""
    task, verdict = result.task, result.verdict
    return {
        "title": task.title,
        "parameters": result.parameters,
        "windows": task.windows,
        "accumulation_steps": task.accumulation_steps,
        "micro_batches_per_epoch": len(task.epochs[0]),
        "agreed": verdict.agreed,
        "verdict": asdict(verdict),
        "runs": {
            name: {
                "final_loss": run.losses[-1],
                "largest_difference_from_plain": run.difference,
                "held_out_accuracy": run.accuracy,
                "milliseconds_per_window": run.milliseconds,
                "peak_gradient_bytes": run.gradient_bytes,
                "losses": run.losses,
            }
            for name, run in result.runs.items()
        },
    }


def backend() -> str:
    """The implementation that fastaccum takes on this machine."""
    return dispatch.choose("auto", torch.device("cpu"))


def versions() -> dict[str, str | None]:
    """The versions that the figures belong to; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None  # as for fastaccum, run from a checkout
    return found


def hardware() -> dict[str, str | int | None]:
    """The machine that the figures belong to."""
    return {
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor() -> str | None:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)
