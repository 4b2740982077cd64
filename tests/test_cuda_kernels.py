"""The CUDA kernels, run on the CPU by tests/cuda_on_cpu: bit for bit the reference and the CPU's kernels.

In three modes: plain (mostly in this process), under the sanitizers, and with every access checked for
races; see tests/cuda_on_cpu/cuda_on_cpu.h.
"""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from fastaccum import FusedAccumulator, dispatch  # noqa: E402
from fastaccum.layout import CHUNK  # noqa: E402
from tests import cases, cuda_checks, emulated  # noqa: E402
from tests.bits import clone  # noqa: E402
from tests.cases import BY_NAME, CASES, Variant, around  # noqa: E402
from tests.cuda_checks import WIDTHS, agrees, families, setting  # noqa: E402
from tests.cuda_on_cpu.emulator import ORDERS  # noqa: E402

REASON = emulated.reason_against()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

VARIANTS = [pytest.param(c, v, id=f"{c.name}-{v.desc}") for c in CASES for v in c.variants]
USUAL = [pytest.param(c, c.variants[0], id=c.name) for c in CASES]
each_width = pytest.mark.parametrize("width", WIDTHS, ids="V{}".format)


@pytest.fixture(scope="module")
def e():
    return emulated.emulator()


@pytest.fixture(autouse=True)
def _options(request):
    yield
    if "e" in request.fixturenames:
        request.getfixturevalue("e").set(**ORDERS["ascending"], compute_capability=9)


def native():
    """The CPU's own kernels, if they are built."""
    cpu = torch.device("cpu")
    return [] if dispatch.reasons_against("native", cpu) else [dispatch.load("native", cpu)]


# -------------------------------------------------------------------------------------- plain: bits


@each_width
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_kernels_are_the_reference_and_the_cpus(case, variant, width, e):
    """Boundary sizes in one list, in another order and offset each time."""
    for i, dtype in enumerate(case.dtypes, case.variants.index(variant)):
        # A float64 reference of every dtype is slow; so the largest size is not for every variant.
        grid = case.grid if variant is case.variants[0] else case.grid[:-1]
        start = 5 * i % len(grid)
        sizes = [0, *grid[start:], *grid[:start], 0]
        with setting(e, list(ORDERS)[i % 4], width):
            agrees(e, case, variant, dtype, sizes, i, others=native(), shift=i % 4)


@each_width
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_each_size_of_the_grid_alone(case, variant, width, e):
    for n, dtype in itertools.product(cases.GRID[:-1], case.dtypes):
        with setting(e, "random", width):
            agrees(e, case, variant, dtype, around(n), n)


@each_width
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_sizes_of_a_vector_at_every_offset(case, variant, width, shift, e):
    for dtype in case.dtypes:
        with setting(e, "descending", width):
            agrees(e, case, variant, dtype, [*range(70), 999], shift=shift)


@each_width
@pytest.mark.parametrize("order", ["columns", "channels_last"])
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_dense_tensors_count_in_memory_order(case, variant, width, order, e):
    for dtype in case.dtypes:
        with setting(e, "random2", width):
            agrees(e, case, variant, dtype, [24, 0, 8 * 1033, 2, 8], order=order, shift=1)


@pytest.mark.parametrize(("case", "variant"), USUAL)
@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 3], [3, 0], [0] * 100], ids=str)
def test_empty_tensors_are_no_work(case, variant, sizes, e):
    launches = e.count("launches")
    agrees(e, case, variant, case.dtypes[0], sizes)
    if not sum(sizes) and case.name != "finish_":
        assert set(families(e)[launches:]) <= {"store"}


@each_width
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_misaligned_flat_buffer(buffer_dtype, shift, width, e):
    def move(named):
        whole = torch.full((named["buffer"].numel() + 64,), cases.CANARY, dtype=buffer_dtype)
        moved = whole[32 + shift : 32 + shift + named["buffer"].numel()]
        named["buffer"] = moved.copy_(named["buffer"])

    variant = Variant("misaligned buffer", {"states": "ab-okp", "buffer_dtype": buffer_dtype, "weight": 0.3})
    for dtype in BY_NAME["gather_"].dtypes:
        with setting(e, "ascending", width):
            agrees(e, BY_NAME["gather_"], variant, dtype, [600, 8192, 0, 33, 9000, 511], change=move)


@each_width
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_folds_over_many_chunks(norm_type, width, e):
    """A wrong fold shows in one chunk of five only, so there are more than 64."""
    for name, dtype in itertools.product(("norm_", "gather_"), (torch.float32, torch.float64)):
        variant = Variant("many chunks", {"norm_type": norm_type})
        sizes = [300_007, 8192 * 2, 5, 290_000]
        with setting(e, "random" if name == "norm_" else "descending", width):
            got = agrees(e, BY_NAME[name], variant, dtype, sizes, others=native())
        assert got["partials"].shape[1] >= 64
    variant = Variant("many chunks", {"norm_type": norm_type, "max_norm": (0.5, 2.0, 1e9)})
    for order, chunks in zip(itertools.cycle(ORDERS), (1, 31, 1023, 1024, 1025, 5003), strict=False):
        with setting(e, order, width):
            agrees(e, BY_NAME["finish_"], variant, torch.float64, chunks)


def test_orders_of_threads_at_the_ends_of_pages(e):
    cuda_checks.check_orders(e, [700, 0, 8193, 33])


# ------------------------------------------------------------------------------- in other processes


def test_long_tables_through_a_limit_of_seven_words():
    """40 tensors of 0 to 9000 elements; the partials are NaN before."""
    library = emulated.library("plain", 7)
    jobs = [(dtype, library, "check_long_tables", {"dtype": dtype}) for dtype in ("float32", "bfloat16")]
    results = cuda_checks.run(jobs)
    for result in results.values():
        assert result.passed, result.text
    names = {name for result in results.values() for name in result.launched}
    assert any("gather_kernel<float, 0, 8, OnDevice>" in name for name in names), names


def _in_mode(mode, jobs):
    library = emulated.library(mode)
    results = cuda_checks.run(
        [(name, library, check, options) for name, check, options in jobs], sanitize=mode == "sanitize"
    )
    for name, result in results.items():
        assert result.passed, f"{name}: {result.text}"
    cuda_checks.assert_all_launched(library, {n for result in results.values() for n in result.launched})


@pytest.mark.slow
def test_under_the_sanitizers():
    _in_mode(
        "sanitize",
        [
            *((f"V{v}", "check_cases", {"sizes": [545, 0, 33], "width": v, "every": 2}) for v in WIDTHS),
            ("orders", "check_orders", {"sizes": [33, 0, 8193]}),
            ("tables", "check_tables", {"small": 501, "large": 4100}),
            ("large", "check_large_tensors", {}),
        ],
    )


@pytest.mark.slow
def test_without_races():
    """Every access is checked: that it is inside of a tensor or table, aligned, and ordered."""
    _in_mode(
        "races",
        [
            *((f"V{v}", "check_cases", {"sizes": [545, 0, 33], "width": v, "every": 2}) for v in WIDTHS),
            ("orders", "check_orders", {"sizes": [33, 0, 8193]}),
            ("tables", "check_tables", {"small": 501, "large": 4100}),
        ],
    )


# ------------------------------------------------------------------------------- launches of a window


@pytest.fixture
def accumulator_on(e, monkeypatch):
    """Makes an accumulator whose ops are the emulated kernels."""

    def make(dtypes, steps, **options):
        emulation = emulated.backend()
        monkeypatch.setattr(dispatch, "load", lambda *_: emulation)
        params = [
            torch.nn.Parameter(torch.randn(n, dtype=torch.float32).to(dtype))
            for n, dtype in zip((600, 9000, 33, 513), itertools.cycle(dtypes), strict=False)
        ]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.1, "weight_decay": 0.0}]
        optimizer = FusedAccumulator(torch.optim.AdamW(groups, lr=0.01), steps, **options)
        return params, optimizer

    return make


def send(params, grads=None):
    for i, p in enumerate(params):
        p.grad = torch.randn_like(p) if grads is None else grads[i]


MIXED = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtypes", [[torch.float32], MIXED], ids=["float32", "mixed"])
@pytest.mark.parametrize(
    "options", [{}, {"max_norm": 0.1}, {"max_norm": 0.1, "norm_type": math.inf}], ids=str
)
def test_a_window_ends_with_three_launches(accumulator_on, dtypes, options, e):
    params, optimizer = accumulator_on(dtypes, 2, **options)
    for window in range(4):
        for micro_batch in range(2):
            send(params)
            e.reset()
            optimizer.step()
            if micro_batch == 0:
                assert families(e) in ([], ["store"])  # the addresses of what is kept
        assert optimizer.updated
        if window:
            assert families(e) == ["gather", "finish", "update"], e.launches


@pytest.mark.parametrize("dtypes", [[torch.float32], MIXED], ids=["float32", "mixed"])
def test_one_micro_batch_ends_with_at_most_four_launches(accumulator_on, dtypes, e):
    params, optimizer = accumulator_on(dtypes, 1, max_norm=0.1)
    grads = [[torch.randn_like(p) for p in params] for _ in range(2)]
    seen = []
    for window in range(6):
        send(params, grads[window // 3])
        e.reset()
        optimizer.step()
        assert optimizer.updated
        seen.append(families(e))
    usual = ["norm", "finish", "update"]
    assert seen[1:3] == [usual] * 2 and seen[4:] == [usual] * 2
    assert sorted(seen[3]) == sorted(["store", *usual])


def test_three_micro_batches_are_one_launch_each(accumulator_on, e):
    params, optimizer = accumulator_on(MIXED, 3)
    for window in range(3):
        seen = []
        for _ in range(3):
            send(params)
            e.reset()
            optimizer.step()
            seen.append(families(e))
        if window:
            assert seen[1:] == [["gather"], ["gather", "finish", "update"]], seen


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_training_has_the_bits_of_the_other_backends(accumulator_on, norm_type, monkeypatch, request):
    """One parameter has no gradient, another one each window; what a buffer held before is NaN."""
    if request.config.getoption("--emulated"):
        pytest.skip("compares with backends that read on the host")
    real = dispatch.load
    cpu = torch.device("cpu")
    ended = []
    for library in (None, *native(), real("reference", cpu)):
        torch.manual_seed(3)
        params, optimizer = accumulator_on(MIXED, 2, max_norm=0.1, norm_type=norm_type)
        if library is not None:
            monkeypatch.setattr(dispatch, "load", lambda *_, library=library: library)
        for window in range(5):
            for _ in range(2):
                send(params)
                params[window % 3].grad = None
                optimizer.step()
            for buffer in optimizer._window.buffers:
                buffer.data.fill_(math.nan)
        assert optimizer.norm.isfinite() and optimizer._window.buffers
        ended.append([optimizer.norm, *(p.detach() for p in params)])
    for theirs in ended[1:]:
        for a, b in zip(ended[0], theirs, strict=True):
            # pow() differs between libraries, which may turn one rounding of the result.
            one_ulp = torch.finfo(a.dtype).eps
            assert torch.equal(a, b) or (norm_type == 3.0 and torch.allclose(a, b, rtol=one_ulp, atol=0))


# ---------------------------------------------------------------------------------------- bad input


class Recorded(Exception):  # noqa: N818
    """Instead of a launch."""


def recorded(name, monkeypatch):
    """The op and the arguments of the launch that a case comes down to."""
    case = BY_NAME[{"upload": "gather_", "store": "gather_"}.get(name, f"{name}_")]
    options = {"weight": 0.5, "kept_weight": 0.5, "states": "b"} if name == "gather" else {}
    args, kwargs = case.make("cpu", case.dtypes[0], [600, 9000, 33], 0, **options)
    backend = emulated.backend()
    seen = {}
    ops = backend._launcher._ops

    class Recorder:
        def __getattr__(self, op):
            def call(*args):
                if op == f"launch_{name}":
                    seen["args"] = args
                else:
                    getattr(ops, op)(*args)

            return call

    monkeypatch.setattr(backend._launcher, "_ops", Recorder())
    getattr(backend, case.name)(*args, **kwargs)
    op = getattr(torch.ops.fastaccum, f"launch_{name}").default
    names = [argument.name for argument in op._schema.arguments]
    return op, dict(zip(names, seen["args"], strict=True)), (args, kwargs, backend)


LAUNCHES = ("gather", "norm", "finish", "scale", "adam", "sgd")
# Shorter by one element, these no longer hold what the other arguments ask for.
FULL = {
    "gather": ("strand_segment", "segments", "fresh", "kept"),
    "norm": ("strand_segment", "segments", "pointers"),
    "finish": ("scalars", "group", "words"),
    "scale": ("strand_segment", "segments", "table"),
    "adam": ("strand_segment", "segments", "table", "grads"),
    "sgd": ("strand_segment", "segments", "table", "grads"),
}
NONE_IS_RIGHT = {("finish", "steps"), ("finish", "spans"), ("finish", "factor")}  # no slots, spans, groups


def bad_values(name, argument, value):
    yield "dtype", value.to(torch.int16)
    flat = value.reshape(-1)
    if argument != "partials" and (name, argument) not in NONE_IS_RIGHT:
        # No segments at all is a right call for a layout of no strands only.
        if argument not in ("segments", "strand_segment"):
            yield "empty", flat[:0]
        if value.numel() > 1 and argument not in ("weight", "kept_weight", "divisor"):
            yield "strided", torch.stack([flat, flat], 1)[:, 0]
    if argument in FULL[name]:
        yield "short", flat[:-1].clone()
    if argument in ("weight", "kept_weight", "divisor"):
        yield "two values", flat.repeat(2)
    if argument == "partials":
        yield "one row", flat
        yield "three rows", torch.cat([value, value[:1]])
        if name != "finish":
            yield "too few chunks", value[:, :-1]
        yield "transposed", torch.zeros(value.shape[::-1], dtype=value.dtype).t()


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_wrong_argument_is_named_before_anything_is_launched(name, monkeypatch, e):
    op, right, alive = recorded(name, monkeypatch)
    before, tried = clone(right), 0
    for argument, value in right.items():
        if not isinstance(value, torch.Tensor):
            continue
        for what, bad in bad_values(name, argument, value):
            e.reset()
            with pytest.raises(RuntimeError, match=rf"fastaccum: .*\b{argument}\b"):
                op(**{**right, argument: bad})
                pytest.fail(f"{argument}, {what}: accepted")
            assert e.count("launches") == 0 and e.count("waiting_copies") == 0
            tried += 1
    assert tried >= 2 * len([v for v in right.values() if isinstance(v, torch.Tensor)]) - 3
    for argument, value in before.items():
        if isinstance(value, torch.Tensor):
            assert not cuda_checks.different(right[argument], value).any(), argument
    e.reset()
    op(**right)
    assert e.count("launches") == 1
    del alive


def test_a_buffer_that_ends_before_the_last_chunk_is_refused(monkeypatch, e):
    op, right, alive = recorded("gather", monkeypatch)
    e.reset()
    chunks = right["strand_segment"].numel() // 16
    assert chunks == 2
    with pytest.raises(RuntimeError, match="fastaccum: buffer must"):
        op(**{**right, "buffer": right["buffer"][: (chunks - 1) * CHUNK]})
    assert e.count("launches") == 0
    del alive


@pytest.mark.parametrize("name", ["store", "upload"])
def test_a_table_is_never_written_beyond_its_end(name, e):
    op = getattr(torch.ops.fastaccum, f"launch_{name}")
    table, words = torch.zeros(5, dtype=torch.int64), torch.arange(6)
    e.reset()
    for bad_table, bad_words, match in (
        (table, words, "table must .* at least 6 elements, got 5"),
        (table.double(), words[:5], "table must"),
        (torch.zeros(10, dtype=torch.int64)[::2], words[:5], "table must be a contiguous"),
        (table, words[:5].double(), "(words|values|pinned) must be contiguous int64"),
        (table, words[::2], "(words|values|pinned) must be contiguous int64"),
    ):
        with pytest.raises(RuntimeError, match=f"fastaccum: {match}"):
            op(bad_table, bad_words)
    if name == "store":
        many = torch.zeros(4081, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="at most 4080, got 4081"):
            op(many.clone(), many)
    assert e.count("launches") == 0 and e.count("waiting_copies") == 0 and not table.any()
    op(table, words[:5])
    e.synchronize()
    assert table.tolist() == [0, 1, 2, 3, 4]


def test_the_limit_of_words_by_value_is_the_librarys(e):
    assert torch.ops.fastaccum.launch_prepare(torch.empty(0)) == 4080


def test_what_a_launch_reports_is_raised(e):
    case = BY_NAME["norm_"]
    args, kwargs = case.make("cpu", torch.float32, [600], 0)
    backend = emulated.backend()
    backend.norm_(*args, **kwargs)
    e.set(next_error=9)
    with pytest.raises(RuntimeError, match="fastaccum: launch_norm: the launch failed: "):
        backend.norm_(*args, **kwargs)
    backend.norm_(*args, **kwargs)
