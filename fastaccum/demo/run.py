"""Runs the trainings side by side, shows them, and says whether they agree."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.optim import AdamW

import fastaccum

from . import plots, report
from .compare import Verdict, judge, largest_difference
from .loops import fused_loop, plain_loop
from .meter import STAGES, Meter, Window
from .tasks import Task, accuracy, digits_task, docstrings_task

# The runs of the table, then those that only measure how exact float32 is.
PLAIN, BEST, FUSED = SHOWN = ("plain loop", "stock best", "fastaccum")
FOREACH, EXACT = "foreach", "float64"


@dataclass
class Run:
    """One training by one provider."""

    model: nn.Module
    meter: Meter
    windows: Iterator[Window]

    @property
    def losses(self) -> list[float]:
        """The loss of every window so far."""
        return [window.loss for window in self.meter.windows]


@dataclass(frozen=True)
class Measured:
    """What the table says about one run."""

    losses: list[float]
    difference: float  # the largest from the plain loop, over the whole training
    milliseconds: dict[str, float]  # per stage, the median over full windows
    gradient_bytes: int
    accuracy: float | None


@dataclass(frozen=True)
class Result:
    """What one training showed."""

    task: Task
    parameters: int
    runs: dict[str, Measured]
    verdict: Verdict


def start(task: Task, name: str) -> Run:
    """Prepares one run; nothing is trained yet."""
    model = task.model(torch.float64 if name == EXACT else torch.float32)
    meter = Meter(model)
    foreach: bool | None
    match name:
        case "fastaccum":
            inner = AdamW(model.parameters(), lr=task.lr)
            wrapper = fastaccum.FusedAccumulator(
                inner, accumulation_steps=task.accumulation_steps, max_norm=task.max_norm
            )
            return Run(model, meter, fused_loop(task, model, wrapper, meter))
        case "stock best":
            optimizer, foreach = AdamW(model.parameters(), lr=task.lr, fused=True), True
        case "foreach":
            optimizer, foreach = AdamW(model.parameters(), lr=task.lr, foreach=True), True
        case _:
            optimizer, foreach = AdamW(model.parameters(), lr=task.lr), None
    return Run(model, meter, plain_loop(task, model, optimizer, meter, foreach))


def train(task: Task, progress: Progress) -> Result:
    """Trains with all providers, window by window in turn."""
    runs = {name: start(task, name) for name in (*SHOWN, FOREACH, EXACT)}
    bar = progress.add_task(f"{task.name:<10}", total=task.windows, loss="", rate="")
    for index in range(task.windows):
        taking_part = list(runs) if index < task.exact_windows else list(SHOWN)
        # Everyone goes first equally often: what a run leaves in the cache favours nobody.
        shift = index % len(taking_part)
        for name in taking_part[shift:] + taking_part[:shift]:
            window = next(runs[name].windows)
            if name == FUSED:
                rate = window.items / sum(window.seconds.values())
                progress.update(bar, loss=f"loss {window.loss:.3f}", rate=f"{rate:,.0f} {task.unit}/s")
        progress.advance(bar)
    plain = runs[PLAIN].losses
    return Result(
        task=task,
        parameters=sum(p.numel() for p in runs[PLAIN].model.parameters()),
        runs={name: measure(task, runs[name], plain) for name in SHOWN},
        verdict=judge(
            runs[FUSED].losses,
            exact=runs[EXACT].losses,
            stock={name: runs[name].losses for name in (PLAIN, FOREACH, BEST)},
        ),
    )


def measure(task: Task, run: Run, plain: list[float]) -> Measured:
    """Sums one run up."""
    windows = run.meter.windows
    # Windows of one size only, warm, and without the one in which memory was looked at.
    timed = [
        window
        for window in windows[Meter.MEMORY_WINDOW + 1 :]
        if window.micro_batches == task.accumulation_steps
    ]
    return Measured(
        losses=run.losses,
        difference=largest_difference(run.losses, plain),
        milliseconds={s: 1e3 * median(window.seconds[s] for window in timed) for s in STAGES},
        gradient_bytes=windows[Meter.MEMORY_WINDOW].gradient_bytes or 0,
        accuracy=accuracy(run.model, task.held_out) if task.held_out else None,
    )


def run(*, quick: bool, json_file: Path | None, out: Path) -> int:
    """Runs the demo and returns the exit status: 0 if all trainings agree, else 1."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a bad path costs no minute
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    report.show_setting(console)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total} windows"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        results = [train(make(quick), progress) for make in (digits_task, docstrings_task)]
    for result in results:
        report.show(console, result)
    files = [plots.loss_curves(results, out), plots.time_split(results, out)]
    if json_file:
        report.write_json(json_file, results, seconds=time.perf_counter() - began)
        files.append(json_file)
    console.print("written: " + ", ".join(map(str, files)), soft_wrap=True)
    return 0 if all(result.verdict.agreed for result in results) else 1
