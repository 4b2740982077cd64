"""Where parameters lie in a buffer: arithmetic only, and the same numbers as the C++ sources'."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from fastaccum import layout, ops, reference  # noqa: E402
from fastaccum.layout import CHUNK, STRAND, Layout  # noqa: E402

pytestmark = pytest.mark.quick
SOURCES = Path(__file__).resolve().parent.parent / "csrc"

SIZES = st.one_of(
    st.integers(0, 3),
    st.integers(0, 3 * CHUNK),
    st.sampled_from([STRAND, CHUNK]),
    st.integers(0, 2**40),
)


@st.composite
def grouped(draw):
    """Sizes, and ascending norm groups that may skip numbers."""
    numels = draw(st.lists(SIZES, max_size=12))
    steps = draw(st.lists(st.integers(0, 2), min_size=len(numels), max_size=len(numels)))
    groups, group = [], 0
    for step in steps:
        group += step
        groups.append(group)
    return numels, groups


@settings(deadline=None, max_examples=300, derandomize=True)
@given(grouped())
def test_segments_do_not_meet_and_chunks_have_one_group(case):
    numels, groups = case
    of = Layout.of(numels, groups)
    assert of.numels == tuple(numels) and len(of.offsets) == len(numels)
    end = 0
    for i, (offset, numel) in enumerate(zip(of.offsets, numels, strict=True)):
        assert offset % STRAND == 0 and offset >= end
        if i and groups[i] != groups[i - 1]:
            assert offset % CHUNK == 0
        end = offset + numel
    assert of.n_chunks == -(-end // CHUNK)
    assert end <= of.numel < end + STRAND and of.numel % STRAND == 0
    # The spans cover the chunks once, in order; each group that has a segment has one span.
    assert [g for g, _, _ in of.spans] == sorted(set(groups))
    at = 0
    for _, begin, stop in of.spans:
        assert begin == at <= stop
        at = stop
    assert at == of.n_chunks
    for group, offset, numel in zip(groups, of.offsets, numels, strict=True):
        if numel:
            of_group = [(b, e) for g, b, e in of.spans if g == group]
            assert of_group[0][0] * CHUNK <= offset and offset + numel <= of_group[0][1] * CHUNK


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(SIZES, max_size=12))
def test_packing_wastes_less_than_a_strand_each(numels):
    of = Layout.of(numels)
    assert of.numel - sum(numels) <= (STRAND - 1) * len(numels)
    assert of == Layout.of(numels, [0] * len(numels))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 1100), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_partials_of_any_layout_are_the_references(numels, random):
    """And a group's partials hold nothing of another group's."""
    groups = sorted(random.randrange(3) for _ in numels)
    of = Layout.of(numels, groups)
    rows = torch.tensor(list(zip(of.offsets, numels, strict=True))).view(-1, 2)
    tensors = [torch.full((n,), float(g + 1)) for n, g in zip(numels, groups, strict=True)]
    got, wanted = torch.zeros(2, 2, of.n_chunks, dtype=torch.float64)
    index = torch.arange(len(numels))
    ops.norm_(got, rows, tensors, index, norm_type=1.0)
    reference.norm_(wanted, rows, tensors, index, 1.0)
    assert torch.equal(got, wanted)
    for group, begin, end in of.spans:
        elements = sum(n for n, g in zip(numels, groups, strict=True) if g == group)
        assert got[0, begin:end].sum() == elements * (group + 1)


def test_offsets_pass_32_bits():
    of = Layout.of([2**31 + 1, 2**32 + 1, 5], [0, 0, 1])
    assert of.offsets == (0, 2**31 + 512, 2**31 + 2**32 + 8192)
    assert of.numel == of.offsets[2] + 512
    assert of.spans == ((0, 0, of.offsets[2] // CHUNK), (1, of.offsets[2] // CHUNK, of.n_chunks))


def test_nothing_at_all():
    assert Layout.of([]) == Layout((), (), (), 0)
    assert Layout.of([]).numel == 0
    assert Layout.of([0, 0], [0, 1]).spans == ((0, 0, 0), (1, 0, 0))


def test_as_many_groups_as_segments():
    with pytest.raises(ValueError, match="shorter"):
        Layout.of([1, 2], [0])


def test_a_layout_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Layout.of([1]).n_chunks = 2
    assert hash(Layout.of([1, 2])) == hash(Layout.of([1, 2]))


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the C++ sources are not beside the tests")
def test_the_sources_have_the_same_numbers():
    strand = (SOURCES / "strand.h").read_text()
    found = dict(re.findall(r"constexpr int k(\w+) = (\d+|[\w ]+ \* [\w ]+);", strand))
    numbers: dict[str, int] = {}
    for name, text in found.items():
        factors = [f.strip() for f in text.split("*")]
        numbers[name] = 1
        for f in factors:
            numbers[name] *= int(f) if f.isdigit() else numbers[f.removeprefix("k")]
    assert numbers == {
        "Lanes": layout.LANES,
        "Rows": layout.ROWS,
        "Strand": layout.STRAND,
        "StrandsPerChunk": layout.STRANDS_PER_CHUNK,
        "Chunk": layout.CHUNK,
        "FinishLanes": layout.FINISH_LANES,
    }


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the C++ sources are not beside the tests")
def test_the_sources_have_the_same_columns():
    finish = (SOURCES / "hyper.h").read_text()
    hyper = re.search(r"enum Hyper : int \{(.*?)\}", finish, re.S)[1]
    names = [re.sub("([A-Z])", r"_\1", n).upper() for n in re.findall(r"\bk(\w+)", hyper)]
    names = [n.lstrip("_") for n in names]
    assert names[-1] == "HYPER_COLUMNS" and len(names) - 1 == ops.HYPER_COLUMNS
    names[names.index("HYPER_FLAGS")] = "FLAGS"
    assert [getattr(reference, n) for n in names[:-1]] == list(range(ops.HYPER_COLUMNS))
    flags = re.search(r"enum HyperFlag : int \{(.*?)\}", finish)[1]
    for name, value in re.findall(r"k(\w+) = (\d+)", flags):
        assert getattr(reference, name.upper()) == int(value)
    scalars = re.search(r"enum Scalars : int \{(.*?)\}", finish)[1]
    assert len(re.findall(r"\bk\w+", scalars)) - 1 == ops.SCALAR_COLUMNS
