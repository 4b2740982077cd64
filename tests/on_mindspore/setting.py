"""What the tests share: parameters, gradients, and a window in float64 that knows nothing of fastaccum."""

from __future__ import annotations

import math

import numpy as np
from mindspore import Parameter, Tensor

# One element, a strand and its neighbours, a 0-d parameter, a matrix; more than 10 000 elements in all.
SHAPES = ((1,), (511,), (16, 32), (513,), (), (90, 110), (3, 1, 5, 5))


def arrays(seed, shapes=SHAPES, scale=1.0):
    rng = np.random.default_rng(seed)
    return [np.float32(scale) * rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def parameters(seed=100, shapes=SHAPES, dtype=None):
    tensors = [Tensor(a) if dtype is None else Tensor(a).astype(dtype) for a in arrays(seed, shapes)]
    return [Parameter(t, name=f"p{i}") for i, t in enumerate(tensors)]


def zeros(dtype=None):
    """Parameters at 0, from which an update by SGD with learning rate 1 takes exactly the gradient."""
    tensors = [Tensor(np.zeros(shape, np.float32)) for shape in SHAPES]
    tensors = tensors if dtype is None else [t.astype(dtype) for t in tensors]
    return [Parameter(t, name=f"p{i}") for i, t in enumerate(tensors)]


def tensors(values, dtype=None):
    return tuple(Tensor(v) if dtype is None else Tensor(v).astype(dtype) for v in values)


def values(params):
    """Copies: MindSpore's asnumpy() is a view of what the next update writes."""
    return [p.asnumpy().astype(np.float64) for p in params]


def finished(grads, weights=None, max_norm=math.inf, divisor=None):
    """The window's gradient in float64: mean by the total weight, then clipped; and its norm."""
    weights = [1.0] * len(grads) if weights is None else weights
    total = [
        sum(w * np.asarray(g, np.float64) for w, g in zip(weights, each, strict=True))
        for each in zip(*grads, strict=True)
    ]
    total = [t / (sum(weights) if divisor is None else divisor) for t in total]
    norm = math.sqrt(sum(float((t * t).sum()) for t in total))
    return [t * min(1.0, max_norm / (norm + 1e-6)) for t in total], norm


def largest_error(got, wanted):
    return max(float(np.max(np.abs(a - b))) for a, b in zip(got, wanted, strict=True))
