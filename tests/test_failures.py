"""What goes wrong in the middle: failing backwards, nested ones, refusals at the end of a window."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fastaccum import FusedAccumulator, clip_grad_norm_  # noqa: E402
from tests.oracle import each_backend, each_take  # noqa: E402

pytestmark = [pytest.mark.native, pytest.mark.quick]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def _ones(*, steps, take, lr=1.0):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    return a, b, FusedAccumulator(torch.optim.SGD([a, b], lr=lr), steps, take=take)


@each_take
@pytest.mark.parametrize("steps", [1, 2])
def test_a_failed_backward_must_be_dropped_before_the_next_step(take, steps):
    a, b, optimizer = _ones(steps=steps, take=take)
    with pytest.raises(MemoryError):
        (_Fails.apply(a) + b).sum().backward()
    (a + b).sum().backward()
    with pytest.raises(RuntimeError, match=r"a backward\(\) raised after some of its gradients"):
        optimizer.step()
    assert torch.equal(a, torch.ones(2)) and torch.equal(b, torch.ones(2))
    optimizer.zero_grad()
    for _ in range(steps):
        (a + b).sum().backward()
        optimizer.step()
    assert torch.equal(a, torch.zeros(2)) and torch.equal(b, torch.zeros(2))


def test_a_failed_backward_inside_a_window_leaves_the_closed_micro_batches():
    a, b, optimizer = _ones(steps=2, take="step")
    (3 * a + b).sum().backward()
    optimizer.step()
    with pytest.raises(MemoryError):
        (_Fails.apply(a) + 100 * b).sum().backward()
    optimizer.zero_grad()
    (a + b).sum().backward()
    optimizer.step()
    assert torch.equal(a, torch.full((2,), -1.0)) and torch.equal(b, torch.zeros(2))


@each_backend
@each_take
@pytest.mark.parametrize("steps", [1, 2])
def test_a_nested_backward_may_bring_the_same_parameters(steps, take, backend):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    params = [*first.parameters(), *second.parameters()]
    x = torch.randn(2, 4, requires_grad=True)

    def loss():
        inner = checkpoint(lambda y: second(first(y)), x, use_reentrant=True)
        return inner.sum() + second(first(x)).square().sum()

    expected = torch.autograd.grad(second(first(x)).sum() + second(first(x)).square().sum(), params)
    expected = [p.detach() - 0.1 * g for p, g in zip(params, expected, strict=True)]
    optimizer = FusedAccumulator(torch.optim.SGD(params, lr=0.1), steps, take=take, backend=backend)
    for _ in range(steps):
        loss().backward()
        optimizer.step()
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-5, atol=1e-6)


@each_take
def test_k_1_has_no_buffer(take):
    p = nn.Parameter(torch.zeros(3_000_000))  # three buckets of take="backward"
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 1, take=take)
    for _ in range(2):
        p.sum().backward()
        optimizer.step()
        assert optimizer.memory()["buffer"] == 0
    assert torch.equal(p, torch.full_like(p, -2.0))


@each_take
def test_a_refusal_at_the_end_of_a_window_changes_no_dtype_of_parameters(take):
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = FusedAccumulator(torch.optim.AdamW([a, b], lr=0.1), 1, take=take)
    (a.sum() + b.sum()).backward()
    optimizer.step()
    before = [t.clone() for t in (a, b)]
    right = optimizer.state[b]["exp_avg"]
    optimizer.state[b]["exp_avg"] = torch.zeros(2)
    (a.sum() + b.sum()).backward()
    with pytest.raises(RuntimeError, match="optimizer state of parameter 1 has shape"):
        optimizer.step()
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 1
    optimizer.state[b]["exp_avg"] = right
    optimizer.step()
    assert optimizer.updated and optimizer.state[a]["step"] == 2


@pytest.mark.parametrize(("key", "wrong"), [("lr", "x"), ("betas", (0.9,)), ("weight_decay", None)])
def test_an_option_that_cannot_be_used_names_its_group(key, wrong):
    p = nn.Parameter(torch.ones(3))
    optimizer = FusedAccumulator(torch.optim.AdamW([p], lr=0.1), 1)
    right, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], wrong
    p.sum().backward()
    with pytest.raises(ValueError, match=r"param_groups\[0\] holds an option .*mend it and call step"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))
    optimizer.param_groups[0][key] = right
    optimizer.step()
    assert optimizer.updated and optimizer.state[p]["step"] == 1


def test_an_expanded_gradient_is_refused_before_any_is_scaled():
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones(3)
    params[1].grad = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="gradient 1 .* is expanded"):
        clip_grad_norm_(params, 0.1)
    assert torch.equal(params[0].grad, torch.ones(3)) and torch.equal(params[2].grad, torch.ones(3))


@pytest.mark.parametrize("at", [0, 30, 80, 118])
def test_a_backward_that_failed_deep_in_a_long_model_is_noticed(at):
    """More parameters than are watched: whichever layers had brought their gradients, the rest is missing."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("deep")

    params = [nn.Parameter(torch.ones(1)) for _ in range(120)]
    optimizer = FusedAccumulator(torch.optim.SGD(params, lr=1.0), 2)
    x = torch.ones(1)
    for i, p in enumerate(params):
        x = x * p
        x = Fails.apply(x) if i == at else x
    with pytest.raises(RuntimeError, match="deep"):
        x.sum().backward()
    with pytest.raises(RuntimeError, match="incomplete"):
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.micro_step == 0 and all(p.grad is None for p in params)
