"""A training step as one cell, the plain-function style, and a user's own graph: the same numbers."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from fastaccum.mindspore import FusedAccumulator, TrainStep
from tests.on_mindspore.setting import largest_error, values

STEPS = 3


class Net(nn.Cell):
    """Two layers and a parameter that takes no part."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)

        def made(name, *shape):
            return Parameter(Tensor(0.3 * rng.standard_normal(shape).astype(np.float32)), name=name)

        self.first, self.second = made("first", 6, 16), made("second", 16, 4)
        self.unused = made("unused", 5)

    def construct(self, x):
        return ops.matmul(ops.tanh(ops.matmul(x, self.first)), self.second)


class Loss(nn.Cell):
    def __init__(self, net, reduction="mean"):
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss(reduction=reduction)

    def construct(self, x, y):
        return self.loss(self.net(x), y)


def batches(rows=(8,) * 7):
    rng = np.random.default_rng(1)
    return [
        (
            Tensor(rng.standard_normal((n, 6)).astype(np.float32)),
            Tensor(rng.integers(0, 4, n).astype(np.int32)),
        )
        for n in rows
    ]


def adam(net):
    return nn.Adam(net.trainable_params(), 1e-2)


def by_mindspore():
    """Eager accumulation by MindSpore's own operators, with the short last window's true count."""
    net = Net()
    network, optimizer = Loss(net), adam(net)
    gradients = mindspore.value_and_grad(network, None, optimizer.parameters)
    total, held, losses = None, 0, []
    data = batches()
    for i, (x, y) in enumerate(data):
        loss, grads = gradients(x, y)
        losses.append(float(loss))
        total = grads if total is None else tuple(ops.add(a, g) for a, g in zip(total, grads, strict=True))
        held += 1
        if held == STEPS or i + 1 == len(data):
            mean = tuple(ops.div(a, held) for a in total)
            norm = ops.sqrt(sum(ops.reduce_sum(ops.square(g)) for g in mean))
            optimizer(tuple(g * ops.minimum(0.1 / (norm + 1e-6), 1.0) for g in mean))
            total, held = None, 0
    return losses, values(net.trainable_params())


def by_functions():
    net = Net()
    network, accumulator = Loss(net), FusedAccumulator(adam(net), STEPS, max_norm=0.1)
    gradients = mindspore.value_and_grad(network, None, accumulator.parameters)
    losses = []
    for x, y in batches():
        loss, grads = gradients(x, y)
        accumulator(grads)
        losses.append(float(loss))
    assert accumulator.flush()
    return losses, values(net.trainable_params())


def by_cell():
    net = Net()
    accumulator = FusedAccumulator(adam(net), STEPS, max_norm=0.1)
    step = TrainStep(Loss(net), accumulator)
    losses = [float(step(x, y)) for x, y in batches()]
    assert accumulator.flush()
    return losses, values(net.trainable_params())


def by_cell_in_graph_mode():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    return by_cell()


def by_functions_in_graph_mode():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    return by_functions()


def by_a_graph_of_the_user():
    net = Net()
    network, accumulator = Loss(net), FusedAccumulator(adam(net), STEPS, max_norm=0.1)
    gradients = mindspore.value_and_grad(network, None, accumulator.parameters)
    total, one = accumulator.sum, Tensor(np.array([1.0, 1.0, 0.0]))

    @mindspore.jit
    def two_micro_batches(x1, y1, x2, y2):
        loss1, grads1 = gradients(x1, y1)
        total.add(one, *grads1)
        loss2, grads2 = gradients(x2, y2)
        total.add(one, *grads2)
        return loss1, loss2

    data, losses = batches(), []
    for i in (0, 3):
        losses += [float(loss) for loss in two_micro_batches(*data[i], *data[i + 1])]
        assert accumulator.micro_step == 2
        loss, grads = gradients(*data[i + 2])
        accumulator.step(grads)
        assert accumulator.updated
        losses.append(float(loss))
    loss, grads = gradients(*data[6])
    accumulator.step(grads)
    accumulator.flush()
    return [*losses, float(loss)], values(net.trainable_params())


@pytest.fixture(scope="module")
def wanted():
    return by_mindspore()


@pytest.mark.parametrize(
    "style",
    [by_functions, by_cell, by_cell_in_graph_mode, by_functions_in_graph_mode, by_a_graph_of_the_user],
)
def test_every_style_is_mindspores_own_accumulation(style, wanted):
    losses, params = style()
    assert np.allclose(losses, wanted[0], rtol=0, atol=1e-6)
    # Three updates of Adam, which divides rounding by rounding where a gradient is near 0.
    assert largest_error(params, wanted[1]) < 1e-5


def test_two_accumulators_in_one_graph():
    """As in a GAN: each has names of its own."""
    nets = [Net(), Net()]
    networks = [Loss(net) for net in nets]
    networks[1].update_parameters_name("other.")
    one, two = (FusedAccumulator(nn.SGD(net.trainable_params(), 1.0), 2) for net in nets)
    first = mindspore.value_and_grad(networks[0], None, one.parameters)
    second = mindspore.value_and_grad(networks[1], None, two.parameters)
    plain = Tensor(np.array([1.0, 1.0, 0.0]))

    @mindspore.jit
    def both(x, y):
        one.sum.add(plain, *first(x, y)[1])
        two.sum.add(plain, *second(x, y)[1])
        return x

    both(*batches()[0])
    for accumulator in (one, two):
        assert accumulator.micro_step == 1 and accumulator.flush()
    assert largest_error(values(nets[0].trainable_params()), values(nets[1].trainable_params())) == 0.0
    assert largest_error(values(nets[0].trainable_params()), values(Net().trainable_params())) > 0.0


def test_rows_of_different_number_give_the_loss_over_all_rows():
    """Weighted by rows, however they are split: the gradient of the mean over all of them."""
    rows = (3, 8, 5)
    data = batches(rows)
    x, y = (ops.cat([b[i] for b in data]) for i in (0, 1))
    results = []
    for reduction, split in (("mean", False), ("mean", True), ("sum", True)):
        net = Net()
        accumulator = FusedAccumulator(nn.SGD(net.trainable_params(), 1.0), len(rows) if split else 1)
        step = TrainStep(Loss(net, reduction), accumulator)
        for inputs, labels in data if split else [(x, y)]:
            step(inputs, labels, **{"weight" if reduction == "mean" else "count": len(labels)})
        assert accumulator.stepped
        results.append(values(net.trainable_params()))
    assert largest_error(results[0], results[1]) < 1e-6 and largest_error(results[0], results[2]) < 1e-6


def test_a_loss_scale_scales_the_backward_pass_only():
    results = []
    for scale in (1.0, 1024.0):
        net = Net()
        accumulator = FusedAccumulator(nn.SGD(net.trainable_params(), 1.0), 2, loss_scale=scale)
        step = TrainStep(Loss(net), accumulator)
        losses = [float(step(*batch)) for batch in batches()[:2]]
        results.append((losses, values(net.trainable_params())))
    assert results[0][0] == results[1][0]
    assert largest_error(results[0][1], results[1][1]) == 0.0  # a power of two costs no rounding


def test_a_network_may_be_a_function():
    net = Net()
    loss = Loss(net)

    def doubled(x, y):
        return loss(x, y) * 2.0

    step = TrainStep(doubled, FusedAccumulator(adam(net), 1))
    before = values(net.trainable_params())
    assert np.isclose(float(step(*batches()[0])), 2.0 * by_mindspore()[0][0])
    assert largest_error(values(net.trainable_params()), before) > 0.0
