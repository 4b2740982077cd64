"""Whether two runs say the same: their ratios between providers, of which the machine's mood is taken out."""

from __future__ import annotations

WITHIN = 0.15


def ratios(report: dict) -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """(allocator, case, provider, metric) -> (that provider's time / fastaccum's, the ratio's spread)."""
    return {
        (allocator, result["name"], provider, metric): (estimate["value"], estimate["spread"])
        for allocator, results in report["results"].items()
        for result in results
        if result["status"] == "ok"
        for provider, metrics in result["against"].items()
        for metric, estimate in metrics.items()
    }


def agreed(report: dict, before: dict) -> tuple[int, int]:
    """(how many of the ratios that both have are within WITHIN, how many both have)."""
    new, old = ratios(report), ratios(before)
    shared = new.keys() & old.keys()
    return sum(abs(new[key][0] / old[key][0] - 1.0) <= WITHIN for key in shared), len(shared)


def rows(report: dict, before: dict) -> tuple[list[list[str]], str]:
    """A row for every ratio that two runs do not agree on, and a sentence about all of them."""
    new, old = ratios(report), ratios(before)
    shared = [key for key in new if key in old]
    apart = {key: new[key][0] / old[key][0] - 1.0 for key in shared}
    far = sorted((key for key in shared if abs(apart[key]) > WITHIN), key=lambda key: -abs(apart[key]))
    found = [
        [*key, f"{old[key][0]:.3f}", f"{new[key][0]:.3f}", f"{100 * apart[key]:+.0f} %",
         f"{100 * max(new[key][1] / new[key][0], old[key][1] / old[key][0]):.0f} %"]
        for key in far
    ]  # fmt: skip
    words = f"{len(shared) - len(far)} of {len(shared)} ratios agree within {100 * WITHIN:.0f} %"
    missing = len(new.keys() ^ old.keys())
    return found, words + (f"; {missing} are in one run only" if missing else "")
