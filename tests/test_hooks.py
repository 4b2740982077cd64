"""The wrapper is an optimizer: hooks, schedulers, closures, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import assert_identical, each_take, parameter, send, snapshot, stock  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD, Adam, AdamW, RMSprop = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
)  # fmt: skip


class OwnAdam(Adam):
    """Goes through the generic path; calls up."""

    def step(self, closure=None):
        return super().step(closure)


FUSED_AND_GENERIC = [SGD, AdamW, RMSprop]
each_path = pytest.mark.parametrize("kind", FUSED_AND_GENERIC)


# ------------------------------------------------------------------------------------------- hooks


@each_take
@pytest.mark.parametrize("kind", [*FUSED_AND_GENERIC, OwnAdam])
def test_a02_step_hooks_fire_once_per_window_in_order(take, kind):
    p = parameter(0.0)
    inner = kind([p], lr=1.0)
    optimizer = FusedAccumulator(inner, 2, take=take)
    seen, values = [], []

    def hook(name):
        def note(owner, args, kwargs):
            seen.append((name, owner is optimizer, owner is inner))
            values.append(p.item())

        return note

    handles = [
        register_optimizer_step_post_hook(hook("global post")),
        register_optimizer_step_pre_hook(hook("global pre")),
        inner.register_step_post_hook(hook("inner post")),
        inner.register_step_pre_hook(hook("inner pre")),
        optimizer.register_step_post_hook(hook("wrapper post")),
        optimizer.register_step_pre_hook(hook("wrapper pre")),
    ]
    try:
        once = [f"{who} {when}" for when in ("pre", "post") for who in ("wrapper", "inner", "global")]
        for i in range(4):
            send(p, 1.0)
            optimizer.step()
            assert [name for name, *_ in seen] == once * ((i + 1) // 2)
        send(p, 1.0)
        optimizer.step()
        assert len(seen) == 12
        optimizer.flush()
        assert [name for name, *_ in seen] == once * 3
        assert not optimizer.flush() and len(seen) == 18
        optimizer.zero_grad()
        assert len(seen) == 18
    finally:
        for handle in handles:
            handle.remove()
    assert [mine for name, mine, _ in seen if "wrapper" in name] == [True] * 6
    assert [its for name, _, its in seen if "inner" in name] == [True] * 6
    for window in range(3):
        before, after = values[6 * window : 6 * window + 3], values[6 * window + 3 : 6 * window + 6]
        assert len(set(before)) == 1 and len(set(after)) == 1 and before[0] != after[0]
    send(p, 1.0)
    optimizer.step()
    optimizer.flush()
    assert len(seen) == 18


@each_path
def test_hooks_fire_for_a_skipped_window_too(kind):
    p = parameter(0.0)
    optimizer = FusedAccumulator(kind([p], lr=1.0))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append((optimizer.updated, optimizer.stepped)))
    send(p, float("nan"))
    optimizer.step()
    optimizer.step()
    assert seen == ["pre", (True, False)] * 2


@each_path
def test_a_pre_hook_that_raises_changes_nothing(kind):
    p = parameter(0.0)
    optimizer = FusedAccumulator(kind([p], lr=1.0), 2)
    send(p, 1.0)
    optimizer.step()
    send(p, 3.0)

    def hook(*_):
        raise KeyError("hook")

    handle = optimizer.register_step_pre_hook(hook)
    before = snapshot(optimizer)
    with pytest.raises(KeyError, match="hook"):
        optimizer.step()
    assert_identical(before, snapshot(optimizer))
    handle.remove()
    optimizer.step()
    assert optimizer.stepped and optimizer.norm.item() == 2.0


# -------------------------------------------------------------------------------------- schedulers

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.5, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@each_path
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("on", ["wrapper", "inner"])
def test_a02_schedulers_run_without_warnings_and_their_values_count(kind, name, on):
    options = {"momentum": 0.9} if kind is not AdamW else {}

    def run(wrap):
        p = parameter(1.0, dtype=torch.float64)
        inner = stock(kind, [p], lr=0.1, **options)
        if not wrap:
            scheduler = SCHEDULERS[name](inner)
        elif on == "inner":
            scheduler = SCHEDULERS[name](inner)
            optimizer = FusedAccumulator(inner, 2)
        else:
            optimizer = FusedAccumulator(inner, 2)
            scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for i in range(6):
            for part in range(2):
                send(p, 1.0 + i)
                if wrap:
                    optimizer.step()
                elif part:
                    p.grad /= 2
                    inner.step()
                    inner.zero_grad()
                if optimizer.updated if wrap else part:
                    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(scheduler.get_last_lr())
        return p, rates

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in")
        (p, rates), (q, expected) = run(True), run(False)
    assert rates == expected and len({tuple(r) for r in rates}) > 1 or name == "CosineAnnealingWarm"
    torch.testing.assert_close(p, q, rtol=1e-9, atol=0)


def test_y03_a_scheduler_moves_once_per_update():
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 4)
    calls = []
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: calls.append(n) or 1.0)
    for i in range(12):
        send(p, float("inf") if i == 5 else 1.0)
        optimizer.step()
        if optimizer.stepped:
            scheduler.step()
    assert calls == [0, 1, 2] and optimizer.skipped.item() == 1


def test_a_scheduler_before_the_first_update_is_warned_as_in_stock():
    optimizer = FusedAccumulator(SGD([parameter(0.0)], lr=1.0), 4)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()


# ------------------------------------------------------------------------------- it is an optimizer


def test_a02_it_is_an_optimizer():
    p, q = parameter(0.0), parameter(0.0)
    inner = SGD([p], lr=0.5, momentum=0.9)
    optimizer = FusedAccumulator(inner, 3)
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.optimizer is inner
    assert optimizer.defaults["lr"] == 0.5
    optimizer.add_param_group({"params": [q], "lr": 0.1})
    assert inner.param_groups[1]["lr"] == 0.1 and inner.param_groups[1]["momentum"] == 0.9
    text = repr(optimizer)
    assert "FusedAccumulator(accumulation_steps=3" in text and "lr: 0.5" in text
    assert "Parameter Group 1" in text


def test_an_average_of_the_weights():
    model = nn.Linear(2, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=1.0), 2)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    average.update_parameters(model)
    torch.testing.assert_close(average.module.weight, model.weight)


# ------------------------------------------------------------------------------------------ copies

BY = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": lambda pair: _through_torch(pair),
}


def _through_torch(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("by", BY)
@each_path
@each_take
@pytest.mark.parametrize("held", [0, 1, 2])
def test_y07_a_copy_is_independent_and_goes_on_the_same(by, kind, take, held):
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    inner = kind(model.parameters(), lr=0.1)
    optimizer = FusedAccumulator(inner, 3, max_norm=0.1, take=take)
    batches = [torch.randn(5, 3) for _ in range(9)]

    def train(model, optimizer, begin, end):
        for x in batches[begin:end]:
            model(x).square().mean().backward()
            optimizer.step()

    train(model, optimizer, 0, 3 + held)
    other_model, other = BY[by]((model, optimizer))
    assert other is not optimizer and other.optimizer is not inner
    assert (other.micro_step, other.updated) == (held, optimizer.updated)
    assert torch.equal(other.norm, optimizer.norm) and other.norm is not optimizer.norm
    assert other.param_groups[0]["params"][0] is next(other_model.parameters())
    before = snapshot(optimizer)
    train(other_model, other, 3 + held, 9)
    assert_identical(before, snapshot(optimizer))
    train(model, optimizer, 3 + held, 9)
    assert_identical(list(model.parameters()), list(other_model.parameters()))
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert len(p._post_accumulate_grad_hooks) == len(q._post_accumulate_grad_hooks) == 1
    assert repr(other) == repr(optimizer)


def test_y07_a_copy_drops_step_hooks_as_stock_does():
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the original's hook"))
    other = copy.deepcopy(optimizer)
    (q,) = other.param_groups[0]["params"]
    send(q, 1.0)
    other.step()
    assert q.item() == -1.0 and p.item() == 0.0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("change", ["replace", "take away", "in place", "group limit"])
@pytest.mark.parametrize("on", ["wrapper", "inner", "global"])
def test_what_a_pre_hook_leaves_in_grad_counts(kind, change, on, recwarn):
    """As in the plain loop; a limit that a hook gives to its group counts too."""

    def hook(optimizer, args, kwargs):
        group = optimizer.param_groups[0]
        for p in group["params"]:
            if change == "replace":
                p.grad = p.grad * 0.25
            elif change == "take away":
                p.grad = None
            elif change == "in place":
                p.grad.mul_(0.25)
        if change == "group limit":
            group["max_norm"] = 0.5

    def run(ours):
        p, q = parameter(1.0, 2.0), nn.Parameter(torch.tensor([[1.0, 2.0, 3.0]]).t())
        inner = stock(kind, [p, q], lr=0.1)
        optimizer = FusedAccumulator(inner, 1) if ours else inner
        if on == "global":
            handle = register_optimizer_step_pre_hook(hook)
        else:
            handle = (optimizer if on == "wrapper" else inner).register_step_pre_hook(hook)
        for i in range(3):
            send([p, q], [[3.0, 4.0 + i], [[1.0], [2.0], [3.0]]])
            if not ours and change == "group limit":
                torch.nn.utils.clip_grad_norm_([p, q], 0.5)
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        return [x.detach() for x in (p, q)]

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-7)
    assert not [str(w.message) for w in recwarn]


def test_what_a_pre_hook_replaces_is_freed_before_the_update():
    """Or a hook that clips into new tensors would need a set of gradients more."""
    p = parameter(0.0)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0))
    freed = []

    def hook(*_):
        before = weakref.ref(p.grad)
        p.grad = torch.full_like(p, 2.0)
        freed.append(before() is None)

    optimizer.register_step_pre_hook(hook)
    send(p, 1.0)
    optimizer.step()
    assert freed == [True] and p.item() == -2.0
