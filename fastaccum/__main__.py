"""``python -m fastaccum doctor | demo | bench``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

USAGE = """usage: python -m fastaccum COMMAND [options]

  doctor   versions, build facts, backends with reasons, and a self-test
  demo     two real trainings: the plain loop against FusedAccumulator
  bench    benchmarks (from a checkout of the project)

python -m fastaccum COMMAND --help tells each command's options."""


def _bench(argv: list[str]) -> int:
    # Many projects have a package of this name, and some install it: ours is in our checkout, beside us.
    root = Path(__file__).resolve().parent.parent
    found = importlib.util.find_spec("benchmarks")
    folders = [Path(folder).resolve() for folder in (found and found.submodule_search_locations) or ()]
    if folders != [root / "benchmarks"] or not (root / "pyproject.toml").is_file():
        print(
            "the benchmarks are not part of the installed package: run this from the root of a "
            "checkout of the project (make bench)",
            file=sys.stderr,
        )
        return 2
    from benchmarks.__main__ import main

    return main(argv)


def main(argv: list[str]) -> int:
    """Runs a command and returns the exit status."""
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "doctor":
        from fastaccum import doctor

        return doctor.main(rest)
    if command == "demo":
        from fastaccum import demo

        return demo.main(rest)
    if command == "bench":
        return _bench(rest)
    print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
