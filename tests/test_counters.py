"""What a window calls, allocates and reads, and the instructions of the CPU loops, beside the stored values.

A regression shows here that a clock on a busy machine would hide: `make counters` prints the same, and
`make counters ARGS=--write` stores new values where a change is meant.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")

from benchmarks import counters, hot_loops, providers, window_counts  # noqa: E402
from benchmarks.shapes import many_small  # noqa: E402
from fastaccum import dispatch  # noqa: E402
from fastaccum.pending import Pending  # noqa: E402
from fastaccum.window import Window  # noqa: E402

STORED = json.loads(counters.STORED.read_text())
WINDOWS = counters.flat(STORED["windows"])
OURS = (window_counts.OURS, window_counts.AS_ON_GPU)
STOCK = tuple(name for name in window_counts.NAMES if name not in OURS)

needs_native = pytest.mark.skipif(
    dispatch.native_module()[0] is None, reason=f"no native code: {dispatch.native_module()[1]}"
)
each_of_ours = pytest.mark.parametrize("name", OURS)


def assert_as_stored(measured, stored):
    found = counters.differences(measured, stored)
    assert not found, "\n".join(["", *found])  # all of them: pytest shortens a list


def provider_of(flat_name):
    return flat_name.partition(": ")[0].split("/")[-1]


@pytest.fixture(scope="module")
def ours():
    """Every count of ours, of windows whose gradients are put there."""
    return window_counts.measure_all(OURS)


@pytest.fixture(scope="module")
def trained():
    """Of windows with a backward."""
    return window_counts.measure_all(window_counts.TRAINED)


@pytest.fixture(scope="module")
def instructions():
    """Instructions per element, or a skip."""
    reason = hot_loops.reason_against()
    if reason:
        pytest.skip(reason)
    return hot_loops.measure()


# ------------------------------------------------------------------------------- against stored values


@needs_native
def test_our_windows_are_as_stored(ours, trained):
    measured = counters.flat({**ours, **trained})
    stored = {name: n for name, n in WINDOWS.items() if provider_of(name) not in STOCK}
    if counters.other_torch(STORED):  # then only what PyTorch has no part in
        measured = {name: n for name, n in measured.items() if counters.is_ours_alone(name)}
        stored = {name: n for name, n in stored.items() if counters.is_ours_alone(name)}
    assert_as_stored(measured, stored)


def test_stock_windows_are_as_stored():
    """So that what we are compared with is what it was."""
    if reason := counters.other_torch(STORED):
        pytest.skip(reason)
    stored = {name: n for name, n in WINDOWS.items() if provider_of(name) in STOCK}
    assert_as_stored(counters.flat(window_counts.measure_all(STOCK)), stored)


def test_instructions_are_as_stored(instructions):
    if reason := counters.other_code(STORED):
        pytest.skip(reason)
    assert_as_stored(instructions, STORED["instructions"]["per element"])


# ------------------------------------------------------------------------------------- absolute claims


@needs_native
def test_a_steady_window_allocates_nothing_and_waits_for_nothing(ours):
    for window, counts in ours.items():
        assert counts["allocations"] == counts["bytes allocated"] == 0, window
        # On the CPU whether to skip is read, once, where it lies already; for a device the device decides.
        reads = 0 if window.endswith(window_counts.AS_ON_GPU) else 1
        assert counts["host reads"] == reads, window


@needs_native
@each_of_ours
def test_a_window_has_as_many_launches_as_micro_batches_and_two(ours, name):
    """K = 1: norm, finish, update. K > 1: the first is kept, each other one is added, finish, update."""
    for label in window_counts.SHAPES:
        assert ours[f"{label}/K=1/{name}"]["fastaccum operators"] == 3
        assert ours[f"{label}/K=4/{name}"]["fastaccum operators"] == 5


@needs_native
def test_a_backward_adds_nothing_to_a_window_that_takes_at_step(ours, trained):
    at_step, in_backward = trained.values()
    assert at_step == ours[f"resnet50/K=4/{window_counts.OURS}"]
    # A call per bucket, and no count that grows with the 161 parameters but the one that `_take` dispatches.
    assert in_backward["fastaccum operators"] < 4 * 161 / 2
    assert in_backward["operators"] - 4 * 161 < 8 * in_backward["fastaccum operators"]


@pytest.mark.quick
@needs_native
@pytest.mark.parametrize("steps", [1, 2, 5])
@each_of_ours
def test_no_count_depends_on_the_number_of_tensors(name, steps):
    one, many = (window_counts.measure(name, many_small(count, 600), steps) for count in (1, 300))
    assert one == many
    assert one["fastaccum operators"] == max(3, steps + 1)


def test_the_vector_loops_are_vectorised(instructions):
    """Eight floats a vector against four: a loop that fell back to scalars would need as many as before."""
    if "avx2/norm" not in instructions:
        pytest.skip("no avx2 here")
    for name, per_element in instructions.items():
        level, _, loop = name.partition("/")
        if level == "avx2":
            assert per_element < 0.6 * instructions[f"baseline/{loop}"], loop


# -------------------------------------------------------------------------------- the counters themselves


def planted(monkeypatch, fault):
    """Counts of a window whose close() does something more."""

    class Planted(providers.Fastaccum):
        def close(self, index):
            super().close(index)
            fault(self)

    monkeypatch.setitem(providers.WINDOW_PROVIDERS, window_counts.OURS, Planted)
    return window_counts.measure(window_counts.OURS, many_small(3, 600), 1)


@pytest.mark.quick
@needs_native
@pytest.mark.parametrize(
    ("fault", "more"),
    [
        (lambda p: p.optimizer.norm.item(), {"host reads": 1}),
        (lambda p: p.optimizer.norm.tolist(), {"host reads": 1}),
        (lambda p: bool(torch.equal(p.params[0], p.params[1])), {"host reads": 1}),
        (lambda p: torch.empty(100), {"allocations": 1, "bytes allocated": 400}),
        (lambda p: [param.detach() for param in p.params], {"operators": 3}),
        (lambda p: torch.ops.fastaccum.norm_, {}),  # named, not called
    ],
    ids=["item", "tolist", "equal", "allocation", "detach per tensor", "nothing"],
)
def test_a_planted_regression_shows(monkeypatch, fault, more):
    usual = window_counts.measure(window_counts.OURS, many_small(3, 600), 1)
    found = planted(monkeypatch, fault)
    for name, n in more.items():
        assert found[name] >= usual[name] + n, name
    if "bytes allocated" not in more:
        assert found["bytes allocated"] == 0
    assert bool(counters.differences(found, usual)) == bool(more)


@pytest.mark.quick
@needs_native
@pytest.mark.parametrize(
    ("take", "owner", "method"),
    [("backward", Pending, "_take"), ("backward", Window, "add"), ("step", Window, "add")],
)
@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (lambda: torch.ones(2).neg(), "operators"),
        (lambda: torch.empty(100), "bytes allocated"),
        (lambda: torch.ones(()).item(), "host reads"),
    ],
    ids=["an operator", "an allocation", "a read"],
)
def test_a_regression_within_a_backward_shows(monkeypatch, take, owner, method, fault, counter):
    shapes = many_small(3, 600)
    usual = window_counts.measure_trained(take, shapes, 2)
    original = getattr(owner, method)

    def planted(*args, **options):
        fault()
        return original(*args, **options)

    monkeypatch.setattr(owner, method, planted)
    found = window_counts.measure_trained(take, shapes, 2)
    assert found[counter] > usual[counter] and counters.differences(found, usual)


@pytest.mark.quick
def test_differences_are_named():
    assert counters.differences({"a": 104, "z": 0}, {"a": 100, "z": 0}) == []
    assert counters.differences({"a": 106}, {"a": 100}) == ["a: 106, stored 100 (+6.0 %)"]
    assert counters.differences({"a": 94}, {"a": 100}) == [
        "a: 94, stored 100 (-6.0 %)"
    ]  # stale is wrong, too
    assert counters.differences({"z": 1}, {"z": 0}) == ["z: 1, stored 0"]
    assert counters.differences({"new": 1}, {"old": 1}) == [
        "new: measured, not stored",
        "old: stored, not measured",
    ]


@pytest.mark.quick
def test_a_dump_that_counted_nothing_is_an_error():
    dump = "version: 1\ndesc: Trigger: Client Request: avx2/SGD, momentum\nevents: Ir\nsummary: {}\n"
    assert hot_loops.counted(dump.format(300), 200) == ("avx2/SGD, momentum", 1.5)
    for wrong in (dump.format(0), dump.format(7).replace("Client Request", "Program termination")):
        with pytest.raises(RuntimeError, match="counted nothing"):
            hot_loops.counted(wrong, 200)


@pytest.mark.quick
def test_what_cannot_be_compared_is_said():
    stored = {
        "environment": {"torch": "1.0.0"},
        "instructions": {"facts": {"compiler": "gcc 3.0", "valgrind": "1", "architecture": "vax"}},
    }
    assert "1.0.0" in counters.other_torch(stored)
    if hot_loops.reason_against() is None:
        assert "vax" in counters.other_code(stored)
        stored["instructions"]["facts"]["architecture"] = hot_loops.facts()["architecture"]
        assert "gcc 3.0" in counters.other_code(stored)


@pytest.mark.quick
@pytest.mark.parametrize("reason", [None, "valgrind is not installed"])
def test_whether_instructions_were_counted_is_said(monkeypatch, capsys, reason):
    monkeypatch.setattr(hot_loops, "reason_against", lambda: reason)
    monkeypatch.setattr(counters, "measure", lambda: STORED)
    assert counters.main([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"INSTRUCTIONS NOT COUNTED: {reason}" if reason else "instructions counted: avx2, baseline"
    )


VALGRIND = "#!/bin/sh\necho valgrind-3.19.0\n"
# What .ci/get_valgrind finds in its PATH: {program: what it does}.
MACHINES = {
    "it is there": ({"valgrind": VALGRIND, "id": "echo 0", "apt-get": "exit 9"}, "valgrind-3.19.0"),
    "it is installed": (
        {"id": "echo 0", "apt-get": '[ "$1" = install ] && cp "$HERE/found" "$HERE/valgrind"'},
        "valgrind-3.19.0",
    ),
    "lists are old": (
        {
            "id": "echo 0",
            "apt-get": 'case "$1" in update) touch "$HERE/new";; install) '
            '[ -e "$HERE/new" ] && cp "$HERE/found" "$HERE/valgrind";; esac',
        },
        "valgrind-3.19.0",
    ),
    "no network": ({"id": "echo 0", "apt-get": "exit 100"}, "NO VALGRIND: instructions will not be counted"),
    "not root": ({"id": "echo 7", "apt-get": "exit 9"}, "NO VALGRIND: instructions will not be counted"),
    "no apt-get": ({"id": "echo 0"}, "NO VALGRIND: instructions will not be counted"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_valgrind_is_got_where_it_can_be(tmp_path, name):
    script = hot_loops.ROOT / ".ci/get_valgrind"
    if not script.is_file():
        pytest.skip("not a checkout")
    programs, last = MACHINES[name]
    for program, text in {**programs, "found": VALGRIND}.items():
        path = tmp_path / program
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    for tool in ("cp", "touch", "sh", "timeout"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        [shutil.which("sh"), script], env={"PATH": str(tmp_path), "HERE": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == last


@pytest.mark.quick
def test_the_table_shows_a_stored_value_that_is_another(capsys):
    now = json.loads(json.dumps(STORED))
    window = next(iter(now["windows"]))
    now["windows"][window]["operators"] += 1
    counters.show(now, STORED)
    shown = capsys.readouterr().out
    n = STORED["windows"][window]["operators"]
    assert f"{n + 1} [{n}]" in shown and len(re.findall(r"\[\d", shown)) == 1
    assert counters.compare(STORED, STORED) == []
