"""Groups and models that change, owners, hooks that go: contract items 11 and 12."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import (  # noqa: E402
    each_take,
    error,
    parameter,
    run_window,
    send,
    stock,
    twins,
    unchanged,
)

pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD, AdamW, RMSprop = torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop


# -------------------------------------------------------------------------------- the groups change


@each_take
@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
@pytest.mark.parametrize("how", ["add_param_group", "append", "inner"])
@pytest.mark.parametrize("held", [0, 1, 2])
def test_parameters_may_be_added_inside_a_window(take, kind, how, held):
    torch.manual_seed(6)
    params = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
    late = nn.Parameter(torch.randn(4))
    truth = twins([*params, late], torch.float64)
    inner = stock(kind, params, lr=0.1)
    optimizer = FusedAccumulator(inner, 3, take=take, max_norm=1.0)
    reference = stock(kind, truth, lr=0.1)
    for window in range(2):
        micro_batches = []
        for i in range(3):
            if window == 0 and i == held:
                if how == "append":
                    optimizer.param_groups[0]["params"].append(late)
                else:
                    owner = optimizer if how == "add_param_group" else inner
                    owner.add_param_group({"params": [late], "lr": 0.1})
                    if how == "inner":
                        optimizer.grad(late)  # any call follows the groups
            here = window > 0 or i >= held
            grads = [torch.randn(3), torch.randn(2, 2), torch.randn(4) if here else None]
            micro_batches.append((1.0, grads))
            send([*params, late], grads)
            optimizer.step()
        run_window(truth, reference, micro_batches, max_norm=1.0)
    assert optimizer.stepped and error([*params, late], truth) < 2e-6


def test_a_parameter_may_be_taken_out():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = FusedAccumulator(SGD([p, q], lr=1.0), 2)
    send([p, q], [1.0, 1.0])
    optimizer.step()
    del optimizer.param_groups[0]["params"][1]
    send([p, q], [3.0, 1.0])
    optimizer.step()
    assert (p.item(), q.item()) == (-2.0, 0.0) and q.grad is not None
    FusedAccumulator(SGD([q], lr=1.0))  # nobody's now


def test_a_refused_group_leaves_the_wrapper_alone():
    p, taken = parameter(0.0), parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2)
    other = FusedAccumulator(SGD([taken], lr=1.0))
    send(p, 1.0)
    optimizer.step()
    for group, exception, match in (
        ({"params": [taken]}, ValueError, "owned by another FusedAccumulator"),
        ({"params": [p]}, ValueError, "more than one parameter group"),
        (
            {"params": [parameter(0.0)], "max_norm": -1.0},
            ValueError,
            r"\[1\]\['max_norm'\].*above 0",
        ),
        ({"params": [parameter(0.0)], "max_norm": True}, TypeError, "max_norm.*number"),
        ({"params": [parameter(0.0)], "differentiable": True}, ValueError, "differentiable=True"),
        (
            {"params": [nn.Parameter(torch.zeros(1, dtype=torch.complex64))]},
            ValueError,
            "complex.*view_as_real",
        ),
        (
            {"params": [nn.Parameter(torch.zeros(1, device="meta"))]},
            ValueError,
            "several devices.*cpu.*meta",
        ),
    ):
        unchanged(optimizer, lambda group=group: optimizer.add_param_group(group), exception, match)
    assert len(optimizer.param_groups) == 1 and not other.state
    send(p, 3.0)
    optimizer.step()
    assert p.item() == -2.0


# ----------------------------------------------------------------------------- the model is changed


@each_take
@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
@pytest.mark.parametrize("change", ["double", "channels_last", "share_memory"])
@pytest.mark.parametrize("held", [0, 1])
def test_a_model_changed_after_wrapping(take, kind, change, held):
    """Between windows it trains on; inside a window it trains on or says why not."""
    torch.manual_seed(8)
    model = nn.Conv2d(3, 4, 2)
    params = list(model.parameters())
    truth = twins(params, torch.float64)
    optimizer = FusedAccumulator(stock(kind, params, lr=0.1), 2, take=take)
    reference = stock(kind, truth, lr=0.1)
    for window in range(3):
        micro_batches = [(1.0, [torch.randn(p.shape) for p in params]) for _ in range(2)]
        for i, (_, grads) in enumerate(micro_batches):
            if window == 1 and i == held:
                if change == "double":
                    model.double()
                elif change == "channels_last":
                    model.to(memory_format=torch.channels_last)
                else:
                    model.share_memory()
                for p in params:  # as optimizer.load_state_dict would
                    for key, value in optimizer.state[p].items():
                        if key != "step":
                            optimizer.state[p][key] = value.to(p.dtype)
            send(params, grads)
            try:
                optimizer.step()
            except RuntimeError as refusal:
                assert held == 1 and "window" in str(refusal)
                return
        run_window(truth, reference, micro_batches)
    assert error(params, truth) < 2e-6


def test_updates_bump_the_version_counters():
    for kind in (SGD, AdamW, RMSprop):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = FusedAccumulator(stock(kind, [p, q], lr=0.1), 2)
        loss = (p * p).sum() + q.sum() * 0
        versions = p._version, q._version
        send([p, q], [1.0, None])
        optimizer.step()
        assert p._version == versions[0]
        send([p, q], [1.0, None])
        optimizer.step()
        assert p._version > versions[0] and q._version == versions[1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --------------------------------------------------------------------------------- owners and hooks


def test_a_parameter_has_one_wrapper():
    p, q = parameter(0.0), parameter(0.0)
    first = FusedAccumulator(SGD([p], lr=1.0), 2)
    with pytest.raises(ValueError, match=r"parameter 1 .*owned by another FusedAccumulator.*delete"):
        FusedAccumulator(SGD([q, p], lr=1.0), 2)
    assert not q._post_accumulate_grad_hooks
    send(p, 1.0)
    first.step()
    assert first.micro_step == 1
    del first
    second = FusedAccumulator(SGD([q, p], lr=1.0))
    send([p, q], [1.0, 1.0])
    second.step()
    assert (p.item(), q.item()) == (-1.0, -1.0)


@each_take
@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
def test_a_deleted_wrapper_takes_its_hooks_along_and_frees_its_parameters(take, kind):
    params = [nn.Parameter(torch.ones(3)) for _ in range(70)]
    kept, frozen = params[0], params[1].requires_grad_(False)
    optimizer = FusedAccumulator(kind(params, lr=0.1), 2, take=take)
    for _ in range(3):
        (sum(p.sum() for p in params)).backward()
        optimizer.step()
    assert len(kept._post_accumulate_grad_hooks) == 1
    assert len(frozen._post_accumulate_grad_hooks) == 1 and not frozen.requires_grad
    (sum(p.sum() for p in params)).backward()
    gone = [weakref.ref(p) for p in params[2:]] + [weakref.ref(optimizer)]
    gc.collect()
    gc.disable()
    try:
        del optimizer, params
        assert not any(reference() is not None for reference in gone)
    finally:
        gc.enable()
    assert not kept._post_accumulate_grad_hooks and not frozen._post_accumulate_grad_hooks


def test_the_users_own_hooks_still_run():
    p = parameter(0.0)
    order = []
    p.register_post_accumulate_grad_hook(lambda q: order.append(q.grad.item()))
    p.register_hook(lambda g: g * 2)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2, take="step")
    p.register_post_accumulate_grad_hook(lambda q: order.append(-q.grad.item()))
    for _ in range(2):
        send(p, 3.0)
        optimizer.step()
    assert order == [6.0, -6.0, 6.0, -6.0] and p.item() == -6.0
