"""Whatever cannot be used is refused: what was expected, what came, what to do; and nothing has changed."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from fastaccum.mindspore import FusedAccumulator, GradientSum, TrainStep, library
from tests.on_mindspore.setting import SHAPES, arrays, parameters, tensors, values


def make(**options):
    return FusedAccumulator(nn.SGD(parameters(), 0.1), **{"accumulation_steps": 3, **options})


@pytest.mark.parametrize(
    "options,error,words",
    [
        ({"accumulation_steps": 0}, ValueError, "at least 1, got 0"),
        ({"accumulation_steps": 2.0}, TypeError, "must be an int"),
        ({"accumulation_steps": True}, TypeError, "must be an int"),
        ({"max_norm": -1.0}, ValueError, "max_norm must be above 0, got -1.0"),
        ({"max_norm": math.nan}, ValueError, "max_norm must be above 0"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number"),
        ({"reduction": "average"}, ValueError, "reduction must be one of 'mean', 'sum'"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite must be one of"),
        ({"loss_scale": 0.0}, ValueError, "loss_scale must be above 0"),
        ({"loss_scale": math.inf}, ValueError, "loss_scale must be a finite number"),
        ({"loss_scale": None}, ValueError, "loss_scale must be a finite number"),
    ],
)
def test_options(options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize(
    "optimizer,error,words",
    [
        (lambda: object(), TypeError, "must be a mindspore.nn.Optimizer .* got object"),
        (lambda: nn.Dense(2, 2), TypeError, "must be a mindspore.nn.Optimizer .* got Dense"),
        (
            lambda: nn.SGD(parameters(), 0.1, loss_scale=8.0),
            ValueError,
            "pass loss_scale to FusedAccumulator",
        ),
        (lambda: nn.SGD([*parameters(), wide()], 0.1), ValueError, "wide is float64, p0 is float32"),
    ],
)
def test_optimizers_that_cannot_be_served(optimizer, error, words):
    with pytest.raises(error, match=words):
        FusedAccumulator(optimizer(), 2)


def wide():
    return Parameter(Tensor(np.zeros(3)), name="wide")


def test_parameters_of_a_sum():
    with pytest.raises(TypeError, match="must be a list of Parameters"):
        GradientSum(parameters()[0])
    with pytest.raises(ValueError, match="at least one Parameter"):
        GradientSum([])
    with pytest.raises(TypeError, match=r"parameters\[0\] must be a Parameter, got Tensor"):
        GradientSum([Tensor(1.0)])
    with pytest.raises(TypeError, match=r"parameters\[0\] \(n\) must be float32, .* got int32"):
        GradientSum([Parameter(Tensor(np.zeros(2, np.int32)), name="n")])


def changed(i, value):
    grads = list(tensors(arrays(1)))
    grads[i] = value
    return tuple(grads)


@pytest.mark.parametrize(
    "gradients,error,words",
    [
        (lambda: Tensor(1.0), TypeError, "must be a tuple of Tensors, got Tensor"),
        (lambda: tensors(arrays(1))[:-1], ValueError, f"each of the {len(SHAPES)} parameters .* got 6"),
        (
            lambda: changed(2, None),
            TypeError,
            r"gradients\[2\] \(of p2\) must be a dense Tensor, got NoneType",
        ),
        (lambda: changed(2, np.zeros((16, 32))), TypeError, r"gradients\[2\] .* got ndarray"),
        (
            lambda: changed(2, Tensor(np.zeros((32, 16), np.float32))),
            ValueError,
            r"shape \(16, 32\), got \(32, 16\)",
        ),
        (lambda: changed(2, Tensor(np.zeros((16, 32), np.int32))), TypeError, "bfloat16, .* got int32"),
        (lambda: changed(4, Tensor(np.zeros(1, np.float32))), ValueError, r"shape \(\), got \(1,\)"),
    ],
)
def test_gradients(gradients, error, words):
    accumulator = make()
    accumulator.step(tensors(arrays(0)))
    state = [accumulator.sum.window, accumulator.sum.buffer, *accumulator.parameters]
    before = [p.asnumpy().copy() for p in state]
    with pytest.raises(error, match=words):
        accumulator.step(gradients())
    assert all(np.array_equal(p.asnumpy(), b) for p, b in zip(state, before, strict=True))
    accumulator.step(tensors(arrays(1)))
    assert accumulator.micro_step == 2


@pytest.mark.parametrize(
    "weights,error,words",
    [
        ({"weight": -1}, ValueError, "weight must be finite and at least 0"),
        ({"weight": math.inf}, ValueError, "weight must be finite"),
        ({"count": math.nan}, ValueError, "count must be finite"),
        ({"weight": True}, TypeError, "weight must be a number"),
        ({"count": "3"}, TypeError, "count must be a number"),
        ({"weight": Tensor(np.ones(2, np.float32))}, ValueError, "one element"),
        ({"weight": 1, "count": 1}, ValueError, "not both"),
    ],
)
def test_weights(weights, error, words):
    accumulator = make()
    with pytest.raises(error, match=words):
        accumulator.step(tensors(arrays(0)), **weights)
    assert accumulator.micro_step == 0


def test_a_window_is_weighted_throughout_or_not_at_all():
    accumulator = make()
    accumulator.step(tensors(arrays(0)), weight=2)
    with pytest.raises(ValueError, match="has no weight, the earlier ones have"):
        accumulator.step(tensors(arrays(1)))
    accumulator.discard()
    accumulator.step(tensors(arrays(0)))
    with pytest.raises(ValueError, match="has a weight, the earlier ones have none"):
        accumulator.step(tensors(arrays(1)), count=2)
    assert accumulator.micro_step == 1


def test_a_group_that_is_added_later():
    from mindspore.experimental import optim

    optimizer = optim.SGD(parameters(), 0.1)
    accumulator = FusedAccumulator(optimizer, 2)
    optimizer.add_param_group({"params": [Parameter(Tensor(np.zeros(3, np.float32)), name="late")]})
    with pytest.raises(ValueError, match="list of parameters has changed"):
        accumulator.step(tensors(arrays(0)))


def test_train_steps():
    with pytest.raises(TypeError, match="must be a FusedAccumulator, got SGD"):
        TrainStep(nn.Dense(2, 2), nn.SGD(parameters(), 0.1))
    with pytest.raises(TypeError, match="network must be a cell or a function"):
        TrainStep(None, make())


def test_a_graph_cannot_close_windows():
    accumulator = make()
    with pytest.raises(RuntimeError, match="called from Python"):
        accumulator.construct(tensors(arrays(0)))


def test_what_an_operator_refuses_is_told():
    total = GradientSum(parameters())
    before = values([total.window, total.present])
    with pytest.raises(RuntimeError, match="fastaccum_accumulate"):
        total.add(Tensor(np.array([1.0, 1.0])), *tensors(arrays(0)))
        total.window.asnumpy()
    assert library.last_refusal() == (
        "fastaccum: accumulate: weight (tensor 1) must be float64 with 3 elements, got float64 with 2; "
        "nothing was changed"
    )
    assert all(
        np.array_equal(a, b) for a, b in zip(values([total.window, total.present]), before, strict=True)
    )


def test_another_device_is_refused(monkeypatch):
    real = mindspore.get_context
    monkeypatch.setattr(
        mindspore, "get_context", lambda name: "Ascend" if name == "device_target" else real(name)
    )
    with pytest.raises(RuntimeError, match="runs on the CPU, MindSpore is set to Ascend"):
        make()
