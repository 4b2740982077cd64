"""A report in the format of pytest-benchmark, for `pytest-benchmark compare` and its storages.

pytest-benchmark runs each benchmark to its end before the next, where here all providers take turns; so
the clock is ours, and statistics, facts about machine and commit, format and comparison are its.
"""

from __future__ import annotations

import itertools


def as_pytest_benchmark(report: dict) -> dict:
    """The report as a file that pytest-benchmark reads: a benchmark per case, provider and metric.

    Args:
        report: with the samples of every provider, as ``--pytest-benchmark-json`` keeps them.
    """
    from pytest_benchmark import __version__
    from pytest_benchmark.plugin import pytest_benchmark_generate_machine_info
    from pytest_benchmark.stats import Stats
    from pytest_benchmark.utils import get_commit_info

    benchmarks = []
    for allocator, result in itertools.chain.from_iterable(
        ((allocator, result) for result in results) for allocator, results in report["results"].items()
    ):
        for provider, metrics in result.get("samples", {}).items():
            for metric, seconds in metrics.items():
                stats = Stats()
                for second in seconds:
                    stats.update(second)
                name = f"{result['name']}[{provider}]"
                benchmarks.append({
                    "group": f"{result['name']} {metric}, {allocator} allocator",
                    "name": name,
                    "fullname": f"{name} {metric} {allocator}",
                    "params": {"provider": provider, "metric": metric, "allocator": allocator},
                    "param": provider,
                    "extra_info": result["facts"],
                    "options": {},
                    "stats": {**stats.as_dict(), "iterations": 1},
                })  # fmt: skip
    return {
        "machine_info": pytest_benchmark_generate_machine_info(),
        "commit_info": get_commit_info(),
        "benchmarks": benchmarks,
        "datetime": report["date"],
        "version": __version__,
    }
