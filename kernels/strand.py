"""What the kernels share: the index space, pointer entries, rounding, the one order of summation.

A strand is 512 consecutive elements of the flat index space, seen as 16 rows of 32 lanes; a program
works on a chunk of 16 strands, each in its own segment. Every program walks 16 rows with one mask per
strand, so that accesses stay 128 bits wide, and then the one row of each strand that is not full. The
rows are unrolled (UNROLLED) where that is worth its compile time.

No product is ever fused with a sum (``enable_fp_fusion=False`` at every launch), float32 divides and
takes roots by the IEEE instructions, and bfloat16 is made with integers: the interpreter truncates.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

LANES = tl.constexpr(32)
STRANDS = tl.constexpr(16)
STRAND = tl.constexpr(512)
PER_CHUNK = 16  # strands, for the host

# Tags of pointer entries: bits 56 to 58.
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
FLOAT64 = tl.constexpr(4)
PRESENT = tl.constexpr(1 << 62)
TAGS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
EVERY_DTYPE = (1, 2, 3, 4)
HAS_FLOAT64 = 1 << 4  # of a set of tags

# How elements join.
TWO = tl.constexpr(0)
ONE = tl.constexpr(1)
INF = tl.constexpr(2)
POWER = tl.constexpr(3)

# Columns of the hyper-parameter table and of the per-parameter scalars, and the flags.
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
EPS = tl.constexpr(3)
WEIGHT_DECAY = tl.constexpr(4)
MOMENTUM = tl.constexpr(5)
DAMPENING = tl.constexpr(6)
MAX_VALUE = tl.constexpr(7)
NORM_GROUP = tl.constexpr(8)
HYPER_FLAGS = tl.constexpr(9)
STEP_SIZE = tl.constexpr(0)
INV_BIAS2_SQRT = tl.constexpr(1)
FIRST = tl.constexpr(2)
LR_NOW = tl.constexpr(3)
SCALAR_COLUMNS = tl.constexpr(4)
DECOUPLED = tl.constexpr(1)
AMSGRAD = tl.constexpr(2)
MAXIMIZE = tl.constexpr(4)
NESTEROV = tl.constexpr(8)


# ------------------------------------------------------------------------------------- for the host


def tag_set(tags: Iterable[int]) -> int:
    """The dtypes that may occur in a table's row as a number: bit t for tag t; 0 is no tensor."""
    bits = 0
    for tag in tags:
        bits |= 1 << tag
    return bits & ~1


def tag_sets(dtypes: Sequence[Iterable[int]] | None, rows: int) -> list[int]:
    """One number per row; None stands for every dtype, which is right and slow."""
    if dtypes is None:
        dtypes = [EVERY_DTYPE] * rows
    if len(dtypes) != rows:
        raise ValueError(f"dtypes must hold the tags of {rows} rows, got {len(dtypes)}")
    return [tag_set(tags) for tags in dtypes]


def real_types(types: Sequence[int], deciding: Sequence[int]) -> list[tuple[Any, list[int]]]:
    """The launches that a set of dtypes needs: the arithmetic of each and its rows' tag sets.

    A strand's arithmetic is float64 if any of the ``deciding`` rows is, else float32; it is a constant
    of a kernel, which leaves the other strands alone.
    """
    doubles = [types[i] & HAS_FLOAT64 for i in deciding]
    launches: list[tuple[Any, list[int]]] = []
    if all(types[i] & ~HAS_FLOAT64 for i in deciding):
        single = [t & ~HAS_FLOAT64 if i in deciding else t for i, t in enumerate(types)]
        launches.append((tl.float32, single))
    if any(doubles):
        launches.append((tl.float64, list(types)))
    return launches


def unrolled(aligned: bool, *types: int) -> bool:
    """Whether a kernel's 16 rows are unrolled: not where they would be scalar accesses or branches.

    With several dtypes in a row of a table, the unrolled kernel takes a minute to compile.
    """
    return aligned and all(t & (t - 1) == 0 for t in types)


def norm_kind(norm_type: float) -> int:
    """The constant that stands for a norm type."""
    return {2.0: TWO.value, 1.0: ONE.value, math.inf: INF.value}.get(norm_type, POWER.value)


def double_bits(value: float) -> int:
    """A float64 as an integer: a Python float would reach the kernel as float32."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels see it: bfloat16 as integers."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@functools.cache
def one(device: torch.device) -> torch.Tensor:
    """The factor that stands for none."""
    return torch.ones((), dtype=torch.float64, device=device)


def launch(
    kernel: Any, programs: int, device: torch.device, *args: Any, num_warps: int = 4, **constants: Any
) -> None:
    """Launches on the tensors' device, which need not be the current one."""
    if not programs:
        return
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)


# --------------------------------------------------------------------------------------- in kernels


@triton.jit
def double_of(bits):
    """The opposite of double_bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def tag_of(entry):
    """What a pointer entry points to; 0 is nothing."""
    return ((entry >> 56) & 7).to(tl.int32)


@triton.jit
def at_strand(entry, start):
    """The entry moved to the strand's first element; one without a tensor stays without."""
    tag = tag_of(entry)
    return entry + start * tl.where(tag == FLOAT64, 8, tl.where(tag == FLOAT32, 4, 2))


@triton.jit
def locate(strand_segment, segments):
    """The chunk's strands, as [16] vectors.

    Returns each strand's number, whether it lies in a segment, the segment (0 if not), where it starts
    within the segment, and how many of the segment's elements are left from there (0 if none).
    """
    strand = tl.program_id(0).to(tl.int64) * STRANDS + tl.arange(0, STRANDS)
    segment = tl.load(strand_segment + strand).to(tl.int64)
    inside = segment >= 0
    segment = tl.where(inside, segment, 0)
    start = strand * STRAND - tl.load(segments + segment * 2, mask=inside, other=0)
    left = tl.load(segments + segment * 2 + 1, mask=inside, other=0) - start
    return strand, inside, segment, start, tl.where(inside, left, 0)


@triton.jit
def full_row(r, left):
    """Places in the strand and the mask of row r, off where the strand does not have all of it."""
    return (tl.arange(0, LANES) + r * LANES)[None, :], (left >= r * LANES + LANES)[:, None]


@triton.jit
def ragged_row(left):
    """The same of the one row of each strand that is not full, if there is one.

    It comes last and holds the last elements of its lanes, so the order of summation is kept.
    """
    at = (left // LANES * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    return at, (at < left[:, None]) & (at < STRAND)


@triton.jit
def widen(x, TAG: tl.constexpr, REAL: tl.constexpr):
    """Loaded values as REAL; exact but for float64 to float32."""
    if TAG == BFLOAT16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TAG == FLOAT16:
        x = x.to(tl.float32)
    return x.to(REAL)


@triton.jit
def narrow(x, TAG: tl.constexpr):
    """Values to be stored, rounded to nearest even; bfloat16 as int16, float64 by way of float32."""
    if TAG == FLOAT64:
        x = x.to(tl.float64)
    else:
        x = x.to(tl.float32)
        if TAG == FLOAT16:
            x = x.to(tl.float16)
        elif TAG == BFLOAT16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            x = tl.where(nan, (bits >> 16) | 0x40, rounded).to(tl.int16)
    return x


@triton.jit
def pointer(entry, POINTER: tl.constexpr, ALIGNED: tl.constexpr):
    """The addresses of the strands' first elements, without the tags."""
    first = (entry & 0x00FFFFFFFFFFFFFF).to(tl.pointer_type(POINTER))
    if ALIGNED:  # a promise, not a wish: without it the accesses are scalar
        first = tl.multiple_of(first, 16)
    return first


@triton.jit
def load_tag(
    entry, at, mask, TAG: tl.constexpr, POINTER: tl.constexpr, REAL: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The elements of the strands whose entry has this tag, 0 elsewhere."""
    mine = (tag_of(entry) == TAG)[:, None]
    x = tl.load(pointer(entry, POINTER, ALIGNED)[:, None] + at, mask=mask & mine, other=0)
    return widen(x, TAG, REAL)


@triton.jit
def load_entry(entry, at, mask, TYPES: tl.constexpr, REAL: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements of each strand as REAL [16, 32], 0 where there is no tensor or the mask is off.

    TYPES is a tag_set: only these dtypes are compiled in.
    """
    x = tl.zeros((STRANDS, LANES), REAL)
    tag = tag_of(entry)[:, None]
    if TYPES & 2:
        x = load_tag(entry, at, mask, FLOAT32, tl.float32, REAL, ALIGNED)
    if TYPES & 4:
        y = load_tag(entry, at, mask, BFLOAT16, tl.int16, REAL, ALIGNED)
        x = y if TYPES & 3 == 0 else tl.where(tag == BFLOAT16, y, x)
    if TYPES & 8:
        y = load_tag(entry, at, mask, FLOAT16, tl.float16, REAL, ALIGNED)
        x = y if TYPES & 7 == 0 else tl.where(tag == FLOAT16, y, x)
    if TYPES & 16:
        y = load_tag(entry, at, mask, FLOAT64, tl.float64, REAL, ALIGNED)
        x = y if TYPES & 15 == 0 else tl.where(tag == FLOAT64, y, x)
    return x


@triton.jit
def store_tag(entry, at, x, mask, TAG: tl.constexpr, POINTER: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes the strands whose entry has this tag."""
    mine = (tag_of(entry) == TAG)[:, None]
    tl.store(pointer(entry, POINTER, ALIGNED)[:, None] + at, narrow(x, TAG), mask=mask & mine)


@triton.jit
def store_entry(entry, at, x, mask, TYPES: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes [16, 32] values to each strand, rounded to its dtype; nothing where there is no tensor."""
    if TYPES & 2:
        store_tag(entry, at, x, mask, FLOAT32, tl.float32, ALIGNED)
    if TYPES & 4:
        store_tag(entry, at, x, mask, BFLOAT16, tl.int16, ALIGNED)
    if TYPES & 8:
        store_tag(entry, at, x, mask, FLOAT16, tl.float16, ALIGNED)
    if TYPES & 16:
        store_tag(entry, at, x, mask, FLOAT64, tl.float64, ALIGNED)


@triton.jit
def contribution(x, power, scale, NORM: tl.constexpr):
    """What a float64 element adds to its norm."""
    if NORM == TWO:
        return x * x
    elif NORM == POWER:
        return tl.exp2(tl.log2(tl.abs(x) / scale) * power)
    else:
        return tl.abs(x)


@triton.jit
def join(a, b, NORM: tl.constexpr):
    """Two contributions in one; the maximum keeps a NaN, where max instructions drop it."""
    if NORM == INF:
        return tl.where((a > b) | (a != a), a, b)
    else:
        return a + b


@triton.jit
def fold_last(x, AXIS: tl.constexpr, NORM: tl.constexpr):
    """Joins pairs: the last axis, AXIS, has two elements, so there is only one possible order."""
    if NORM == INF:
        nan = tl.max((x != x).to(tl.int32), axis=AXIS) != 0
        largest = tl.max(tl.where(x != x, 0.0, x), axis=AXIS)
        return tl.where(nan, float("nan"), largest)
    else:
        return tl.sum(x, axis=AXIS)


@triton.jit
def fold_chunk(x, NORM: tl.constexpr):
    """Adjacent lanes, then adjacent strands, of [16, 32] running sums: one number."""
    x = tl.reshape(x, (STRANDS, 2, 2, 2, 2, 2))
    x = fold_last(x, 5, NORM)
    x = fold_last(x, 4, NORM)
    x = fold_last(x, 3, NORM)
    x = fold_last(x, 2, NORM)
    x = fold_last(x, 1, NORM)
    x = tl.reshape(x, (2, 2, 2, 2))
    x = fold_last(x, 3, NORM)
    x = fold_last(x, 2, NORM)
    x = fold_last(x, 1, NORM)
    return fold_last(x, 0, NORM)


@triton.jit
def not_finite(x):
    """1 where a value is NaN or infinite."""
    return ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)


@triton.jit
def store_partial(partials, row_stride, sums, bad, NORM: tl.constexpr, FLAGS: tl.constexpr):
    """Writes a chunk's sum and whether it holds a value that is not finite.

    Without FLAGS the sum says so itself: 8192 squares of finite float32 values are finite in float64.
    """
    chunk = tl.program_id(0).to(tl.int64)
    total = fold_chunk(sums, NORM)
    if FLAGS:
        flag = tl.max(tl.max(bad, axis=1), axis=0)
    else:
        flag = not_finite(total)
    tl.store(partials + chunk, total)
    tl.store(partials + row_stride + chunk, flag.to(tl.float64))


@triton.jit
def negative(x):
    """Minus x; Triton's own minus may be 0 - x, which has the wrong sign at 0."""
    return x * -1.0


@triton.jit
def clamp(x, limit):
    """Between -limit and limit; NaN stays."""
    lowest = negative(limit)
    return tl.where(x > limit, limit, tl.where(x < lowest, lowest, x))


@triton.jit
def divide(a, b):
    """IEEE division: `/` is one only for float64."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def square_root(x):
    """IEEE square root: tl.sqrt is one only for float64."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


# -------------------------------------------------------------------------------------- updates


@triton.jit
def load_lr(entry, lr, mask):
    """The learning rates that are tensors, where they are; else lr."""
    is_single = mask & (tag_of(entry) == FLOAT32)
    is_double = mask & (tag_of(entry) == FLOAT64)
    single = tl.load(pointer(entry, tl.float32, False), mask=is_single, other=0.0)
    double = tl.load(pointer(entry, tl.float64, False), mask=is_double, other=0.0)
    return tl.where(is_double, double, tl.where(is_single, single.to(tl.float64), lr))


@triton.jit
def hyper_of(hyper, COLUMN: tl.constexpr, mask):
    """A column of the strands' rows of hyper-parameters; hyper points to the rows."""
    return tl.load(hyper + COLUMN, mask=mask, other=0.0)


@triton.jit
def scalar_of(scalars, COLUMN: tl.constexpr, mask):
    """A column of the strands' rows of scalars; scalars points to the rows."""
    return tl.load(scalars + COLUMN, mask=mask, other=0.0)


@triton.jit
def locate_update(
    table, row_stride, grads, hyper, hyper_stride, scalars, factor, segment, inside, start,
    REAL: tl.constexpr,
):  # fmt: skip
    """What an update needs to know of each strand, as [16] vectors (the last two [16, 1]).

    Returns the entries of parameter and gradient (moved to the strand), pointers to the rows of hyper
    and scalars, whether this launch updates the strand, its options, and what its gradient is
    multiplied by and clamped to.
    """
    param = tl.load(table + segment, mask=inside, other=0)
    grad = tl.load(grads + segment, mask=inside, other=0)
    inside = inside & (tag_of(param) != 0) & (tag_of(grad) != 0)
    double = (tag_of(param) == FLOAT64) | (tag_of(grad) == FLOAT64)
    inside = inside & (double == (REAL == tl.float64))
    meta = tl.load(table + 5 * row_stride + segment, mask=inside, other=0)
    hyper = hyper + (meta & 0xFFFFFFFF) * hyper_stride
    scalars = scalars + (meta >> 32) * SCALAR_COLUMNS
    flags = hyper_of(hyper, HYPER_FLAGS, inside).to(tl.int32)
    norm_group = hyper_of(hyper, NORM_GROUP, inside).to(tl.int64)
    by = tl.load(factor + norm_group, mask=inside, other=0.0)
    by = tl.where((flags & MAXIMIZE) != 0, negative(by), by).to(REAL)[:, None]
    limit = hyper_of(hyper, MAX_VALUE, inside).to(REAL)[:, None]
    return at_strand(param, start), at_strand(grad, start), hyper, scalars, inside, flags, by, limit


@triton.jit
def row_entry(table, row_stride, ROW: tl.constexpr, segment, mask, start):
    """The strands' entries of a row of the table."""
    return at_strand(tl.load(table + ROW * row_stride + segment, mask=mask, other=0), start)


@triton.jit
def finished(g, by, limit):
    """The gradient that the update sees: factor, clamp, sign."""
    return clamp(g * by, limit)


@triton.jit
def store_copy(copy, param, at, p, mask, COPY: tl.constexpr, PARAM: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes the parameter, as it was stored, to its copy of another dtype."""
    if COPY:
        tag = tag_of(param)[:, None]
        if PARAM & 4:
            p = tl.where(tag == BFLOAT16, widen(narrow(p, BFLOAT16), BFLOAT16, p.dtype), p)
        if PARAM & 8:
            p = tl.where(tag == FLOAT16, widen(narrow(p, FLOAT16), FLOAT16, p.dtype), p)
        if PARAM & 2:
            p = tl.where(tag == FLOAT32, widen(narrow(p, FLOAT32), FLOAT32, p.dtype), p)
        store_entry(copy, at, p, mask, COPY, ALIGNED)


def launch_update(
    kernel: Any,
    strand_segment: torch.Tensor,
    segments: torch.Tensor,
    table: torch.Tensor,
    grads: torch.Tensor,
    hyper: torch.Tensor,
    scalars: torch.Tensor,
    factor: torch.Tensor,
    skip: torch.Tensor,
    dtypes: Sequence[Iterable[int]] | None,
    aligned: bool,
) -> None:
    """Launches an update once for each arithmetic that occurs."""
    types = tag_sets(dtypes, 6)
    for real, (param, state0, state1, state2, copy, grad) in real_types(types, (0, 5)):
        launch(
            kernel,
            strand_segment.numel() // PER_CHUNK,
            table.device,
            strand_segment,
            segments,
            table,
            table.stride(0),
            grads,
            hyper,
            hyper.stride(0),
            scalars,
            factor,
            skip,
            REAL=real,
            PARAM=param,
            STATE0=state0,
            STATE1=state1,
            STATE2=state2,
            COPY=copy,
            GRAD=grad,
            ALIGNED=aligned,
            UNROLLED=unrolled(aligned, param, state0, state1, state2, copy, grad),
        )
