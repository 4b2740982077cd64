"""The first care: batch sizes that divide, and learning rates that follow the batch."""

from __future__ import annotations

import gc
import math
import re
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import fastaccum  # noqa: E402
from fastaccum import FusedAccumulator, WarmUp, accumulation_steps_for, scale_lr  # noqa: E402
from tests.oracle import fused, parameter, send, unchanged  # noqa: E402
from tests.test_schedulers import SCHEDULERS  # noqa: E402

pytestmark = pytest.mark.quick
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW

# ------------------------------------------------------------------------------------- batch size


@pytest.mark.parametrize(
    ("virtual", "micro", "world", "steps"),
    [(64, 8, 1, 8), (64, 8, 4, 2), (8, 8, 1, 1), (1, 1, 1, 1), (4096, 2, 64, 32), (7, 7, 1, 1)],
)
def test_exact_sizes(virtual, micro, world, steps):
    assert accumulation_steps_for(virtual, micro, world) == steps
    assert accumulation_steps_for(virtual, micro, world, uneven=True) == steps


@settings(max_examples=200, deadline=None, derandomize=True)
@given(virtual=st.integers(1, 400), micro=st.integers(1, 50), world=st.integers(1, 6))
def test_exact_or_the_nearest_are_offered(virtual, micro, world):
    if virtual % (micro * world) == 0:
        assert accumulation_steps_for(virtual, micro, world) * micro * world == virtual
        return
    with pytest.raises(ValueError, match="is not a multiple") as caught:
        accumulation_steps_for(virtual, micro, world)
    offers = str(caught.value).partition("Nearest: ")[2]
    # Looked for by counting, and every number that is offered is taken.
    totals = [n for n in range(1, 1000) if n % (micro * world) == 0]
    below, above = [n for n in totals if n < virtual][-1:], [n for n in totals if n > virtual][:1]
    (offered,) = re.findall(r"virtual_batch_size=(.*?);", offers)
    assert [int(n) for n in re.findall(r"(\d+) \(", offered)] == below + above
    for total, steps in re.findall(r"(\d+) \((\d+) micro", offered):
        assert accumulation_steps_for(int(total), micro, world) == int(steps)
    sizes = [n for n in range(1, virtual + 1) if virtual % (n * world) == 0]
    expected = [n for n in sizes if n < micro][-1:] + [n for n in sizes if n > micro][:1]
    offered = re.findall(r"micro_batch_size=([\d or]+?);", offers)
    assert [int(n) for text in offered for n in text.split(" or ")] == expected
    if virtual % world == 0:
        parts = torch.arange(virtual // world).split(micro)
        assert accumulation_steps_for(virtual, micro, world, uneven=True) == len(parts)
        assert f"holds {len(parts[-1])} rows" in offers
    else:
        with pytest.raises(ValueError, match="with uneven=True a multiple of world_size"):
            accumulation_steps_for(virtual, micro, world, uneven=True)


def test_an_uneven_window_is_the_whole_batch():
    model = nn.Linear(5, 3).double()
    whole = nn.Linear(5, 3).double()
    whole.load_state_dict(model.state_dict())
    rows, targets = torch.randn(10, 5, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), accumulation_steps_for(10, 4, uneven=True))
    for x, y in zip(rows.split(4), targets.split(4), strict=True):
        optimizer.backward((model(x) - y).square().mean(), weight=len(x))
        optimizer.step()
    assert optimizer.updated
    (whole(rows) - targets).square().mean().backward()
    SGD(whole.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    ("wrong", "exception"),
    [
        (0, ValueError),
        (-8, ValueError),
        (8.0, TypeError),
        (True, TypeError),
        ("8", TypeError),
        (None, TypeError),
    ],
)
def test_wrong_sizes(position, wrong, exception):
    sizes = [8, 8, 1]
    sizes[position] = wrong
    name = ("virtual_batch_size", "micro_batch_size", "world_size")[position]
    with pytest.raises(exception, match=f"{name} must be .*got {wrong!r}"):
        accumulation_steps_for(*sizes)
    with pytest.raises(TypeError, match="uneven must be a bool"):
        accumulation_steps_for(8, 8, uneven=1)


# ---------------------------------------------------------------------------------- learning rate


def groups_of(*lrs):
    return [{"params": [parameter(0.0)], "lr": lr} for lr in lrs]


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
@pytest.mark.parametrize("wrap", [False, True])
def test_the_update_is_the_factor_times_as_long(rule, factor, wrap):
    p = parameter(0.0, 0.0)
    optimizer = SGD([p], lr=0.25)
    optimizer = FusedAccumulator(optimizer) if wrap else optimizer
    assert scale_lr(optimizer, 4, rule) is None
    send(p, torch.tensor([1.0, -3.0]))
    optimizer.step()
    assert p.tolist() == [-0.25 * factor, 0.75 * factor]


def test_a_tensor_is_written_in_place_and_once():
    lr = torch.tensor(0.5)
    optimizer = SGD(groups_of(lr, lr, 0.125), lr=0.1)
    scale_lr(optimizer, 4)
    assert optimizer.param_groups[0]["lr"] is lr is optimizer.param_groups[1]["lr"]
    assert rates(optimizer) == [2.0, 2.0, 0.5]
    scale_lr(optimizer, 1 / 4)
    assert rates(optimizer) == [0.5, 0.5, 0.125]


def course(name, factor, tensors=False, when=0):
    """A scheduler's learning rates over ten updates; scaled before update ``when``."""
    lrs = [torch.tensor(lr, dtype=torch.float64) if tensors else lr for lr in (0.1, 0.05)]
    inner = SGD(groups_of(*lrs), lr=0.1, momentum=0.9)
    optimizer = FusedAccumulator(inner)
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR's own call of a deprecated form
        for update in range(10):
            if factor is not None and update == when:
                scale_lr(optimizer, factor, scheduler=scheduler)
            seen.append(rates(optimizer))
            if hasattr(scheduler, "get_last_lr"):
                assert [float(lr) for lr in scheduler.get_last_lr()] == pytest.approx(rates(optimizer))
            send([group["params"][0] for group in optimizer.param_groups], [1.0, 1.0])
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    return torch.tensor(seen, dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensors", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("when", [0, 3])
def test_every_scheduler_made_before_runs_at_the_factor_from_now_on(name, tensors, when):
    plain, scaled = course(name, None, tensors), course(name, 3.0, tensors, when)
    torch.testing.assert_close(scaled[:when], plain[:when], rtol=0, atol=0)
    # An update that happens to have a learning rate of 0 proves nothing; there are others.
    assert (plain[when:] > 0).any()
    torch.testing.assert_close(scaled[when:], 3.0 * plain[when:], rtol=1e-12, atol=1e-18)


def fails(self, closure=None):
    raise ArithmeticError("in step")


@pytest.mark.parametrize("kind", ["nonfinite", "generic", "plain"])
def test_an_update_that_raises_leaves_the_full_rate(kind, monkeypatch):
    p = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.RMSprop([p], lr=0.1) if kind == "generic" else torch.optim.SGD([p], lr=0.1)
    optimizer = inner if kind == "plain" else FusedAccumulator(inner, nonfinite="error")
    scale_lr(optimizer, 4, warmup_steps=10)
    (p * (math.nan if kind == "nonfinite" else 1.0)).sum().backward()
    if kind != "nonfinite":
        monkeypatch.setattr(type(inner), "step", torch.optim.Optimizer.profile_hook_step(fails))
    with pytest.raises(RuntimeError if kind == "nonfinite" else ArithmeticError):
        optimizer.step()
    if kind == "plain":  # the next update or checkpoint finds it
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.4
    assert optimizer.param_groups[0]["lr"] == 0.4


def test_the_least_change_of_a_plateau_is_scaled_too():
    optimizer = fused(parameter(0.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, eps=0.3)
    scale_lr(optimizer, 0.01, scheduler=scheduler)
    for _ in range(4):  # from 1 stock goes to 0.5 and stays: a quarter is less than 0.3
        scheduler.step(1.0)
    assert rates(optimizer) == [0.005]


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n not in ("CyclicLR", "OneCycleLR")])
def test_a_scheduler_made_after_starts_from_the_new_rates(name):
    def run(lrs, factor):
        optimizer = SGD(groups_of(*lrs), lr=0.1, momentum=0.9)
        if factor:
            scale_lr(optimizer, factor)
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                seen.append(rates(optimizer))
                optimizer.step()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return seen

    assert run((0.1, 0.05), 4) == run((0.1 * 4, 0.05 * 4), None)


def test_a_hidden_scheduler_is_asked_for():
    optimizer = fused(parameter(0.0))
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    unchanged(optimizer, lambda: scale_lr(optimizer, 2), ValueError, "scheduler=")
    scale_lr(optimizer, 2, scheduler=())
    assert rates(optimizer) == [2.0] and scheduler.base_lrs == [1.0]
    other = fused(parameter(0.0))
    unchanged(other, lambda: scale_lr(other, 2, scheduler=scheduler), ValueError, "StepLR.*another optimizer")
    unchanged(other, lambda: scale_lr(other, 2, scheduler=[1.0]), TypeError, "LRScheduler, got float")
    # On the optimizer inside, which has the same groups.
    inner = SGD([parameter(0.0)], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(inner, lambda n: 1.0)
    scale_lr(FusedAccumulator(inner), 2, scheduler=scheduler)
    assert scheduler.base_lrs == [2.0] == rates(inner)


@pytest.mark.parametrize(
    ("arguments", "exception", "match"),
    [
        (dict(batch_size_ratio=0), ValueError, "batch_size_ratio must be above 0"),
        (dict(batch_size_ratio=-2.0), ValueError, "batch_size_ratio must be above 0"),
        (dict(batch_size_ratio=math.nan), ValueError, "batch_size_ratio must be above 0"),
        (dict(batch_size_ratio=math.inf), ValueError, "batch_size_ratio must be finite"),
        (dict(batch_size_ratio=True), TypeError, "batch_size_ratio must be a number"),
        (dict(batch_size_ratio=None), TypeError, "batch_size_ratio must be a number"),
        (dict(batch_size_ratio="2"), TypeError, "batch_size_ratio must be a number"),
        (dict(rule="cubic"), ValueError, "rule must be one of 'linear', 'sqrt', got 'cubic'"),
        (dict(warmup_steps=-1), ValueError, "warmup_steps must be at least 0"),
        (dict(warmup_steps=1.5), TypeError, "warmup_steps must be an int"),
        (dict(warmup_steps=5, batch_size_ratio=0.5), ValueError, "not above it.*warmup_start"),
        (dict(warmup_steps=5, warmup_start=1.0), ValueError, "from 0 to below 1, got 1.0"),
        (dict(warmup_steps=5, warmup_start=-0.1), ValueError, "from 0 to below 1"),
        (dict(warmup_steps=5, warmup_start="0"), TypeError, "start must be a number"),
    ],
)
def test_wrong_arguments_change_nothing(arguments, exception, match):
    optimizer = fused(parameter(0.0))
    call = {"batch_size_ratio": 2.0, **arguments}
    unchanged(optimizer, lambda: scale_lr(optimizer, **call), exception, match)
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got Linear"):
        scale_lr(nn.Linear(1, 1), **call)


def test_a_group_without_a_learning_rate_is_named():
    optimizer = SGD(groups_of(0.5, 0.5), lr=0.5)
    optimizer.param_groups[1]["lr"] = None
    unchanged(optimizer, lambda: scale_lr(optimizer, 2), ValueError, r"param_groups\[1\]\['lr'\] must be")


# ---------------------------------------------------------------------------------------- warm-up


def ramp(update, steps, start):
    return start + (1 - start) * update / steps if update < steps else 1.0


@pytest.mark.parametrize("kind", ["stock", "fused", "generic"])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_warm_up_rises_from_the_old_rate_once_per_update(kind, tensor):
    p = parameter(0.0, dtype=torch.float64)
    lr = torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
    inner = (type("Own", (SGD,), {}) if kind == "generic" else SGD)([p], lr=lr)
    optimizer = inner if kind == "stock" else FusedAccumulator(inner, 3)
    warm_up = scale_lr(optimizer, 8, warmup_steps=4)
    expected = 0.0
    for update in range(7):
        assert warm_up.factor == ramp(update, 4, 1 / 8) and warm_up.updates == update
        expected -= 4.0 * ramp(update, 4, 1 / 8)  # from 0.5 to 4, the gradient being 1
        for _ in range(1 if kind == "stock" else 3):
            optimizer.zero_grad()
            send(p, 1.0)
            optimizer.step()
            assert rates(optimizer) == [4.0]
        assert p.item() == pytest.approx(expected, rel=1e-15)
    if tensor:
        assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made", ["before", "after"])
def test_any_scheduler_goes_through_the_warm_up(name, made):
    def run(warm):
        optimizer = FusedAccumulator(SGD(groups_of(0.1, 0.05), lr=0.1, momentum=0.9), 2)
        scheduler = SCHEDULERS[name](optimizer) if made == "before" else None
        if warm:
            WarmUp(optimizer, 5, 0.2)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        used = []
        optimizer.register_step_pre_hook(lambda *_: used.append(rates(optimizer)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(16):
                send([group["params"][0] for group in optimizer.param_groups], [1.0, 1.0])
                optimizer.step()
                if optimizer.updated:
                    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return torch.tensor(used, dtype=torch.float64)

    plain, warmed = run(False), run(True)
    factors = torch.tensor([[ramp(i, 5, 0.2)] for i in range(8)], dtype=torch.float64)
    torch.testing.assert_close(warmed, plain * factors, rtol=1e-12, atol=0)


def test_groups_that_share_a_tensor_are_lowered_once():
    lr = torch.tensor(1.0)
    optimizer = SGD(groups_of(lr, lr), lr=1.0)
    WarmUp(optimizer, 2, 0.5)
    a, b = (group["params"][0] for group in optimizer.param_groups)
    send([a, b], [1.0, 1.0])
    optimizer.step()
    assert a.item() == b.item() == -0.5 and lr.item() == 1.0


def test_an_update_that_raises_leaves_the_full_rate_for_the_next():
    p = parameter(0.0)
    optimizer = fused(p, nonfinite="error")
    warm_up = WarmUp(optimizer, 4, 0.5)
    send(p, math.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    optimizer.discard()
    for expected in (-0.5, -1.125):  # 0.5, then 0.5 + 0.5 / 4
        send(p, 1.0)
        optimizer.step()
        assert p.item() == expected and rates(optimizer) == [1.0]
    assert warm_up.updates == 2


def test_it_goes_on_from_its_state_and_is_removed():
    p = parameter(0.0)
    first, optimizer = fused(parameter(0.0)), fused(p)
    warm_up = WarmUp(first, 4, 0.5)
    for _ in range(2):
        send(first.param_groups[0]["params"], [1.0])
        first.step()
    state = warm_up.state_dict()
    assert state == {"updates": 2, "steps": 4, "start": 0.5}
    again = WarmUp(optimizer, 9, 0.1)
    with pytest.raises(ValueError, match="updates, steps and start, got"):
        again.load_state_dict({"updates": 2})
    again.load_state_dict(state)
    send(p, 1.0)
    optimizer.step()
    assert p.item() == -0.75
    for twice in (optimizer, optimizer.optimizer):
        with pytest.raises(ValueError, match="has a warm-up already"):
            WarmUp(twice, 1, 0.5)
    again.remove()
    send(p, 1.0)
    optimizer.step()
    assert p.item() == -1.75 and again.updates == 3
    WarmUp(optimizer, 1, 0.5)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        WarmUp(first, 0, 0.5)
    with pytest.raises(TypeError, match="got Linear"):
        WarmUp(nn.Linear(1, 1), 1, 0.5)


def test_it_lives_and_goes_with_its_optimizer():
    p = parameter(0.0)
    optimizer = fused(p)
    reference = weakref.ref(scale_lr(optimizer, 2, warmup_steps=2))
    gc.collect()
    assert reference() is not None  # nobody kept it, and it works
    send(p, 1.0)
    optimizer.step()
    assert p.item() == -1.0
    del optimizer
    gc.collect()
    assert reference() is None


def test_the_names_are_public():
    for name in ("accumulation_steps_for", "scale_lr", "WarmUp"):
        assert name in fastaccum.__all__ and name in dir(fastaccum)
