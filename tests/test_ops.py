"""Every op against its specification, bit for bit; and what a caller may rely on."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from fastaccum import ops, reference  # noqa: E402
from tests import cases  # noqa: E402
from tests.bits import assert_same, clone, count_steps, different, tensors_of, total_norm, whole  # noqa: E402
from tests.cases import BY_NAME, CASES, around  # noqa: E402

pytestmark = pytest.mark.native

VARIANTS = [pytest.param(c, v, id=f"{c.name}-{v.desc}") for c in CASES for v in c.variants]
USUAL = [pytest.param(c, c.variants[0], id=c.name) for c in CASES]
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in ops.DTYPES}


def agrees(case, variant, backend, dtype, n, seed=0, **where):
    """Runs backend and reference on equal arguments; compares arguments and surroundings."""
    args, kwargs = case.make("cpu", dtype, n, seed, **variant.options, **where)
    before = case.named(*clone((args, kwargs)))
    theirs = clone((args, kwargs))
    case.of(backend)(*args, **kwargs)
    case.reference(*theirs[0], **theirs[1])
    got = case.named(args, kwargs)
    note = f"{case.name}, {variant.desc}, {DTYPE_NAMES[dtype]}, {n}, {where}"
    assert_same(got, case.named(*theirs), note, variant.exact)
    untouched = [name for name in got if name not in case.mutates]
    assert_same({k: got[k] for k in untouched}, {k: before[k] for k in untouched}, note + ", a source")
    return before, got


# --------------------------------------------------------------------------- against the reference


def lists(grid, start):
    """Every size of the grid in one list, from another one on each time, empties first and last."""
    start = start * 5 % len(grid)
    return [0, *grid[start:], 3, *grid[:start], 700, 0]


@pytest.mark.parametrize(
    ("case", "variant", "dtype"),
    [
        pytest.param(c, v, dtype, id=f"{c.name}-{v.desc}-{DTYPE_NAMES[dtype]}")
        for c in CASES
        for v in c.variants
        for dtype in c.dtypes
    ],
)
def test_native_is_the_reference(case, variant, dtype, backend):
    i = case.variants.index(variant) + case.dtypes.index(dtype)
    grid = case.grid if dtype == case.dtypes[0] else case.grid[:-1]
    agrees(case, variant, backend, dtype, lists(grid, i), i, shift=i % 3)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_native_is_the_reference_in_short(case, variant, backend):
    """One dtype and offset a variant, without the largest sizes."""
    i = case.variants.index(variant)
    dtype = case.dtypes[i % len(case.dtypes)]
    grid = tuple(n for n in case.grid if n < 8191 or n == 8193)
    agrees(case, variant, backend, dtype, lists(grid, i), i, shift=i % 3)


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_sizes_of_a_vector_at_every_offset(case, variant, backend, shift):
    for dtype in case.dtypes:
        agrees(case, variant, backend, dtype, [*range(70), 999], shift=shift)


@pytest.mark.quick
@pytest.mark.parametrize("order", ["columns", "channels_last"])
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_dense_tensors_count_in_memory_order(case, variant, backend, order):
    for dtype in case.dtypes:
        agrees(case, variant, backend, dtype, [24, 0, 8 * 1033, 2, 8], order=order, shift=1)


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "sizes",
    [[], [0], [0, 0, 0], [0, 0, 3], [3, 0], [1, 1, 0, 1, 0], [0] * 100, [2] * 35 + [0] + [2] * 40],
    ids=lambda sizes: f"{len(sizes)} tensors of {sum(sizes)}",
)
def test_empty_tensors_are_no_work(case, backend, sizes):
    for variant in case.variants:
        agrees(case, variant, backend, case.dtypes[0], sizes)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gather_", 5003), ("norm_", 5003), ("sgd_", 5003), ("adam_", 603), ("scale_into_", 603)],
)
def test_more_tensors_than_a_launch_takes(name, count, backend):
    case = BY_NAME[name]
    sizes = [i % 11 for i in range(count)]
    agrees(case, case.variants[0], backend, case.dtypes[0], sizes)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_folds_over_many_chunks(backend, dtype, norm_type):
    """A wrong fold shows in one chunk of five only, so there are more than 64."""
    sizes = [300_007, 8192 * 2, 5, 290_000]
    for name in ("norm_", "gather_"):
        case = BY_NAME[name]
        variant = cases.Variant("many chunks", {"norm_type": norm_type})
        _, got = agrees(case, variant, backend, dtype, sizes)
        assert got["partials"].shape[1] >= 64


@pytest.mark.quick
@pytest.mark.parametrize("states", ["---o---", "----ak-", "--o---b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_bucket_far_into_the_buffer(backend, dtype, states):
    """Its chunks are counted from the first that has work."""
    options = {"states": states, "buffer_dtype": dtype, "partials": False, "weight": 0.3}
    variant = cases.Variant("far", options)
    agrees(BY_NAME["gather_"], variant, backend, dtype, [9000, 8190, 20_000, 3, 8192, 8200, 16_500])


@pytest.mark.quick
@pytest.mark.parametrize("chunks", [15, 16, 17, 32, 33, 49])
@pytest.mark.parametrize("name", ["norm_", "scale_"])
def test_the_last_chunk_of_a_batch_is_done(name, chunks, backend):
    """Chunks are handed to threads by sixteen."""
    case = BY_NAME[name]
    agrees(case, case.variants[0], backend, torch.float32, [(chunks - 1) * 8192 + 5])


def test_folds_over_many_rows_of_partials(backend):
    case = BY_NAME["finish_"]
    agrees(case, case.variants[0], backend, torch.float64, 20_001)


def test_a_buffer_beyond_the_caches(backend):
    """At 32 MiB a buffer may be written in another way."""
    sizes = [2_100_000, 511, 2_100_100, 512, 0, 513, 4_200_007, 100_003]
    variant = cases.Variant("beyond the caches", {"states": "oba", "weight": 0.3})
    agrees(BY_NAME["gather_"], variant, backend, torch.bfloat16, sizes)


@pytest.mark.quick
def test_canaries_are_there(backend):
    """The comparison with the reference covers what lies beside a tensor: show that it is seen."""
    args, kwargs = BY_NAME["scale_"].make("cpu", torch.float32, [5], 0, shift=1)
    storage = whole(args[0][0])
    assert (storage == cases.CANARY).sum() == 2 * cases.MARGIN
    ops.scale_(*args, **kwargs)
    inside = torch.zeros(len(storage), dtype=torch.bool)
    inside[cases.MARGIN + 1 : cases.MARGIN + 6] = True
    assert (storage[~inside] == cases.CANARY).all() and (storage[inside] != cases.CANARY).all()
    other = clone(args[0])
    whole(other[0])[cases.MARGIN] = 1.0
    with pytest.raises(AssertionError, match=r"tensors\[0\] differs in 1 of"):
        assert_same({"tensors": other}, {"tensors": args[0]})


@pytest.mark.quick
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_public_function_is_the_op(case, variant, backend):
    args, kwargs = case.make("cpu", case.dtypes[0], around(513), 0, **variant.options)
    theirs = clone((args, kwargs))
    assert case.public(*args, **kwargs) is None
    case.of(backend)(*theirs[0], **theirs[1])
    assert_same(case.named(args, kwargs), case.named(*theirs))


# ------------------------------------------------------------------------------------------ gather


@pytest.mark.quick
@pytest.mark.parametrize("weight", [None, 0.3, -7.0])
def test_gather_is_eager_addition(weight):
    """Bit for bit ``acc += weight * grad``, and never the fused ``add(alpha=)``."""
    args, kwargs = BY_NAME["gather_"].make("cpu", torch.bfloat16, [9001, 7], 0, weight=weight)
    buffer, _, _, segments, fresh, *_ = args
    wanted = []
    for (offset, numel), grad in zip(segments.tolist(), fresh, strict=True):
        acc = buffer[offset : offset + numel].clone()
        acc += grad.float() if weight is None else torch.tensor(weight) * grad.float()
        wanted.append(acc)
    ops.gather_(*args, **kwargs)
    for (offset, numel), acc in zip(segments.tolist(), wanted, strict=True):
        assert not different(buffer[offset : offset + numel], acc).any()


@pytest.mark.quick
def test_gather_sets_present_and_ignores_what_is_not_there():
    make = BY_NAME["gather_"].make
    args, kwargs = make("cpu", torch.float32, [600] * 7, 0, states="aokbp-", norm_type=2.0)
    buffer, present, partials, segments = args[:4]
    assert present.tolist() == [1, 0, 0, 0, 1, 0, 1]
    ops.gather_(*args, **kwargs)
    assert present.tolist() == [1, 1, 1, 1, 1, 0, 1]
    there = [buffer[o : o + n] for k, (o, n) in enumerate(segments.tolist()) if present[k]]
    assert partials[1].sum() == 0
    total = sum(x.double().pow(2).sum() for x in there)
    torch.testing.assert_close(partials[0].sum(), total, rtol=1e-14, atol=0)
    assert buffer[5 * 1024 : 5 * 1024 + 600].isnan().all()  # the one without a gradient


@pytest.mark.quick
def test_a_narrow_buffers_norm_is_of_what_it_holds():
    args, kwargs = BY_NAME["gather_"].make("cpu", torch.float32, [3], 0, buffer_dtype=torch.float16)
    buffer, partials, fresh = args[0], args[2], args[4]
    buffer[:3], fresh[0][:] = 40000.0, torch.tensor([30000.0, 1.0, 0.0])
    ops.gather_(*args, **kwargs)
    assert buffer[:3].tolist() == [math.inf, 40000.0, 40000.0]
    assert partials[1].tolist() == [1.0]


# -------------------------------------------------------------------------------- norm: the oracle


def ulps(a, b):
    """Distance of two positive float32 in units in the last place."""
    return abs(a.float().view(torch.int32).item() - b.float().view(torch.int32).item())


def oracle(tensors, norm_type):
    x = torch.cat([t.double().flatten() for t in tensors]).abs()
    if norm_type == math.inf:
        return x.max()
    scale = x.max()
    return scale * (x / scale).pow(norm_type).sum().pow(1 / norm_type)


@pytest.mark.quick
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, 7.0, math.inf])
def test_norm_is_within_two_ulps_of_float64(norm_type):
    maker = cases.Maker("cpu", 3)
    for dtype in ops.DTYPES:
        tensors = [maker.signed(n, dtype) for n in around(4_011)]
        norm, bad = total_norm(ops, tensors, norm_type)
        assert not bad and ulps(norm, oracle(tensors, norm_type)) <= 2, dtype
    mixed = [maker.signed(4001, dtype) for dtype in ops.DTYPES]
    assert ulps(total_norm(ops, mixed, norm_type)[0], oracle(mixed, norm_type)) <= 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ([torch.full((1,), 1e19)] * 128, 1.1313708e20),  # squares beyond float32
        ([torch.full((4,), 1e-25)], 2e-25),  # squares below float32
        ([torch.tensor([1e-40])], 1e-40),  # a denormal
        ([torch.tensor([300.0], dtype=torch.float16)], 300.0),
        ([torch.full((4,), 300.0, dtype=torch.float16)], 600.0),
        ([torch.full((400,), 5000.0, dtype=torch.float16)], 1e5),
        ([torch.full((4,), 1e-4, dtype=torch.float16)], 2 * 1.000165939331054688e-4),
        ([torch.full((400,), 3e38, dtype=torch.bfloat16)], math.inf),  # float32 cannot hold it
        ([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)], 5.0),
        ([torch.full((1,), 1e200, dtype=torch.float64)], math.inf),
        ([torch.empty(0)], 0.0),
    ],
    ids=str,
)
def test_norm_of_huge_and_tiny_values(tensors, wanted):
    norm, bad = total_norm(ops, tensors)
    assert not bad
    assert ulps(norm, torch.tensor(wanted)) <= 2


@pytest.mark.quick
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_what_is_not_finite_is_found_anywhere(norm_type, value):
    for dtype in ops.DTYPES:
        for tensor in (0, 1, 2):
            for element in (0, 513, 1024):
                tensors = [torch.full((1025,), 2.0, dtype=dtype) for _ in range(3)]
                tensors[tensor][element] = value
                norm, bad = total_norm(ops, tensors, norm_type)
                assert bad, (dtype, tensor, element)
                if math.isnan(value):
                    assert norm.isnan()
                else:
                    assert norm == math.inf


@pytest.mark.quick
@pytest.mark.parametrize("name", ["norm_", "gather_"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_flag_is_the_chunks_own(name, value):
    case = BY_NAME[name]
    for norm_type in (1.0, 2.0, math.inf):
        for element in (0, 5, 511, 512, 8191, 8192, 20_000, 24_575):
            args, kwargs = case.make("cpu", torch.float32, [24_576], 0, norm_type=norm_type)
            named = case.named(args, kwargs)
            source = named["tensors"] if "tensors" in named else named["fresh"]
            source[0][element] = value
            case.public(*args, **kwargs)
            flags = [0.0, 0.0, 0.0]
            flags[element // 8192] = 1.0
            assert named["partials"][1].tolist() == flags
            assert named["partials"][0].isfinite().tolist() == [not f for f in flags]


@pytest.mark.quick
def test_overflow_of_finite_float64_is_not_flagged():
    huge = torch.full((600,), 1e300, dtype=torch.float64)
    norm, bad = total_norm(ops, [huge, torch.ones(3)])
    assert norm == math.inf and not bad
    huge[599] = math.inf
    assert total_norm(ops, [huge, torch.ones(3)])[1]


# ----------------------------------------------------------------------------------- end of window


@pytest.mark.quick
def test_finish_clips_averages_and_counts():
    make = BY_NAME["finish_"].make
    args, kwargs = make("cpu", torch.float64, 10, 0, max_norm=(0.01, 1e9), divisor=4.0, weight=4.0)
    norm, group_norms, factor, skip, skipped, partials, spans = args[:7]
    ops.finish_(*args, **kwargs)
    sums = [sum(partials[0, b:e].sum() for g, b, e in spans.tolist() if g == k) for k in (0, 1)]
    norms = [math.sqrt(s) / 4 for s in sums]
    assert group_norms.tolist() == pytest.approx(norms, rel=1e-14)
    assert norm.item() == pytest.approx(math.hypot(*norms), rel=1e-7)
    assert factor.tolist() == pytest.approx([0.01 / (norms[0] + 1e-6) / 4, 0.25], rel=1e-14)
    assert (skip.item(), skipped.item()) == (0, 41)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "skip", "skipped"),
    [
        ({}, 0, 41),
        ({"planted": math.nan}, 1, 42),
        ({"planted": math.inf}, 1, 42),
        ({"planted": math.nan, "skip_nonfinite": False}, 0, 41),
        ({"weight": 0.0, "divisor": 0.0}, 1, 41),
        ({"weight": 0.0, "divisor": 0.0, "planted": math.nan}, 1, 41),
        ({"weight": -1.0}, 1, 41),
        ({"weight": math.nan}, 1, 41),
    ],
    ids=str,
)
def test_finish_skips(options, skip, skipped):
    args, kwargs = BY_NAME["finish_"].make("cpu", torch.float64, 10, 0, **options)
    ops.finish_(*args, **kwargs)
    assert (args[3].item(), args[4].item()) == (skip, skipped)
    if options.get("weight", 1.0) != 1.0:
        assert args[0].item() == 0.0


@pytest.mark.quick
def test_chunks_beyond_the_spans_do_not_count():
    args, kwargs = BY_NAME["finish_"].make("cpu", torch.float64, 10, 0)
    partials, spans = args[5], args[6]
    partials[:, 9] = math.nan
    spans[1, 2] = 9
    ops.finish_(*args, **kwargs)
    assert args[0].isfinite() and not args[3]


@pytest.mark.quick
def test_bias_corrections_are_those_of_float64():
    args, kwargs = BY_NAME["finish_"].make("cpu", torch.float64, 3, 0, parameters=300, most=200_000)
    steps, scalars, row, group, hyper = (kwargs[k] for k in ("steps", "scalars", "row", "group", "hyper"))
    before = steps.clone()
    ops.finish_(*args, **kwargs)
    for k, g in zip(row.tolist(), group.tolist(), strict=True):
        lr, beta1, beta2 = hyper[g, :3].tolist()
        t = before[k].item() + 1
        assert steps[k] == t
        wanted = [lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t), float(t == 1), lr]
        assert scalars[k].tolist() == pytest.approx(wanted, rel=1e-10)
    others = torch.ones(300, dtype=torch.bool)
    others[row] = False
    assert torch.equal(steps[others], before[others])


# --------------------------------------------------------------------------------- hand-made cases


def _one_update(name, param, grad, **row):
    """One step of one parameter from zero state, factor 1."""
    double = {"dtype": torch.float64}
    steps, scalars = torch.zeros(1), torch.zeros(1, ops.SCALAR_COLUMNS, **double)
    hyper = torch.tensor([cases.hyper_row(**row)], **double)
    zero, skip = torch.zeros(1, dtype=torch.int64), torch.zeros((), dtype=torch.int32)
    count_steps(steps, scalars, zero, zero, hyper)
    n_states = {"adam_": 2, "sgd_": 1}[name]
    states = [[torch.zeros_like(param)] for _ in range(n_states)]
    extra = [[]] if name == "adam_" else []
    segments = torch.tensor([[0, param.numel()]])
    getattr(ops, name)(
        [param], *states, *extra, [], [grad], segments, zero, zero, zero, hyper, scalars,
        torch.ones(1, **double), skip,
    )  # fmt: skip
    return param, [s[0] for s in states]


@pytest.mark.quick
def test_adam_and_adamw_decay_differently():
    row = {"lr": 0.1, "weight_decay": 0.5}
    p, (m, _) = _one_update("adam_", torch.tensor([2.0]), torch.tensor([-0.5]), **row)
    assert (p.item(), m.item()) == (pytest.approx(1.9), pytest.approx(0.05))
    p, (m, _) = _one_update("adam_", torch.tensor([2.0]), torch.tensor([-0.5]), decoupled=True, **row)
    assert (p.item(), m.item()) == (pytest.approx(2.0), pytest.approx(-0.05))


@pytest.mark.quick
def test_sgd_first_step_takes_the_gradient_whole():
    row = {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}
    p, (b,) = _one_update("sgd_", torch.tensor([1.0]), torch.tensor([0.25]), **row)
    assert (p.item(), b.item()) == (0.75, 0.25)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["adam_", "sgd_"])
def test_a_skipped_update_reads_no_gradient_and_writes_nothing(name):
    case = BY_NAME[name]
    args, kwargs = case.make("cpu", torch.float32, around(600), 0, skip=1)
    named = case.named(args, kwargs)
    for grad in named["grads"]:
        grad.fill_(math.nan)
    before = clone(named)
    case.public(*args, **kwargs)
    assert_same(named, before)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["scale_", "scale_into_"])
@pytest.mark.parametrize("library", [ops, reference], ids=["public", "reference"])
def test_scale_takes_a_0d_factor(name, library):
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    args = [[torch.zeros(2), torch.zeros(1)]] * (name == "scale_into_") + [tensors]
    index = [torch.zeros(2, dtype=torch.int64)]
    getattr(library, name)(*args, torch.tensor(0.5, dtype=torch.float64), *index)
    assert [t.tolist() for t in args[0]] == [[0.5, 1.0], [1.5]]


@pytest.mark.quick
def test_scale_keeps_nan_and_clamps_infinity():
    tensor = torch.tensor([math.nan, math.inf, -math.inf, 1e-40, -0.0])
    ops.scale_([tensor], torch.ones(1, dtype=torch.float64), max_value=2.0)
    assert tensor[0].isnan() and tensor[1:].tolist() == [2.0, -2.0, torch.tensor(1e-40).item(), 0.0]


# --------------------------------------------------------------------- torch: schemas, compilation


@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_opcheck(case, variant):
    for n in ([5, 0, 600], []):
        args, kwargs = case.make("cpu", case.dtypes[0], n, 0, **variant.options)
        torch.library.opcheck(case.raw, args, kwargs)


@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_schema_says_what_is_mutated(case, variant):
    written = [a.name for a in case.raw._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert tuple(written) == case.mutates


@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_compiles_whole_and_once(case, variant):
    torch._dynamo.reset()
    compiled = torch.compile(case.public, fullgraph=True, backend="aot_eager")
    options = {"weight": 0.5, "kept_weight": 0.5} if "kept_weight" in case.changing else {}
    for seed, stance in enumerate(("default", "fail_on_recompile", "fail_on_recompile")):
        args, kwargs = case.make("cpu", case.dtypes[0], [600, 0, 7], 5, **variant.options, **options)
        named = case.named(args, kwargs)
        for name in case.changing:
            value = named[name]
            if value is not None and value.is_floating_point():
                (value[:, 0] if value.dim() == 2 else value).mul_(1.0 + 0.25 * seed)
            elif value is not None:
                value.fill_(seed // 2)
        theirs = case.split(clone(named))
        with torch.compiler.set_stance(stance):
            compiled(*args, **kwargs)
        case.reference(*theirs[0], **theirs[1])
        assert_same(named, case.named(*theirs), f"call {seed}")


@pytest.mark.parametrize("name", ["scale_", "adam_", "sgd_"])
def test_compiled_code_sees_the_mutation(name):
    case = BY_NAME[name]

    def step(*args, **kwargs):
        before = args[0][0] * 1.0
        case.public(*args, **kwargs)
        return before, args[0][0] * 1.0

    args, kwargs = case.make("cpu", torch.float32, [600, 7], 0)
    original = args[0][0].clone()
    torch._dynamo.reset()
    before, after = torch.compile(step, fullgraph=True, backend="aot_eager")(*args, **kwargs)
    assert torch.equal(before, original)
    assert torch.equal(after, args[0][0]) and not torch.equal(after, original)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_works_on_leaves_and_records_no_graph(case, variant):
    """None of the ops is differentiable, so gradcheck does not apply."""
    args, kwargs = case.make("cpu", case.dtypes[0], [600, 7], 0, **variant.options)
    theirs = clone((args, kwargs))
    tensors = [t for _, t in tensors_of(case.named(args, kwargs)) if t.is_floating_point()]
    for tensor in tensors:
        tensor.requires_grad_()
    assert torch.is_grad_enabled()
    case.public(*args, **kwargs)
    assert all(t.is_leaf and t.grad_fn is None for t in tensors)
    for tensor in tensors:
        tensor.requires_grad_(False)
    case.public(*theirs[0], **theirs[1])
    assert_same(case.named(args, kwargs), case.named(*theirs))


@pytest.mark.quick
@pytest.mark.parametrize(("case", "variant"), USUAL)
def test_version_counters_move(case, variant):
    args, kwargs = case.make("cpu", case.dtypes[0], [600, 0, 7], 0, **variant.options)
    named = case.named(args, kwargs)
    before = {name: t._version for name, t in tensors_of(named)}
    case.public(*args, **kwargs)
    for name, tensor in tensors_of(named):
        moved = tensor._version > before[name]
        if name.split("[")[0] in case.bumps:
            assert moved, name
        elif name.split("[")[0] not in case.mutates:
            assert not moved, name


@pytest.mark.quick
@pytest.mark.parametrize("name", ["scale_", "adam_", "sgd_"])
def test_a_graph_that_saved_a_parameter_notices(name):
    case = BY_NAME[name]
    args, kwargs = case.make("cpu", torch.float32, [600, 7], 0)
    weight = torch.ones(600, requires_grad=True)
    loss = (weight * args[0][0]).sum()
    case.public(*args, **kwargs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------------------------- refusals


def refusals(field):
    return [
        pytest.param(case, r, id=f"{case.name}-{r.argument}-{r.desc}")
        for case in CASES
        for r in getattr(case, field)
    ]


def refused(case, refusal, function):
    args, kwargs = case.make("cpu", case.dtypes[0], [600, 9000, 0, 7], 0, **refusal.options)
    named = case.named(args, kwargs)
    function(*clone(args), **clone(kwargs))  # all right as it is
    named[refusal.argument] = refusal.change(named.get(refusal.argument))
    visible = {k: v for k, v in named.items() if k != refusal.argument}
    before = clone(visible)
    args, kwargs = case.split(named)
    with pytest.raises(refusal.exception, match=refusal.match):
        function(*args, **kwargs)
    assert_same(visible, before, "changed by a call that was refused")


@pytest.mark.quick
@pytest.mark.parametrize(("case", "refusal"), refusals("errors"))
def test_refuses(case, refusal):
    refused(case, refusal, case.public)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "refusal"), refusals("raw_errors"))
def test_bare_op_refuses_what_is_not_its_memory(case, refusal, backend):
    refused(case, refusal, case.raw)


# ------------------------------------------------------------------------------------- bytes moved


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "dtype", "options", "wanted"),
    [
        ("gather_", torch.float32, {}, 12),
        ("gather_", torch.bfloat16, {}, 10),
        ("gather_", torch.float32, {"states": "b"}, 12),
        ("gather_", torch.bfloat16, {"states": "b"}, 8),
        ("gather_", torch.float32, {"states": "o"}, 8),
        ("gather_", torch.bfloat16, {"states": "o"}, 6),
        ("norm_", torch.float32, {}, 4),
        ("norm_", torch.bfloat16, {}, 2),
        ("adam_", torch.float32, {}, 28),
        ("adam_", torch.float32, {"rows": [{"amsgrad": True}]}, 36),
        ("sgd_", torch.float32, {}, 20),
        ("sgd_", torch.float32, {"rows": [{}]}, 12),
        ("scale_", torch.float32, {}, 8),
        ("scale_into_", torch.float32, {"out_dtype": torch.bfloat16}, 6),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_per_element(name, dtype, options, wanted):
    assert BY_NAME[name].bytes(1000, dtype, **options) == 1000 * wanted
