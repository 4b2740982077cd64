"""One table of the ops, for tests, benchmarks and the README: how to call each, what it must do.

A case makes its own arguments (:attr:`OpCase.make`); its variants are options of that function,
each with a line that a person can read. Tensors lie in larger storages with canaries on both sides,
so a write beside one shows. Nothing here but torch and fastaccum is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastaccum import dispatch, ops, reference
from fastaccum.layout import STRAND, Layout

# Around a vector, a strand and a chunk, and a prime.
GRID = (0, 1, 7, 31, 32, 33, 511, 512, 513, 8191, 8192, 8193, 100_003)
MARGIN = 32  # elements on both sides of a tensor: keeps the alignment of an unshifted one
CANARY = -77.0
INF = math.inf

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call an op.

    Attributes:
        desc: for people.
        options: keyword arguments of the case's ``make`` and ``bytes``.
        exact: bit for bit what the reference gives; else to a relative 1e-12.
    """

    desc: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A call that must raise and change nothing.

    Attributes:
        argument: the argument that is wrong.
        desc: what is wrong with it.
        change: makes the wrong value of the right one.
        exception: what must be raised.
        match: regular expression for its message.
        options: of ``make``.
    """

    argument: str
    desc: str
    change: Callable[[Any], Any]
    exception: type[Exception]
    match: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OpCase:
    """What there is to know about an op.

    Attributes:
        name: of the op, in ``fastaccum.ops``.
        make: ``make(device, dtype, n, seed, **options)`` gives args and kwargs; ``n`` is a size
            or a list of sizes.
        mutates: the arguments that are written.
        bumps: those of them whose version counters the public function moves.
        bytes: ``bytes(n, dtype, **options)``: read and written in memory, for ``n`` of ``unit``.
        dtypes: of the tensors.
        variants: the first is the usual one.
        errors: refusals of the public function.
        raw_errors: of the bare op, which must not touch memory that is not its own.
        changing: arguments whose value changes from step to step, without a recompilation.
        unit: what ``n`` counts.
        grid: the sizes worth testing.
    """

    name: str
    make: Callable[..., Arguments]
    mutates: tuple[str, ...]
    bumps: tuple[str, ...]
    bytes: Callable[..., float]
    dtypes: tuple[torch.dtype, ...]
    variants: tuple[Variant, ...]
    errors: tuple[Refusal, ...]
    raw_errors: tuple[Refusal, ...]
    changing: tuple[str, ...]
    unit: str = "elements"
    grid: tuple[int, ...] = GRID

    @property
    def public(self) -> Callable[..., None]:
        """The checked function."""
        return getattr(ops, self.name)

    @property
    def reference(self) -> Callable[..., None]:
        """The specification."""
        return getattr(reference, self.name)

    @property
    def raw(self) -> Any:
        """The registered op."""
        return getattr(torch.ops.fastaccum, self.name).default

    def of(self, backend: str) -> Callable[..., None]:
        """A backend's function."""
        return getattr(dispatch.load(backend), self.name)

    def skip(self, backend: str, device: str = "cpu") -> str | None:
        """Why a backend cannot run this case here."""
        return "; ".join(dispatch.reasons_against(backend, torch.device(device))) or None

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        names = [argument.name for argument in self.raw._schema.arguments]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def split(self, named: Mapping[str, Any]) -> Arguments:
        """The opposite of :meth:`named`."""
        kinds = {name: p.kind for name, p in inspect.signature(self.public).parameters.items()}
        keywords = {k for k, kind in kinds.items() if kind == inspect.Parameter.KEYWORD_ONLY}
        args = tuple(named[name] for name in kinds if name in named and name not in keywords)
        return args, {k: v for k, v in named.items() if k in keywords}


# ----------------------------------------------------------------------------------- making tensors


@functools.cache
def _pool() -> Tensor:
    """A prime number of random values: a test takes its own from anywhere in it."""
    random, n = torch.Generator().manual_seed(1), 1_000_003
    magnitude = torch.exp2(torch.rand(n, generator=random, dtype=torch.float64) * 16 - 12)
    return torch.randn(n, generator=random, dtype=torch.float64) * magnitude


class Maker:
    """Random tensors in storages with canaries.

    Args:
        device: where.
        seed: same seed, same values.
        shift: elements by which each tensor is moved off its alignment.
        order: ``rows``, ``columns`` (2-d, transposed) or ``channels_last``: how the dimensions lie.
    """

    def __init__(self, device: str, seed: int, shift: int = 0, order: str = "rows") -> None:
        self.device, self.shift, self.order = device, shift, order
        self.random = torch.Generator().manual_seed(seed)

    def numbers(self, n: int) -> Tensor:
        """Signed values of many magnitudes, so that every rounding shows."""
        pool = _pool()
        start = int(torch.randint(len(pool), (), generator=self.random))
        if start + n > len(pool):
            pool = pool.repeat(1 + (start + n) // len(pool))
        return pool[start : start + n]

    def place(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values as a tensor of ``dtype`` between canaries."""
        n = values.numel()
        whole = torch.full((n + 2 * MARGIN,), CANARY, dtype=dtype, device=self.device)
        flat = whole[MARGIN + self.shift : MARGIN + self.shift + n]
        flat.copy_(values)
        if self.order == "columns" and n % 2 == 0:
            return flat.view(2, n // 2).t()
        if self.order == "channels_last" and n % 8 == 0:
            return flat.view(2, 2, 2, n // 8).permute(0, 3, 1, 2)
        return flat

    def signed(self, n: int, dtype: torch.dtype) -> Tensor:
        """A gradient or a parameter."""
        return self.place(self.numbers(n), dtype)

    def positive(self, n: int, dtype: torch.dtype) -> Tensor:
        """A second moment."""
        return self.place(self.numbers(n).abs(), dtype)

    def integers(self, high: int, n: int) -> Tensor:
        """Random numbers below ``high``."""
        return torch.randint(high, (n,), generator=self.random).to(self.device)

    def table(self, values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
        """A small table."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def sizes_of(n: int | Sequence[int]) -> list[int]:
    """A size or a list of sizes as a list."""
    return [n] if isinstance(n, int) else list(n)


def around(n: int) -> list[int]:
    """Sizes with an empty tensor first, in the middle and last."""
    return [0, n, 3, 0, n, 700, 0]


def _segments(maker: Maker, layout: Layout) -> Tensor:
    rows = list(zip(layout.offsets, layout.numels, strict=True))
    return maker.table(rows, torch.int64).view(-1, 2)


def _cycle(dtype: torch.dtype, mixed: bool, count: int) -> list[torch.dtype]:
    kinds = (dtype, *(d for d in ops.DTYPES if d != dtype)) if mixed else (dtype,)
    return list(itertools.islice(itertools.cycle(kinds), count))


# ------------------------------------------------------------------------------------ gather, norm


def make_gather(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    states: str = "a",
    buffer_dtype: torch.dtype | None = torch.float32,
    mixed: bool = False,
    weight: float | None = None,
    kept_weight: float | None = None,
    norm_type: float = 2.0,
    partials: bool = True,
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``gather_``.

    ``states`` says what each segment in turn has: ``a`` a sum in the buffer and a fresh gradient,
    ``o`` a fresh gradient only, ``k`` a kept gradient only, ``b`` both kept and fresh, ``p`` a sum
    only, ``-`` nothing. The buffer holds NaN where no sum is; ``buffer_dtype`` None is ``dtype``.
    """
    maker = Maker(device, seed, shift, order)
    sizes = sizes_of(n)
    layout = Layout.of(sizes)
    state = list(itertools.islice(itertools.cycle(states), len(sizes)))
    dtypes = _cycle(dtype, mixed, len(sizes))
    buffer = Maker(device, seed).place(torch.full((layout.numel,), math.nan), buffer_dtype or dtype)
    for s, offset, numel in zip(state, layout.offsets, sizes, strict=True):
        if s in "ap":
            buffer[offset : offset + numel] = maker.numbers(numel)
    fresh = [k for k, s in enumerate(state) if s in "aob"]
    kept = [k for k, s in enumerate(state) if s in "kb"]
    args = (
        buffer,
        maker.table([s in "ap" for s in state], torch.uint8),
        maker.table([[math.nan] * layout.n_chunks] * 2).view(2, -1) if partials else None,
        _segments(maker, layout),
        [maker.signed(sizes[k], dtypes[k]) for k in fresh],
        maker.table(fresh, torch.int64),
        [maker.signed(sizes[k], dtypes[k]) for k in kept],
        maker.table(kept, torch.int64),
    )
    return args, {
        "weight": None if weight is None else maker.table(weight),
        "kept_weight": None if kept_weight is None else maker.table(kept_weight),
        "norm_type": norm_type,
    }


def bytes_gather(
    n: int,
    dtype: torch.dtype,
    *,
    states: str = "a",
    buffer_dtype: torch.dtype | None = torch.float32,
    **_: Any,
) -> float:
    """Add: buffer read and written, gradient read. The norm of what is at hand costs nothing."""
    b, g = (buffer_dtype or dtype).itemsize, dtype.itemsize
    of = {"a": 2 * b + g, "o": b + g, "k": b + g, "b": b + 2 * g, "p": b, "-": 0}
    return n * sum(of[s] for s in states) / len(states)


def make_norm(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    norm_type: float = 2.0,
    scale: float | None = None,
    mixed: bool = False,
    absent: bool = False,
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``norm_``; ``absent``: every third segment has no tensor."""
    maker = Maker(device, seed, shift, order)
    sizes = sizes_of(n)
    layout = Layout.of(sizes)
    dtypes = _cycle(dtype, mixed, len(sizes))
    index = [k for k in range(len(sizes)) if not absent or k % 3]
    args = (
        maker.table([[math.nan] * layout.n_chunks] * 2).view(2, -1),
        _segments(maker, layout),
        [maker.signed(sizes[k], dtypes[k]) for k in index],
        maker.table(index, torch.int64),
    )
    return args, {"norm_type": norm_type, "scale": None if scale is None else maker.table(scale)}


# ----------------------------------------------------------------------------------- end of window


def make_finish(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    max_norm: Sequence[float] = (INF,),
    divisor: float = 1.0,
    weight: float = 1.0,
    norm_type: float = 2.0,
    scale: float | None = None,
    planted: float | None = None,
    skip_nonfinite: bool = True,
    parameters: int | None = 40,
    most: int = 1000,
    lr_tensors: bool = False,
    found_inf: float | None = None,
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``finish_`` for ``n`` chunks; norm groups own two spans each, interleaved.

    Two in three ``parameters`` take part; they have taken 0 to ``most / 2`` steps. None: no counters.
    """
    maker = Maker(device, seed)
    chunks, groups = sum(sizes_of(n)), len(max_norm)
    cuts = [chunks * i // (2 * groups) for i in range(2 * groups + 1)]
    spans = [(i % groups, a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
    partials = torch.stack([maker.numbers(chunks).abs(), torch.zeros(chunks)]).to(device)
    if planted is not None and chunks:
        partials[0, chunks // 2] = planted
        partials[1, chunks // 2] = 1.0
    args = (
        maker.table(CANARY, torch.float32), maker.table([CANARY] * groups),
        maker.table([CANARY] * groups), maker.table(-7, torch.int32), maker.table(41, torch.int64),
        partials,
        maker.table(spans, torch.int64), maker.table(list(max_norm)), maker.table(weight),
        maker.table(divisor),
    )  # fmt: skip
    return args, {
        **(NO_COUNTERS if parameters is None else _counters(maker, parameters, most, lr_tensors)),
        "norm_type": norm_type,
        "scale": None if scale is None else maker.table(scale),
        "skip_nonfinite": skip_nonfinite,
        "found_inf": None if found_inf is None else maker.table(found_inf, F32),
    }


NO_COUNTERS = {
    **dict.fromkeys(("steps", "scalars", "row", "group", "hyper", "lr_groups")),
    "lrs": [],
}


def _counters(maker: Maker, n: int, most: int, lr_tensors: bool) -> dict[str, Any]:
    row = [k for k in range(n) if k % 3 != 1]
    hyper = [hyper_row(), hyper_row(lr=0.0, beta1=0.0, beta2=0.99), hyper_row(lr=3.0, beta1=0.95)]
    lrs = [maker.table(0.07, F32), maker.table([[1e-5]])] if lr_tensors else []
    return {
        "steps": (maker.integers(most, n) - most // 2).clamp(min=0).float(),
        "scalars": maker.table([[CANARY] * ops.SCALAR_COLUMNS] * n).view(-1, ops.SCALAR_COLUMNS),
        "row": maker.table(row, torch.int64),
        "group": maker.integers(len(hyper), len(row)),
        "hyper": maker.table(hyper),
        "lrs": lrs,
        "lr_groups": maker.table([0, 2], torch.int64) if lrs else None,
    }


def hyper_row(
    *,
    lr: float = 1e-2,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    max_value: float = INF,
    norm_group: int = 0,
    decoupled: bool = False,
    amsgrad: bool = False,
    maximize: bool = False,
    nesterov: bool = False,
) -> list[float]:
    """One row of ``hyper``."""
    flags = decoupled + 2 * amsgrad + 4 * maximize + 8 * nesterov
    return [lr, beta1, beta2, eps, weight_decay, momentum, dampening, max_value, norm_group, flags]


# ----------------------------------------------------------------------------------------- scale


def make_scale(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    factors: Sequence[float] = (0.3,),
    max_value: float = INF,
    mixed: bool = False,
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``scale_``; tensors take the factors in turn."""
    maker = Maker(device, seed, shift, order)
    sizes = sizes_of(n)
    dtypes = _cycle(dtype, mixed, len(sizes))
    args = (
        [maker.signed(m, d) for m, d in zip(sizes, dtypes, strict=True)],
        maker.table(list(factors)),
        maker.table([k % len(factors) for k in range(len(sizes))], torch.int64),
    )
    return args, {"max_value": max_value}


def make_scale_into(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    out_dtype: torch.dtype | None = None,
    factors: Sequence[float] = (0.3,),
    max_value: float = INF,
    mixed: bool = False,
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``scale_into_``; ``out_dtype`` None is ``dtype``."""
    (tensors, *tables), kwargs = make_scale(
        device, dtype, n, seed, factors=factors, max_value=max_value, mixed=mixed, shift=shift,
        order=order,
    )  # fmt: skip
    maker = Maker(device, seed + 1, 2 - shift, order)  # out and source are misaligned differently
    out = [maker.signed(t.numel(), out_dtype or dtype) for t in tensors]
    return (out, tensors, *tables), kwargs


# ---------------------------------------------------------------------------------------- updates


def _make_update(
    maker: Maker,
    dtype: torch.dtype,
    n: int | Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    grad_dtype: torch.dtype | None,
    mixed: bool,
    first: bool,
    skip: int,
    factors: Sequence[float],
) -> tuple[list[int], list[Tensor], tuple[Any, ...], list[torch.dtype]]:
    sizes = sizes_of(n)
    dtypes = _cycle(dtype, mixed, len(sizes))
    params = [maker.signed(m, d) for m, d in zip(sizes, dtypes, strict=True)]
    grads = [maker.signed(m, grad_dtype or d) for m, d in zip(sizes, dtypes, strict=True)]
    steps = [1.0 if first else 10.0 + k % 5 for k in range(len(sizes))]
    which = [rows[k % len(rows)] for k in range(len(sizes))]
    # Rows of `scalars` lie in another order than the parameters.
    where = [(7 * k + 3) % len(sizes) for k in range(len(sizes))] if len(sizes) % 7 else range(len(sizes))
    scalars = [[math.nan] * ops.SCALAR_COLUMNS] * len(sizes)
    for k, (t, row) in enumerate(zip(steps, which, strict=True)):
        lr = row.get("lr", 1e-2)
        scalars[where[k]] = [lr / (1 - 0.9**t), 1 / math.sqrt(1 - 0.999**t), float(t == 1), lr]
    tables = (
        grads,
        _segments(maker, Layout.of(sizes)),
        maker.table(list(range(len(sizes))), torch.int64),
        maker.table([k % len(rows) for k in range(len(sizes))], torch.int64),
        maker.table(list(where), torch.int64),
        maker.table([hyper_row(**row) for row in rows]),
        maker.table(scalars).view(-1, ops.SCALAR_COLUMNS),
        maker.table(list(factors)),
        maker.table(skip, torch.int32),
    )
    return sizes, params, tables, dtypes


def _copies(maker: Maker, params: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    return [] if dtype is None else [maker.signed(p.numel(), dtype) for p in params]


def make_adam(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    rows: Sequence[Mapping[str, Any]] = ({"weight_decay": 0.1, "decoupled": True},),
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    copies: torch.dtype | None = None,
    master: bool = False,
    mixed: bool = False,
    skip: int = 0,
    factors: Sequence[float] = (0.3, -0.7),
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``adam_``: tensors take the ``rows`` of hyper in turn."""
    maker = Maker(device, seed, shift, order)
    if master:
        dtype, grad_dtype = (F64 if dtype == F64 else F32), grad_dtype or dtype
    sizes, params, tables, dtypes = _make_update(
        maker, dtype, n, rows, grad_dtype, mixed, False, skip, factors
    )
    kinds = [state_dtype or d for d in dtypes]
    maker.shift = (shift + 1) % 3 if shift else 0  # states lie differently from parameters
    states = [
        [make(m, d) for m, d in zip(sizes, kinds, strict=True)]
        for make in (maker.signed, maker.positive, maker.positive)
    ]
    if not any(row.get("amsgrad") for row in rows):
        states[2] = []
    return (params, *states, _copies(maker, params, copies), *tables), {}


def bytes_adam(
    n: int,
    dtype: torch.dtype,
    *,
    rows: Sequence[Mapping[str, Any]] = ({},),
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    **_: Any,
) -> float:
    """Gradient read; parameter and two states (amsgrad: three) read and written: 28 in float32."""
    p, g, s = dtype.itemsize, (grad_dtype or dtype).itemsize, (state_dtype or dtype).itemsize
    states = 2 + sum(bool(row.get("amsgrad")) for row in rows) / len(rows)
    return n * (g + 2 * p + 2 * s * states)


def make_sgd(
    device: str,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int,
    *,
    rows: Sequence[Mapping[str, Any]] = ({"momentum": 0.9},),
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    copies: torch.dtype | None = None,
    master: bool = False,
    mixed: bool = False,
    first: bool = False,
    skip: int = 0,
    factors: Sequence[float] = (0.3, -0.7),
    shift: int = 0,
    order: str = "rows",
) -> Arguments:
    """Arguments of ``sgd_``; ``first``: the step that fills the (zero) momentum buffers."""
    maker = Maker(device, seed, shift, order)
    if master:
        dtype, grad_dtype = (F64 if dtype == F64 else F32), grad_dtype or dtype
    sizes, params, tables, dtypes = _make_update(
        maker, dtype, n, rows, grad_dtype, mixed, first, skip, factors
    )
    maker.shift = (shift + 1) % 3 if shift else 0
    buffers = [
        maker.place(torch.zeros(m) if first else maker.numbers(m), state_dtype or d)
        for m, d in zip(sizes, dtypes, strict=True)
    ]
    if not any(row.get("momentum") for row in rows):
        buffers = []
    return (params, buffers, _copies(maker, params, copies), *tables), {}


def bytes_sgd(
    n: int,
    dtype: torch.dtype,
    *,
    rows: Sequence[Mapping[str, Any]] = ({"momentum": 0.9},),
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    **_: Any,
) -> float:
    """Gradient read; parameter and, with momentum, its buffer read and written: 20 in float32."""
    p, g, s = dtype.itemsize, (grad_dtype or dtype).itemsize, (state_dtype or dtype).itemsize
    states = sum(bool(row.get("momentum")) for row in rows) / len(rows)
    return n * (g + 2 * p + 2 * s * states)


# ---------------------------------------------------------------------------------------- variants

F32, BF16, F16, F64 = ops.DTYPES

GATHER = (
    Variant("add"),
    Variant("add, weight 0.3", {"weight": 0.3}),
    Variant("add, no norm", {"weight": 0.3, "partials": False}),
    Variant("a few of many, no norm", {"states": "----o---ap-k-b---", "weight": 0.3, "partials": False}),
    Variant("every state, every dtype, no norm", {"states": "-bapko", "mixed": True, "partials": False}),
    Variant("weights 0 select nothing", {"states": "aokb", "weight": 0.0, "kept_weight": 0.0}),
    Variant("overwrite", {"states": "o"}),
    Variant("overwrite, weight 0.3, 1-norm", {"states": "o", "weight": 0.3, "norm_type": 1.0}),
    Variant("kept only", {"states": "k", "kept_weight": 0.7}),
    Variant("kept and fresh", {"states": "b", "weight": 0.3, "kept_weight": 0.7}),
    Variant("kept and fresh, no weights", {"states": "b", "norm_type": INF}),
    Variant("nothing fresh, norm only", {"states": "p"}),
    Variant("no gradient at all", {"states": "-"}),
    Variant("every state, every dtype", {"states": "ab-okp-", "mixed": True, "weight": 0.3}),
    Variant("every state, inf-norm", {"states": "p-aobk", "norm_type": INF, "kept_weight": 0.3}),
    Variant("every state, 1-norm", {"states": "-bapko", "norm_type": 1.0, "weight": -0.3}),
    Variant("buffer of the gradients' dtype", {"states": "ab-okp", "buffer_dtype": None, "weight": 0.3}),
    Variant("bf16 buffer, every dtype", {"states": "abok", "buffer_dtype": BF16, "mixed": True}),
    Variant("fp16 buffer, every dtype", {"states": "abok", "buffer_dtype": F16, "mixed": True}),
    Variant(
        "float64 buffer, every dtype",
        {"states": "abok", "buffer_dtype": F64, "mixed": True, "weight": 0.3, "kept_weight": 0.7},
    ),
)

NORM = (
    Variant("2-norm"),
    Variant("1-norm", {"norm_type": 1.0}),
    Variant("inf-norm", {"norm_type": INF}),
    Variant("2-norm, tensors missing, every dtype", {"absent": True, "mixed": True}),
    Variant("1-norm, tensors missing, every dtype", {"absent": True, "mixed": True, "norm_type": 1.0}),
    Variant("inf-norm, tensors missing, every dtype", {"absent": True, "mixed": True, "norm_type": INF}),
    Variant("0.5-norm", {"norm_type": 0.5, "scale": 40.0}, exact=False),
    Variant("3-norm", {"norm_type": 3.0, "scale": 40.0}, exact=False),
    Variant("7-norm, no scale", {"norm_type": 7.0}, exact=False),
)

FINISH = (
    Variant("one group"),
    Variant("clipped", {"max_norm": (0.5,), "divisor": 3.0}),
    Variant("three groups, one not clipped", {"max_norm": (0.5, INF, 1e9), "divisor": 3.0}),
    Variant("three groups, 1-norm", {"max_norm": (0.5, 2.0, 1e9), "divisor": 0.3, "norm_type": 1.0}),
    Variant("three groups, inf-norm", {"max_norm": (0.5, 2.0, 1e9), "norm_type": INF}),
    Variant("negative divisor", {"max_norm": (0.5, 1e9), "divisor": -3.0}),
    Variant("3-norm", {"max_norm": (0.5, 2.0), "norm_type": 3.0, "scale": 40.0}, exact=False),
    Variant("total weight 0", {"weight": 0.0, "divisor": 0.0}),
    Variant("total weight infinite", {"weight": INF, "divisor": INF}),
    Variant("NaN", {"planted": math.nan, "max_norm": (0.5, INF)}),
    Variant("NaN, inf-norm", {"planted": math.nan, "max_norm": (0.5, INF), "norm_type": INF}),
    Variant("infinite", {"planted": INF, "max_norm": (0.5, INF)}),
    Variant(
        "NaN, updates all the same",
        {"planted": math.nan, "max_norm": (0.5, INF), "skip_nonfinite": False},
    ),
    Variant("found_inf, finite", {"found_inf": 0.0}),
    Variant("found_inf, NaN", {"found_inf": 0.0, "planted": math.nan}),
    Variant(
        "found_inf, NaN, updates all the same",
        {"found_inf": 0.0, "planted": math.nan, "skip_nonfinite": False},
    ),
    Variant("found_inf was told, finite", {"found_inf": 2.0, "skip_nonfinite": False}),
    Variant("no parameters of ours", {"parameters": None}),
    Variant("up to a million steps", {"most": 2_000_000, "parameters": 200}),
    Variant("learning rates that are tensors", {"lr_tensors": True}),
    Variant("2000 parameters", {"parameters": 2000}),
)

SCALE = (
    Variant("factor 0.3"),
    Variant("factor exactly 1", {"factors": (1.0,)}),
    Variant("clamp", {"factors": (0.3, 1.0), "max_value": 0.1}),
    Variant("clamp beyond float32", {"factors": (0.3, 1.0), "max_value": 1e39}),
    Variant("three factors, every dtype", {"factors": (0.3, 1.0, -7.7), "mixed": True}),
)

SCALE_INTO = (
    Variant("factor 0.3"),
    Variant("copy", {"factors": (1.0,)}),
    Variant("to float32", {"out_dtype": F32, "mixed": True, "factors": (0.3, 1.0)}),
    Variant("to bfloat16", {"out_dtype": BF16, "mixed": True, "factors": (0.3, 1.0)}),
    Variant("to float16", {"out_dtype": F16, "mixed": True, "factors": (1e4, 0.3, 1.0)}),
    Variant("to float64, clamp", {"out_dtype": F64, "mixed": True, "max_value": 0.1}),
)


def _adam_options() -> list[Variant]:
    decays = (
        ("no decay", {}),
        ("weight decay, coupled", {"weight_decay": 0.1}),
        ("weight decay, decoupled", {"weight_decay": 0.1, "decoupled": True}),
    )
    variants = []
    for (desc, decay), amsgrad, maximize, clamp in itertools.product(decays, *[(False, True)] * 3):
        row = {
            **decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "max_value": 0.05 if clamp else INF,
        }
        extra = [amsgrad and "amsgrad", maximize and "maximize", clamp and "clamp"]
        variants.append(Variant(", ".join([desc, *filter(None, extra)]), {"rows": [row]}))
    return variants


# Float32 parameters whose 16-bit copies are written in the same pass, whatever the case's dtype.
MASTER = {"master": True, "copies": BF16}
EVERY_ADAM = [
    {"weight_decay": 0.1, "decoupled": True, "norm_group": 1},
    {"weight_decay": -0.2, "amsgrad": True},
    {"maximize": True, "eps": 1e-3, "max_value": 0.05, "norm_group": 1},
    {"beta1": 0.0, "beta2": 0.5, "lr": 3.0},
]
ADAM = (
    Variant("AdamW"),
    *_adam_options(),
    Variant("every option, every dtype", {"rows": EVERY_ADAM, "mixed": True}),
    Variant("float32 sums, float32 states", {"grad_dtype": F32, "state_dtype": F32}),
    Variant("bf16 gradients", {"grad_dtype": BF16}),
    Variant("float64 gradients", {"rows": EVERY_ADAM, "grad_dtype": F64}),
    Variant("bf16 states", {"rows": EVERY_ADAM, "state_dtype": BF16, "grad_dtype": F32}),
    Variant("skipped", {"skip": 1, "factors": (math.nan, math.nan), **MASTER}),
    Variant("with bf16 copies", {"rows": EVERY_ADAM, **MASTER}),
    Variant("with fp16 copies", {"rows": EVERY_ADAM, **MASTER, "copies": F16}),
)


def _sgd_options() -> list[Variant]:
    variants = [
        Variant("plain", {"rows": [{}]}),
        Variant("decay", {"rows": [{"weight_decay": 0.1}]}),
    ]
    for first, nesterov, decay, dampening in itertools.product((False, True), repeat=4):
        row = {
            "momentum": 0.9,
            "nesterov": nesterov,
            "weight_decay": 0.1 if decay else 0.0,
            "dampening": 0.3 if dampening else 0.0,
        }
        extra = [nesterov and "nesterov", decay and "decay", dampening and "dampening"]
        desc = "first step" if first else "momentum"
        variants.append(Variant(", ".join([desc, *filter(None, extra)]), {"rows": [row], "first": first}))
    return variants


EVERY_SGD = [
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "norm_group": 1},
    {"weight_decay": -0.2, "lr": 3.0},
    {"momentum": 0.5, "dampening": 0.3, "maximize": True, "max_value": 0.05, "norm_group": 1},
    {"maximize": True},
]
SGD = (
    Variant("with momentum"),
    *_sgd_options(),
    Variant("maximize", {"rows": [{"maximize": True, "weight_decay": 0.1}]}),
    Variant("clamp", {"rows": [{"momentum": 0.9, "max_value": 0.05}]}),
    Variant("every option, every dtype", {"rows": EVERY_SGD, "mixed": True}),
    Variant("float32 sums, float32 states", {"grad_dtype": F32, "state_dtype": F32}),
    Variant("float64 gradients", {"rows": EVERY_SGD, "grad_dtype": F64}),
    Variant("bf16 states", {"rows": EVERY_SGD, "state_dtype": BF16, "grad_dtype": F32}),
    Variant("skipped", {"skip": 1, "factors": (math.nan, math.nan), **MASTER}),
    Variant("with bf16 copies", {"rows": EVERY_SGD, **MASTER}),
)


# ---------------------------------------------------------------------------------------- refusals


def _second(change: Callable[[Tensor], Any]) -> Callable[[Sequence[Tensor]], list[Any]]:
    """Changes the second tensor of a list."""
    return lambda tensors: [tensors[0], change(tensors[1]), *tensors[2:]]


def _expanded(tensor: Tensor) -> Tensor:
    return tensor.new_ones(1).expand(tensor.numel())


def _strided(tensor: Tensor) -> Tensor:
    return tensor.new_ones(2 * tensor.numel())[::2]


def _list_refusals(name: str, **options: Any) -> tuple[Refusal, ...]:
    """What every list of tensors refuses."""
    of = rf"{name}\[1\] must "
    wrong: tuple[tuple[str, Callable[[Any], Any], type[Exception], str], ...] = (
        ("a tensor, not a list", lambda t: t[0], TypeError, f"{name} must be a list of tensors"),
        ("None inside", _second(lambda t: None), TypeError, of + "be a tensor, got NoneType"),
        ("integers", _second(lambda t: t.long()), TypeError, of + "be float32, .* got torch.int64"),
        ("sparse", _second(lambda t: t.to_sparse()), TypeError, of + "be dense .*coalesce it"),
        ("expanded", _second(_expanded), ValueError, of + "be dense"),
        ("every other element", _second(_strided), ValueError, of + "be dense"),
    )
    return tuple(Refusal(name, *w, options) for w in wrong)


def _raw_list_refusals(name: str, label: str, **options: Any) -> tuple[Refusal, ...]:
    wrong: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("one element short", _second(lambda t: t[:-1])),
        ("expanded", _second(_expanded)),
        ("every other element", _second(_strided)),
        ("integers", _second(lambda t: t.long())),
    )
    return tuple(Refusal(name, *w, RuntimeError, label, options) for w in wrong)


def _other_device(name: str) -> Refusal:
    change = _second(lambda t: t.to("meta"))
    return Refusal(name, "another device", change, ValueError, rf"{name}\[1\] must be on cpu, got meta")


def _wrong_dtype(name: str, dtype: torch.dtype, wanted: str, **options: Any) -> Refusal:
    match = f"{name} must be a torch.{wanted} tensor .*got {dtype}"
    return Refusal(name, f"{dtype}", lambda t: t.to(dtype), TypeError, match, options)


def _no_tensor(name: str) -> Refusal:
    return Refusal(name, "no tensor", lambda t: 1.0, TypeError, f"{name} must be a .*got float")


SEGMENTS = (
    _wrong_dtype("segments", torch.int32, "int64"),
    Refusal("segments", "three columns", lambda t: torch.cat([t, t[:, :1]], 1), ValueError,
            r"segments must have shape \[n, 2\]"),
    Refusal("segments", "one dimension", lambda t: t.flatten(), ValueError, r"shape \[n, 2\]"),
)  # fmt: skip


def _move(tensor: Tensor, row: int, by: int) -> Tensor:
    moved = tensor.clone()
    moved[row, 0] += by
    return moved


RAW_SEGMENTS = (
    Refusal("segments", "not on a strand", lambda t: _move(t, -1, 1), RuntimeError, "multiples of 512"),
    Refusal("segments", "overlapping", lambda t: _move(t, -1, -STRAND * 2), RuntimeError, "overlap"),
    Refusal("segments", "int32", lambda t: t.int(), RuntimeError, "segments"),
    Refusal("segments", "not contiguous", lambda t: t.t().contiguous().t(), RuntimeError, "segments"),
)


def _last_is_99(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:-1], tensor.new_tensor([99])])


def _index_refusals(name: str, of: str) -> tuple[Refusal, ...]:
    return (
        Refusal(name, "int32", lambda t: t.int(), TypeError, f"{of}'s index must be a torch.int64"),
        Refusal(name, "too short", lambda t: t[:-1], ValueError, f"{of}'s index must name"),
        Refusal(name, "repeated", torch.zeros_like, ValueError, f"{of}'s index must ascend"),
        Refusal(name, "beyond the segments", _last_is_99, ValueError, f"{of}'s index must ascend"),
    )


def _raw_index_refusals(name: str, label: str) -> tuple[Refusal, ...]:
    return (
        Refusal(name, "too short", lambda t: t[:-1], RuntimeError, label),
        Refusal(name, "descending", lambda t: t.flip(0), RuntimeError, f"{label} must hold ascending"),
        Refusal(name, "beyond the segments", lambda t: t + 1, RuntimeError, "must hold ascending"),
        Refusal(name, "negative", lambda t: t - 1, RuntimeError, "must hold ascending"),
        Refusal(name, "int32", lambda t: t.int(), RuntimeError, label),
    )


PARTIALS = (
    _wrong_dtype("partials", torch.float32, "float64"),
    Refusal("partials", "too narrow", lambda t: t[:, :-1], ValueError, r"partials must have shape \[2, "),
    Refusal("partials", "one row", lambda t: t[:1], ValueError, r"partials must have shape \[2, "),
)
RAW_PARTIALS = (
    Refusal("partials", "too narrow", lambda t: t[:, :-1], RuntimeError, "partials must be float64"),
    Refusal("partials", "one row", lambda t: t[:1], RuntimeError, "partials must be float64"),
    Refusal("partials", "float32", lambda t: t.float(), RuntimeError, "partials must be float64"),
    Refusal("partials", "columns apart", lambda t: t.repeat(1, 2)[:, ::2], RuntimeError, "partials"),
)


def _wrong_norm_types(*values: Any) -> tuple[Refusal, ...]:
    def change(value: Any) -> Callable[[Any], Any]:
        return lambda _: value

    return tuple(
        Refusal("norm_type", repr(v), change(v), ValueError, "norm_type must be a number above 0")
        for v in values
    )


GATHER_ERRORS = (
    *SEGMENTS,
    *PARTIALS,
    *_list_refusals("fresh"),
    *_list_refusals("kept", states="k"),
    *_index_refusals("fresh_index", "fresh"),
    _other_device("fresh"),
    Refusal(
        "fresh",
        "wrong size",
        _second(lambda t: t[:-1].clone()),
        ValueError,
        r"fresh\[1\] must have the \d+ elements of segment 1, got",
    ),
    Refusal(
        "buffer",
        "integers",
        lambda t: t.nan_to_num().int(),
        TypeError,
        r"buffer\[0\] must be float32",
    ),
    Refusal("buffer", "too small", lambda t: t[:-STRAND], ValueError, "buffer must be contiguous"),
    Refusal("buffer", "not contiguous", lambda t: t.repeat(2)[::2], ValueError, "buffer.* must be "),
    Refusal("present", "bool", lambda t: t.bool(), TypeError, "present must be a torch.uint8"),
    Refusal("present", "too short", lambda t: t[:-1], ValueError, "present must have"),
    Refusal(
        "present",
        "1 where there is a kept gradient",
        torch.ones_like,
        ValueError,
        r"kept\[0\] must be of a segment that is not present",
        {"states": "b"},
    ),
    Refusal("weight", "a number", lambda t: 0.3, TypeError, "weight must be a torch.float64 tensor"),
    Refusal(
        "weight",
        "float32",
        lambda t: torch.tensor(0.3),
        TypeError,
        "weight must be a torch.float64",
    ),
    Refusal("kept_weight", "a number", lambda t: 1.0, TypeError, "kept_weight must be a torch.float64"),
    Refusal("norm_type", "3", lambda t: 3.0, ValueError, "gather_ sums norm_type 1, 2 or inf, got 3.0"),
    *_wrong_norm_types(0.0, -1.0, math.nan, "2", True),
)
GATHER_RAW = (
    *RAW_SEGMENTS,
    *RAW_PARTIALS,
    *_raw_list_refusals("fresh", "fresh"),
    *_raw_list_refusals("kept", "kept", states="k"),
    *_raw_index_refusals("fresh_index", "fresh_index"),
    Refusal("buffer", "too small", lambda t: t[:-STRAND], RuntimeError, "buffer must be a contiguous"),
    Refusal("buffer", "expanded", lambda t: t[:1].expand(t.numel()), RuntimeError, "buffer must be"),
    Refusal("buffer", "integers", lambda t: t.nan_to_num().int(), RuntimeError, "buffer must be float32"),
    Refusal("present", "too short", lambda t: t[:-1], RuntimeError, "present must be"),
    Refusal("present", "int64", lambda t: t.long(), RuntimeError, "present must be"),
    Refusal("weight", "float32", lambda t: torch.tensor(0.3), RuntimeError, "weight must be"),
    Refusal(
        "present",
        "1 where there is a kept gradient",
        torch.ones_like,
        RuntimeError,
        "already in the buffer",
        {"states": "b"},
    ),
    Refusal("weight", "empty", lambda t: torch.empty(0).double(), RuntimeError, "weight must be"),
)

NORM_ERRORS = (
    *SEGMENTS,
    *PARTIALS,
    *_list_refusals("tensors"),
    *_index_refusals("index", "tensors"),
    _other_device("tensors"),
    Refusal(
        "tensors",
        "wrong size",
        _second(lambda t: t[:-1].clone()),
        ValueError,
        r"tensors\[1\] must have the \d+ elements of segment 1, got",
    ),
    _no_tensor("partials"),
    Refusal("scale", "a number", lambda t: 0.3, TypeError, "scale must be a torch.float64 tensor"),
    *_wrong_norm_types(0, -INF, math.nan, None, True),
)
NORM_RAW = (
    *RAW_SEGMENTS,
    *RAW_PARTIALS,
    *_raw_list_refusals("tensors", "tensors"),
    *_raw_index_refusals("index", "index"),
    Refusal("scale", "float32", lambda t: torch.tensor(0.3), RuntimeError, "scale must be"),
)

RAW_UPDATE_TABLES = (
    Refusal("group", "beyond hyper", lambda t: t + 3, RuntimeError, r"group\[\d\] is out of range"),
    Refusal("group", "negative", lambda t: t - 3, RuntimeError, r"group\[\d\] is out of range"),
    Refusal("group", "too short", lambda t: t[:-1], RuntimeError, "group must be"),
    Refusal("hyper", "a column short", lambda t: t[:, :-1], RuntimeError, "hyper must have shape"),
    Refusal("hyper", "float32", lambda t: t.float(), RuntimeError, "hyper must be"),
    Refusal(
        "hyper",
        "columns first",
        lambda t: t.repeat(2, 1).t().contiguous().t(),
        RuntimeError,
        "hyper",
    ),
    Refusal("row", "beyond scalars", lambda t: t + 1000, RuntimeError, r"row\[\d+\] is beyond scalars"),
    Refusal("row", "negative", lambda t: t - 1000, RuntimeError, r"row\[\d+\] is beyond scalars"),
    Refusal("scalars", "a column short", lambda t: t[:, :-1], RuntimeError, "scalars must have shape"),
    Refusal("skip", "int64", lambda t: t.long(), RuntimeError, "skip must be"),
)

FINISH_ERRORS = (
    _wrong_dtype("found_inf", torch.float64, "float32", found_inf=0.0),
    _wrong_dtype("steps", torch.float64, "float32"),
    _wrong_dtype("row", torch.int32, "int64"),
    _wrong_dtype("group", torch.int32, "int64"),
    _wrong_dtype("hyper", torch.float32, "float64"),
    _wrong_dtype("scalars", torch.float32, "float64"),
    Refusal("scalars", "none", lambda t: None, TypeError, "scalars must be given with steps"),
    Refusal("scalars", "a column short", lambda t: t[:, :-1], ValueError, "scalars must have shape"),
    Refusal("hyper", "a column short", lambda t: t[:, :-1], ValueError, r"hyper must have shape"),
    Refusal("steps", "one short", lambda t: t[:-1], ValueError, "steps must have the 40 elements"),
    Refusal("group", "too short", lambda t: t[:-1], ValueError, "group must have an entry for each"),
    Refusal(
        "lrs",
        "two elements",
        lambda t: [torch.zeros(2)],
        ValueError,
        r"lrs\[0\] must be one",
        {"lr_tensors": True},
    ),
    Refusal("lr_groups", "none", lambda t: None, TypeError, "lr_groups must be", {"lr_tensors": True}),
    _wrong_dtype("norm", torch.float64, "float32"),
    _wrong_dtype("group_norms", torch.float32, "float64"),
    _wrong_dtype("factor", torch.float32, "float64"),
    _wrong_dtype("skip", torch.int64, "int32"),
    _wrong_dtype("skipped", torch.int32, "int64"),
    _wrong_dtype("partials", torch.float32, "float64"),
    _wrong_dtype("spans", torch.int32, "int64"),
    _wrong_dtype("max_norm", torch.float32, "float64"),
    _no_tensor("max_norm"),
    _no_tensor("weight"),
    _no_tensor("divisor"),
    Refusal("scale", "a number", lambda t: 0.3, TypeError, "scale must be a torch.float64 tensor"),
    Refusal(
        "group_norms",
        "empty",
        lambda t: t[:0],
        ValueError,
        "group_norms must have 1 or more elements",
    ),
    Refusal("factor", "empty", lambda t: t[:0], ValueError, "factor must have 1 or more elements"),
    Refusal("spans", "two columns", lambda t: t[:, :2], ValueError, r"spans must have shape \[m, 3\]"),
    Refusal("partials", "one row", lambda t: t[:1], ValueError, r"partials must have shape \[2, "),
    *_wrong_norm_types(0, math.nan),
)
FINISH_RAW = (
    Refusal(
        "spans",
        "group beyond max_norm",
        lambda t: t + 1,
        RuntimeError,
        "spans row 0 is out of range",
    ),
    Refusal("spans", "negative", lambda t: t - 1, RuntimeError, "spans row 0 is out of range"),
    Refusal("spans", "descending", lambda t: t.flip(1), RuntimeError, "spans row 0 is out of range"),
    Refusal("spans", "two columns", lambda t: t[:, :2], RuntimeError, "spans must have shape"),
    *RAW_PARTIALS,
    Refusal("group_norms", "empty", lambda t: t[:0], RuntimeError, "group_norms must be"),
    Refusal("factor", "empty", lambda t: t[:0], RuntimeError, "factor must be"),
    Refusal("norm", "float64", lambda t: t.double(), RuntimeError, "norm must be"),
    Refusal("skip", "int64", lambda t: t.long(), RuntimeError, "skip must be"),
    Refusal("divisor", "float32", lambda t: t.float(), RuntimeError, "divisor must be"),
    *RAW_UPDATE_TABLES,
    Refusal("steps", "float64", lambda t: t.double(), RuntimeError, "steps must be"),
    Refusal("steps", "expanded", lambda t: t[:1].expand(len(t)), RuntimeError, "steps must be"),
    Refusal("scalars", "none", lambda t: None, RuntimeError, "steps needs scalars"),
    Refusal(
        "lr_groups",
        "beyond",
        lambda t: t + 3,
        RuntimeError,
        r"lr_groups\[0\] is out of range",
        {"lr_tensors": True},
    ),
    Refusal(
        "lrs",
        "two elements",
        lambda t: [torch.zeros(2)] * 2,
        RuntimeError,
        "one element",
        {"lr_tensors": True},
    ),
)

UPDATE_TABLES = (
    _wrong_dtype("index", torch.int32, "int64"),
    _wrong_dtype("group", torch.int32, "int64"),
    _wrong_dtype("hyper", torch.float32, "float64"),
    _wrong_dtype("scalars", torch.float32, "float64"),
    _wrong_dtype("skip", torch.int64, "int32"),
    Refusal(
        "hyper",
        "a column short",
        lambda t: t[:, :-1],
        ValueError,
        r"hyper must have shape \[groups, 10\]",
    ),
    Refusal("scalars", "a column short", lambda t: t[:, :-1], ValueError, r"scalars must have shape"),
    Refusal("group", "too short", lambda t: t[:-1], ValueError, "group must have an entry for each"),
    Refusal("row", "too short", lambda t: t[:-1], ValueError, "row must have an entry for each"),
    _wrong_dtype("row", torch.int32, "int64"),
)


def _wrong_max_values(*values: Any) -> tuple[Refusal, ...]:
    def change(value: Any) -> Callable[[Any], Any]:
        return lambda _: value

    return tuple(
        Refusal("max_value", repr(v), change(v), ValueError, "max_value must be a number of at least 0")
        for v in values
    )


SCALE_TABLES = (
    _wrong_dtype("factor", torch.float32, "float64"),
    _no_tensor("factor"),
    _wrong_dtype("factor_index", torch.int32, "int64"),
    Refusal("factor_index", "too short", lambda t: t[:-1], ValueError, "factor_index must name a factor"),
    *_wrong_max_values(-1.0, math.nan, "1", True),
)
RAW_SCALE = (
    Refusal("factor", "float32", lambda t: t.float(), RuntimeError, "factor must be"),
    Refusal("factor", "empty", lambda t: t[:0], RuntimeError, "factor must be"),
    Refusal("factor_index", "too short", lambda t: t[:-1], RuntimeError, "factor_index must be"),
    Refusal(
        "factor_index",
        "beyond",
        lambda t: t + 1,
        RuntimeError,
        r"factor_index\[0\] is out of range",
    ),
    Refusal("factor_index", "negative", lambda t: t - 1, RuntimeError, "out of range"),
)
SCALE_ERRORS = (*_list_refusals("tensors"), *SCALE_TABLES)
SCALE_INTO_ERRORS = (
    *_list_refusals("out"),
    *_list_refusals("tensors"),
    *SCALE_TABLES,
    Refusal(
        "out",
        "one short",
        lambda t: t[:-1],
        ValueError,
        "out and tensors must hold as many tensors",
    ),
    Refusal(
        "out",
        "wrong size",
        _second(lambda t: t[:-1].clone()),
        ValueError,
        "of as many elements each",
    ),
)


def _update_refusals(name: str, **options: Any) -> tuple[Refusal, ...]:
    match = f"{name} must hold one tensor per parameter"
    return (
        *_list_refusals(name, **options),
        dataclasses.replace(_other_device(name), options=options),
        Refusal(name, "one short", lambda t: t[:-1], ValueError, match, options),
        Refusal(name, "wrong size", _second(lambda t: t[:-1].clone()), ValueError, match, options),
    )


def _raw_update_refusals(name: str, label: str, **options: Any) -> tuple[Refusal, ...]:
    short = Refusal(name, "one short", lambda t: t[:-1], RuntimeError, "fastaccum: as many", options)
    return (*_raw_list_refusals(name, label, **options), short)


AMSGRAD = {"rows": [{"amsgrad": True}]}
UPDATE_ERRORS = (
    *SEGMENTS,
    *UPDATE_TABLES,
    *_index_refusals("index", "params")[2:],
    *_list_refusals("params"),
    *_update_refusals("grads"),
    _wrong_dtype("factor", torch.float32, "float64"),
    _no_tensor("factor"),
    Refusal(
        "segments",
        "other sizes",
        lambda t: t + torch.tensor([0, 1]),
        ValueError,
        r"params\[0\] must have the \d+ elements of segment 0",
    ),
)
UPDATE_RAW = (
    *RAW_SEGMENTS,
    *RAW_UPDATE_TABLES,
    *_raw_index_refusals("index", "index"),
    *_raw_list_refusals("params", "params"),
    *_raw_update_refusals("grads", "grads|as many"),
    Refusal("params", "one short", lambda t: t[:-1], RuntimeError, "as many grads"),
    Refusal("factor", "float32", lambda t: t.float(), RuntimeError, "factor must be"),
    Refusal("factor", "empty", lambda t: t[:0], RuntimeError, "factor must be"),
    Refusal(
        "hyper",
        "norm group beyond factor",
        lambda t: t + 2,
        RuntimeError,
        "norm group is out of range",
    ),
)
ADAM_ERRORS = (
    *UPDATE_ERRORS,
    *_update_refusals("exp_avgs"),
    *_update_refusals("exp_avg_sqs"),
    *_update_refusals("max_exp_avg_sqs", **AMSGRAD),
)
ADAM_RAW = (
    *UPDATE_RAW,
    *_raw_update_refusals("exp_avgs", "states"),
    *_raw_update_refusals("exp_avg_sqs", "states"),
    *_raw_update_refusals("max_exp_avg_sqs", "states", **AMSGRAD),
    Refusal(
        "max_exp_avg_sqs",
        "none for amsgrad",
        lambda t: [],
        RuntimeError,
        "needs 3 state tensors",
        AMSGRAD,
    ),
    Refusal("exp_avgs", "none", lambda t: [], RuntimeError, "needs 2 state tensors"),
)
SGD_ERRORS = (*UPDATE_ERRORS, *_update_refusals("momentum_buffers"))
SGD_RAW = (
    *UPDATE_RAW,
    *_raw_update_refusals("momentum_buffers", "states"),
    Refusal("momentum_buffers", "none", lambda t: [], RuntimeError, "needs 1 state tensors"),
)


# ------------------------------------------------------------------------------------------- cases

_DOUBLES = (torch.float64,)  # tables only: the dtype of tensors says nothing

CASES = (
    OpCase(
        "gather_", make_gather, ("buffer", "present", "partials"), (), bytes_gather, ops.DTYPES,
        GATHER, GATHER_ERRORS, GATHER_RAW, ("weight", "kept_weight"),
    ),
    OpCase(
        # Read once.
        "norm_", make_norm, ("partials",), (), lambda n, dtype, **_: n * dtype.itemsize, ops.DTYPES,
        NORM, NORM_ERRORS, NORM_RAW, ("scale",),
    ),
    OpCase(
        # Sum and flag of each chunk read. For two parameters in three: step count read and written, row
        # and group read, four scalars written.
        "finish_", make_finish,
        ("norm", "group_norms", "factor", "skip", "skipped", "steps", "scalars", "found_inf"), (),
        lambda n, dtype, parameters=40, **_: 16 * n + 2 / 3 * (parameters or 0) * (4 + 4 + 8 + 8 + 32),
        _DOUBLES, FINISH, FINISH_ERRORS, FINISH_RAW, ("max_norm", "weight", "divisor", "hyper", "steps"),
        unit="chunks", grid=(0, 1, 7, 1023, 1024, 1025, 5003),
    ),
    OpCase(
        # Read and written.
        "scale_", make_scale, ("tensors",), ("tensors",),
        lambda n, dtype, **_: 2 * n * dtype.itemsize,
        ops.DTYPES, SCALE, SCALE_ERRORS,
        (*RAW_SCALE, *_raw_list_refusals("tensors", "tensors")[1:]), ("factor",),
    ),
    OpCase(
        # Source read, out written.
        "scale_into_", make_scale_into, ("out",), ("out",),
        lambda n, dtype, out_dtype=None, **_: n * (dtype.itemsize + (out_dtype or dtype).itemsize),
        ops.DTYPES, SCALE_INTO, SCALE_INTO_ERRORS,
        (*RAW_SCALE, *_raw_list_refusals("tensors", "tensors|out"),
         *_raw_list_refusals("out", "out"),
         Refusal("out", "one short", lambda t: t[:-1], RuntimeError, "as many outputs")),
        ("factor",),
    ),
    OpCase(
        "adam_", make_adam, 
        ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"), ("params", "copies"),
        bytes_adam, ops.DTYPES, ADAM, ADAM_ERRORS, ADAM_RAW, ("hyper", "scalars", "factor", "skip"),
    ),
    OpCase(
        "sgd_", make_sgd, ("params", "momentum_buffers", "copies"), ("params", "copies"), bytes_sgd,
        ops.DTYPES, SGD, SGD_ERRORS, SGD_RAW, ("hyper", "scalars", "factor", "skip"),
    ),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
