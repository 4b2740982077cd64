"""The core's ops as MindSpore operators: their arguments, in order.

Each is a ``mindspore.ops.Custom`` primitive compiled ahead of time, for direct use in PyNative mode and in
graphs. Those that change parameters in place are marked so, which keeps their order in a graph. Words: a
*segment* is one parameter's place in the flat buffer (:mod:`fastaccum.layout`); there are ``n`` of them and
``c`` chunks. Tables are tensors of exactly the dtype given here; lists of ``n`` tensors hold float32,
bfloat16, float16 or float64 in any mixture. An operator that refuses its arguments changes nothing; MindSpore
raises ``RuntimeError`` then, and :func:`fastaccum.mindspore.library.last_refusal` and the error output tell
why.

``accumulate(segments, weight, window, present, partials, buffer, *gradients)``
    adds a micro-batch, and sums the squares of the result chunk by chunk.
``clear(window, present)``
    ends the window; the buffer is not touched, as the next window overwrites it.
``finish(control, hyper, window, partials, outcome, scalars, step[, beta1_power, beta2_power])``
    decides: norm, clip factor, skip, step count, bias corrections; powers of the first row's betas.
``adam(segments, hyper, scalars, outcome, buffer, *params, *exp_avgs, *exp_avg_sqs[, *max_exp_avg_sqs])``
    updates, unless the outcome says skip.
``sgd(segments, hyper, scalars, outcome, buffer, *params, *momentum_buffers[, *first_step_marks])``
    the same.
``finished(segments, outcome, buffer)``
    returns the finished gradients: averaged and clipped.

============  =======  ===========  ========================================================================
table         dtype    shape        content
============  =======  ===========  ========================================================================
segments      int64    [n, 2]       offset, number of elements
weight        float64  [3]          factor of the gradients, what they count for, 1 if that was given
window        float64  [3]          micro-batches held, their total weight, 1 if it was given
present       uint8    [n]          1 where the buffer holds a gradient of this window
partials      float64  [2, c]       sum of squares, 1 where not finite
buffer        float*   [elements]   the sum of the gradients
control       float64  [4]          max_norm (inf: none), loss scale, 1 for the mean, 1 to skip non-finite
hyper         float64  [n, 10]      lr, beta1, beta2, eps, weight decay, momentum, dampening, inf, 0, flags
outcome       float64  [4]          norm, factor, 1 if the update must not happen, updates skipped so far
scalars       float64  [n, 4]       scratch of the update
step          int32    one element  updates applied
powers        float32  one element  beta1 ** step, beta2 ** step
============  =======  ===========  ========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import ops

from fastaccum.mindspore import library

WEIGHT_COLUMNS, WINDOW_COLUMNS, CONTROL_COLUMNS, OUTCOME_COLUMNS = 3, 3, 4, 4
HYPER_COLUMNS, SCALAR_COLUMNS = 10, 4
MICRO_BATCHES, TOTAL_WEIGHT, WEIGHTED = range(3)  # of window
NORM, FACTOR, SKIP, SKIPPED = range(4)  # of outcome
# Flags of a hyper row.
DECOUPLED, AMSGRAD, MAXIMIZE, NESTEROV, EPSILON_HAT, UNCORRECTED = 1, 2, 4, 8, 16, 32


def _operator(name: str) -> ops.Custom:
    operator = ops.Custom(f"{library.path()}:fastaccum_{name}", (1,), mindspore.float32, func_type="aot")
    operator.add_prim_attr("side_effect_mem", True)
    return operator


def accumulate() -> ops.Custom:
    """The operator of that name."""
    return _operator("accumulate")


def clear() -> ops.Custom:
    """The operator of that name."""
    return _operator("clear")


def finish() -> ops.Custom:
    """The operator of that name."""
    return _operator("finish")


def adam() -> ops.Custom:
    """The operator of that name."""
    return _operator("adam")


def sgd() -> ops.Custom:
    """The operator of that name."""
    return _operator("sgd")


def finished(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> ops.Custom:
    """The operator of that name, for gradients of these shapes and MindSpore dtypes.

    A shape must have a dimension: MindSpore aborts the process where an output of several is 0-d.
    """
    operator = ops.Custom(
        f"{library.path()}:fastaccum_finished",
        tuple(tuple(shape) for shape in shapes),
        tuple(dtypes),
        func_type="aot",
    )
    operator.add_prim_attr("side_effect_mem", True)
    return operator
