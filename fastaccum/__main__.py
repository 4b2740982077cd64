"""``python -m fastaccum doctor | demo | bench``."""

from __future__ import annotations

import sys

USAGE = """usage: python -m fastaccum COMMAND [options]

  doctor   versions, build facts, backends with reasons, and a self-test
  demo     two real trainings: the plain loop against FusedAccumulator
  bench    benchmarks (from a checkout of the project)

python -m fastaccum COMMAND --help tells each command's options."""


def _bench(argv: list[str]) -> int:
    try:
        from benchmarks.__main__ import main
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "benchmarks":
            print(
                "the benchmarks are not part of the installed package: run this from the root of a "
                "checkout of the project (make bench)",
                file=sys.stderr,
            )
            return 2
        raise
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
