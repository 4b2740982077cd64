"""Tables on a GPU: layouts and pointers, made from lists of tensors and uploaded when they change.

- A layout's tables: the segment of each strand, and each segment's offset and size; uploaded once.
- Pointers: one word per tensor, ``address | tag << 56``, the tag being the dtype (0: no tensor) and flags.

A table is compared with what the host last put there and uploaded only when a word has changed, so from
the second window on nothing but fresh gradients travels. Nothing here waits for the device.
"""

from __future__ import annotations

import array
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastaccum.layout import CHUNK, STRAND, STRANDS_PER_CHUNK

TAG_SHIFT = 56
# DType + 1 of csrc/strand.h; 0 is no tensor.
TAGS = {
    torch.float32: 1 << TAG_SHIFT,
    torch.bfloat16: 2 << TAG_SHIFT,
    torch.float16: 3 << TAG_SHIFT,
    torch.float64: 4 << TAG_SHIFT,
}
DTYPE_MASK = 7 << TAG_SHIFT
PRESENT = 64 << TAG_SHIFT  # the flat buffer holds this segment
MISALIGNED = 32 << TAG_SHIFT  # not on 16 bytes; CUDA looks for itself, Triton must be told


class Uploader(Protocol):
    """How words get to the device."""

    limit: int  # words that travel by value

    def capturing(self, device: torch.device) -> bool:
        """Whether a graph is being captured on the device's current stream."""

    def store(self, table: Tensor, words: Tensor) -> None:
        """Writes at most ``limit`` words from the host by value."""

    def upload(self, table: Tensor, pinned: Tensor) -> None:
        """Copies from pinned memory, asynchronously."""


class Words:
    """64-bit words on the host, with a tensor over the same memory: writing them costs no torch op."""

    def __init__(self, count: int) -> None:
        self._array = array.array("q", bytes(8 * max(count, 1)))
        self.tensor = torch.frombuffer(self._array, dtype=torch.int64)[:count]

    def write(self, words: Sequence[int]) -> Tensor:
        """Replaces the words; returns the tensor."""
        self._array[: len(words)] = array.array("q", words)
        return self.tensor


# Slots of rings that are gone while a copy from them was still on its way: their memory is not free yet.
_parked: list[tuple[Tensor, Any]] = []


class Ring:
    """Pinned memory for uploads: a slot is written again only when its copy has run.

    A copy from a slot is asynchronous, so writing the slot too early would change what is on its way.
    A busy slot is passed over; when all are busy the ring grows, and never waits.
    """

    SLOTS = 16  # the host may be that many uploads ahead of the device

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._slots: list[tuple[Tensor, Any]] = [self._make() for _ in range(self.SLOTS)]
        self._next = 0

    def _make(self) -> tuple[Tensor, Any]:
        on_gpu = self._device.type == "cuda"
        pinned = torch.empty(self._count, dtype=torch.int64, pin_memory=on_gpu)
        return pinned, torch.cuda.Event() if on_gpu else None

    def __del__(self) -> None:
        """Keeps what may still be read: this may run in a capture, where no event can be asked."""
        _parked.extend(slot for slot in getattr(self, "_slots", ()) if slot[1] is not None)

    def upload(self, words: Sequence[int], copy: Callable[[Tensor], None]) -> None:
        """Puts the words into a free slot and copies it. Never in a capture."""
        for slot in [slot for slot in _parked if slot[1].query()]:
            _parked.remove(slot)
        for i in range(len(self._slots)):
            at = (self._next + i) % len(self._slots)
            event = self._slots[at][1]
            if event is None or event.query():
                break
        else:
            self._slots.append(self._make())
            at = len(self._slots) - 1
        self._next = (at + 1) % len(self._slots)
        pinned, event = self._slots[at]
        pinned.copy_(torch.frombuffer(array.array("q", words), dtype=torch.int64))
        copy(pinned)
        if event is not None:  # on the tables' device, which need not be the current one
            if self._device.type == "cuda":
                event.record(torch.cuda.current_stream(self._device))
            else:
                event.record()


class Table:
    """A table of words on the device and what the host last put there.

    Attributes:
        in_graph: a captured graph reads it, so its words must stay as they are.
    """

    def __init__(self, count: int, device: torch.device, uploader: Uploader) -> None:
        self.tensor = torch.empty(count, dtype=torch.int64, device=device)
        self.in_graph = False
        self._uploader = uploader
        self._words: list[int] | None = None
        self._host: Words | None = None
        self._ring: Ring | None = None

    def holds(self, words: Sequence[int]) -> bool:
        """Whether the device has these words for sure."""
        return self._words == words

    def put(self, words: list[int]) -> None:
        """Brings the words to the device."""
        if not words:
            pass
        elif len(words) <= self._uploader.limit:
            if self._host is None:
                self._host = Words(len(words))
            self._uploader.store(self.tensor, self._host.write(words))
        else:
            if self._ring is None:
                self._ring = Ring(len(words), self.tensor.device)
            self._ring.upload(words, functools.partial(self._uploader.upload, self.tensor))
        self._words = words

    def capture(self, words: list[int]) -> None:
        """Has the graph that is being captured store the words; the device gets them when it is replayed.

        By value, in as many launches as it takes: a captured copy would read the host's memory again at
        every replay, whatever it holds then.
        """
        limit = self._uploader.limit
        if not limit:
            raise RuntimeError(
                "the Triton kernels read pointers from tables, and a table cannot be uploaded while a CUDA "
                "graph is being captured. Capture with the CUDA kernels (backend='native'), or with "
                "gradients that lie where they lay in the window before"
            )
        for first in range(0, len(words), limit):
            piece = words[first : first + limit]
            kept = Words(len(piece))
            self._uploader.store(self.tensor[first : first + limit], kept.write(piece))
        self._words, self.in_graph = None, True


class Tables:
    """The tables of one owner, by role, made at their first use.

    An owner's words are its own: another thread's training must not write into what this one passes.
    """

    def __init__(self, device: torch.device, uploader: Uploader) -> None:
        self._device, self._uploader = device, uploader
        self._tables: dict[str, Table] = {}
        self._words: dict[str, Words] = {}
        self._of_graphs: list[Tensor] = []

    def put(self, role: str, words: list[int]) -> Tensor:
        """The words on the device.

        A table that a graph reads is not written any more: other words go into a new one.
        """
        table, capturing = self._tables.get(role), self._uploader.capturing(self._device)
        if table is not None and table.holds(words):
            table.in_graph = table.in_graph or capturing
            return table.tensor
        if table is not None and (table.in_graph or capturing):
            self._of_graphs.append(table.tensor)  # it must live as long as the graph may
        if table is None or table.in_graph or capturing or table.tensor.numel() != len(words):
            table = self._tables[role] = Table(len(words), self._device, self._uploader)
        table.capture(words) if capturing else table.put(words)
        return table.tensor

    def by_value(self, role: str, words: list[int]) -> Tensor:
        """The words as a tensor: of the host while they fit into a launch's arguments, else of the device."""
        if len(words) > self._uploader.limit:
            return self.put(role, words)
        known = self._words.get(role)
        if known is None or known.tensor.numel() != len(words):
            known = self._words[role] = Words(len(words))
        return known.write(words)

    def holder(self, words: Sequence[int]) -> str | None:
        """A role whose table has these words for sure."""
        return next((role for role, table in self._tables.items() if table.holds(words)), None)


def host(table: Tensor) -> list[Any]:
    """A table that lives on the CPU as numbers."""
    if table.device.type != "cpu":
        raise AssertionError(f"a host table lies on {table.device}: reading it would wait for the device")
    return table.tolist()


def version_of(tensor: Tensor) -> int:
    """What changes when a tensor is written; inference tensors do not tell."""
    return 0 if tensor.is_inference() else tensor._version


def entries(tensors: Sequence[Tensor]) -> list[int]:
    """One pointer entry per tensor."""
    tags = TAGS
    return [
        address | tags[tensor.dtype] if not address & 15 else address | tags[tensor.dtype] | MISALIGNED
        for address, tensor in zip(map(Tensor.data_ptr, tensors), tensors, strict=True)
    ]


def spread(words: Sequence[int], index: Tensor, n: int) -> list[int]:
    """Words at their segments, 0 elsewhere."""
    if len(words) == n:
        return list(words)
    result = [0] * n
    for k, word in zip(host(index), words, strict=False):
        result[k] = word
    return result


class Pointers(NamedTuple):
    """A table on the device and the words in it."""

    table: Tensor
    words: list[int]

    def tags(self, count: int) -> set[int]:
        """The dtypes' tags in the first words."""
        return {(word & DTYPE_MASK) >> TAG_SHIFT for word in self.words[:count]}


class DeviceLayout:
    """A layout's tables on the device, and the pointer tables that go with it.

    Attributes:
        n: segments.
        end: one past the last element.
        strand_segment: int32 ``[n_chunks * 16]``: the segment of each strand, -1 for padding.
        segments: int64 ``[n, 2]``.
        tables: by role.
    """

    def __init__(self, segments: Tensor, device: torch.device, uploader: Uploader) -> None:
        rows = host(segments)
        self.n = len(rows)
        self.end = rows[-1][0] + rows[-1][1] if rows else 0
        chunks = -(-self.end // CHUNK)
        strands = array.array("i", [-1]) * (chunks * STRANDS_PER_CHUNK)
        for k, (offset, numel) in enumerate(rows):
            first, count = offset // STRAND, -(-numel // STRAND)
            strands[first : first + count] = array.array("i", [k]) * count
        on_host = (
            torch.frombuffer(strands, dtype=torch.int32) if strands else torch.empty(0, dtype=torch.int32)
        )
        self.strand_segment = on_host.to(device, copy=True)
        self.segments = segments.to(device, copy=True)
        self.version = version_of(segments)
        self.tables = Tables(device, uploader)

    def pointers(self, role: str, tensors: Sequence[Tensor], index: Tensor) -> Pointers:
        """A table of one tensor per segment, uploaded unless some role has it already."""
        words = spread(entries(tensors), index, self.n)
        return Pointers(self.tables.put(self.tables.holder(words) or role, words), words)


@dataclasses.dataclass
class Groups:
    """The parameter groups' hyper-parameters as words.

    Attributes:
        rows: of the table, as numbers.
        amsgrad: some group wants it.
        version: of the tensor that they were read from.
    """

    rows: list[list[float]]
    amsgrad: bool
    version: int


@dataclasses.dataclass
class Counters:
    """What ``finish_`` needs beside the window's sums, in the form of tables.

    Attributes:
        spans: int64 ``[m, 3]`` on the device.
        groups: of the parameters, or None where there are none.
        lrs: ``(group, tensor)`` of learning rates that lie on the device.
        limits: ``max_norm`` of each norm group.
        active: bit mask over the slots.
        group: int64 ``[n_slots]`` on the device: rows of the hyper-parameters.
        tables: for its launch.
    """

    spans: Tensor
    groups: Groups | None
    lrs: list[tuple[int, Tensor]]
    limits: list[float]
    active: list[int]
    group: Tensor
    tables: Tables


def bits(values: Sequence[float]) -> list[int]:
    """Float64 values as words."""
    return array.array("q", array.array("d", values).tobytes()).tolist()


def mask(numbers: Sequence[int], count: int) -> list[int]:
    """A bit mask of ``count`` bits, as signed words."""
    words = [0] * -(-count // 64)
    for number in numbers:
        words[number >> 6] |= 1 << (number & 63)
    return [word - (1 << 64) if word >> 63 else word for word in words]
