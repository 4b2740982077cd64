"""A part of the GPU check: what it is called, how long it may take, and where it writes what it finds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_machine import BACKENDS, Gpu, Skip

PROOF, SPEED = "proof", "speed"


class Log:
    """What a part finds, handed on at once so that a part that is cut short loses nothing.

    Args:
        emit: takes one event, a dictionary that JSON can hold.
        shard: this process does every shard[1]-th job, from shard[0] on.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], shard: tuple[int, int] = (0, 1)) -> None:
        self.emit, self.shard = emit, shard
        self.failed = 0

    def row(self, what: str, value: float | str, unit: str = "", **more: Any) -> None:
        """A measured value; ``goal`` is shown beside it and decides nothing."""
        self.emit({"event": "row", "row": {"what": what, "value": value, "unit": unit, **more}})

    def note(self, text: str) -> None:
        """Something that a reader should know."""
        self.emit({"event": "note", "text": text})

    def fail(self, what: str, error: BaseException | str) -> None:
        """A check that did not hold."""
        self.failed += 1
        text = str(error) if isinstance(error, (str, AssertionError)) else _short(error)
        self.emit({"event": "failure", "what": what, "text": text[:2000]})

    def checks(self, jobs: Iterable[tuple[str, Callable[[], None]]]) -> None:
        """Runs jobs, each of which raises if it does not hold.

        Raises:
            Exception: the device is lost, so that nothing more can be learnt in this process.
        """
        for what, job in jobs:
            try:
                job()
            except Skip as reason:
                self.note(f"{what}: skipped: {reason}")
                continue
            except Exception as error:
                self.fail(what, error)
                if is_lost(error):
                    raise
            self.emit({"event": "check"})


def _short(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"


def is_lost(error: BaseException) -> bool:
    """Whether the process's CUDA context is of no use any more."""
    text = str(error).lower()
    words = ("illegal memory", "device-side assert", "unspecified launch failure", "misaligned address")
    return any(word in text for word in words)


def backends_of(machine: Gpu, log: Log, interpreted: bool = False) -> Iterator[str]:
    """The backends that can run; a note says why another cannot.

    Args:
        machine: where.
        log: for the notes.
        interpreted: Triton's interpreter is fast enough for the part's emulation.

    Raises:
        Skip: none can.
    """
    found = 0
    for backend in BACKENDS:
        reason = machine.reason(backend)
        if machine.emulated and backend == "triton" and not interpreted:
            reason = reason or "its interpreter would take minutes"
        if reason:
            log.note(f"{backend}: skipped: {reason}")
            continue
        found += 1
        yield backend
    if not found:
        raise Skip("no backend can run here")


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: unique.
        kind: PROOF, whose failures decide the exit status, or SPEED.
        limit: seconds after which it is ended.
        run: does it.
        goal: what its numbers are held against, in words.
    """

    name: str
    kind: str
    limit: float
    run: Callable[[Gpu, Log], None]
    goal: str = ""
