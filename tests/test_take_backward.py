"""take="backward": gradients leave .grad while backward runs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fastaccum import FusedAccumulator, pending  # noqa: E402
from tests.oracle import (  # noqa: E402
    assert_identical,
    each_backend,
    error,
    parameter,
    run_window,
    send,
    stock,
    twins,
    unchanged,
)
from tests.test_accumulator import Breaks  # noqa: E402

pytestmark = pytest.mark.native
SGD, AdamW, RMSprop = torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop


def fused(params, steps=2, **options):
    params = [params] if isinstance(params, torch.Tensor) else params
    return FusedAccumulator(SGD(params, lr=1.0), steps, take="backward", **options)


@each_backend
def test_gradients_are_gone_after_backward_and_count_at_step(backend):
    p = parameter(0.0)
    optimizer = fused(p, backend=backend)
    for grad in (1.0, 3.0):
        send(p, grad)
        assert p.grad is None
        optimizer.step()
    assert p.item() == -2.0


@each_backend
@pytest.mark.parametrize("bucket", [1, 100, 1 << 20])
@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
@pytest.mark.parametrize("steps", [1, 3])
def test_any_bucket_gives_what_the_loop_gives(monkeypatch, backend, bucket, kind, steps):
    monkeypatch.setattr(pending, "BUCKET_BYTES", bucket)
    torch.manual_seed(2)
    shapes = [(5, 3), (0,), (), (9, 9), (40,)]
    params = [nn.Parameter(torch.randn(s)) for s in shapes]
    params += [nn.Parameter(torch.randn(7).double()), nn.Parameter(torch.randn(6, 4).t())]
    truth = twins(params, torch.float64)
    reference = stock(kind, truth, lr=0.1)
    optimizer = FusedAccumulator(
        stock(kind, params, lr=0.1), steps, take="backward", backend=backend, max_norm=2.0
    )
    for window in range(3):
        micro_batches = []
        for i in range(steps):
            grads = [torch.randn(p.shape).to(p.dtype) for p in params]
            grads[(window + i) % len(grads)] = None
            micro_batches.append((1.0, grads))
            send(params, grads)
            assert all(p.grad is None for p in params)
            optimizer.step()
        norm = run_window(truth, reference, micro_batches, max_norm=2.0)
        torch.testing.assert_close(optimizer.norm.double(), norm, rtol=1e-6, atol=0)
    assert error(params, truth) < 2e-6


@each_backend
def test_a_bucket_of_empty_gradients_only(backend):
    p = nn.Parameter(torch.zeros(0, 4))
    optimizer = FusedAccumulator(torch.optim.Adam([p], lr=1.0), 2, take="backward", backend=backend)
    send(p, torch.zeros(0, 4))
    optimizer.step()
    assert optimizer.grad(p).shape == (0, 4)
    send(p, torch.zeros(0, 4))
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 1  # as stock counts it


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_it_is_take_step_bit_for_bit(kind):
    runs = []
    for take in ("step", "backward"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
        optimizer = FusedAccumulator(kind(model.parameters(), lr=0.1), 3, take=take, max_norm=0.1)
        for _ in range(9):
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
        runs.append((list(model.parameters()), optimizer.norm))
    assert_identical(*runs)


def test_several_backward_calls_are_one_micro_batch():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = fused([p, q])
    for _ in range(2):
        send([p, q], [1.0, None])
        send([p, q], [2.0, 5.0])
        optimizer.step()
    assert (p.item(), q.item()) == (-3.0, -5.0)


def test_a_gradient_put_into_grad_by_hand_is_taken_at_step():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = fused([p, q])
    for _ in range(2):
        send(p, 1.0)
        q.grad = torch.tensor([4.0])
        optimizer.step()
        assert q.grad is None
    assert (p.item(), q.item()) == (-1.0, -4.0)


def test_autograd_grad_takes_nothing():
    p = parameter(0.0)
    optimizer = fused(p, 1)
    (grad,) = torch.autograd.grad((p * 3.0).sum(), [p])
    assert grad.item() == 3.0
    optimizer.step()
    assert optimizer.updated and not optimizer.stepped and p.item() == 0.0


@pytest.mark.filterwarnings("ignore:every micro-batch so far")  # the layer is in both parts
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_activations(use_reentrant):
    torch.manual_seed(4)
    model = nn.Linear(3, 3)
    truth = twins(model.parameters(), torch.float64)
    optimizer = fused(list(model.parameters()))
    xs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    for x in xs:
        hidden = checkpoint(lambda t: model(t).tanh(), model(x), use_reentrant=use_reentrant)
        hidden.square().sum().backward()
        optimizer.step()
    loss = sum(
        (nn.functional.linear(nn.functional.linear(x.double(), *truth), *truth).tanh() ** 2).sum() for x in xs
    )
    grads = torch.autograd.grad(loss / 2, truth)
    with torch.no_grad():
        for t, g in zip(truth, grads, strict=True):
            t -= g
    assert error(list(model.parameters()), truth) < 2e-6


@pytest.mark.parametrize("zero", [False, True])
def test_weights(zero):
    p = parameter(0.0)
    optimizer = fused(p, 3)
    for grad, n in ((1.0, 2), (float("nan") if zero else 7.0, 0), (4.0, 6)):
        optimizer.backward((p * grad).sum(), weight=n)
        optimizer.step()
    assert p.item() == -(2 * 1.0 + 6 * 4.0) / 8
    for grad, n in ((1.0, 2), (2.0, 3), (4.0, 6)):
        send(p, grad)
        optimizer.step(count=n)
    assert p.item() == pytest.approx(-26 / 8 - 7 / 11)


# ------------------------------------------------------------------------ what needs a pending one


def test_a_weight_at_step_comes_too_late():
    p = parameter(0.0)
    optimizer = fused(p)
    send(p, 1.0)
    with pytest.raises(ValueError, match="take='backward'.*backward\\(loss, weight="):
        optimizer.step(weight=3)
    assert optimizer.micro_step == 0
    optimizer.step()
    send(p, 3.0)
    optimizer.step()
    assert p.item() == -2.0


def test_zero_grad_drops_the_pending_micro_batch_while_it_can():
    p = parameter(0.0)
    optimizer = fused(p)
    optimizer.zero_grad()
    send(p, 100.0)
    optimizer.zero_grad()
    send(p, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.micro_step == 1
    send(p, 3.0)
    with pytest.raises(RuntimeError, match="cannot drop the pending.*discard.*take='step'"):
        optimizer.zero_grad()
    optimizer.step()
    assert p.item() == -2.0


@pytest.mark.parametrize("bucket", [1, 1 << 20])
def test_a_backward_that_raised_after_some_were_taken_blocks_until_discard(monkeypatch, bucket):
    monkeypatch.setattr(pending, "BUCKET_BYTES", bucket)
    p, q = parameter(0.0), parameter(0.0)
    optimizer = fused([p, q])
    send([p, q], [1.0, 1.0])
    optimizer.step()
    with pytest.raises(MemoryError):
        # q's node ran first: it was made last.
        (Breaks.apply(p * 1.0) + 5.0 * q).sum().backward()
    for call in (
        optimizer.step,
        optimizer.flush,
        lambda: optimizer.backward((p * 1.0).sum(), weight=1),
        optimizer.window_state_dict,
        optimizer.state_dict,
    ):
        with pytest.raises(RuntimeError, match=r"backward\(\) raised.*discard"):
            call()
        assert (p.item(), q.item()) == (0.0, 0.0)
    optimizer.discard()
    for _ in range(2):
        send([p, q], [2.0, 2.0])
        optimizer.step()
    assert (p.item(), q.item()) == (-2.0, -2.0)


def test_a_backward_that_raised_before_anything_was_taken_may_be_tried_again():
    p = parameter(0.0)
    optimizer = fused(p)
    send(p, 1.0)
    optimizer.step()
    with pytest.raises(MemoryError):
        (Breaks.apply(p) * 100.0).sum().backward()
    send(p, 3.0)
    optimizer.step()
    assert p.item() == -2.0


@pytest.mark.parametrize("call", ["flush", "window_state_dict", "state_dict"])
def test_an_unfinished_micro_batch_is_never_taken_for_a_closed_one(call):
    """Its gradients are in the buffer, its weight is not yet."""
    p = parameter(0.0)
    optimizer = fused(p, 3)
    send(p, 1.0)
    optimizer.step()
    send(p, 100.0)
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        getattr(optimizer, call)()
    assert p.item() == 0.0 and optimizer.micro_step == 1
    optimizer.step()
    getattr(optimizer, call)()
    optimizer.flush()
    assert p.item() == -50.5


def test_accumulation_steps_wait_for_the_pending_micro_batch():
    p = parameter(0.0)
    optimizer = fused(p, 1)
    send(p, 1.0)
    with pytest.raises(RuntimeError, match="inside an open window"):
        optimizer.accumulation_steps = 2
    optimizer.step()
    optimizer.accumulation_steps = 2


def test_a_plain_backward_in_a_weighted_window_is_refused():
    p = parameter(0.0)
    optimizer = fused(p)
    optimizer.backward((p * 1.0).sum(), weight=2)
    optimizer.step()
    send(p, 1.0)
    unchanged_values = p.item()
    with pytest.raises(ValueError, match="weighted throughout"):
        optimizer.step()
    assert p.item() == unchanged_values and optimizer.micro_step == 1


def test_a_parameter_that_is_in_no_group_keeps_its_gradient():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = fused([p, q], 1)
    del optimizer.param_groups[0]["params"][1]
    send([p, q], [1.0, 1.0])
    optimizer.step()
    assert q.grad.item() == 1.0 and (p.item(), q.item()) == (-1.0, 0.0)


def test_memory_is_the_buffer_and_one_bucket(monkeypatch):
    monkeypatch.setattr(pending, "BUCKET_BYTES", 4096)
    params = [nn.Parameter(torch.zeros(1024)) for _ in range(16)]
    optimizer = fused(params, 4)
    most = 0
    add = pending.Pending.add_taken

    def spy(self):
        nonlocal most
        most = max(most, sum(g.numel() * 4 for _, g in self.taken))
        add(self)

    monkeypatch.setattr(pending.Pending, "add_taken", spy)
    for _ in range(3):
        send(params, [torch.ones(1024)] * 16)
        optimizer.step()
        assert all(p.grad is None for p in params)
    held = optimizer.memory()
    assert held["kept"] == 0 and held["buffer"] == 16 * 1024 * 4 and most <= 4096


def test_unchanged_by_refusals():
    p = parameter(0.0)
    optimizer = fused(p)
    send(p, 1.0)
    optimizer.step()
    unchanged(optimizer, lambda: optimizer.backward((p * 1.0).sum(), weight=-1), ValueError, "at least 0")
