"""Windows, micro-batches and counters: contract items 1 to 4, 12 and 13."""

from __future__ import annotations

import math
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import each_backend, each_take, fused, parameter, send, unchanged  # noqa: E402

pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD = torch.optim.SGD


# ------------------------------------------------------------------------------------------ windows


@each_take
@each_backend
def test_every_nth_step_updates(take, backend):
    p = parameter(0.0)
    optimizer = fused(p, 4, take=take, backend=backend)
    seen = []
    for i in range(8):
        send(p, float(i))
        assert optimizer.step() is None
        assert p.grad is None
        seen.append((optimizer.updated, optimizer.stepped, optimizer.micro_step, p.item()))
    open_ = [(False, False, held, 0.0) for held in (1, 2, 3)]
    assert seen[:4] == [*open_, (True, True, 0, -1.5)]
    assert seen[4:] == [*[(*s[:3], -1.5) for s in open_], (True, True, 0, -7.0)]


@each_take
@each_backend
def test_several_backward_calls_are_one_micro_batch(take, backend):
    p = parameter(0.0)
    optimizer = fused(p, 2, take=take, backend=backend)
    for grads in ((1.0, 2.0, 3.0), (4.0,)):
        for grad in grads:
            send(p, grad)
        optimizer.step()
    assert p.item() == -5.0


def test_gradients_are_visible_until_step():
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 3.0)
    assert p.grad.item() == 3.0
    p.grad *= 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    send(p, 0.0)
    optimizer.step()
    assert p.item() == -3.0


def test_step_runs_a_closure_and_returns_its_loss():
    p = parameter(2.0)
    optimizer = fused(p, 2)

    def closure():
        optimizer.zero_grad()
        loss = (p * 3.0).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 6.0
        assert optimizer.step(closure).item() == 6.0
    assert optimizer.updated and p.item() == -1.0


def test_a_closure_that_raises_changes_nothing():
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 1.0)
    optimizer.step()

    def closure():
        raise KeyError("data")

    unchanged(optimizer, lambda: optimizer.step(closure), KeyError, "data")


@each_take
@pytest.mark.parametrize(("steps", "n", "expected"), [(4, 10, -18.5), (4, 3, -2.0), (1, 3, -6.0)])
def test_n05_y01_a_short_last_window_is_divided_by_what_it_holds(take, steps, n, expected):
    p = parameter(0.0)
    optimizer = fused(p, steps, take=take)
    updates = 0
    for i in range(1, n + 1):
        send(p, float(i))
        optimizer.step()
        updates += optimizer.updated
    left = n % steps
    assert optimizer.flush() is bool(left)
    assert optimizer.updated is bool(left) and optimizer.stepped is bool(left)
    assert updates + bool(left) == -(-n // steps)
    assert p.item() == expected and optimizer.micro_step == 0
    assert optimizer.flush() is False and not optimizer.updated and not optimizer.stepped
    assert p.item() == expected


def test_flush_leaves_the_pending_micro_batch():
    p = parameter(0.0)
    optimizer = fused(p, 3)
    send(p, 1.0)
    assert optimizer.flush() is False and p.grad.item() == 1.0
    optimizer.step()
    send(p, 10.0)
    assert optimizer.flush() is True
    assert p.item() == -1.0 and p.grad.item() == 10.0
    optimizer.step()
    assert optimizer.micro_step == 1 and optimizer.grad(p).item() == 10.0


@each_take
def test_accumulation_steps_change_between_windows_only(take):
    p = parameter(0.0)
    optimizer = fused(p, 2, take=take)
    optimizer.accumulation_steps = 3
    for i in range(3):
        send(p, float(i))
        optimizer.step()
        if i < 2:
            with pytest.raises(RuntimeError, match=r"inside an open window \(\d of 3.*flush"):
                optimizer.accumulation_steps = 4
    assert p.item() == -1.0
    optimizer.accumulation_steps = 1
    send(p, 1.0)
    optimizer.step()
    assert optimizer.updated and p.item() == -2.0
    for wrong, exception in (
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (2.0, TypeError),
    ):
        with pytest.raises(exception, match="accumulation_steps must be"):
            optimizer.accumulation_steps = wrong
    assert optimizer.accumulation_steps == 1


def test_discard_drops_the_window_and_what_is_pending():
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 100.0)
    optimizer.step()
    send(p, 100.0)
    optimizer.discard()
    assert optimizer.micro_step == 0 and p.grad is None and optimizer.grad(p) is None
    for grad in (1.0, 3.0):
        send(p, grad)
        optimizer.step()
    assert p.item() == -2.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_the_pending_micro_batch_only(set_to_none):
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    send(p, 100.0)
    optimizer.zero_grad(set_to_none)
    assert p.grad is None if set_to_none else p.grad.item() == 0.0
    send(p, 3.0)
    optimizer.step()
    assert p.item() == -2.0


@pytest.mark.frames
@each_take
def test_y01_a_loop_with_its_own_count_is_warned_once(take):
    p = parameter(0.0)
    optimizer = fused(p, 2, take=take)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(16):
            send(p, 1.0)
            if (i + 1) % 2 == 0:
                optimizer.step()
    messages = [w for w in caught if "exactly accumulation_steps=2 backward calls" in str(w.message)]
    assert len(messages) == 1 and "delete" in str(messages[0].message)
    assert messages[0].filename == __file__


@each_take
@pytest.mark.parametrize("calls", [[1] * 12, [3, 1, 3, 1, 3, 1], [2, 2, 1, 3]])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_right_loop_is_not_warned(take, calls, steps):
    p = parameter(0.0)
    optimizer = fused(p, steps, take=take)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in calls:
            for _ in range(n):
                send(p, 1.0)
            optimizer.step()
    assert optimizer.micro_step == len(calls) % steps and p.item() < 0.0


# ----------------------------------------------------------------------------- nothing is ever lost


class Breaks(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("backward")


def test_a_failed_backward_is_dropped_and_tried_again():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = fused([p, q], 2)
    send([p, q], [1.0, 2.0])
    optimizer.step()
    broken = (Breaks.apply(p) * q.detach()).sum()
    for _ in range(3):
        with pytest.raises(MemoryError):
            (broken + (100.0 * q).sum()).backward(retain_graph=True)
        optimizer.zero_grad()
    assert optimizer.micro_step == 1
    send([p, q], [3.0, 4.0])
    optimizer.step()
    assert (p.item(), q.item()) == (-2.0, -3.0)


def test_a_failed_weighted_backward_forgets_its_weight():
    p = parameter(0.0)
    optimizer = fused(p)
    with pytest.raises(MemoryError):
        optimizer.backward((Breaks.apply(p) * 5.0).sum(), weight=7)
    optimizer.zero_grad()
    optimizer.backward((p * 5.0).sum(), weight=2)
    optimizer.step()
    assert p.item() == -5.0


@pytest.mark.parametrize("how", ["model.zero_grad", "grad = None", "other optimizer"])
def test_l01_a_gradient_that_vanished_raises(how):
    model = nn.Linear(2, 1)
    optimizer = fused(list(model.parameters()), 2)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    optimizer.step()
    model(x).sum().backward()
    if how == "model.zero_grad":
        model.zero_grad()
    elif how == "grad = None":
        model.bias.grad = None
    else:
        SGD(model.parameters()).zero_grad()
    unchanged(optimizer, optimizer.step, RuntimeError, r"parameter \d .*gone from .grad.*zero_grad")
    assert optimizer.micro_step == 1
    optimizer.zero_grad()
    model(3 * x).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 2.0)


def test_l01_a_replaced_gradient_is_taken():
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 100.0)
    p.grad = torch.tensor([2.0])
    optimizer.step()
    p.grad = torch.tensor([4.0])  # without any backward
    optimizer.step()
    assert p.item() == -3.0


def test_cleared_and_arrived_again_is_the_ordinary_gan_loop():
    torch.manual_seed(1)
    make = [lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 1)]
    real = [torch.randn(4, 3) for _ in range(8)]
    noise = [torch.randn(4, 3) for _ in range(8)]

    def train(wrap):
        torch.manual_seed(2)
        generator, critic = make[0](), make[1]()
        optimizers = [wrap(SGD(m.parameters(), lr=0.1, foreach=False)) for m in (generator, critic)]
        for x, z in zip(real, noise, strict=True):
            critic.zero_grad()
            (critic(x) ** 2).mean().backward()
            ((critic(generator(z).detach()) - 1) ** 2).mean().backward()
            optimizers[1].step()
            generator.zero_grad()
            (critic(generator(z)) ** 2).mean().backward()
            optimizers[0].step()
        return [*generator.parameters(), *critic.parameters()]

    # Gradients that the generator's loss left in the critic are cleared before the critic's step.
    for a, b in zip(train(FusedAccumulator), train(lambda inner: inner), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hold", ["tensor", "view", "detach", "data", "numpy", "dlpack", "slice"])
def test_a_gradient_that_somebody_holds_may_be_overwritten_after_step(hold):
    p = parameter(0.0, 0.0)
    optimizer = fused(p, 2)
    if hold == "slice":
        held = torch.tensor([1.0, 3.0, 5.0])
        p.grad = held[:2]
    else:
        send(p, torch.tensor([1.0, 3.0]))
    if hold == "numpy":
        held = pytest.importorskip("numpy") and p.grad.numpy()
    elif hold != "slice":
        held = {
            "tensor": lambda g: g, "view": lambda g: g.view(2, 1), "detach": lambda g: g.detach(),
            "data": lambda g: g.data, "dlpack": torch.from_dlpack,
        }[hold](p.grad)  # fmt: skip
    optimizer.step()
    held[:] = math.nan
    send(p, torch.tensor([1.0, 1.0]))
    optimizer.step()
    assert p.tolist() == [-1.0, -2.0]


def test_gradients_that_are_views_of_one_tensor():
    params = [parameter(0.0, 0.0), parameter(0.0)]
    optimizer = fused(params, 2)
    flat = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        params[0].grad, params[1].grad = flat[:2], flat[2:]
        optimizer.step()
        flat *= 2  # as DDP does with its buckets
    assert params[0].tolist() == [-1.5, -3.0] and params[1].item() == -4.5


# ----------------------------------------------------------------------------------------- counters


@each_take
def test_grad_is_the_open_windows_gradient(take):
    p, q, r = parameter(0.0), parameter(0.0), parameter(0.0)
    optimizer = fused([p, q, r], 3, take=take)
    assert optimizer.grad(p) is None
    for weight, grads in ((2, [3.0, None, None]), (4, [6.0, 1.0, None])):
        losses = [(t * g).sum() for t, g in zip((p, q, r), grads, strict=True) if g is not None]
        optimizer.backward(sum(losses), weight=weight)
        optimizer.step()
        seen = optimizer.grad(p)
        assert seen.shape == p.shape and seen.item() == (3.0 if weight == 2 else 5.0)
        seen.fill_(math.nan)  # a copy
    assert optimizer.grad(q).item() == pytest.approx(4 / 6) and optimizer.grad(r) is None
    with pytest.raises(ValueError, match="no parameter group"):
        optimizer.grad(parameter(0.0))
    optimizer.flush()
    assert optimizer.grad(p) is None and p.item() == -5.0


@each_backend
def test_norm_and_skipped_are_the_same_tensors_every_window(backend):
    p = parameter(0.0, 0.0)
    optimizer = fused(p, backend=backend)
    norm, skipped = optimizer.norm, optimizer.skipped
    assert (norm.dtype, norm.dim(), skipped.dtype, skipped.dim()) == (
        torch.float32,
        0,
        torch.int64,
        0,
    )
    for grad, expected, count in (
        ([3.0, 4.0], 5.0, 0),
        ([math.inf, 0], math.inf, 1),
        ([0, 2], 2.0, 1),
    ):
        send(p, torch.tensor(grad))
        optimizer.step()
        assert optimizer.norm is norm and optimizer.skipped is skipped
        assert norm.item() == expected and skipped.item() == count
        assert optimizer.stepped is math.isfinite(expected)


@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 512), (torch.float16, 4096)])
def test_d02_sixteen_bit_gradients_are_added_in_float32(dtype, n):
    p = parameter(0.0, dtype=dtype)
    optimizer = fused(p, n, reduction="sum")
    for _ in range(n - 1):
        p.grad = torch.ones(1, dtype=dtype)
        optimizer.step()
    assert optimizer.grad(p).dtype == torch.float32 and optimizer.grad(p).item() == n - 1
    p.grad = torch.ones(1, dtype=dtype)
    optimizer.step()
    assert p.item() == -n and optimizer.norm.item() == n


def test_accumulate_dtype_applies_to_all():
    params = [parameter(0.0, dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16)]
    optimizer = fused(params, 300, reduction="sum", accumulate_dtype=torch.bfloat16)
    for _ in range(299):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [optimizer.grad(p).item() for p in params] == [256.0] * 3  # what bfloat16 can count to
    wide = fused(parameter(0.0), 2, accumulate_dtype=torch.float64)
    (p,) = wide.param_groups[0]["params"]
    for grad in (1.0, 2.0**-40):
        send(p, grad)
        wide.step()
        wide.grad(p)
    assert wide.stepped
