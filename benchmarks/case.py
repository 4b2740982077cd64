"""A benchmark case: what is prepared, what is sampled, what it should have cost in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Sampler = Callable[[], dict[str, float]]


@dataclass
class Prepared:
    """A case ready to be timed; its results were compared before it was handed over."""

    samplers: dict[str, Sampler]  # provider -> seconds per metric, of one run
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # provider -> metric -> bytes
    missing: dict[str, str] = field(default_factory=dict)  # provider -> reason
    facts: dict[str, object] = field(default_factory=dict)  # what a reader should know
    sections: dict[str, dict] = field(default_factory=dict)  # measured without a clock
    subject: str = "fastaccum"  # the provider that the others are compared with


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: unique; ``--only`` selects every case whose name contains its argument.
        prepare: builds the providers and asserts that their results agree.
        memory: bytes that it needs at once; a machine with less skips it and says so.
        rounds: samples per provider.
        quick: whether ``--quick`` runs it, with `quick_rounds` rounds.
        roofline: whether the bandwidth loops run in the same rounds.
    """

    name: str
    prepare: Callable[[], Prepared]
    memory: int = 0
    rounds: int = 15
    quick_rounds: int = 5
    quick: bool = False
    roofline: bool = False
