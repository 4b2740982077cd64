"""One update from an identical state: as near to float64 as MindSpore's own, for every optimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from benchmarks.shapes import gpt2
from fastaccum.mindspore import FusedAccumulator
from tests.on_mindspore.setting import SHAPES, arrays, finished, largest_error, parameters, tensors, values

# Of one update in float32: the rounding of a value that is added to a parameter of size 1.
FLOOR = 2.0**-24


def exact_adam(
    p, m, v, g, t, *, lr, eps, decay=0.0, decoupled=False, form="torch", b1=0.9, b2=0.999, vhat=None
):
    """One step in float64; ``form`` is where eps stands, and whether there is a bias correction."""
    if decoupled:
        p = p * (1 - lr * decay)
    else:
        g = g + decay * p
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    second = v if vhat is None else np.maximum(vhat, v)
    c1, c2 = (1.0, 1.0) if form == "uncorrected" else (1 - b1**t, 1 - b2**t)
    if form == "hat":
        return p - lr * math.sqrt(c2) / c1 * m / (np.sqrt(second) + eps), m, v
    return p - lr / c1 * m / (np.sqrt(second) / math.sqrt(c2) + eps), m, v


def exact_sgd(p, b, g, first, *, lr, momentum=0.0, dampening=0.0, decay=0.0, nesterov=False):
    g = g + decay * p
    if momentum == 0.0:
        return p - lr * g, b
    b = g if first else momentum * b + (1 - dampening) * g
    return p - lr * (g + momentum * b if nesterov else b), b


ADAMS = {
    "nn.Adam": (lambda p: nn.Adam(p, 1e-2, eps=1e-4), {"lr": 1e-2, "eps": 1e-4, "form": "hat"}),
    "nn.Adam decay": (
        lambda p: nn.Adam(p, 1e-2, weight_decay=0.05),
        {"lr": 1e-2, "eps": 1e-8, "form": "hat", "decay": 0.05},
    ),
    "nn.AdamWeightDecay": (
        lambda p: nn.AdamWeightDecay(p, 1e-3, weight_decay=0.05),
        {"lr": 1e-3, "eps": 1e-6, "form": "uncorrected", "decay": 0.05, "decoupled": True},
    ),
    "optim.Adam": (
        lambda p: optim.Adam(p, 1e-2, weight_decay=0.05),
        {"lr": 1e-2, "eps": 1e-8, "form": "hat", "decay": 0.05},
    ),
    "optim.AdamW": (
        lambda p: optim.AdamW(p, 1e-2, weight_decay=0.05),
        {"lr": 1e-2, "eps": 1e-8, "decay": 0.05, "decoupled": True},
    ),
}
SGDS = {
    "nn.SGD": (lambda p: nn.SGD(p, 0.1), {"lr": 0.1}),
    "nn.SGD momentum": (
        lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "decay": 0.05},
    ),
    "nn.SGD nesterov": (
        lambda p: nn.SGD(p, 0.1, momentum=0.9, nesterov=True),
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "nn.Momentum": (
        lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=0.05),
        {"lr": 0.1, "momentum": 0.9, "decay": 0.05},
    ),
    "optim.SGD": (
        lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "decay": 0.05},
    ),
}


def stock(optimizer, gradient):
    """MindSpore's own update with a gradient that float64 averaged."""
    optimizer(tensors([np.asarray(g, np.float32) for g in gradient]))


def state_of(optimizer):
    for names in (("moment1", "moment2"), ("moments1", "moments2"), ("exp_avg", "exp_avg_sq")):
        if hasattr(optimizer, names[0]):
            return [getattr(optimizer, name) for name in names]
    return [optimizer.moments] if hasattr(optimizer, "moments") else [optimizer.accum]


def check(fused, stocks, exact, what):
    mine, theirs = largest_error(values(fused), exact), largest_error(values(stocks), exact)
    assert mine <= 2 * theirs + FLOOR, f"{what}: {mine:.2e} against {theirs:.2e}"


LENET5 = ((6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,))
CASES = [pytest.param(name, SHAPES, id=name) for name in (*ADAMS, *SGDS)]
CASES += [pytest.param(name, LENET5 * 4, id=f"{name}, LeNet-5 x4") for name in ("nn.Adam", "nn.SGD momentum")]
CASES += [pytest.param("optim.AdamW", tuple(gpt2(layers=1, vocab=1000)), id="optim.AdamW, a layer of GPT-2")]


@pytest.mark.parametrize("name,shapes", CASES)
def test_two_updates_each_from_the_same_state(name, shapes):
    make, options = {**ADAMS, **SGDS}[name]
    mine, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    wrapped, alone = make(mine), make(theirs)
    accumulator = FusedAccumulator(wrapped, 2, max_norm=3.0)
    for t in (1, 2):
        micro = [arrays(10 * t, shapes), arrays(10 * t + 1, shapes)]
        gradient, norm = finished(micro, max_norm=3.0)
        before, states = values(alone.parameters), [values(s) for s in state_of(alone)]
        for grads in micro:
            accumulator.step(tensors(grads))
        stock(alone, gradient)
        if name in ADAMS:
            exact = [exact_adam(*x, t, **options) for x in zip(before, *states, gradient, strict=True)]
        else:
            exact = [exact_sgd(*x, t == 1, **options) for x in zip(before, *states, gradient, strict=True)]
        check(wrapped.parameters, alone.parameters, [e[0] for e in exact], "parameters")
        for i, (a, b) in enumerate(zip(state_of(wrapped), state_of(alone), strict=True)):
            if options.get("momentum", 1.0):
                check(a, b, [e[i + 1] for e in exact], f"state {i}")
        assert accumulator.stepped and abs(float(accumulator.norm) - norm) <= 2 * np.spacing(np.float32(norm))
        # From MindSpore's own state, whatever the difference was: the next comparison starts equal.
        for a, b in zip(wrapped.parameters, alone.parameters, strict=True):
            ops.assign(a, Tensor(b.asnumpy().copy()))
        for a, b in zip(
            sum(map(list, state_of(wrapped)), []), sum(map(list, state_of(alone)), []), strict=True
        ):
            ops.assign(a, Tensor(b.asnumpy().copy()))


@pytest.mark.parametrize("name", ["nn.Adam decay", "nn.SGD momentum", "optim.AdamW"])
def test_the_optimizer_continues_by_itself(name):
    """Its own state, counters included, is right after fused updates, and the reverse."""
    make, _ = {**ADAMS, **SGDS}[name]
    wrapped, alone = make(parameters()), make(parameters())
    accumulator = FusedAccumulator(wrapped, 1)
    for t in range(4):
        grads = arrays(t)
        if t in (0, 2):
            accumulator.step(tensors(grads))
        else:
            wrapped(tensors(grads))
        alone(tensors(grads))
    assert largest_error(values(wrapped.parameters), values(alone.parameters)) < 1e-6
    for a, b in zip(state_of(wrapped), state_of(alone), strict=True):
        assert largest_error(values(a), values(b)) < 1e-6
    counter = "state_step" if hasattr(alone, "state_step") else "global_step"
    assert getattr(wrapped, counter).asnumpy() == getattr(alone, counter).asnumpy() == 4
    if isinstance(alone, nn.Adam):
        assert math.isclose(float(wrapped.beta1_power), 0.9**4, rel_tol=1e-6)
        assert math.isclose(float(wrapped.beta2_power), 0.999**4, rel_tol=1e-6)
    if isinstance(alone, nn.SGD):
        assert all(not s.asnumpy().any() for s in wrapped.stat)


def test_groups_and_schedules_are_read_for_every_window():
    def make():
        params = parameters()
        decay = {"params": params[:3], "lr": nn.ExponentialDecayLR(0.1, 0.5, 1), "weight_decay": 0.1}
        return nn.Momentum([decay, {"params": params[3:]}], learning_rate=0.05, momentum=0.9)

    wrapped, alone = make(), make()
    accumulator = FusedAccumulator(wrapped, 1)
    for t in range(3):
        accumulator.step(tensors(arrays(t)))
        alone(tensors(arrays(t)))
        assert largest_error(values(wrapped.parameters), values(alone.parameters)) < 1e-6


def test_a_changed_learning_rate_takes_effect():
    params = parameters()
    accumulator = FusedAccumulator(nn.SGD(params, 0.1), 1)
    before = values(params)
    ops.assign(accumulator.optimizer.learning_rate, Tensor(np.float32(0.5)))
    grads = arrays(1)
    accumulator.step(tensors(grads))
    wanted = [p - 0.5 * np.asarray(g, np.float64) for p, g in zip(before, grads, strict=True)]
    assert largest_error(values(params), wanted) < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda p: nn.RMSProp(p, 1e-2),
        lambda p: nn.Adam(p, 1e-2, use_nesterov=True),
        lambda p: nn.Momentum(p, 0.1, 0.9, use_nesterov=True),
    ],
    ids=["RMSProp", "Adam nesterov", "Momentum nesterov"],
)
def test_any_other_optimizer_gets_the_finished_gradient(make):
    wrapped, alone = make(parameters()), make(parameters())
    accumulator = FusedAccumulator(wrapped, 2, max_norm=3.0)
    for t in range(2):
        micro = [arrays(2 * t), arrays(2 * t + 1)]
        for grads in micro:
            accumulator.step(tensors(grads))
        stock(alone, finished(micro, max_norm=3.0)[0])
        assert accumulator.stepped and accumulator.micro_step == 0
    # A quotient of two roundings of the gradient: RMSProp divides by its root.
    assert largest_error(values(wrapped.parameters), values(alone.parameters)) < 2e-6


def test_a_subclass_does_its_own_update():
    class Doubled(nn.SGD):
        def construct(self, gradients):
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                ops.assign_sub(parameter, 0.2 * gradient)

    params = parameters(shapes=((700,),))
    accumulator = FusedAccumulator(Doubled(params, 0.1), 1)
    before, grads = values(params), arrays(1, ((700,),))
    accumulator.step(tensors(grads))
    assert largest_error(values(params), [before[0] - 0.2 * grads[0]]) < 1e-6
