"""Settings changed after construction take effect everywhere, or are refused; what a window refuses."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from fastaccum.mindspore import FusedAccumulator, TrainStep
from tests.on_mindspore.test_loading import MODES


@pytest.fixture(params=MODES, autouse=True)
def _mode(request):
    mindspore.set_context(mode=request.param)


def made(optimizer=None, steps=2, **options):
    """An update of zeros by SGD shows the finished gradient."""
    p = Parameter(Tensor(np.zeros(4, np.float32)), name="p")
    return p, FusedAccumulator((optimizer or (lambda p: nn.SGD(p, 1.0)))([p]), steps, **options)


def ones(value=1.0):
    return (Tensor(np.full(4, value, np.float32)),)


def test_max_norm_counts_from_the_next_end_of_a_window_on():
    p, accumulator = made()
    assert accumulator.max_norm is None
    accumulator.step(ones(4.0))
    accumulator.max_norm = 0.5
    accumulator.step(ones(4.0))
    assert np.allclose(p.asnumpy(), -0.25, rtol=1e-6) and float(accumulator.norm) == 8.0
    accumulator.max_norm = None
    accumulator.step(ones(4.0))
    accumulator.flush()
    assert np.allclose(p.asnumpy(), -4.25, rtol=1e-6)


def test_nonfinite_is_followed():
    p, accumulator = made(steps=1)
    accumulator.nonfinite = "error"
    with pytest.raises(RuntimeError, match="not finite"):
        accumulator.step(ones(math.nan))
    accumulator.nonfinite = "skip"
    assert accumulator.flush() and not accumulator.stepped and int(accumulator.skipped) == 1
    assert not p.asnumpy().any()
    accumulator.nonfinite = "propagate"
    accumulator.step(ones(math.nan))
    assert accumulator.stepped and np.isnan(p.asnumpy()).all()


@pytest.mark.parametrize(
    "name,value,error,words",
    [
        ("max_norm", -1.0, ValueError, "max_norm must be above 0, got -1.0"),
        ("max_norm", "1", TypeError, "max_norm must be a number"),
        ("nonfinite", "ignore", ValueError, "nonfinite must be one of"),
        ("reduction", "average", ValueError, "reduction must be one of"),
        ("loss_scale", 0.0, ValueError, "loss_scale must be above 0"),
        ("loss_scale", math.inf, ValueError, "loss_scale must be a finite number"),
    ],
)
def test_what_cannot_be_used_is_refused_and_changes_nothing(name, value, error, words):
    p, accumulator = made(max_norm=1.0, loss_scale=2.0)
    before = getattr(accumulator, name)
    with pytest.raises(error, match=words):
        setattr(accumulator, name, value)
    assert getattr(accumulator, name) == before
    accumulator.step(ones(8.0))
    accumulator.step(ones(8.0))
    assert np.allclose(p.asnumpy(), -0.5, rtol=1e-5) and float(accumulator.norm) == 8.0


@pytest.mark.parametrize("name,value,other", [("reduction", "mean", "sum"), ("loss_scale", 8.0, 4.0)])
def test_what_the_losses_depend_on_changes_between_windows_only(name, value, other):
    p, accumulator = made(**{name: value})
    accumulator.step(ones())
    with pytest.raises(RuntimeError, match=f"{name} cannot change while a window holds 1 micro-batches"):
        setattr(accumulator, name, other)
    assert getattr(accumulator, name) == value
    accumulator.step(ones())
    assert np.allclose(p.asnumpy(), -1.0 / (value if name == "loss_scale" else 1.0))
    setattr(accumulator, name, other)
    assert getattr(accumulator, name) == other


def test_a_loss_scale_as_a_dynamic_one_sets_it():
    p, accumulator = made(loss_scale=8.0)
    accumulator.loss_scale = 4
    accumulator.step(ones(4.0))
    assert np.all(accumulator.grad(p).asnumpy() == 1.0)
    accumulator.step(ones(4.0))
    assert np.all(p.asnumpy() == -1.0)


def test_reduction_sum_is_followed():
    p, accumulator = made()
    accumulator.reduction = "sum"
    accumulator.step(ones())
    accumulator.step(ones())
    assert np.all(p.asnumpy() == -2.0)


class Product(nn.Cell):
    """A loss whose gradient is the input; or something that is no loss."""

    def __init__(self, p, to=None):
        super().__init__()
        self.p = p
        self.to = to

    def construct(self, x):
        if self.to == "rows":
            return self.p * x
        if self.to == "pair":
            return (self.p * x).sum(), x
        if self.to == "one row":
            return (self.p * x).sum().reshape((1,))
        return (self.p * x).sum()


def test_a_train_step_follows_the_loss_scale():
    p, accumulator = made(steps=1, loss_scale=8.0)
    step = TrainStep(Product(p), accumulator)
    assert float(step(*ones())) == 0.0 and np.all(p.asnumpy() == -1.0)
    for scale in (4.0, 0.3, 1.0):
        before = p.asnumpy().copy()
        accumulator.loss_scale = scale
        assert math.isclose(float(step(*ones())), before.sum(), rel_tol=1e-6)
        assert np.allclose(p.asnumpy(), before - 1.0, rtol=1e-6)


def test_a_train_step_scales_what_would_vanish_in_16_bits():
    p = Parameter(Tensor(np.zeros(4, np.float32)).astype(mindspore.float16), name="p")
    accumulator = FusedAccumulator(nn.SGD([p], 1.0), 1, loss_scale=2.0**14)
    small = Tensor(2.0**-13, mindspore.float16)

    def loss(x):
        return (p * x).sum() * small

    step = TrainStep(loss, accumulator)
    x = Tensor(np.full(4, 2.0**-13, np.float32)).astype(mindspore.float16)
    assert step(x).dtype == mindspore.float16
    assert math.isclose(float(accumulator.norm), 2.0**-25, rel_tol=1e-3)  # 2 * 2**-26, which float16 has not
    accumulator.loss_scale = 1.0
    step(x)
    assert float(accumulator.norm) == 0.0


def test_a_float16_loss_times_its_scale_may_be_beyond_float16():
    p = Parameter(Tensor(np.full(4, 10.0, np.float32)).astype(mindspore.float16), name="p")

    def network(x):
        return (p * x).sum()

    step = TrainStep(network, FusedAccumulator(nn.SGD([p], 1.0), 1, loss_scale=2.0**14))
    loss = step(Tensor(np.ones(4, np.float32)).astype(mindspore.float16))
    assert loss.dtype == mindspore.float16 and float(loss) == 40.0
    assert np.all(p.asnumpy() == 9.0)


@pytest.mark.parametrize(
    "to,error,words",
    [
        (
            "rows",
            ValueError,
            r"must return its loss, one number, got shape \(4.*take its mean or sum",
        ),
        ("pair", TypeError, "network must return its loss, a Tensor of one number"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused_before_anything_is_added(to, error, words):
    p, accumulator = made()
    with pytest.raises(error, match=words):
        TrainStep(Product(p, to), accumulator)(*ones())
    assert accumulator.micro_step == 0 and accumulator.grad(p) is None
    step = TrainStep(Product(p, "one row"), accumulator)
    assert step(*ones()).shape == (1,)
    step(*ones(3.0))
    assert np.all(p.asnumpy() == -2.0)


class Raises(nn.RMSProp):
    """An optimizer that fails until it is mended."""

    broken = True

    def __call__(self, gradients):
        if self.broken:
            raise MemoryError("for now")
        return super().__call__(gradients)


@pytest.mark.parametrize("by_cell", [False, True], ids=["step", "TrainStep"])
@pytest.mark.parametrize("again", ["flush", "discard"])
def test_a_window_that_could_not_be_closed_takes_no_more(by_cell, again):
    p, accumulator = made(lambda p: Raises(p, 0.1))
    step = TrainStep(Product(p), accumulator) if by_cell else lambda *x: accumulator.step(x)
    step(*ones(1.0))
    with pytest.raises(MemoryError):
        step(*ones(3.0))
    assert accumulator.micro_step == 2 and not accumulator.updated and not accumulator.stepped
    accumulator.optimizer.broken = False
    with pytest.raises(RuntimeError, match=r"already holds its 2 micro-batches .* flush\(\) tries it again"):
        step(*ones(100.0))
    assert np.all(accumulator.grad(p).asnumpy() == 2.0)
    if again == "flush":
        assert accumulator.flush() and accumulator.stepped and float(accumulator.norm) == 4.0
    else:
        accumulator.discard()
        assert not p.asnumpy().any()
    assert accumulator.micro_step == 0
    step(*ones(5.0))
    step(*ones(7.0))
    assert accumulator.stepped and float(accumulator.norm) == 12.0


def test_nor_does_one_that_is_not_finite():
    p, accumulator = made(nonfinite="error")
    accumulator.step(ones(math.inf))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="not finite" if accumulator.micro_step < 2 else "already holds"
        ):
            accumulator.step(ones())
    assert accumulator.micro_step == 2 and not p.asnumpy().any()
    accumulator.discard()
    accumulator.step(ones())
    accumulator.step(ones(3.0))
    assert np.all(p.asnumpy() == -2.0)
