"""Plots of a report: the roofline and time against the number of tensors."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import RESIDENT


def _results(report: dict) -> list[dict]:
    results = report["results"]
    chosen = results.get(RESIDENT) or next(iter(results.values()), [])
    return [result for result in chosen if result["status"] == "ok"]


def write(report: dict, folder: Path) -> str:
    """Writes the plots into ``folder``; returns a line that says what was written or why not."""
    try:
        import matplotlib
    except ImportError:
        return "plots skipped: matplotlib is not installed"
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    results = _results(report)
    done = [draw(results, folder) for draw in (roofline, tensor_count)]
    return "plots: " + ", ".join(str(path) for path in done if path) if any(done) else "no plots"


def roofline(results: list[dict], folder: Path) -> Path | None:
    """Bytes that must move against the time it took, with the loops' bandwidths as lines."""
    from matplotlib import pyplot

    points: dict[str, list[tuple[float, float]]] = {}
    bandwidth: dict[str, float] = {}
    for result in results:
        for provider, metrics in result["share"].items():
            for metric, share in metrics.items():
                seconds = result["providers"][provider][metric]["median"]
                points.setdefault(provider, []).append((share["bytes"], seconds))
        for loop, rate in result.get("roofline", {}).items():
            bandwidth[loop] = max(rate, bandwidth.get(loop, 0.0))
    if not points:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 5))
    sizes = [size for found in points.values() for size, _ in found]
    ends = [min(sizes), max(sizes)]
    for loop, rate in bandwidth.items():
        axes.loglog(ends, [end / rate / 1e9 for end in ends], lw=1, label=f"{loop} {rate:.0f} GB/s")
    for (provider, found), marker in zip(points.items(), "osv^Dx*" * 3, strict=False):
        axes.loglog(*zip(*found, strict=True), marker, alpha=0.7, label=provider)
    axes.set(xlabel="bytes that must move", ylabel="seconds", title="Time against bytes moved")
    return _save(figure, axes, folder / "roofline.png")


def tensor_count(results: list[dict], folder: Path) -> Path | None:
    """Time of a window end at K = 1 against the number of 512-element tensors."""
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result["name"].startswith("window/tensors-"):
            count = result["facts"]["tensors"]
            for provider in result["share"]:
                median = result["providers"][provider]["window"]["median"]
                lines.setdefault(provider, []).append((count, 1e3 * median))
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for provider, found in lines.items():
        axes.loglog(*zip(*sorted(found), strict=True), "o-", label=provider)
    axes.set(xlabel="tensors of 512 elements", ylabel="ms", title="Norm, clip and AdamW, K = 1")
    return _save(figure, axes, folder / "tensor_count.png")


def _save(figure, axes, path: Path) -> Path:
    from matplotlib import pyplot

    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
