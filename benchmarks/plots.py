"""Plots of a report: bandwidth reached against bytes moved, and time against number and size of tensors."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import RESIDENT

# The same colour and marker for one provider in every picture.
LOOKS = {
    "fastaccum": ("tab:blue", "o"),
    "stock best": ("tab:orange", "s"),
    "stock loop": ("tab:red", "v"),
    "torch": ("tab:green", "^"),
}


def _results(report: dict) -> list[dict]:
    results = report["results"]
    chosen = results.get(RESIDENT) or next(iter(results.values()), [])
    return [result for result in chosen if result["status"] == "ok"]


def write(report: dict, folder: Path, source: str = "") -> str:
    """Writes the plots into ``folder``; returns a line that says what was written or why not.

    Args:
        source: kept in the pictures, to tell later what they were made from.
    """
    try:
        import matplotlib
    except ImportError:
        return "plots skipped: matplotlib is not installed"
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    results = _results(report)
    done = [draw(results, folder, source) for draw in (roofline, growth)]
    return "plots: " + ", ".join(str(path) for path in done if path) if any(done) else "no plots"


def roofline(results: list[dict], folder: Path, source: str = "") -> Path | None:
    """GB/s reached against bytes that must move; what the memory gives as lines."""
    from matplotlib import pyplot

    points: dict[str, list[tuple[float, float]]] = {}
    roofs: dict[str, list[float]] = {}
    for result in results:
        for provider, metrics in result["share"].items():
            for share in metrics.values():
                points.setdefault(provider, []).append((share["bytes"], share["GB/s"]))
        for loop, rate in result.get("roofline", {}).items():
            roofs.setdefault(loop, []).append(rate)
    if not points:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (loop, rates), style in zip(roofs.items(), ("-", "--", ":", "-.") * 2, strict=False):
        rate = sorted(rates)[len(rates) // 2]
        axes.axhline(rate, color="gray", lw=1, ls=style, label=f"{loop}: {rate:.0f} GB/s")
    for provider in sorted(points, key=lambda name: list(LOOKS).index(name) if name in LOOKS else 99):
        if provider in LOOKS:  # the others stand in one case only
            colour, marker = LOOKS[provider]
            axes.plot(*zip(*points[provider], strict=True), marker, color=colour, alpha=0.6, label=provider)
    axes.set(xscale="log", yscale="log", xlabel="bytes that must move", ylabel="GB/s")
    axes.set_title("Bandwidth reached: ops, window ends, whole windows")
    return _save(figure, [axes], folder / "roofline.png", source)


def growth(results: list[dict], folder: Path, source: str = "") -> Path | None:
    """Time of norm, clip and AdamW (K = 1) against the number of tensors and against their total size."""
    from matplotlib import pyplot

    panels = (
        ("window/tensors-", "tensors", "tensors of 512 elements"),
        ("window/total-", "elements", "elements in 16 tensors"),
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    for (prefix, fact, words), panel in zip(panels, axes, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for result in results:
            if result["name"].startswith(prefix):
                for provider, metrics in result["share"].items():
                    median = result["providers"][provider]["window"]["median"]
                    lines.setdefault(provider, []).append((result["facts"][fact], 1e3 * median))
                    assert "window" in metrics
        for provider, found in lines.items():
            colour, marker = LOOKS.get(provider, ("black", "x"))
            panel.plot(*zip(*sorted(found), strict=True), f"{marker}-", color=colour, label=provider)
        panel.set(xscale="log", yscale="log", xlabel=words)
    if not any(panel.lines for panel in axes):
        pyplot.close(figure)
        return None
    axes[0].set_ylabel("ms")
    figure.suptitle("Norm, clip and AdamW, one micro-batch")
    return _save(figure, [panel for panel in axes if panel.lines], folder / "growth.png", source)


def _save(figure, axes: list, path: Path, source: str) -> Path:
    from matplotlib import pyplot

    for panel in axes:
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Source": source})
    pyplot.close(figure)
    return path
