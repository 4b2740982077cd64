"""The Triton kernels at the level of tables, in Triton's interpreter, against the reference."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fastaccum import dispatch, reference  # noqa: E402
from fastaccum.layout import Layout  # noqa: E402
from fastaccum.ops import DTYPES  # noqa: E402
from tests import bits  # noqa: E402
from tests.cases import CANARY, MARGIN, Maker  # noqa: E402
from tests.triton_tables import (  # noqa: E402
    HAS_TRITON,
    PRESENT,
    aligned,
    entries,
    entry,
    guarded,
    kernel_package,
    read_only,
    tables,
    tags,
    words,
)

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="no Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy's, of infinities
]

INF, NAN = math.inf, math.nan
SIZES = (0, 1, 31, 32, 33, 511, 512, 513, 8191, 8192, 8193)
MEDIUM = (1, 33, 513, 0, 31, 32, 8193)
SMALL = (0, 33, 1, 513, 0, 1024)
F32, BF16, F16, F64 = DTYPES
DOUBLE = {"dtype": torch.float64}
each_norm = pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])


def scalar(value):
    return torch.tensor(value, **DOUBLE)


def chosen(tensors):
    """A list with holes as the op takes it: the tensors and their segments."""
    index = [k for k, t in enumerate(tensors) if t is not None]
    return [tensors[k] for k in index], torch.tensor(index, dtype=torch.int64)


def empty_partials(layout):
    """Nothing old may survive, neither in the columns beyond the last chunk may anything change."""
    return torch.full((2, layout.n_chunks + 3), NAN, **DOUBLE)


# -------------------------------------------------------------------------------------------- gather


def gather_case(buffer_dtype, fresh_dtypes, sizes=SIZES, shift=0, every=5, keep=True, seed=0):
    """A buffer with canaries, gradients with holes, some segments held, some kept, some neither."""
    make, layout = Maker("cpu", seed, shift), Layout.of(sizes)
    buffer = make.signed(layout.numel, buffer_dtype)
    buffer = buffer if not shift else Maker("cpu", seed).signed(layout.numel, buffer_dtype)
    kinds = itertools.cycle(fresh_dtypes)
    fresh = [make.signed(n, next(kinds)) if k % every != 4 else None for k, n in enumerate(sizes)]
    kinds = itertools.cycle(fresh_dtypes[::-1])
    kept = [make.signed(n, next(kinds)) if keep and k % 3 == 1 else None for k, n in enumerate(sizes)]
    present = torch.tensor([k % 3 == 0 for k in range(len(sizes))], dtype=torch.uint8)
    return layout, buffer, fresh, kept, present


def launch_gather(layout, buffer, fresh, kept, present, partials, weight, kept_weight, norm_type=2.0):
    strands, segments = tables(layout)
    table = entries(fresh) | present.long() * PRESENT
    kernel_package().launch_gather(
        buffer, partials, strands, segments, table, entries(kept) if chosen(kept)[0] else None,
        scalar(weight), scalar(kept_weight), norm_type,
        dtypes=tags(fresh, kept), aligned=aligned(fresh, kept),
    )  # fmt: skip


def check_gather(case, with_partials=True, weight=0.3, kept_weight=0.7, norm_type=2.0, ops=reference):
    layout, buffer, fresh, kept, present = case
    wanted, partials = bits.clone(buffer), empty_partials(layout)
    wanted_partials = partials.clone()
    ops.gather_(
        wanted, present.clone(), wanted_partials if with_partials else None, tables(layout)[1],
        *chosen(fresh), *chosen(kept), scalar(weight), scalar(kept_weight), norm_type,
    )  # fmt: skip
    launch_gather(
        layout, buffer, fresh, kept, present, partials if with_partials else None, weight, kept_weight,
        norm_type,
    )  # fmt: skip
    bits.assert_same(
        {"buffer": buffer, "partials": partials}, {"buffer": wanted, "partials": wanted_partials}
    )


@each_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_of_every_dtype(dtype, norm_type):
    check_gather(gather_case(dtype, DTYPES, SIZES if norm_type == 2.0 else SMALL), norm_type=norm_type)


@pytest.mark.parametrize("fresh", [F32, BF16], ids=str)
@pytest.mark.parametrize("buffer", [F32, BF16], ids=str)
def test_gather_of_one_dtype(buffer, fresh):
    check_gather(gather_case(buffer, [fresh], MEDIUM))


def test_gather_is_the_native_one():
    if dispatch.reasons_against("native", torch.device("cpu")):
        pytest.skip("no native code")
    check_gather(gather_case(F32, [F32, BF16]), ops=dispatch.load("native"))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_gather_without_partials_or_kept(dtype):
    check_gather(gather_case(dtype, DTYPES, keep=False), with_partials=False)
    check_gather(gather_case(dtype, DTYPES, SMALL), with_partials=False)
    check_gather(gather_case(dtype, DTYPES, SMALL, keep=False))


def test_gather_of_nothing_fresh_sums_what_is_there():
    layout, buffer, fresh, kept, present = gather_case(F32, [F32], SMALL)
    check_gather((layout, buffer, [None] * len(fresh), [None] * len(kept), present))
    check_gather((Layout.of([]), buffer[:0], [], [], present[:0]))


def test_gather_leaves_a_kept_gradient_where_the_buffer_holds_one():
    layout, buffer, fresh, kept, present = gather_case(F32, [F32], SMALL)
    present.fill_(1)
    before, partials = bits.clone(buffer), empty_partials(layout)
    launch_gather(layout, buffer, [None] * len(fresh), kept, present, partials, 0.3, 0.7)
    bits.assert_same({"buffer": buffer}, {"buffer": before})
    assert partials[0, 0].isfinite()


@each_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_says_what_is_not_finite(dtype, norm_type):
    for value, at in zip((NAN, INF, -INF), (512, 300, 0), strict=True):
        layout, buffer, fresh, kept, present = gather_case(dtype, [F32], SMALL)
        fresh[3][at] = value
        check_gather((layout, buffer, fresh, kept, present), norm_type=norm_type)
    if dtype == F64:
        # Finite, though its square is not.
        layout, buffer, fresh, kept, present = gather_case(dtype, [F64], SMALL)
        fresh[3][7] = 1e200
        check_gather((layout, buffer, fresh, kept, present), norm_type=norm_type)


def test_gather_never_reads_a_stale_buffer():
    layout, buffer, fresh, kept, present = gather_case(F32, [F32])
    for k, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        if not present[k]:
            buffer[offset : offset + numel] = NAN
    check_gather((layout, buffer, fresh, kept, present))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rounding_of_every_upper_half(dtype):
    upper = torch.arange(0, 65536, 1 if dtype == BF16 else 3, dtype=torch.int64) << 16
    pattern = torch.cat([upper | lower for lower in (0x7FFF, 0x8000, 0x8001)])
    # For float16 the halfway cases lie 13 bits down.
    pattern = torch.cat([pattern, upper[::7] | 0x0FFF, upper[::7] | 0x1000, upper[::7] | 0x1001])
    values = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).int().view(torch.float32)
    layout = Layout.of([len(values)])
    buffer = torch.zeros(layout.numel, dtype=dtype)
    launch_gather(layout, buffer, [values], [None], torch.zeros(1), None, 1.0, 1.0)
    bits.assert_same({"buffer": buffer[: len(values)].clone()}, {"buffer": values.to(dtype)})


# ---------------------------------------------------------------------------------------------- norm


def check_norm(tensors, norm_type, scale=None, exact=True):
    layout = Layout.of([0 if t is None else t.numel() for t in tensors])
    strands, segments = tables(layout)
    partials, scale = empty_partials(layout), None if scale is None else scalar(scale)
    wanted = partials.clone()
    reference.norm_(wanted, segments, *chosen(tensors), norm_type, scale)
    kernel_package().launch_norm(
        partials, strands, segments, entries(tensors), norm_type, scale,
        dtypes=tags(tensors), aligned=aligned(tensors),
    )  # fmt: skip
    bits.assert_same({"partials": partials}, {"partials": wanted}, f"p = {norm_type}", exact)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 3.0, 0.5])
def test_norm(norm_type):
    make, scale = Maker("cpu", 1), None if norm_type in (1.0, 2.0, INF) else 7.5
    tensors = [make.signed(n, DTYPES[k % 4]) if k % 6 != 5 else None for k, n in enumerate(SIZES)]
    check_norm(tensors, norm_type, scale, exact=scale is None)
    check_norm([make.signed(n, F32) for n in SMALL], norm_type, scale, exact=scale is None)
    if scale is not None:
        check_norm([torch.zeros(100)], norm_type, 0.0, exact=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_value_that_is_not_finite_gets_lost(dtype):
    make, sizes = Maker("cpu", 2), (513, 8192, 40)
    nans = [(NAN, 0, 0), (NAN, 1, -1), (NAN, 2, 17), (NAN, 2, -1)]
    for value, tensor, at in [*nans, (INF, 0, 17), (INF, 1, 0)]:
        tensors = [make.signed(n, dtype) for n in sizes]
        tensors[tensor][at] = value
        check_norm(tensors, INF)
        if at == 17:
            check_norm(tensors, 2.0)
            check_norm(tensors, 3.0, 5.0, exact=False)


def test_places_beyond_32_bits():
    # A segment that seems to begin 2^33 elements before the chunk; nothing there is touched.
    # Mapped memory lies high enough for an address 2^35 bytes below it; the heap need not.
    values, far = torch.frombuffer(mmap.mmap(-1, 4000), dtype=F32), 1 << 33
    values.copy_(Maker("cpu", 3).signed(1000, F32))
    layout = Layout.of([1000])
    strands, _ = tables(layout)
    segments = torch.tensor([[-far, far + 1000]])
    pointers = torch.tensor([entry(values) - far * values.element_size()])
    partials, wanted = empty_partials(layout), empty_partials(layout)
    kernel_package().launch_norm(partials, strands, segments, pointers, 2.0, None, dtypes=tags([values]))
    reference.norm_(wanted, torch.tensor([[0, 1000]]), *chosen([values]), 2.0)
    bits.assert_same({"partials": partials}, {"partials": wanted})


# -------------------------------------------------------------------------------------------- finish


def hypers(*rows):
    columns = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}
    columns |= {"dampening": 0.0, "max_value": INF, "norm_group": 0, "flags": 0}
    return torch.tensor([list((columns | row).values()) for row in rows], **DOUBLE)


@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 3.0])
def test_finish(norm_type, bad, skip_nonfinite):
    random = torch.Generator().manual_seed(4)
    partials = torch.rand(2, 9000, generator=random, **DOUBLE)
    partials *= torch.exp2(torch.rand(2, 9000, generator=random, **DOUBLE) * 30)
    partials[1] = 0
    if bad:
        partials[:, 4711] = torch.tensor([NAN, 1.0])
    # Groups in pieces and out of order, one empty.
    spans = torch.tensor([[0, 0, 5500], [1, 5500, 5501], [0, 5501, 8700], [2, 8700, 8700], [1, 8701, 9000]])
    n, weight = 1300, 0.0 if norm_type == 1.0 and bad else 3.0
    active = (torch.rand(n, generator=random) < 0.7).tolist()
    index = torch.tensor(active).nonzero().flatten()
    group = torch.randint(3, (n,), generator=random).int()
    hyper = hypers({}, {"lr": 0.0, "beta1": 0.0, "beta2": 1.0}, {"lr": -2e-3, "beta1": 1.0})
    results = []
    for ops in (reference, kernel_package()):
        out = {
            "norm": torch.full((), -1.0), "group_norms": torch.zeros(3, **DOUBLE),
            "factor": torch.zeros(3, **DOUBLE), "skip": torch.full((), -1, dtype=torch.int32),
            "skipped": torch.tensor(4),
        }  # fmt: skip
        last = scalar(2.5) if norm_type == 3.0 else None
        limits = torch.tensor([1.0, INF, 0.5], **DOUBLE)
        steps = torch.randint(2000, (n,), generator=torch.Generator().manual_seed(5)).float()
        scalars = torch.full((n, 4), CANARY, **DOUBLE)
        window = (partials, spans, limits, scalar(weight), scalar(0.7))
        lrs = [torch.tensor(0.1), scalar(0.3)] if bad else []
        if ops is reference:
            ops.finish_(
                *out.values(), *window, steps, scalars, index, group[index].long(), hyper, lrs,
                torch.tensor([1, 2]) if bad else None, norm_type, last, skip_nonfinite,
            )  # fmt: skip
        else:
            ops.launch_finish(
                *out.values(), steps, scalars, *window, words(active), group, hyper, norm_type, last,
                skip_nonfinite, lrs=entries([None, *lrs]) if bad else None,
            )  # fmt: skip
        results.append(({"steps": steps, "scalars": scalars}, out))
    (advanced, decided), (advanced_too, decided_too) = results
    bits.assert_same(advanced_too, advanced)
    bits.assert_same(decided_too, decided, exact=norm_type != 3.0)


def test_finish_of_an_empty_window_and_no_slots():
    out = [torch.ones(()), torch.ones(1, **DOUBLE), torch.ones(1, **DOUBLE)]
    out += [torch.zeros((), dtype=torch.int32), torch.tensor(7)]
    nothing = torch.zeros(0)
    kernel_package().launch_finish(
        *out, nothing, torch.zeros(0, 4, **DOUBLE), torch.zeros(2, 0, **DOUBLE),
        torch.zeros(0, 3, dtype=torch.int64), scalar([1.0]), scalar(0.0), scalar(1.0), nothing.long(),
        nothing.int(), hypers({}), 2.0, None, True,
    )  # fmt: skip
    norm, group_norms, factor, skip, skipped = (t.item() for t in out)
    assert (norm, group_norms, factor, skip, skipped) == (0.0, 0.0, 1.0, 1, 7)


# --------------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize("max_value", [INF, 0.25, 0.0])
def test_scale(max_value):
    make = Maker("cpu", 6)
    source = [make.signed(n, DTYPES[k % 4]) for k, n in enumerate(SIZES)]
    target = [s if k % 3 else make.signed(s.numel(), DTYPES[(k + k // 4) % 4]) for k, s in enumerate(source)]
    source[-1][0], source[-2][1] = NAN, -INF
    index = torch.arange(len(SIZES)) % 2
    factor = torch.tensor([1.0, 0.3], **DOUBLE)
    wanted = bits.clone((source, target))
    reference.scale_into_(wanted[1], wanted[0], factor, index, max_value)
    strands, segments = tables(Layout.of(SIZES))
    kernel_package().launch_scale(
        strands, segments, torch.stack([entries(source), entries(target), index]), factor, max_value,
        dtypes=tags(source, target), aligned=aligned(source, target),
    )  # fmt: skip
    bits.assert_same({"source": source, "target": target}, {"source": wanted[0], "target": wanted[1]})


def test_scale_by_one_touches_nothing():
    values = torch.ones(1000)
    strands, segments = tables(Layout.of([1000]))
    for max_value, protected in ((INF, read_only(values)), (INF, read_only(values.double()))):
        table = torch.tensor([[entry(protected)], [entry(protected)], [0]])
        kernel_package().launch_scale(strands, segments, table, scalar([1.0]), max_value)


# ------------------------------------------------------------------------------------------- updates

# Every option, alone and together.
GROUPS = (
    {"flags": 0},
    {"flags": 1, "weight_decay": 0.1},
    {"flags": 2, "weight_decay": 0.1, "norm_group": 1, "momentum": 0.9},
    {"flags": 3, "max_value": 0.2, "momentum": 0.9, "dampening": 0.1},
    {"flags": 4, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.3},
    {"flags": 8, "momentum": 0.9, "norm_group": 1},
    {"flags": 15, "momentum": 0.8, "weight_decay": 0.1, "max_value": 3.0},
)


class Update:
    """Parameters, gradients and states of an update; every fourth gradient is missing."""

    def __init__(self, param_dtypes, grad_dtypes, state_dtypes=None, sizes=SIZES, shift=0, copy=None, seed=7):
        make, n = Maker("cpu", seed, shift), len(sizes)
        state_dtypes = state_dtypes or param_dtypes

        def tensors(kind, dtypes):
            return [kind(size, dtypes[k % len(dtypes)]) for k, size in enumerate(sizes)]

        self.params, self.grads = tensors(make.signed, param_dtypes), tensors(make.signed, grad_dtypes)
        self.states = [tensors(make.signed, state_dtypes)]
        self.states += [tensors(make.positive, state_dtypes), tensors(make.positive, state_dtypes)]
        self.copies = tensors(make.signed, [copy]) if copy else [None] * n
        self.grads = [g if k % 4 != 3 else None for k, g in enumerate(self.grads)]
        self.hyper, self.group = hypers(*GROUPS), torch.arange(n) % len(GROUPS)
        self.slot = torch.randperm(n, generator=make.random)
        self.scalars = torch.rand(n, 4, generator=make.random, **DOUBLE) * 3
        self.scalars[:, 2] = torch.arange(n) % 2
        self.factor = torch.tensor([0.3, 0.77], **DOUBLE)
        self.strands, self.segments = tables(Layout.of(sizes))
        self.skip = torch.zeros((), dtype=torch.int32)

    def check(self, name, ops=reference):
        n_states = 3 if name == "adam" else 1
        states, here = self.states[:n_states], chosen(self.grads)[1]
        if name == "sgd":
            for k, slot in enumerate(self.slot.tolist()):
                if self.scalars[slot, 2]:
                    states[0][k].zero_()
        results = {"params": self.params, "copies": self.copies}
        results |= {f"state{i}": state for i, state in enumerate(states)}
        wanted = bits.clone(results)

        def pick(tensors):
            return [tensors[k] for k in here.tolist()]

        getattr(ops, f"{name}_")(
            pick(wanted["params"]), *(pick(wanted[f"state{i}"]) for i in range(n_states)), [],
            pick(self.grads), self.segments, here, self.group[here], self.slot[here],
            self.hyper, self.scalars, self.factor, self.skip,
        )  # fmt: skip
        for k in here.tolist():
            if self.copies[k] is not None:
                wanted["copies"][k].copy_(wanted["params"][k])
        self.launch(name)
        bits.assert_same(results, wanted)

    def launch(self, name):
        rows = [self.params, *self.states] if name == "adam" else [self.params, self.states[0], [], []]
        nothing = torch.zeros(len(self.params), dtype=torch.int64)
        table = [entries(row) if len(row) else nothing for row in (*rows, self.copies)]
        getattr(kernel_package(), f"launch_{name}")(
            self.strands, self.segments, torch.stack([*table, self.group | self.slot << 32]),
            entries(self.grads), self.hyper, self.scalars, self.factor, self.skip,
            dtypes=tags(*rows, self.copies, self.grads), aligned=aligned(*rows, self.copies, self.grads),
        )  # fmt: skip


each_update = pytest.mark.parametrize("name", ["adam", "sgd"])


@each_update
@pytest.mark.parametrize(
    "param, grad, state, copy",
    [
        (F32, F32, F32, None), (F32, BF16, F32, BF16), (BF16, BF16, BF16, None), (BF16, F32, F32, F16),
        (F16, F32, F32, None), (F64, F64, F64, F32), (F64, F32, F64, None), (F32, F64, F32, BF16),
    ],
    ids=str,
)  # fmt: skip
def test_update_of_one_dtype(name, param, grad, state, copy):
    Update([param], [grad], [state], SIZES if grad == param == F32 else MEDIUM, copy=copy).check(name)


@each_update
def test_update_of_every_dtype_at_once(name):
    sizes = (1, 33, 0, 512, 31, 8193, 700, 33, 40)
    Update(DTYPES, [F32, F64, BF16], [F32, BF16, F64, F16, F32], sizes, copy=BF16).check(name)


@each_update
def test_update_is_the_native_one(name):
    if dispatch.reasons_against("native", torch.device("cpu")):
        pytest.skip("no native code")
    Update([F32], [F32]).check(name, dispatch.load("native"))


@each_update
def test_update_with_values_that_are_not_finite(name):
    update = Update([F32], [F32], sizes=SMALL)
    update.grads[1][:3], update.grads[5][7] = torch.tensor([NAN, INF, -INF]), NAN
    update.params[5][3], update.states[0][5][4], update.states[2][5][8] = INF, NAN, NAN
    update.states[1][5][5:7] = torch.tensor([-1.0, 0.0])
    update.check(name)


def test_sgd_without_buffers():
    update = Update([F32], [F32], sizes=SMALL)
    update.hyper[:, 5] = 0.0
    update.states[0] = [torch.zeros(n) for n in SMALL]
    update.check("sgd")


# ----------------------------------------------------------------------------- memory not to be touched


def record(monkeypatch, file):
    """A list of the constants of every launch that a file makes from now on."""
    owner, launches = sys.modules[f"{kernel_package().__name__}.{file}"], []
    original = owner.launch

    def launch(*args, **constants):
        launches.append(constants)
        original(*args, **constants)

    monkeypatch.setattr(owner, "launch", launch)
    return launches


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_only_aligned_tensors_get_the_aligned_instance(monkeypatch, shift):
    assert MARGIN * 2 % 16 == 0  # so that a tensor that is not shifted is aligned
    for launcher in kernel_package().__all__:
        getattr(kernel_package(), launcher)  # imports the files
    promised = shift != 1
    launches = record(monkeypatch, "gather")
    check_gather(gather_case(F32, [F32], SMALL, shift))
    assert [launch["ALIGNED"] for launch in launches] == [promised]
    launches = record(monkeypatch, "norm")
    check_norm([Maker("cpu", 8, shift).signed(n, F32) for n in SMALL], 2.0)
    assert [launch["ALIGNED"] for launch in launches] == [promised]
    launches = record(monkeypatch, "strand")
    Update([F32], [F32], sizes=SMALL, shift=shift).check("adam")
    Update([F32], [F32], sizes=SMALL, shift=shift).check("sgd")
    assert [launch["ALIGNED"] for launch in launches] == [promised, promised]


def run_alone(function):
    """Runs a function of this file in a process that a fault may kill; pages stay protected in it."""
    code = f"from tests.test_triton_kernels import *\n{function.__name__}()\n"
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def copied(value):
    """In place of bits.clone, which copies whole storages, protected pages included."""
    if isinstance(value, dict):
        return {name: copied(v) for name, v in value.items()}
    if isinstance(value, list):
        return [copied(v) for v in value]
    return value if value is None else value.clone()


def within_guards():
    bits.clone, bits.whole = copied, lambda tensor: tensor
    sizes = (1, 33, 513, 1000)
    for dtype in (F32, BF16, F64):
        layout, buffer, fresh, kept, present = gather_case(dtype, [F32, BF16], sizes)
        fresh, kept = ([None if t is None else guarded(t) for t in ts] for ts in (fresh, kept))
        check_gather((layout, guarded(buffer), fresh, kept, present))
    check_norm([guarded(Maker("cpu", 9).signed(n, F32)) for n in sizes], 2.0)
    for name in ("adam", "sgd"):
        update = Update([F32, BF16, F64], [F32, BF16], sizes=sizes, copy=F16)
        update.params = [guarded(t) for t in update.params]
        update.grads = [None if t is None else guarded(t) for t in update.grads]
        update.states = [[guarded(t) for t in state] for state in update.states]
        update.copies = [guarded(t) for t in update.copies]
        update.check(name)


def nothing_written():
    for name in ("adam", "sgd"):
        update = Update([F32, F64], [F32], sizes=SMALL, copy=BF16)
        update.params = [read_only(t) for t in update.params]
        update.states = [[read_only(t) for t in state] for state in update.states]
        update.copies = [read_only(t) for t in update.copies]
        update.grads = [None] * len(SMALL)
        update.launch(name)
        update.skip.fill_(1)
        update.grads = [read_only(torch.full((n,), NAN)) for n in SMALL]
        update.launch(name)


def a_write_that_faults():
    update = Update([F32], [F32], sizes=SMALL)
    update.params = [read_only(t) for t in update.params]
    update.launch("adam")


def test_nothing_beyond_a_tensor_is_touched():
    run_alone(within_guards)


def test_a_skipped_update_writes_nothing():
    run_alone(nothing_written)


def test_the_pages_are_really_protected():
    with pytest.raises(AssertionError, match="Segmentation fault"):
        run_alone(a_write_that_faults)


def test_importing_the_package_does_not_import_triton():
    name = kernel_package().__name__
    code = f"import sys, {name} as k; assert 'triton' not in sys.modules; k.launch_norm; import triton"
    code += "; assert {*k.__all__} <= {*dir(k)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_launcher_is_looked_up_once():
    package = kernel_package()
    assert package.launch_norm is package.launch_norm
    with pytest.raises(AttributeError, match="launch_nothing"):
        package.launch_nothing  # noqa: B018
    with pytest.raises(ValueError, match="dtypes"):
        functools.partial(package.launch_norm, *[None] * 6)(dtypes=[(1,), (2,)])
