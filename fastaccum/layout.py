"""Where each parameter lies in a flat buffer: strands, chunks, segments. Plain arithmetic, no tensors.

A strand is 512 consecutive elements (16 rows of 32 lanes), a chunk 16 strands. A segment (one
parameter) starts on a strand; a norm group starts on a chunk, so that every chunk's partial sum
belongs to exactly one norm. The same numbers stand in ``csrc/strand.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

LANES = 32
ROWS = 16
STRAND = LANES * ROWS
STRANDS_PER_CHUNK = 16
CHUNK = STRAND * STRANDS_PER_CHUNK
FINISH_LANES = 1024


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Layout:
    """Offsets of segments in one flat buffer.

    Attributes:
        offsets: first element of each segment, a multiple of ``STRAND``, ascending.
        numels: elements of each segment.
        spans: ``(norm_group, first_chunk, end_chunk)`` of each norm group, ascending.
        n_chunks: chunks that the segments reach into.
    """

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    n_chunks: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included: whole strands, not whole chunks."""
        if not self.offsets:
            return 0
        return round_up(self.offsets[-1] + self.numels[-1], STRAND)

    @staticmethod
    def of(numels: Sequence[int], norm_groups: Sequence[int] | None = None) -> Layout:
        """Lays segments out in the given order.

        Args:
            numels: elements of each segment.
            norm_groups: the norm group of each segment, ascending; one group by default.
        """
        groups = [0] * len(numels) if norm_groups is None else list(norm_groups)
        offsets: list[int] = []
        spans: list[tuple[int, int, int]] = []
        end = 0
        first_chunk = 0
        for i, (numel, group) in enumerate(zip(numels, groups, strict=True)):
            start = round_up(end, STRAND)
            if i and group != groups[i - 1]:
                start = round_up(start, CHUNK)
                spans.append((groups[i - 1], first_chunk, start // CHUNK))
                first_chunk = start // CHUNK
            offsets.append(start)
            end = start + numel
        n_chunks = round_up(end, CHUNK) // CHUNK
        if groups:
            spans.append((groups[-1], first_chunk, n_chunks))
        return Layout(tuple(offsets), tuple(numels), tuple(spans), n_chunks)
