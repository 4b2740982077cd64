"""Two pictures: that the losses are the same, and where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # files only: works without a display

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from .meter import STAGES  # noqa: E402

if TYPE_CHECKING:
    from .run import Result

COLOURS = dict(zip(STAGES, ("#b8c4d0", "#e08a3c", "#3b6fb0"), strict=True))


def loss_curves(results: list[Result], out: Path) -> Path:
    """Draws every run's loss, and below it how far the runs are apart."""
    figure, axes = plt.subplots(
        2,
        len(results),
        figsize=(6 * len(results), 6),
        sharex="col",
        squeeze=False,
        height_ratios=(2, 1),
        layout="constrained",
    )
    for (above, below), result in zip(axes.T, results, strict=True):
        (plain_name, plain), (best_name, best), (name, fused) = result.runs.items()
        windows = range(1, len(plain.losses) + 1)
        above.plot(windows, plain.losses, color="#b8c4d0", linewidth=4, label=plain_name)
        above.plot(windows, fused.losses, color="#3b6fb0", linewidth=1.2, label=name)
        above.set(title=result.task.title, ylabel=f"loss per {result.task.unit[:-1]} (nats)")
        above.legend(frameon=False)
        for label, run, colour in ((best_name, best, "#e08a3c"), (name, fused, "#3b6fb0")):
            apart = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
            below.plot(windows, apart, ".", color=colour, markersize=4, label=label)
        below.set(
            xlabel=f"window (one update, {result.task.accumulation_steps} micro-batches)",
            ylabel="difference from\nthe plain loop",
        )
        # Linear below the last bit of a float32 loss, so that equal losses can be drawn too.
        below.set_yscale("symlog", linthresh=1e-8)
        below.set_ylim(0, 100 * max(best.difference, fused.difference, 1e-8))
        below.legend(frameon=False, loc="upper left", ncols=2)
    return save(figure, out / "loss_curves.png")


def time_split(results: list[Result], out: Path) -> Path:
    """Draws the time per window, first whole, then without forward and backward."""
    figure, axes = plt.subplots(
        len(results), 2, figsize=(12, 2.6 * len(results)), squeeze=False, layout="constrained"
    )
    for row, result in zip(axes, results, strict=True):
        for axis, stages in zip(row, (STAGES, STAGES[1:]), strict=True):
            names = list(result.runs)
            left = [0.0] * len(names)
            for stage in stages:
                widths = [run.milliseconds[stage] for run in result.runs.values()]
                axis.barh(names, widths, left=left, color=COLOURS[stage], label=stage, height=0.6)
                left = [start + width for start, width in zip(left, widths, strict=True)]
            for index, end in enumerate(left):
                axis.text(end, index, f" {end:.2f} ms", va="center")
            axis.invert_yaxis()
            axis.margins(x=0.25)
            axis.set_xlabel("ms per window, median")
        row[0].set_title(result.task.title)
        row[1].set_title("the same without forward and backward")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STAGES), frameon=False)
    return save(figure, out / "time_split.png")


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure and frees it."""
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
