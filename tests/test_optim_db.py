"""Every stock optimizer, over the options that PyTorch's own tests list for it, is the plain loop's.

The database is ``torch.testing._internal.common_optimizers.optim_db``: inputs that others wrote.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # torch.testing._internal imports it

from torch import nn  # noqa: E402
from torch.testing._internal.common_optimizers import optim_db  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from fastaccum.updates import FusedRule, GenericRule  # noqa: E402
from tests.oracle import assert_identical, each_backend, error, run_window, stock, twins  # noqa: E402

pytestmark = pytest.mark.native

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
FUSED = (SGD, Adam, AdamW)
REFUSED = [info for info in optim_db if info.step_requires_closure or info.only_supports_sparse_grads]
SERVED = [info for info in optim_db if info not in REFUSED]
SHAPES = [(5, 7), (7,), (3, 2, 2), (1,), ()]
WINDOWS = 4


def inputs(info):
    """The options of an optimizer, a tensor copied for each use."""
    return [(i.desc, i.kwargs) for i in info.optim_inputs_func(device="cpu")]


def listed(infos):
    return [
        pytest.param(info.optim_cls, kwargs, id=f"{info.optim_cls.__name__}-{desc.replace(' ', '_')}")
        for info in infos
        for desc, kwargs in inputs(info)
    ]


def parameters(kind):
    # Muon takes matrices only.
    shapes = [(5, 7), (7, 5), (3, 3)] if kind is torch.optim.Muon else SHAPES
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def micro_batches(params, k):
    """Gradients of all windows; the second parameter misses a micro-batch, then a whole window."""
    windows = [[(1.0, [torch.randn(p.shape) for p in params]) for _ in range(k)] for _ in range(WINDOWS)]
    if k > 1:
        windows[1][0][1][1] = None
    for _, grads in windows[2]:
        grads[1] = None
    return windows


def generic(kind):
    """The same optimizer by a subclass, which may do anything: it runs its own step."""
    return type(kind.__name__, (kind,), {}) if kind in FUSED else kind


def train(optimizer, params, windows):
    """Hands every micro-batch to the wrapper as its user does: by ``.grad`` and ``step()``."""
    for window in windows:
        for _, grads in window:
            for p, g in zip(params, grads, strict=True):
                p.grad = None if g is None else g.clone()
            optimizer.step()
        assert optimizer.updated


def train_stock(kind, params, windows, kwargs, dtype=None):
    """(parameters, state) of the single-tensor loop."""
    mine = twins(params, dtype)
    optimizer = stock(kind, mine, **copy.deepcopy(kwargs))
    for window in windows:
        run_window(mine, optimizer, window)
    return mine, [optimizer.state[p] for p in mine]


def close(got, wanted, **tolerance):
    """Nested values: the same keys, tensors within a tolerance."""
    assert type(got) is type(wanted)
    if isinstance(got, dict):
        assert got.keys() == wanted.keys()
        for key in got:
            close(got[key], wanted[key], **tolerance)
    elif isinstance(got, list):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            close(a, b, **tolerance)
    else:
        torch.testing.assert_close(got, wanted, **tolerance)


# A third is not exact: the average is a factor here and a division there.
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize(("kind", "kwargs"), listed(SERVED))
def test_the_generic_path_is_the_plain_loop(kind, kwargs, k):
    params = parameters(kind)
    windows = micro_batches(params, k)
    wanted, state = train_stock(kind, params, windows, kwargs)
    mine = twins(params)
    inner = stock(kind, mine, **copy.deepcopy(kwargs))
    inner.__class__ = generic(kind)
    optimizer = FusedAccumulator(inner, k)
    assert isinstance(optimizer._rule, GenericRule)
    train(optimizer, mine, windows)
    got = [dict(optimizer.state[p]) for p in mine]
    assert all(not torch.equal(a, b) for a, b in zip(mine, params, strict=True))
    if k != 3:
        assert_identical(mine, wanted)
        assert_identical(got, [dict(s) for s in state])
    elif (
        kind is torch.optim.Muon
    ):  # orthogonalised in bfloat16: steps of 2^-8 of the update, whose size is lr
        close(mine, wanted, rtol=0, atol=WINDOWS * 2**-6 * float(kwargs.get("lr", 1e-3)))
    else:
        close([p.detach() for p in mine], [p.detach() for p in wanted], rtol=1e-5, atol=1e-6)
        close(got, [dict(s) for s in state], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("kind", "kwargs"), listed([i for i in SERVED if i.optim_cls in FUSED]))
@each_backend
def test_the_fused_path_is_as_exact_as_stock(kind, kwargs, k, backend):
    """The parameters' error after a training is at most 4 times stock's, and state has stock's form."""
    params = parameters(kind)
    windows = micro_batches(params, k)
    loop, state = train_stock(kind, params, windows, kwargs)
    truth, _ = train_stock(kind, params, windows, kwargs, torch.float64)
    mine = twins(params)
    optimizer = FusedAccumulator(kind(mine, **copy.deepcopy(kwargs)), k, backend=backend)
    assert isinstance(optimizer._rule, FusedRule)
    train(optimizer, mine, windows)
    assert all(not torch.equal(a, b) for a, b in zip(mine, params, strict=True))
    assert error(mine, truth) <= 4 * error(loop, truth) + 1e-6
    close([dict(optimizer.state[p]) for p in mine], [dict(s) for s in state], rtol=1e-5, atol=1e-6)


IMPLEMENTATIONS = [
    pytest.param(
        info.optim_cls, kwargs, flag, id=f"{info.optim_cls.__name__}-{flag}-{desc.replace(' ', '_')}"
    )
    for info in SERVED
    for flag in ("foreach", "fused")
    if flag in info.supported_impls
    for desc, kwargs in inputs(info)
    if not isinstance(kwargs.get("lr"), torch.Tensor)  # stock refuses a tensor with foreach
]


@pytest.mark.parametrize(("kind", "kwargs", "flag"), IMPLEMENTATIONS)
def test_foreach_and_fused_optimizers_can_be_wrapped(kind, kwargs, flag):
    """Which implementation the user asked stock for does not change what comes out."""
    params = parameters(kind)
    windows = micro_batches(params, 3)
    wanted, _ = train_stock(kind, params, windows, kwargs)
    mine = twins(params)
    train(FusedAccumulator(kind(mine, **copy.deepcopy(kwargs), **{flag: True}), 3), mine, windows)
    close([p.detach() for p in mine], [p.detach() for p in wanted], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [info.optim_cls for info in SERVED], ids=lambda kind: kind.__name__)
def test_a_learning_rate_tensor_is_read_at_every_window(kind):
    """Stock's loop with a float that changes, against a tensor written in place between windows."""
    params = parameters(kind)
    windows = micro_batches(params, 3)
    rates = (0.01, 0.02, 0.005, 0.0)
    wanted = twins(params)
    oracle = stock(kind, wanted, lr=rates[0])
    mine, lr = twins(params), torch.tensor(rates[0])
    optimizer = FusedAccumulator(stock(kind, mine, lr=lr), 3)
    assert optimizer.param_groups[0]["lr"] is lr
    for rate, window in zip(rates, windows, strict=True):
        lr.fill_(rate)
        oracle.param_groups[0]["lr"] = rate
        run_window(wanted, oracle, window)
        train(optimizer, mine, [window])
        atol = 1e-3 if kind is torch.optim.Muon else 1e-6
        close([p.detach() for p in mine], [p.detach() for p in wanted], rtol=1e-5, atol=atol)
    assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize(
    "info", [i for i in optim_db if i.supports_sparse], ids=lambda i: i.optim_cls.__name__
)
def test_sparse_gradients_equal_the_sparse_loop(info):
    """Options as listed for sparse gradients; rows that a window does not touch stay."""
    kwargs, _ = info.metadata_for_sparse
    mine = nn.Embedding(7, 3, sparse=True)
    wanted = copy.deepcopy(mine)
    before = mine.weight.detach().clone()
    optimizer = FusedAccumulator(info.optim_cls(mine.parameters(), **kwargs), 2)
    oracle = stock(info.optim_cls, wanted.parameters(), **kwargs)
    for first, second in (([1, 1, 3], [0, 3]), ([6, 1], [1, 1, 1])):
        oracle.zero_grad()
        for rows in (first, second):
            (wanted(torch.tensor(rows)).square().sum() / 2).backward()
            mine(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        wanted.weight.grad = wanted.weight.grad.coalesce()
        oracle.step()
    close(mine.weight.detach(), wanted.weight.detach(), rtol=1e-5, atol=1e-6)
    untouched = [2, 4, 5]
    assert torch.equal(mine.weight[untouched], before[untouched])
    assert not torch.equal(mine.weight, before)


REASONS = {"LBFGS": "re-evaluates the loss", "SparseAdam": "sparse gradients only"}


@pytest.mark.parametrize(("kind", "kwargs"), listed(REFUSED))
def test_what_cannot_be_wrapped_is_refused_with_the_reason(kind, kwargs):
    params = parameters(kind)
    inner = kind(params, **copy.deepcopy(kwargs))
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be wrapped: .*{REASONS[kind.__name__]}"):
        FusedAccumulator(inner, 2)
    assert not any(p._post_accumulate_grad_hooks for p in params)


@pytest.mark.parametrize(
    "kind",
    [info.optim_cls for info in optim_db if "differentiable" in info.supported_impls],
    ids=lambda kind: kind.__name__,
)
def test_differentiable_is_refused_with_the_reason(kind):
    inner = kind(parameters(kind), differentiable=True)
    with pytest.raises(ValueError, match="differentiable=True, .* not recorded by autograd"):
        FusedAccumulator(inner, 2)


def test_the_database_holds_what_this_file_names():
    """Another torch may list more: each is served or refused, none is missing here."""
    names = {info.optim_cls.__name__ for info in optim_db}
    assert {info.optim_cls.__name__ for info in REFUSED} == set(REASONS)
    assert {"SGD", "Adam", "AdamW", "Adafactor", "Muon", "Rprop", "ASGD"} <= names
