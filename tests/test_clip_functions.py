"""``clip_grad_norm_`` and ``get_total_norm`` in place of ``torch.nn.utils``'s."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator, clip_grad_norm_, get_total_norm  # noqa: E402
from tests.oracle import assert_identical, each_dtype, parameter  # noqa: E402

pytestmark = [pytest.mark.native, pytest.mark.quick]
INF, NAN = math.inf, math.nan
NORM_TYPES = [2, 2.0, 1.0, INF, "inf", 3.0, 0.5, 1.5, 0.0, -1.0, -2.0, -INF]


def exact(tensors, norm_type):
    """Stock's definition in float64: the norm of the tensors' norms."""
    norms = [torch.linalg.vector_norm(t.double(), float(norm_type)) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(norms), float(norm_type))


def with_grads(grads):
    params = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return params


def layouts(dtype):
    """The same numbers in many layouts, none of them shared."""
    big = torch.randn(12, 14).to(dtype)
    return [
        big[:, :7].clone(), big.t().clone(memory_format=torch.preserve_format).t()[:5],
        big[::2, 1::3],
        torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last), big[3, 3].clone(),
        torch.randn(700).to(dtype)[1:],
    ]  # fmt: skip


@each_dtype
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_norm_type_that_stock_takes(dtype, norm_type):
    tensors = layouts(dtype)
    norm = get_total_norm(tensors, norm_type)
    assert norm.dim() == 0
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), exact(tensors, norm_type), rtol=3e-7, atol=0)
    params = with_grads(tensors)
    before = [t.clone() for t in tensors]
    limit = float(norm) / 2
    if not 0 < limit < INF:
        return
    torch.testing.assert_close(clip_grad_norm_(params, limit, norm_type), norm)
    factor = min(1.0, limit / (exact(before, norm_type).item() + 1e-6))
    for p, was in zip(params, before, strict=True):
        wanted = (was.double() * factor).to(dtype)
        torch.testing.assert_close(p.grad, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_stock_and_ours_agree_where_stock_is_right():
    grads = [torch.randn(50, 3), torch.randn(7), torch.randn(())]
    for norm_type in NORM_TYPES:
        ours, theirs = (with_grads([g.clone() for g in grads]) for _ in range(2))
        a = clip_grad_norm_(ours, 0.7, norm_type, foreach=True)
        b = torch.nn.utils.clip_grad_norm_(theirs, 0.7, norm_type, foreach=False)
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-6, atol=1e-7)


def test_mixed_dtypes():
    grads = [torch.full((3,), 3.0, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32)]
    assert get_total_norm(grads).dtype == torch.float32
    assert get_total_norm([*grads, torch.ones(1).double()]).dtype == torch.float64
    assert get_total_norm(grads).item() == 9.0
    params = with_grads(grads)
    clip_grad_norm_(params, 0.9)
    for p in params:
        torch.testing.assert_close(p.grad.float(), torch.full((3,), 0.3), rtol=4e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [(300.0, 1), (300.0, 4), (300.0, 200_000), (1e-4, 4)])
def test_d01_sums_of_squares_do_not_overflow_in_sixteen_bits(dtype, n):
    value, count = n
    (p,) = with_grads([torch.full((count,), value, dtype=dtype)])
    truth = p.grad.double().norm().item()
    norm = clip_grad_norm_([p], 1.0)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(truth, rel=1e-7)
    assert p.grad.double().norm().item() == pytest.approx(min(truth, 1.0), rel=8e-3)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
def test_u01_a_float32_norm_neither_overflows_nor_underflows(norm_type):
    for value in (1e19, 1e36, 1e-25, 1e-40):
        grads = [torch.full((1,), value) for _ in range(128)]
        truth = grads[0].double().item() * (128 ** (1 / norm_type) if norm_type < INF else 1.0)
        assert get_total_norm(grads, norm_type).item() == pytest.approx(truth, rel=1e-6)


def test_c04_nothing_to_clip_is_a_norm_of_0():
    for nothing in (
        [],
        iter([]),
        [parameter(1.0)],
        parameter(1.0),
        (parameter(1.0) for _ in range(2)),
    ):
        norm = clip_grad_norm_(nothing, 1.0)
        assert norm.dim() == 0 and norm.item() == 0.0
    assert get_total_norm([]).item() == 0.0
    assert get_total_norm(torch.tensor([3.0, 4.0])).item() == 5.0
    empties = with_grads([torch.zeros(0), torch.zeros(2, 0)])
    for norm_type in (1.0, 2.0, 3.0, INF):
        assert clip_grad_norm_(empties, 1.0, norm_type).item() == 0.0


def test_c04_one_tensor_a_generator_and_missing_gradients():
    params = with_grads([torch.tensor([3.0]), torch.tensor([4.0])])
    without = parameter(1.0)
    assert clip_grad_norm_((p for p in [params[0], without, params[1]]), 1.0).item() == 5.0
    assert without.grad is None
    assert [round(p.grad.item(), 5) for p in params] == [0.6, 0.8]
    assert clip_grad_norm_(params[0], 0.3).item() == pytest.approx(0.6)
    assert params[0].grad.item() == pytest.approx(0.3, rel=1e-5)


def test_c04_several_devices_are_refused():
    grads = [torch.ones(1), torch.ones(1, device="meta")]
    with pytest.raises(ValueError, match="several devices.*cpu.*meta"):
        get_total_norm(grads)
    params = with_grads([torch.ones(1)]) + [nn.Parameter(torch.ones(1, device="meta"))]
    params[1].grad = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="several devices"):
        clip_grad_norm_(params, 0.1)
    assert params[0].grad.item() == 1.0


def test_c06_zero_gradients():
    params = with_grads([torch.zeros(3), torch.zeros(2)])
    for norm_type in (1.0, 2.0, 3.0, INF):
        assert clip_grad_norm_(params, 1.0, norm_type).item() == 0.0
    assert not params[0].grad.any() and not params[1].grad.any()


def test_c08_one_parameter_listed_twice_counts_and_shrinks_once():
    (p,) = with_grads([torch.tensor([3.0, 4.0])])
    assert clip_grad_norm_([p, p], 2.5).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([1.5, 2.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF, 0.5, -1.0])
def test_c03_error_if_nonfinite_raises_before_a_gradient_is_touched(bad, norm_type):
    params = with_grads([torch.tensor([1.0]), torch.tensor([1.0, bad])])
    before = [p.grad.clone() for p in params]
    if math.isfinite(exact(before, norm_type)):  # 1 / inf is 0
        return
    for function in (
        lambda: clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True),
        lambda: get_total_norm([p.grad for p in params], norm_type, error_if_nonfinite=True),
    ):
        with pytest.raises(RuntimeError, match="non-finite"):
            function()
        assert_identical(before, [p.grad for p in params])
    theirs = with_grads([g.clone() for g in before])
    a = clip_grad_norm_(params, 1.0, norm_type)
    b = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type, foreach=False)
    torch.testing.assert_close(a, b, equal_nan=True)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_l03_layouts_and_overlaps():
    base = torch.tensor([2.0])
    grads = [
        torch.arange(6.0).view(3, 2).t(),
        base.expand(4),
        torch.arange(24.0).view(4, 6)[:, ::2].t(),
    ]
    params = with_grads(grads)
    for p in params[:1] + params[2:]:
        before = p.grad.clone()
        norm = clip_grad_norm_([p], 1.0)
        assert norm.item() == pytest.approx(before.double().norm().item())
        torch.testing.assert_close(p.grad, before / before.norm(), rtol=1e-5, atol=0)
    assert get_total_norm([grads[1]]).item() == 4.0


def test_l06_neighbours_are_not_touched():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for shift in (1, 2, 3):
            for n in (1, 3, 7, 15, 17, 999):
                whole = torch.full((n + 8,), 8.0, dtype=dtype)
                (p,) = with_grads([whole[shift : shift + n]])
                truth = 8.0 * math.sqrt(n)
                norm = clip_grad_norm_([p], truth / 2)
                assert norm.item() == pytest.approx(truth, rel=1e-6)
                assert (whole[:shift] == 8.0).all() and (whole[shift + n :] == 8.0).all()
                torch.testing.assert_close(p.grad, torch.full((n,), 4.0, dtype=dtype))


def test_nothing_is_written_when_nothing_is_clipped():
    (p,) = with_grads([torch.tensor([3.0, 4.0])])
    clip_grad_norm_([p], 5.1)
    assert p.grad.tolist() == [3.0, 4.0]


def test_writing_bumps_the_version():
    (p,) = with_grads([torch.tensor([3.0, 4.0])])
    version = p.grad._version
    clip_grad_norm_([p], 1.0)
    assert p.grad._version > version


def test_the_norm_is_the_same_for_any_number_of_threads():
    tensors = [torch.randn(n) for n in (100_003, 5, 8193)]
    norms = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norms.add(get_total_norm(tensors).item())
    assert len(norms) == 1


@pytest.mark.parametrize(
    ("max_norm", "exception", "match"),
    [
        (-1.0, ValueError, "max_norm must be above 0, got -1"),
        (0, ValueError, "max_norm must be above 0, got 0"),
        (NAN, ValueError, "max_norm must be above 0, got nan"),
        (True, TypeError, "max_norm must be a number.*True.*bool"),
        ("1", TypeError, "max_norm must be a number.*'1'"),
        (None, TypeError, "max_norm must be a number, got None"),
    ],
)
def test_a01_a_wrong_max_norm(max_norm, exception, match):
    (p,) = with_grads([torch.tensor([3.0, 4.0])])
    with pytest.raises(exception, match=match):
        clip_grad_norm_([p], max_norm)
    assert p.grad.tolist() == [3.0, 4.0]
    clip_grad_norm_([p], INF)
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("norm_type", [NAN, True, None, "two"])
def test_a_wrong_norm_type(norm_type):
    (p,) = with_grads([torch.tensor([3.0, 4.0])])
    with pytest.raises((TypeError, ValueError), match="norm_type|two"):
        clip_grad_norm_([p], 1.0, norm_type)
    assert p.grad.tolist() == [3.0, 4.0]


def test_wrong_tensors():
    with pytest.raises(TypeError, match=r"parameters\[1\] must be a tensor, got float"):
        clip_grad_norm_([parameter(1.0), 2.0], 1.0)
    with pytest.raises(TypeError, match=r"tensors\[0\] must be a tensor, got str"):
        get_total_norm(["a"])
    with pytest.raises(ValueError, match="dtype torch.complex64"):
        get_total_norm([torch.ones(1, dtype=torch.complex64)])
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    with pytest.raises(ValueError, match="sparse.*coalesce"):
        clip_grad_norm_(embedding.parameters(), 1.0)


def test_the_norm_of_a_window_is_not_there_to_be_judged():
    p = parameter(1.0)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0))
    with pytest.raises(ValueError, match="error_if_nonfinite=True goes with parameters.*nonfinite='error'"):
        clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="built with norm_type=2.0, got 1.0"):
        clip_grad_norm_(optimizer, 1.0, norm_type=1.0)
    (p * 4.0).sum().backward()
    optimizer.step()
    assert p.item() == -3.0  # neither has clipped anything
