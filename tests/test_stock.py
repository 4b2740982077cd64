"""One update from an identical state is at least half as exact as stock PyTorch's own loop.

The oracle is the same torch optimizer in float64. Stock is the single-tensor loop
(``foreach=False, fused=False``); the fused one is a competitor, not an oracle.
"""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from fastaccum import ops  # noqa: E402
from fastaccum.layout import Layout  # noqa: E402
from tests.bits import count_steps  # noqa: E402
from tests.cases import hyper_row  # noqa: E402

pytestmark = pytest.mark.native
SIZES = (8193, 0, 33, 4001)  # over 10 000 elements
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOOR = 1e-9  # relative to the largest value: where the stock loop happens to be exact


def draw(dtype: torch.dtype, positive: bool = False) -> list[torch.Tensor]:
    made = [torch.randn(n) * torch.exp2(torch.rand(n) * 8 - 6) for n in SIZES]
    return [(x.abs() if positive else x).to(dtype) for x in made]


def stock(make, dtype, params, grads, states, step):
    """Values after one step of a stock optimizer whose state is given."""
    parameters = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in params]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.to(dtype, copy=True)
    optimizer = make(parameters, foreach=False, fused=False)
    if step:
        for i, p in enumerate(parameters):
            optimizer.state[p] = {k: v[i].to(dtype, copy=True) for k, v in states.items()}
            if "exp_avg" in states:
                optimizer.state[p]["step"] = torch.tensor(float(step))
    optimizer.step()
    after = {"params": [p.detach() for p in parameters]}
    for name in states:
        after[name] = [optimizer.state[p][name] for p in parameters]
    return after


def ours(name, params, grads, states, step, row):
    """The same step by our ops; states are lists by name, in the op's order."""
    double = {"dtype": torch.float64}
    m = len(params)
    params = [p.clone() for p in params]
    mine = {k: [t.clone() for t in v] for k, v in states.items()}
    steps, scalars = torch.full((m,), float(step)), torch.zeros(m, ops.SCALAR_COLUMNS, **double)
    index, group = torch.arange(m), torch.zeros(m, dtype=torch.int64)
    hyper, skip = torch.tensor([hyper_row(**row)], **double), torch.zeros((), dtype=torch.int32)
    count_steps(steps, scalars, index, group, hyper)
    layout = Layout.of(SIZES)
    segments = torch.tensor(list(zip(layout.offsets, SIZES, strict=True)))
    lists = list(mine.values())
    if name == "adam_" and len(lists) == 2:
        lists.append([])
    if name == "sgd_" and not lists:
        lists = [[]]
    getattr(ops, name)(
        params,
        *lists,
        [],
        grads,
        segments,
        index,
        group,
        index,
        hyper,
        scalars,
        torch.ones(1, **double),
        skip,
    )
    return {"params": params, **mine}


def rms(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()


def assert_half_as_exact(got, same, oracle, dtype):
    """Twice stock's error at most, in the mean square and at worst.

    The worst of ``exp_avg`` alone may be one rounding more: stock's ``lerp_`` is a fused multiply-add, where
    ``m * beta1 + g * (1 - beta1)`` rounds each product (no fused operations: the same bits on every
    machine). Measured: worst 1.3 to 3.0 times, mean square 1.7 times stock's, parameters 1.00.
    """
    for name in got:
        g, s, o = (torch.cat([t.double() for t in x[name]]) for x in (got, same, oracle))
        scale = o.abs().max().item()
        if dtype == torch.float64:  # the oracle is stock itself
            assert (g - o).abs().max() <= 4e-15 * scale, name
            continue
        rounding = torch.finfo(dtype).eps if name == "exp_avg" else 0.0
        for measure, floor in ((rms, FLOOR), (torch.max, max(FLOOR, rounding))):
            mine, theirs = measure((g - o).abs()).item(), measure((s - o).abs()).item()
            assert mine <= 2 * theirs + floor * scale, (name, measure.__name__, mine, theirs)


ADAMS = list(itertools.product((torch.optim.Adam, torch.optim.AdamW), (0.0, 0.1), *[(False, True)] * 2))


@pytest.mark.parametrize("step", [0, 11])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "decay", "amsgrad", "maximize"), ADAMS)
def test_adam(kind, decay, amsgrad, maximize, dtype, step):
    options = {
        "lr": 3e-3,
        "weight_decay": decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
        "eps": 1e-8,
    }
    if dtype == torch.float16:
        options["eps"] = 1e-4  # 1e-8 is 0 in half
    params, grads = draw(dtype), draw(dtype)
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    states = {k: draw(dtype, positive=k != "exp_avg") for k in names}
    if not step:
        states = {k: [torch.zeros_like(t) for t in v] for k, v in states.items()}

    def make(parameters, **how):
        return kind(parameters, betas=(0.9, 0.99), **options, **how)

    same = stock(make, dtype, params, grads, states, step)
    oracle = stock(make, torch.float64, params, grads, states, step)
    renamed = {f"{k}s": v for k, v in states.items()}
    row = {**options, "beta2": 0.99, "decoupled": kind is torch.optim.AdamW}
    got = ours("adam_", params, grads, renamed, step, row)
    got = {k if k == "params" else k[:-1]: v for k, v in got.items()}
    assert_half_as_exact(got, same, oracle, dtype)


SGDS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay,
     "maximize": maximize}
    for momentum, dampening, nesterov, decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), (False, True))
    if not (nesterov and (momentum == 0.0 or dampening != 0.0)) and (momentum or not dampening)
]  # fmt: skip


@pytest.mark.parametrize("step", [0, 11])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", SGDS, ids=lambda o: "-".join(k for k, v in o.items() if v) or "plain")
def test_sgd(options, dtype, step):
    params, grads = draw(dtype), draw(dtype)
    states = {"momentum_buffer": draw(dtype)} if options["momentum"] else {}
    if not step:
        states = {k: [torch.zeros_like(t) for t in v] for k, v in states.items()}

    def make(parameters, **how):
        return torch.optim.SGD(parameters, lr=0.03, **options, **how)

    same = stock(make, dtype, params, grads, states, step)
    oracle = stock(make, torch.float64, params, grads, states, step)
    got = ours("sgd_", params, grads, states, step, {"lr": 0.03, **options})
    assert_half_as_exact(got, same, oracle, dtype)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_clip_grad_norm(norm_type):
    """``norm_``, ``finish_`` and ``scale_`` in a row, against stock's clipping in float64."""
    grads = [g.double() for g in draw(torch.float32) if len(g)]  # stock has no inf-norm of nothing
    mine = [g.clone() for g in grads]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    wanted = torch.nn.utils.clip_grad_norm_(parameters, 0.7, norm_type)
    layout = Layout.of([len(g) for g in grads])
    segments = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)))
    double, chunks = {"dtype": torch.float64}, layout.n_chunks
    partials, one = torch.zeros(2, chunks, **double), torch.ones((), **double)
    ops.norm_(partials, segments, mine, torch.arange(len(mine)), norm_type=norm_type)
    norm, factor, skip = (
        torch.zeros(()),
        torch.zeros(1, **double),
        torch.zeros((), dtype=torch.int32),
    )
    ops.finish_(
        norm, torch.zeros(1, **double), factor, skip, torch.zeros((), dtype=torch.int64), partials,
        torch.tensor([[0, 0, chunks]]), torch.full((1,), 0.7, **double), one, one,
        norm_type=norm_type,
    )  # fmt: skip
    ops.scale_(mine, factor)
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-7, atol=0)
    for g, p in zip(mine, parameters, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-14, atol=0)
