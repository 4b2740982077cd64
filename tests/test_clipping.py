"""Clipping a window, and what is done with inf and NaN: contract items 8 and 9."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

import fastaccum  # noqa: E402
from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import (  # noqa: E402
    assert_identical,
    each_backend,
    each_dtype,
    each_take,
    parameter,
    run_window,
    send,
    snapshot,
    stock,
    twins,
    unchanged,
)

pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD = torch.optim.SGD
INF, NAN = math.inf, math.nan
NORM_TYPES = [0.5, 1.0, 1.5, 2.0, 3.0, 7.0, INF]


def zeros(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def randoms(params, scale=1.0):
    return [torch.randn(p.shape) * scale for p in params]


@each_take
@each_backend
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_c01_the_window_is_clipped_and_not_the_micro_batch(take, backend, reduction):
    p = parameter(0.0, 0.0)
    k = 1.0 if reduction == "sum" else 2.0
    optimizer = FusedAccumulator(
        SGD([p], lr=1.0), 2, max_norm=1.0, reduction=reduction, take=take, backend=backend
    )
    for grad in ([3.0, 0.0], [0.0, 4.0]):
        send(p, torch.tensor(grad) * k)
        optimizer.step()
    assert optimizer.norm.item() == 5.0
    torch.testing.assert_close(-p.detach(), torch.tensor([0.6, 0.8]) * 5 / 5.000001, rtol=3e-7, atol=0)


@each_backend
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, INF])
def test_max_norm_is_what_stock_does_to_the_finished_gradient(backend, norm_type, max_norm):
    shapes = [(7, 5), (0,), (513,), (), (40, 41)]
    params = zeros(*shapes)
    oracle = twins(params, torch.float64)
    options = {"max_norm": max_norm, "norm_type": norm_type}
    optimizer = FusedAccumulator(SGD(params, lr=1.0), 3, backend=backend, **options)
    for _ in range(2):
        micro_batches = [(1.0, randoms(params)) for _ in range(3)]
        for _, grads in micro_batches:
            send(params, grads)
            optimizer.step()
        norm = run_window(oracle, stock(SGD, oracle, lr=1.0), micro_batches, **options)
        torch.testing.assert_close(optimizer.norm.double(), norm, rtol=3e-7, atol=0)
    for p, q in zip(params, oracle, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-6, atol=3e-7 * min(1.0, max_norm))


@each_backend
@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_max_value_clamps_the_finished_gradient(backend, kind):
    params = zeros((5, 3), (400,))
    oracle = twins(params, torch.float64)
    optimizer = FusedAccumulator(stock(kind, params, lr=0.1), 2, max_value=0.5, backend=backend)
    reference = stock(kind, oracle, lr=0.1)
    for _ in range(3):
        micro_batches = [(1.0, randoms(params)) for _ in range(2)]
        for _, grads in micro_batches:
            send(params, grads)
            optimizer.step()
        run_window(oracle, reference, micro_batches, max_value=0.5)
    for p, q in zip(params, oracle, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


@each_backend
@pytest.mark.parametrize("kind", [SGD, torch.optim.RMSprop])
def test_a_group_with_its_own_max_norm_is_clipped_by_its_own_norm(backend, kind):
    a, b, c = parameter(0.0, 0.0), parameter(0.0), parameter(0.0, dtype=torch.float64)
    groups = [{"params": [a]}, {"params": [b], "max_norm": 2.0}, {"params": [c], "max_norm": 100.0}]
    optimizer = FusedAccumulator(stock(kind, groups, lr=1.0), max_norm=1.0, backend=backend)
    send([a, b, c], [torch.tensor([3.0, 4.0]), 12.0, 84.0])
    seen = {}

    def look(*_):
        seen.update({id(p): p.grad for p in (a, b, c)})

    if kind is not SGD:  # the generic path shows the finished gradient to the inner step
        step = kind.step.__wrapped__

        class Spy(kind):
            def step(self, closure=None):
                look()
                return step(self, closure)

        optimizer.optimizer.__class__ = Spy
    optimizer.step()
    assert optimizer.norm.item() == pytest.approx(math.sqrt(25 + 144 + 84**2))
    finished = [-p if kind is SGD else seen[id(p)] for p in (a, b, c)]
    torch.testing.assert_close(finished[0].detach(), torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)
    assert finished[1].item() == pytest.approx(2.0) and finished[2].item() == pytest.approx(84.0)


@each_backend
def test_without_max_norm_only_the_groups_own_limits_clip(backend):
    a, b = parameter(0.0), parameter(0.0)
    groups = [{"params": [a]}, {"params": [b], "max_norm": 1.0}]
    optimizer = FusedAccumulator(SGD(groups, lr=1.0), backend=backend)
    send([a, b], [3.0, 4.0])
    optimizer.step()
    assert a.item() == -3.0 and b.item() == pytest.approx(-1.0) and optimizer.norm.item() == 5.0
    optimizer.param_groups[1]["max_norm"] = None
    send([a, b], [3.0, 4.0])
    optimizer.step()
    assert b.item() == pytest.approx(-5.0)
    optimizer.param_groups[0]["max_norm"] = 1.0
    send([a, b], [3.0, 4.0])
    optimizer.step()
    assert a.item() == pytest.approx(-7.0) and b.item() == pytest.approx(-9.0)


def test_max_norm_may_be_assigned():
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0))
    optimizer.max_norm = 2.0
    send(p, 8.0)
    optimizer.step()
    assert p.item() == pytest.approx(-2.0)
    optimizer.max_norm = None
    send(p, 8.0)
    optimizer.step()
    assert p.item() == pytest.approx(-10.0)
    for wrong, exception in (
        (0, ValueError),
        (NAN, ValueError),
        (True, TypeError),
        ("1", TypeError),
    ):
        with pytest.raises(exception, match="max_norm must be"):
            optimizer.max_norm = wrong
    assert optimizer.max_norm is None
    by_value = FusedAccumulator(SGD([parameter(0.0)], lr=1.0), max_value=1.0)
    with pytest.raises(ValueError, match="max_norm and max_value exclude"):
        by_value.max_norm = 1.0


@each_take
def test_clip_grad_norm_of_the_wrapper_clips_the_next_window_only(take):
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2, take=take)
    for window, expected in enumerate((-1.0, -9.0)):
        for _ in range(2):
            send(p, 8.0)
            if window == 0:
                assert fastaccum.clip_grad_norm_(optimizer, 1.0) is optimizer.norm
            optimizer.step()
        assert p.item() == pytest.approx(expected) and optimizer.norm.item() == 8.0
    fastaccum.clip_grad_norm_(optimizer, 1.0)
    send(p, 8.0)
    optimizer.step()
    optimizer.flush()
    assert p.item() == pytest.approx(-10.0)
    with pytest.raises(ValueError, match="norm_type=2.0"):
        fastaccum.clip_grad_norm_(optimizer, 1.0, norm_type=1.0)
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        fastaccum.clip_grad_norm_(optimizer, -1.0)


@pytest.mark.frames
def test_a_foreign_clip_of_a_pending_gradient_is_warned_once():
    p = parameter(0.0, 0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2)
    with pytest.warns(UserWarning, match="max_norm=") as caught:
        for _ in range(4):
            send(p, torch.tensor([3.0, 4.0]))
            torch.nn.utils.clip_grad_norm_([p], 1.0)
            optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__


# ---------------------------------------------------------------------------------- the global norm


@each_backend
@each_dtype
def test_d01_sixteen_bit_norms_are_float32(backend, dtype):
    for n, value, expected in (
        (1, 300.0, 300.0), (4, 300.0, 600.0), (400 * 5000 // 20, 300.0, 300 * math.sqrt(100_000)),
        (4, 1e-4, 2e-4),
    ):  # fmt: skip
        (p,) = zeros((n,), dtype=dtype)
        optimizer = FusedAccumulator(SGD([p], lr=1.0), max_norm=1.0, backend=backend)
        p.grad = torch.full((n,), value, dtype=dtype)
        exact = p.grad.double().norm()
        assert exact.item() == pytest.approx(expected, rel=4e-3)
        optimizer.step()
        assert optimizer.norm.dtype == torch.float32
        assert optimizer.norm.item() == pytest.approx(exact.item(), rel=1e-7)
        clipped = p.detach().double().norm().item()
        assert clipped == pytest.approx(min(1.0, exact.item()), rel=torch.finfo(dtype).eps * 2 + 1e-5)


@each_backend
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_u01_the_norm_is_finite_whenever_it_fits_float32(backend, norm_type):
    for value in (1e19, 1e-25, 1e30):
        (p,) = zeros((128,))
        optimizer = FusedAccumulator(SGD([p], lr=1.0), max_norm=1.0, norm_type=norm_type, backend=backend)
        p.grad = torch.full((128,), value)
        exact = value * (128 ** (1 / norm_type) if norm_type < INF else 1.0)
        optimizer.step()
        assert optimizer.norm.item() == pytest.approx(exact, rel=1e-6)
        factor = min(1.0, 1.0 / (exact + 1e-6))
        torch.testing.assert_close(p.detach(), torch.full((128,), -value * factor), rtol=1e-5, atol=0)


@each_backend
def test_the_norm_is_within_2_ulp_and_the_same_for_any_number_of_threads(backend):
    params = zeros((100_003,), (33, 7), (8193,))
    grads = [g * torch.rand_like(g).exp2() for g in randoms(params)]
    truth = torch.cat([g.double().flatten() for g in grads]).norm()
    optimizer = FusedAccumulator(SGD(params, lr=0.0), backend=backend)
    norms = set()
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        send(params, grads)
        optimizer.step()
        norms.add(optimizer.norm.item())
    assert len(norms) == 1
    ulp = torch.finfo(torch.float32).eps * 2.0 ** math.floor(math.log2(truth))
    assert abs(norms.pop() - truth.item()) <= 2 * ulp


@each_backend
def test_the_norm_spans_all_groups_and_dtypes(backend):
    params = [parameter(0.0, dtype=d) for d in (torch.float64, torch.float16, torch.float32)]
    groups = [{"params": [p], "lr": 1.0} for p in params]
    optimizer = FusedAccumulator(SGD(groups), max_norm=1.3, backend=backend)
    send(params, [3.0, 4.0, 12.0])
    optimizer.step()
    assert optimizer.norm.item() == 13.0
    assert [round(-p.item(), 3) for p in params] == [0.3, 0.4, 1.2]


@each_backend
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    grads=st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=20),
    max_norm=st.floats(1e-6, 1e6),
)
def test_c06_the_clip_factor_is_between_0_and_1_or_the_window_is_skipped(backend, grads, max_norm):
    (p,) = zeros((len(grads),))
    optimizer = FusedAccumulator(SGD([p], lr=1.0), max_norm=max_norm, backend=backend)
    p.grad = torch.tensor(grads)
    optimizer.step()
    if not all(map(math.isfinite, grads)):
        assert not optimizer.stepped and not p.detach().any()
        return
    exact = torch.tensor(grads, dtype=torch.float64).norm().item()
    factor = min(1.0, max_norm / (exact + 1e-6))
    torch.testing.assert_close(-p.detach(), torch.tensor(grads) * factor, rtol=1e-6, atol=1e-44)


@each_backend
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_c06_a_zero_gradient_is_an_ordinary_window(backend, norm_type):
    p = parameter(1.0)
    optimizer = FusedAccumulator(torch.optim.Adam([p]), max_norm=1.0, norm_type=norm_type, backend=backend)
    send(p, 0.0)
    optimizer.step()
    assert optimizer.stepped and optimizer.norm.item() == 0.0 and p.item() == 1.0
    assert optimizer.state[p]["step"].item() == 1 and optimizer.skipped.item() == 0


# ----------------------------------------------------------------------------------- inf and NaN


@each_backend
@each_take
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, SGD, torch.optim.RMSprop])
def test_c03_a_window_that_is_not_finite_leaves_everything_alone(backend, take, bad, kind):
    options = {"momentum": 0.9} if kind is SGD else {}
    params = zeros((3,), (600,), (2, 2))
    inner = stock(kind, params, lr=0.1, **options)
    optimizer = FusedAccumulator(inner, 2, max_norm=1.0, backend=backend, take=take)
    grads = randoms(params)
    for _ in range(2):
        send(params, grads)
        optimizer.step()
    count = 0
    for tensor in range(3):
        for place in (0, params[tensor].numel() // 2, -1):
            before = snapshot(inner)
            for bad_at in (0, 1):
                hurt = [g.clone() for g in grads]
                if bad_at == (place == 0):
                    hurt[tensor].view(-1)[place] = bad
                send(params, hurt)
                optimizer.step()
            count += 1
            assert optimizer.updated and not optimizer.stepped and optimizer.skipped.item() == count
            assert not math.isfinite(optimizer.norm.item())
            assert_identical(before, snapshot(inner))
    for _ in range(2):
        send(params, grads)
        optimizer.step()
    assert optimizer.stepped and optimizer.skipped.item() == count


@each_backend
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"max_value": 1.0}, {}])
def test_micro_batches_that_cancel_to_nan_are_skipped(backend, options):
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2, backend=backend, **options)
    for grad in (INF, -INF):
        send(p, grad)
        optimizer.step()
    assert not optimizer.stepped and p.item() == 0.0 and optimizer.skipped.item() == 1


@each_backend
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"max_value": 1.0}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_propagate_does_what_stock_does(backend, options, kind, bad):
    p, others = parameter(1.0, 2.0), twins([parameter(1.0, 2.0)])
    inner = stock(kind, [p], lr=0.1)
    optimizer = FusedAccumulator(inner, nonfinite="propagate", backend=backend, **options)
    reference = stock(kind, others, lr=0.1)
    for grad in (torch.tensor([1.0, bad]), torch.tensor([1.0, 1.0])):
        send(p, grad)
        optimizer.step()
        run_window(others, reference, [(1.0, [grad])], **options)
    assert optimizer.stepped and optimizer.skipped.item() == 0
    torch.testing.assert_close(p, others[0], equal_nan=True)


@each_backend
@each_take
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_error_raises_before_anything_changes_and_keeps_the_window_open(backend, take, kind):
    p = parameter(1.0, 2.0)
    inner = stock(kind, [p], lr=0.1)
    optimizer = FusedAccumulator(inner, 2, nonfinite="error", backend=backend, take=take)
    for grad in ([1.0, 1.0], [1.0, 1.0], [INF, 1.0]):
        send(p, torch.tensor(grad))
        optimizer.step()
    before = snapshot(inner)
    send(p, torch.tensor([1.0, 1.0]))
    with pytest.raises(RuntimeError, match="not finite.*nonfinite='error'.*still open"):
        optimizer.step()
    assert_identical(before[1:4], snapshot(inner)[1:4])
    assert not optimizer.updated and not optimizer.stepped and optimizer.skipped.item() == 0
    assert optimizer.micro_step == 2 and optimizer.grad(p).tolist() == [INF, 1.0]
    send(p, torch.tensor([1.0, 1.0]))
    with pytest.raises(RuntimeError, match="discard"):
        optimizer.step()
    optimizer.discard()
    for _ in range(2):
        send(p, torch.tensor([1.0, 1.0]))
        optimizer.step()
    assert optimizer.stepped and optimizer.norm.item() == pytest.approx(math.sqrt(2))


def test_an_open_window_after_an_error_does_not_share_the_users_tensor():
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), nonfinite="error")
    grad = torch.tensor([INF])
    p.grad = grad
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    grad.fill_(5.0)
    assert optimizer.grad(p).item() == INF
    unchanged(optimizer, optimizer.flush, RuntimeError, "not finite")


def test_c09_sparse_gradients_are_coalesced():
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = FusedAccumulator(SGD(embedding.parameters(), lr=1.0), 2)
    before = embedding.weight.detach().clone()
    for _ in range(2):
        embedding(torch.tensor([1, 1, 3])).sum().backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
    assert optimizer.norm.item() == pytest.approx(math.sqrt(10))
    expected = torch.tensor([0.0, 2, 0, 1, 0]).view(5, 1).expand(5, 2)
    torch.testing.assert_close(before - embedding.weight.detach(), expected)


@each_backend
@pytest.mark.parametrize("listed", ["tied", "twice", "named"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_c08_a_shared_parameter_counts_once(backend, listed):
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    params = {
        "tied": list(model.parameters()),
        "twice": [embedding.weight, head.weight],
        "named": [p for _, p in model.named_parameters(remove_duplicate=False)],
    }[listed]
    optimizer = FusedAccumulator(SGD(params, lr=1.0), max_norm=1e9, backend=backend)
    before = embedding.weight.detach().clone()
    embedding.weight.grad = torch.full((4, 3), math.sqrt(800 / 12))
    optimizer.step()
    assert optimizer.norm.item() == pytest.approx(28.284271)
    torch.testing.assert_close(before - embedding.weight, torch.full((4, 3), math.sqrt(800 / 12)))


# ------------------------------------------------------------------- by hand, and by something else


@each_take
@each_backend
@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_clipping_by_hand_is_stocks_clip_of_the_finished_gradient(take, backend, kind):
    """The documented place: before the closing step(); the same bits as max_norm=, and float64's values."""
    starts = [torch.randn(shape) for shape in ((5, 3), (400,), ())]
    by_hand, by_option, oracle = ([nn.Parameter(t.clone()) for t in starts] for _ in range(3))
    oracle = twins(oracle, torch.float64)
    hand = FusedAccumulator(stock(kind, by_hand, lr=0.1), 3, take=take, backend=backend)
    option = FusedAccumulator(stock(kind, by_option, lr=0.1), 3, max_norm=0.7, take=take, backend=backend)
    reference = stock(kind, oracle, lr=0.1)
    for window in range(3):
        micro_batches = [(1.0, randoms(by_hand, scale=10.0**-window)) for _ in range(3)]
        for i, (_, grads) in enumerate(micro_batches):
            send(by_hand, grads)
            if i == 2:
                norm = fastaccum.clip_grad_norm_(hand, 0.7)
            hand.step()
            send(by_option, grads)
            option.step()
        exact = run_window(oracle, reference, micro_batches, max_norm=0.7)
        torch.testing.assert_close(norm.double(), exact, rtol=3e-7, atol=0)
        assert (exact > 0.7) == (window < 2)  # the last window is not clipped
    assert_identical(snapshot(option)[1], snapshot(hand)[1])
    for p, q in zip(by_hand, oracle, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


@each_backend
def test_clipping_by_hand_leaves_a_groups_own_limit_to_it(backend):
    a, b = parameter(0.0), parameter(0.0)
    groups = [{"params": [a]}, {"params": [b], "max_norm": 3.0}]
    optimizer = FusedAccumulator(SGD(groups, lr=1.0), 2, max_norm=50.0, backend=backend)
    for clip, expected in ((True, (-2.0, -3.0)), (False, (-8.0, -3.0))):
        for _ in range(2):
            send([a, b], [8.0, 15.0])
            if clip:
                fastaccum.clip_grad_norm_(optimizer, 2.0)
            optimizer.step()
        assert (a.item(), b.item()) == pytest.approx(expected) and optimizer.norm.item() == 17.0
        with torch.no_grad():
            a.zero_(), b.zero_()


FOREIGN = {
    "torch's clip": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
    "our clip of the parameters": lambda params: fastaccum.clip_grad_norm_(params, 1.0),
    "by value": lambda params: torch.nn.utils.clip_grad_value_(params, 1.0),
    "without foreach": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False),
    "by hand": lambda params: [p.grad.mul_(0.2) for p in params],
}


@pytest.mark.parametrize("clip", FOREIGN.values(), ids=FOREIGN)
def test_whatever_clips_a_micro_batch_in_place_is_warned_of_once(clip):
    p, q = parameter(0.0), parameter(0.0)
    optimizer = FusedAccumulator(SGD([p, q], lr=1.0), 2)
    with pytest.warns(UserWarning, match="pass max_norm= to FusedAccumulator") as caught:
        for _ in range(4):
            send([p, q], [3.0, 4.0])
            clip([p, q])
            optimizer.step()
    assert len(caught) == 1
    # What was clipped counts as it lies in .grad: the mean of clipped micro-batches, over two windows.
    clipped = (1.0, 1.0) if clip is FOREIGN["by value"] else (0.6, 0.8)
    assert (-p.item() / 2, -q.item() / 2) == pytest.approx(clipped)


def test_what_does_not_clip_is_not_warned_of(recwarn):
    p, q = parameter(0.0), parameter(0.0)
    optimizer = FusedAccumulator(SGD([p, q], lr=1.0), 2, max_norm=1.0)
    for i in range(4):
        send([p, q], [3.0, 4.0])
        if i % 2:
            torch.nn.utils.get_total_norm([p.grad, q.grad])  # reads
            p.grad = p.grad * 0.5  # another tensor: taken as it is, by design
            fastaccum.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert not [w for w in recwarn if "in place" in str(w.message)]
    by_backward = FusedAccumulator(SGD([parameter(0.0)], lr=1.0), 2, take="backward")
    param = by_backward.param_groups[0]["params"][0]
    send(param, 3.0)
    torch.nn.utils.clip_grad_norm_([param], 1.0)  # finds nothing in .grad
    by_backward.step()
    by_backward.flush()
    assert param.item() == -3.0 and not [w for w in recwarn if "in place" in str(w.message)]
