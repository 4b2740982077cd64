"""Weights of micro-batches: contract items 5 and 6."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import each_backend, each_take, fused, parameter, send, unchanged  # noqa: E402

pytestmark = [pytest.mark.native, pytest.mark.quick]


@each_backend
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_n03_the_mean_does_not_depend_on_the_number_of_micro_batches(backend, steps):
    rows = torch.arange(1.0, 9.0).view(8, 1) * torch.tensor([1.0, -0.3, 7.0])
    p = parameter(0.0, 0.0, 0.0)
    optimizer = fused(p, steps, backend=backend)
    for part in rows.chunk(steps):
        (part @ p).mean().backward()
        optimizer.step()
    torch.testing.assert_close(p.detach(), -rows.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(optimizer.norm, rows.mean(0).norm(), rtol=1e-6, atol=0)


A, B, EMPTY = torch.ones(2), torch.full((6,), 5.0), torch.ones(0)


@each_take
@each_backend
@pytest.mark.parametrize("how", ["backward weight", "step weight", "backward count", "step count"])
@pytest.mark.parametrize("tensor", [False, True])
def test_n01_micro_batches_count_by_their_items(take, backend, how, tensor):
    if how == "step weight" and take == "backward":
        pytest.skip("refused, see test_take_backward")
    for parts, expected in (
        ([A, B], 4.0),
        ([A, EMPTY], 1.0),
        ([EMPTY, B], 5.0),
        ([EMPTY, EMPTY], None),
    ):
        w = parameter(1.0)
        optimizer = FusedAccumulator(torch.optim.Adam([w], lr=0.5), len(parts), take=take, backend=backend)
        for x in parts:
            n = torch.tensor(len(x)) if tensor else len(x)
            loss = (w * x).mean() if "weight" in how else (w * x).sum()
            if how == "backward weight":
                optimizer.backward(loss, weight=n)
                optimizer.step()
            elif how == "backward count":
                optimizer.backward(loss, count=n)
                optimizer.step()
            else:
                loss.backward()
                optimizer.step(**{how.split()[1]: n})
        assert optimizer.updated
        if expected is None:
            assert not optimizer.stepped and optimizer.norm.item() == 0.0
            assert w.item() == 1.0 and optimizer.skipped.item() == 0
            # Where the device decides, state is made before: zeros, as if there were none.
            assert not any(bool(value.any()) for value in optimizer.state[w].values())
        else:
            assert optimizer.stepped and optimizer.norm.item() == pytest.approx(expected)
            assert optimizer.state[w]["exp_avg"].item() == pytest.approx(expected * 0.1)


@pytest.mark.parametrize("mode", ["mean", "sum", "weighted", "pre-normalised"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_n02_exactly_one_normalisation(mode, steps):
    x = torch.tensor([1.0, 1, 5, 5, 5, 5, 5, 5])
    w = parameter(0.0)
    reduction = "sum" if mode == "pre-normalised" else "mean"
    optimizer = fused(w, steps, reduction=reduction)
    for part in x.chunk(steps):
        if mode == "mean":
            (w * part).mean().backward()
            optimizer.step()
        elif mode == "sum":
            optimizer.backward((w * part).sum(), count=len(part))
            optimizer.step()
        elif mode == "weighted":
            optimizer.backward((w * part).mean(), weight=len(part))
            optimizer.step()
        else:
            ((w * part).sum() / 8).backward()
            optimizer.step()
    assert w.item() == -4.0 and optimizer.norm.item() == 4.0


@each_take
@each_backend
@pytest.mark.parametrize("kind", ["weight", "count"])
def test_a_window_does_not_depend_on_how_the_examples_are_split(take, backend, kind):
    rng = random.Random(3)
    x = torch.randn(40, 5, dtype=torch.float64)
    truth = -x.mean(0)
    for _ in range(6):
        cuts = sorted(rng.choices(range(41), k=rng.randrange(6)))
        parts = [x[a:b] for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
        p = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = fused(p, len(parts), take=take, backend=backend)
        for part in parts:
            rows = part @ p
            loss = rows.mean() if kind == "weight" else rows.sum()
            optimizer.backward(loss, **{kind: len(part)})
            optimizer.step()
        assert optimizer.updated
        torch.testing.assert_close(p.detach(), truth, rtol=1e-13, atol=1e-15)


@each_take
@each_backend
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_of_0_selects_nothing_not_even_a_nan(take, backend, place, bad):
    p = parameter(0.0)
    optimizer = fused(p, 3, take=take, backend=backend)
    for i in range(3):
        none = i == place
        optimizer.backward((p * (bad if none else 4.0)).sum(), weight=0 if none else 2)
        optimizer.step()
    assert optimizer.stepped and p.item() == -4.0 and optimizer.norm.item() == 4.0


@each_take
def test_reduction_sum_never_divides(take):
    p = parameter(0.0)
    optimizer = fused(p, 3, reduction="sum", take=take)
    for grad, n in ((1.0, 2), (2.0, 3)):
        optimizer.backward((p * grad).sum(), weight=n)
        optimizer.step()
    assert optimizer.grad(p).item() == 8.0
    optimizer.flush()
    assert p.item() == -8.0


@each_take
def test_a_step_without_a_backward_weighs_nothing_but_counts(take):
    p = parameter(0.0)
    optimizer = fused(p, 3, take=take)
    optimizer.step()
    send(p, 6.0)
    optimizer.step()
    optimizer.step()
    assert optimizer.updated and optimizer.stepped and p.item() == -6.0
    for _ in range(3):
        optimizer.step()
    assert optimizer.updated and not optimizer.stepped and p.item() == -6.0


def test_the_loss_is_never_multiplied_by_the_weight():
    p = parameter(0.0, dtype=torch.float16)
    optimizer = fused(p, 2)
    for n in (1_000_000, 3_000_000):
        optimizer.backward((p * 2.0).sum(), weight=n)
        assert p.grad.item() == 2.0
        optimizer.step()
    assert optimizer.stepped and p.item() == -2.0


def test_the_micro_batch_weight_counts_once():
    p = parameter(0.0)
    optimizer = fused(p, 2)
    for n, calls in ((1, 1), (3, 2)):
        for _ in range(calls):
            optimizer.backward((p * 2.0).sum(), weight=n)
        optimizer.step(weight=n)
    assert p.item() == -(1 * 2.0 + 3 * 4.0) / 4


def test_backward_passes_its_options_on():
    p = parameter(2.0)
    optimizer = fused(p)
    loss = (p**2).sum()
    optimizer.backward(loss, weight=1, retain_graph=True)
    optimizer.backward(loss, weight=1)
    with pytest.raises(RuntimeError, match="second time"):
        optimizer.backward(loss, weight=1)
    optimizer.step()
    assert p.item() == 2.0 - 8.0


@pytest.mark.parametrize(
    ("before", "during", "match"),
    [
        ({"weight": 2}, {"weight": 3}, "same weight.*weight=3 after weight=2"),
        ({"weight": 2}, {"count": 2}, "same weight.*count=2 after weight=2"),
        ({"weight": 2}, {}, "same weight"),
        ({}, {"weight": 2, "count": 2}, "not both"),
        ({}, {"weight": -1}, "weight must be finite and at least 0.*got -1"),
        ({}, {"weight": math.nan}, "weight must be finite.*nan"),
        ({}, {"count": math.inf}, "count must be finite.*inf"),
        ({}, {"weight": torch.ones(2)}, "weight must be a number or a 0-d"),
        ({}, {"weight": torch.tensor(True)}, "weight must be a number or a 0-d"),
    ],
)
def test_a_wrong_weight_is_refused_before_backward_runs(before, during, match):
    p = parameter(0.0)
    optimizer = fused(p, 2)
    optimizer.backward((p * 1.0).sum(), weight=2)
    optimizer.step()
    if before:
        optimizer.backward((p * 1.0).sum(), **before)
    unchanged(optimizer, lambda: optimizer.backward((p * 5.0).sum(), **during), ValueError, match)
    if not before:
        send(p, 1.0)
    optimizer.step(weight=2)
    assert p.item() == -1.0


@pytest.mark.parametrize("wrong", [True, "2", [2]])
def test_a_weight_of_a_wrong_type_is_refused(wrong):
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 1.0)
    unchanged(optimizer, lambda: optimizer.step(weight=wrong), TypeError, "weight must be a number")
    unchanged(optimizer, lambda: optimizer.step(count=wrong), TypeError, "count must be a number")


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"weight": 2}), ({"weight": 2}, {}), ({"weight": 2}, {"count": 2}), ({"count": 2}, {})],
)
def test_a_window_is_weighted_throughout_or_not_at_all(first, second):
    p = parameter(0.0)
    optimizer = fused(p, 2)
    send(p, 1.0)
    optimizer.step(**first)
    send(p, 5.0)
    unchanged(optimizer, lambda: optimizer.step(**second), ValueError, "weighted throughout or not")
    assert optimizer.flush() and p.item() == (-0.5 if "count" in first else -1.0)
    optimizer.step(**second)
    assert optimizer.micro_step == 1
