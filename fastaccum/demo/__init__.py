"""The demo: two real trainings, each with the plain loop and with `FusedAccumulator`.

    python -m fastaccum demo [--quick] [--json FILE] [--out DIR]

It needs the ``demo`` extra and downloads nothing. The exit status is 0 when the trainings agree
(`fastaccum.demo.compare` states the rule), 1 when they do not, and 2 when something is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

EXTRA = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}


def missing_packages() -> list[str]:
    """Names the packages of the ``demo`` extra that are not installed."""
    return [package for module, package in EXTRA.items() if find_spec(module) is None]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the command line of ``python -m fastaccum demo``."""
    parser = argparse.ArgumentParser(
        prog="python -m fastaccum demo",
        description="Train twice from the same seed, with the plain loop and with "
        "FusedAccumulator, and show that the result is the same and what it cost.",
    )
    parser.add_argument("--quick", action="store_true", help="ten seconds instead of a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("fastaccum-demo"),
        help="where the plots go (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs the demo and returns the exit status of the process."""
    arguments = parse_arguments(argv)
    if missing := missing_packages():
        print(f'the demo needs {", ".join(missing)}: pip install "fastaccum[demo]"', file=sys.stderr)
        return 2
    # OpenMP reads this when torch is loaded. Threads that spin while they wait for each other stall
    # each other on a machine that also does something else; sleeping costs next to nothing here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Only now, so that --help and the message above need neither torch nor the extra.
    from .run import run

    return run(quick=arguments.quick, json_file=arguments.json, out=arguments.out)
