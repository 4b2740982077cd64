"""Real data that every machine already has: handwritten digits, and the docstrings of Python."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the target of a padded position, as `cross_entropy` expects it
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
START, UNKNOWN = len(PRINTABLE), len(PRINTABLE) + 1
VOCABULARY = len(PRINTABLE) + 2


class MicroBatch(NamedTuple):
    """What one forward and backward pass sees."""

    inputs: Tensor  # [rows, ...]
    targets: Tensor  # [rows] or [rows, longest row], IGNORED where padded
    items: int  # what its mean loss is a mean over: rows, or tokens that are not padding


def digits(train_rows: int = 1440) -> tuple[MicroBatch, MicroBatch]:
    """Splits scikit-learn's 1797 digits of 8 x 8 pixels into training and held-out rows."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    # Neighbouring rows come from one writer, so the split is drawn at random, always the same.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:train_rows], order[train_rows:]
    return (
        MicroBatch(images[train], labels[train], len(train)),
        MicroBatch(images[held_out], labels[held_out], len(held_out)),
    )


def docstrings(root: Path | None = None) -> Iterator[str]:
    """Yields the docstrings of the standard library's top-level modules, in a fixed order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text


def text_rows(rows: int, longest: int, root: Path | None = None) -> list[Tensor]:
    """Makes rows of different lengths: the beginning of each docstring, behind a START token.

    Args:
        rows: How many rows to return; reading stops there.
        longest: Characters that are kept of a longer docstring.
        root: A directory of Python files; by default the running interpreter's standard library.

    Raises:
        RuntimeError: There are too few docstrings, as where Python comes without its sources.
    """
    code = {character: index for index, character in enumerate(PRINTABLE)}
    encoded: list[Tensor] = []
    for text in docstrings(root):
        beginning = [code.get(character, UNKNOWN) for character in text[:longest]]
        encoded.append(torch.tensor([START, *beginning]))
        if len(encoded) == rows:
            return encoded
    raise RuntimeError(
        f"expected {rows} rows of docstrings in Python's standard library, found {len(encoded)}; "
        "run the demo with a Python that ships its sources"
    )


def pad(rows: list[Tensor]) -> MicroBatch:
    """Pads rows to the longest of them; the target of each token is the one that follows it."""
    longest = max(map(len, rows)) - 1
    inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full((len(rows), longest), IGNORED)
    for index, row in enumerate(rows):
        inputs[index, : len(row) - 1] = row[:-1]
        targets[index, : len(row) - 1] = row[1:]
    return MicroBatch(inputs, targets, sum(map(len, rows)) - len(rows))
