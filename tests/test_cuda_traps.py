"""What is easily got wrong in the CUDA kernels: the right ones pass each check, planted faults fail it."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from fastaccum import tables  # noqa: E402
from tests import cuda_checks, emulated  # noqa: E402
from tests.cases import BY_NAME  # noqa: E402
from tests.cuda_checks import families  # noqa: E402
from tests.cuda_traps import FAULTS, planted  # noqa: E402

REASON = emulated.reason_against()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

CHECKS = {fault.check: fault.mode for fault in FAULTS.values()}


@pytest.fixture(scope="module")
def results():
    """Each check of the right kernels and of every fault; a few at a time."""
    for mode in sorted(set(CHECKS.values())):
        emulated.library(mode)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        paths = dict(zip(FAULTS, pool.map(planted, FAULTS, FAULTS.values()), strict=True))
    jobs = [(check, emulated.library(mode), check, {}) for check, mode in CHECKS.items()]
    jobs += [(name, paths[name], fault.check, {}) for name, fault in FAULTS.items()]
    return cuda_checks.run(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_pass(check, results):
    assert results[check].passed, results[check].text


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, results):
    assert not results[name].passed
    assert re.search(FAULTS[name].match, results[name].text), results[name].text


def test_every_trap_of_a_kernel_has_a_fault():
    """11 is the host's, below; 12 is the machine code's: tests/test_static_proof.py."""
    assert {name[:2] for name in FAULTS} == {f"{n:02}" for n in range(1, 11)}


# ------------------------------------------------------------- 11: a copy reads its source when it runs


@pytest.fixture
def e():
    emulator = emulated.emulator()
    emulator.synchronize()
    return emulator


class Event:
    """Tells whether a copy has run; the emulation puts copies off until the next launch."""

    def __init__(self, emulator):
        self._emulator, self._at = emulator, None

    def record(self):
        self._at = self._emulator.count("copies") + self._emulator.count("waiting_copies")

    def query(self):
        return self._at is None or self._emulator.count("copies") >= self._at


class Ring(tables.Ring):
    """A ring whose slots know whether their copies have run, as on a GPU."""

    def __init__(self, count, emulator):
        self._emulator = emulator
        super().__init__(count, emulated.CPU)

    def _make(self):
        return super()._make()[0], Event(self._emulator)


class RingOfOne(tables.Ring):
    """The fault: one slot, and nobody looks whether its copy has run."""

    SLOTS = 1

    def __init__(self, count, emulator):
        super().__init__(count, emulated.CPU)


def uploads(ring, e, rounds=3):
    """Uploads in bursts, longer each time, to a table each; returns how many came out wrong."""
    wrong = 0
    for burst in range(1, 4 * rounds, 3):
        targets = [torch.full((5,), -1) for _ in range(burst)]
        words = [[100 * burst + i] * 5 for i in range(burst)]
        for target, some in zip(targets, words, strict=True):
            ring.upload(some, lambda pinned, to=target: torch.ops.fastaccum.launch_upload(to, pinned))
            assert (target == -1).all(), "the emulation copies late"
        e.synchronize()
        wrong += sum(target.tolist() != some for target, some in zip(targets, words, strict=True))
    return wrong


def test_the_ring_writes_no_slot_whose_copy_has_not_run(e):
    ring = Ring(5, e)
    assert uploads(ring, e) == 0
    assert len(ring._slots) == max(10, Ring.SLOTS), "the ring grows to the longest burst, and no further"


def test_a_ring_that_does_not_look_is_seen(e):
    assert uploads(RingOfOne(5, e), e) > 0


def long_norm(seed=0, count=4100):
    """A norm over more tensors than travel by value."""
    case = BY_NAME["norm_"]
    return case.named(*case.make("cpu", torch.float32, [3] * count, seed))


def call(backend, named):
    args, kwargs = BY_NAME["norm_"].split(named)
    backend.norm_(*args, **kwargs)


def test_a_long_table_is_stored_by_the_graph_in_pieces_and_never_copied(e):
    """A captured copy would read the host's memory at every replay, whatever it holds then."""
    backend, named = emulated.backend(), long_norm()
    call(backend, named)
    right = named["partials"].clone()
    named["tensors"] = [t.clone() for t in named["tensors"]]
    backend._launcher.graph = True
    with e.capturing():
        e.reset()
        named["partials"].fill_(float("nan"))
        call(backend, named)
        assert families(e) == ["store", "store", "norm"] and e.count("waiting_copies") == 0
    assert torch.equal(named["partials"], right)
    backend._launcher.graph, backend._launcher.limit = True, 0  # as Triton, which stores nothing by value
    named["tensors"] = [t.clone() for t in named["tensors"]]
    with pytest.raises(RuntimeError, match="cannot be uploaded while a CUDA graph is being captured"):
        call(backend, named)


def test_a_launcher_that_does_not_see_the_capture_is_stopped(e):
    """The fault: the host's check is gone. The op has its own, and says what to do."""
    backend, named = emulated.backend(), long_norm()
    with e.capturing():
        e.reset()
        with pytest.raises(RuntimeError, match="Run one window with the same tensors before the capture"):
            call(backend, named)
        assert e.count("launches") == 0 and e.count("waiting_copies") == 0


def test_a_table_of_a_graph_is_left_to_it(e):
    """Replays read it again, so other words go into a new one; and what they store is there only then."""
    backend = emulated.backend()
    case = BY_NAME["norm_"]
    named = case.named(*case.make("cpu", torch.float32, [600, 9000], 0))
    here, there = named["tensors"], [t.clone() for t in named["tensors"]]
    seen = []
    for graph, tensors in (
        (False, here), (False, here), (True, here), (False, here),  # held: the graph reads the table as it is
        (False, there), (False, here),  # the graph's table is not written: new ones
        (True, there), (False, there), (False, there), (True, there),  # the graph stores, then the host does
    ):  # fmt: skip
        backend._launcher.graph = graph
        named["tensors"] = tensors
        e.reset()
        call(backend, named)
        seen.append(families(e))
    stored, held = ["store", "norm"], ["norm"]
    assert seen == [stored, held, held, held, stored, stored, stored, stored, held, held]


def test_the_table_that_a_graph_read_still_has_its_words(e):
    backend = emulated.backend()
    layout = backend._layout(torch.tensor([[0, 600]]))
    backend._launcher.graph = True
    first = layout.tables.put("grads", [11])
    backend._launcher.graph = False
    layout.tables.put("grads", [22])
    assert first.tolist() == [11]
    second = layout.tables.put("grads", [22])
    backend._launcher.graph = True
    assert layout.tables.put("grads", [22]) is second
    backend._launcher.graph = False
    third = layout.tables.put("grads", [33])
    assert second.tolist() == [22] and third.tolist() == [33]
