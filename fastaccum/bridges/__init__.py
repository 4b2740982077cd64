"""Bridges to training frameworks, by their public extension points; each imports its library when imported.

``accelerate`` (FusedAccelerator), ``transformers`` (FusedTrainer), ``lightning`` (FusedWindows).
"""

from __future__ import annotations


def missing(library: str, extra: str, error: ImportError) -> ImportError:
    """The error to raise where a bridge's library cannot be imported."""
    return ImportError(
        f"fastaccum.bridges.{extra} needs {library}, which cannot be imported here ({error}): "
        f'pip install "fastaccum[{extra}]"'
    )
