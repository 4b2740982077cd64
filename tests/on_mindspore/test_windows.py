"""Windows: mean by the true count, weights, flush, clipping, what is not finite, 16 bits, checkpoints."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from fastaccum.mindspore import FusedAccumulator, GradientSum, operators
from tests.on_mindspore.setting import (
    SHAPES,
    arrays,
    finished,
    largest_error,
    parameters,
    tensors,
    values,
    zeros,
)

# Gradients of size 5 at most, summed over 4: a few roundings of half an ulp.
CLOSE = 1e-6


def sgd(params, steps, **options):
    """SGD without momentum: an update of zeros shows the finished gradient."""
    return FusedAccumulator(nn.SGD(params, 1.0), steps, **options)


def applied(params):
    """The gradient that was applied to zeros."""
    return [-p for p in values(params)]


def run(micro, steps, flush=False, weights=None, counts=None, **options):
    params = zeros()
    accumulator = sgd(params, steps, **options)
    for i, grads in enumerate(micro):
        accumulator.step(
            tensors(grads),
            weight=None if weights is None else weights[i],
            count=None if counts is None else counts[i],
        )
    if flush:
        assert accumulator.flush()
    return accumulator, applied(params)


def test_a_window_is_the_mean_of_its_micro_batches():
    micro = [arrays(i) for i in range(4)]
    accumulator, got = run(micro, 4)
    assert accumulator.updated and accumulator.stepped and accumulator.micro_step == 0
    assert largest_error(got, finished(micro)[0]) < CLOSE


def test_a_partial_window_is_divided_by_what_it_holds():
    micro = [arrays(i) for i in range(3)]
    accumulator, got = run(micro, 8, flush=True)
    assert largest_error(got, finished(micro)[0]) < CLOSE
    assert not accumulator.flush() and not accumulator.updated


def test_weights_and_counts_give_the_mean_over_items():
    micro, items = [arrays(i) for i in range(3)], [3, 5, 2]
    wanted = finished(micro, weights=items)[0]
    assert largest_error(run(micro, 3, weights=items)[1], wanted) < CLOSE
    sums = [[n * np.asarray(g, np.float64) for g in grads] for n, grads in zip(items, micro, strict=True)]
    sums = [[s.astype(np.float32) if s.ndim else np.float32(s) for s in grads] for grads in sums]
    assert largest_error(run(sums, 3, counts=items)[1], wanted) < CLOSE
    assert largest_error(run(micro, 4, weights=[Tensor(n) for n in items], flush=True)[1], wanted) < CLOSE


def test_reduction_sum_does_not_divide_and_loss_scale_does():
    micro = [arrays(i) for i in range(2)]
    assert largest_error(run(micro, 2, reduction="sum")[1], finished(micro, divisor=1.0)[0]) < 4 * CLOSE
    assert largest_error(run(micro, 2, loss_scale=8.0)[1], finished(micro, divisor=16.0)[0]) < CLOSE


def test_clipping_is_by_the_global_norm_after_the_division():
    micro = [arrays(i) for i in range(4)]
    wanted, norm = finished(micro, max_norm=2.0)
    accumulator, got = run(micro, 4, max_norm=2.0)
    assert largest_error(got, wanted) < CLOSE
    assert abs(float(accumulator.norm) - norm) <= 2 * np.spacing(np.float32(norm))
    assert largest_error(run(micro, 4, max_norm=1e6)[1], finished(micro)[0]) < CLOSE


def test_the_norm_of_values_whose_squares_overflow_float32():
    micro = [arrays(0, scale=1e20)]
    accumulator, _ = run(micro, 1, max_norm=1.0)
    norm = finished(micro)[1]
    assert abs(float(accumulator.norm) - norm) <= 2 * np.spacing(np.float32(norm)) and accumulator.stepped


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_window_that_is_not_finite_is_skipped_and_counted(bad):
    params = parameters()
    optimizer = nn.Adam(params, 1e-2)
    accumulator = FusedAccumulator(optimizer, 2, max_norm=1.0)
    accumulator.step(tensors(arrays(0)))
    accumulator.flush()
    kept = [*params, *optimizer.moment1, *optimizer.moment2, optimizer.global_step, optimizer.beta1_power]
    before = [p.asnumpy().copy() for p in kept]
    grads = arrays(1)
    grads[5][89, 109] = bad
    accumulator.step(tensors(grads))
    accumulator.step(tensors(arrays(2)))
    assert accumulator.updated and not accumulator.stepped and int(accumulator.skipped) == 1
    assert all(np.array_equal(p.asnumpy(), b) for p, b in zip(kept, before, strict=True))
    # The next window starts anew: nothing of the bad one is left.
    accumulator.step(tensors(arrays(3)))
    accumulator.step(tensors(arrays(4)))
    assert accumulator.stepped and int(accumulator.skipped) == 1
    assert all(np.isfinite(p.asnumpy()).all() for p in kept)


def test_a_generic_optimizer_is_not_called_for_a_window_that_is_not_finite():
    params = parameters()
    accumulator = FusedAccumulator(nn.RMSProp(params, 1e-2), 1)
    before, grads = values(params), arrays(0)
    grads[1][0] = math.nan
    accumulator.step(tensors(grads))
    assert not accumulator.stepped and largest_error(values(params), before) == 0.0
    accumulator.step(tensors(arrays(1)))
    assert accumulator.stepped and largest_error(values(params), before) > 0.0


def test_propagate_and_error():
    grads = arrays(0)
    grads[1][0] = math.nan
    accumulator, got = run([grads], 1, nonfinite="propagate")
    assert accumulator.stepped and math.isnan(got[1][0]) and int(accumulator.skipped) == 0
    params = zeros()
    accumulator = sgd(params, 1, nonfinite="error")
    with pytest.raises(RuntimeError, match="not finite; nothing was updated and the window is still open"):
        accumulator.step(tensors(grads))
    assert accumulator.micro_step == 1 and not any(p.any() for p in applied(params))
    accumulator.discard()
    accumulator.step(tensors(arrays(1)))
    assert largest_error(applied(params), arrays(1)) < CLOSE


def test_a_window_of_total_weight_0_updates_nothing():
    params = zeros()
    accumulator = sgd(params, 2)
    grads = arrays(0)
    grads[1][0] = math.nan  # the gradient of a mean over nothing
    accumulator.step(tensors(grads), weight=0)
    accumulator.step(tensors(arrays(1)), weight=0)
    assert accumulator.updated and not accumulator.stepped
    assert not any(p.any() for p in applied(params))
    assert int(accumulator.skipped) == 0 and float(accumulator.norm) == 0.0


@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.bfloat16])
def test_gradients_of_16_bits_are_summed_in_float32(dtype):
    params = zeros(dtype)
    accumulator = sgd(params, 1000)
    # 2048 + 1 is 2048 in float16, and sooner in bfloat16: a sum in 16 bits would stay where it is.
    big, small = ([np.full(shape, x, np.float32) for shape in SHAPES] for x in (2048.0, 1.0))
    accumulator.step(tensors(big, dtype))
    for _ in range(15):
        accumulator.step(tensors(small, dtype))
    assert all(np.all(accumulator.sum.sum_of(i) == 2063.0) for i in range(len(SHAPES)))
    assert accumulator.flush()
    wanted = Tensor(np.float32(-2063.0 / 16)).astype(dtype).astype(mindspore.float32).asnumpy()
    for p in params:
        assert p.dtype == dtype and np.all(p.astype(mindspore.float32).asnumpy() == wanted)


def test_float64_parameters_are_summed_in_float64():
    params = zeros(mindspore.float64)
    accumulator = sgd(params, 2)
    micro = [[g * (1 / 3) for g in arrays(i)] for i in range(2)]
    micro = [[np.asarray(g, np.float64) for g in grads] for grads in micro]
    for grads in micro:
        accumulator.step(tensors(grads))
    assert largest_error(applied(params), finished(micro)[0]) < 1e-14


def test_the_sum_is_bit_equal_to_adding_one_by_one():
    total, micro = GradientSum(parameters()), [arrays(i) for i in range(5)]
    weight = Tensor(np.array([1.0, 1.0, 0.0]))
    wanted = micro[0]
    for i, grads in enumerate(micro):
        total.add(weight, *tensors(grads))
        if i:
            wanted = [a + g for a, g in zip(wanted, grads, strict=True)]
    assert all(np.array_equal(total.sum_of(i), w) for i, w in enumerate(wanted))
    total.clear()
    assert total.micro_batches == 0 and total.sum_of(0) is None


def test_gradients_that_do_not_lie_in_order_in_memory():
    params = [Parameter(Tensor(np.zeros(s, np.float32)), name=f"p{s}") for s in ((40, 30), (7,))]
    accumulator = sgd(params, 1)
    one = Tensor(np.arange(1200, dtype=np.float32).reshape(30, 40))
    two = Tensor(np.arange(14, dtype=np.float32))[::2]
    accumulator.step((one.T, two))
    wanted = [np.arange(1200.0).reshape(30, 40).T, np.arange(0.0, 14.0, 2.0)]
    assert largest_error(applied(params), wanted) == 0.0


def test_grad_shows_the_open_window():
    params = parameters()
    accumulator = sgd(params, 4)
    assert accumulator.grad(params[0]) is None
    micro = [arrays(i) for i in range(3)]
    for grads in micro:
        accumulator.step(tensors(grads))
    wanted = finished(micro)[0]
    for p, w in zip(params, wanted, strict=True):
        shown = accumulator.grad(p)
        assert shown.shape == p.shape and np.allclose(shown.asnumpy(), w, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="holds no such parameter: other"):
        accumulator.grad(Parameter(Tensor(np.zeros(1, np.float32)), name="other"))


def test_accumulation_steps_change_between_windows_only():
    accumulator = sgd(parameters(), 2)
    accumulator.step(tensors(arrays(0)))
    with pytest.raises(
        RuntimeError, match=r"cannot change while a window holds 1 .* flush\(\) or discard\(\)"
    ):
        accumulator.accumulation_steps = 3
    assert accumulator.accumulation_steps == 2
    accumulator.discard()
    accumulator.accumulation_steps = 1
    accumulator.step(tensors(arrays(0)))
    assert accumulator.updated


def test_a_checkpoint_in_mid_window_continues_bit_for_bit(tmp_path):
    def make():
        return FusedAccumulator(nn.Adam(parameters(), 1e-2), 3, max_norm=1.0)

    through, first, second = make(), make(), make()
    micro = [arrays(i) for i in range(9)]
    for grads in micro:
        through.step(tensors(grads))
    for grads in micro[:4]:
        first.step(tensors(grads))
    file = str(tmp_path / "middle.ckpt")
    mindspore.save_checkpoint(first, file)
    missing, unused = mindspore.load_param_into_net(second, mindspore.load_checkpoint(file))
    assert not missing and not unused and second.micro_step == 1
    for grads in micro[4:]:
        second.step(tensors(grads))
    for a, b in zip(second.parameters, through.parameters, strict=True):
        assert np.array_equal(a.asnumpy(), b.asnumpy())
    assert int(second.optimizer.global_step.asnumpy()[0]) == 3
    assert second.outcome.number(operators.NORM) == through.outcome.number(operators.NORM)
