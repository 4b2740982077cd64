"""Calls the operators that MindSpore loads as it calls them: through their C functions, without MindSpore."""

import ctypes
import math
from pathlib import Path

import numpy as np

import fastaccum
from fastaccum.layout import Layout

LIBRARY = Path(fastaccum.__file__).parent / "libfastaccum_mindspore.so"
SIZES = (1, 511, 512, 513, 8192, 20_001, 7)
LR, BETA1, BETA2, EPS, DECAY, MOMENTUM, DAMPENING, MAX_VALUE, NORM_GROUP, FLAGS = range(10)


def call(name, *arrays, dtypes=None):
    """Calls an operator; the output is the last array."""
    library = ctypes.CDLL(str(LIBRARY))
    n = len(arrays)
    names = dtypes or [str(a.dtype) for a in arrays]
    pointers = (ctypes.c_void_p * n)(*[a.ctypes.data for a in arrays])
    ndims = (ctypes.c_int * n)(*[a.ndim for a in arrays])
    rows = [(ctypes.c_int64 * max(a.ndim, 1))(*a.shape) for a in arrays]
    shapes = (ctypes.POINTER(ctypes.c_int64) * n)(
        *[ctypes.cast(row, ctypes.POINTER(ctypes.c_int64)) for row in rows]
    )
    words = (ctypes.c_char_p * n)(*[name.encode() for name in names])
    return getattr(library, f"fastaccum_{name}")(n, pointers, ndims, shapes, words, None, None)


def refusal():
    text = ctypes.create_string_buffer(1024)
    ctypes.CDLL(str(LIBRARY)).fastaccum_last_refusal(text, ctypes.c_size_t(1024))
    return text.value.decode()


def done():
    return np.zeros(1, np.float32)


class Window:
    """The tables of one window, NaN wherever nothing may be read."""

    def __init__(self, sizes=SIZES, dtype=np.float32):
        layout = Layout.of(sizes)
        self.layout, self.n = layout, len(sizes)
        self.segments = np.array(list(zip(layout.offsets, layout.numels, strict=True)), np.int64)
        self.window = np.zeros(3)
        self.present = np.zeros(self.n, np.uint8)
        self.partials = np.full((2, layout.n_chunks), np.nan)
        self.buffer = np.full(layout.numel, np.nan, dtype)
        self.outcome = np.zeros(4)
        self.scalars = np.full((self.n, 4), np.nan)
        self.step = np.zeros(1, np.int32)

    def accumulate(self, grads, weight=(1.0, 1.0, 0.0), dtypes=None):
        tables = (self.segments, np.array(weight), self.window, self.present, self.partials, self.buffer)
        names = None
        if dtypes is not None:
            names = [*(str(t.dtype) for t in tables), *dtypes, "float32"]
        return call("accumulate", *tables, *grads, done(), dtypes=names)

    def finish(self, hyper, max_norm=math.inf, loss_scale=1.0, mean=1.0, skip_nonfinite=1.0):
        control = np.array([max_norm, loss_scale, mean, skip_nonfinite])
        tables = (control, hyper, self.window, self.partials, self.outcome, self.scalars, self.step)
        return call("finish", *tables, done())

    def sums(self):
        return [self.buffer[o : o + n] for o, n in zip(self.layout.offsets, self.layout.numels, strict=True)]

    def update(self, name, hyper, *lists):
        tables = (self.segments, hyper, self.scalars, self.outcome, self.buffer)
        return call(name, *tables, *[a for arrays in lists for a in arrays], done())


def gradients(seed, sizes=SIZES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n).astype(dtype) for n in sizes]


def hyper_rows(n, **columns):
    rows = np.zeros((n, 10))
    rows[:, MAX_VALUE] = math.inf
    for name, value in columns.items():
        rows[:, globals()[name]] = value
    return rows
