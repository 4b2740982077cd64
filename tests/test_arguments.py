"""Every argument that is refused: which exception, what it says, and that nothing has changed."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import parameter, send, unchanged  # noqa: E402

pytestmark = pytest.mark.quick
SGD = torch.optim.SGD
INF, NAN = math.inf, math.nan


def refused(exception, match, *args, **options):
    """The wrapper is not made, and its optimizer and parameters are as if nobody had tried."""
    p = parameter(0.0)
    inner = SGD([p], lr=1.0, momentum=0.9)
    unchanged(inner, lambda: FusedAccumulator(inner, *args, **options), exception, match)
    assert not p._post_accumulate_grad_hooks and not inner._optimizer_step_pre_hooks
    FusedAccumulator(inner, 2, backend="reference")


@pytest.mark.parametrize(
    ("value", "exception"),
    [(0, ValueError), (-4, ValueError), (1.0, TypeError), (True, TypeError), ("4", TypeError),
     (None, TypeError)],
)  # fmt: skip
def test_a01_accumulation_steps(value, exception):
    match = rf"accumulation_steps must be .*{value}"
    refused(exception, match, value)
    refused(exception, match, accumulation_steps=value)


NUMBERS = [
    (0, ValueError), (0.0, ValueError), (-1.0, ValueError), (-INF, ValueError), (NAN, ValueError),
    (True, TypeError), (False, TypeError), ("1", TypeError), ([1.0], TypeError), (1j, TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("value", "exception"), NUMBERS)
@pytest.mark.parametrize("name", ["max_norm", "norm_type", "max_value"])
def test_a01_limits(name, value, exception):
    advice = "must be above 0" if exception is ValueError else "must be a number"
    refused(exception, rf"{name} {advice}.*{str(value)[:2].replace('[', '')}", **{name: value})


def test_limits_that_are_right():
    for name in ("max_norm", "max_value"):
        for value in (None, 1, 0.5, INF):
            FusedAccumulator(SGD([parameter(0.0)], lr=1.0), **{name: value})
    for value in (1, 2.0, 0.5, INF, "inf"):
        FusedAccumulator(SGD([parameter(0.0)], lr=1.0), norm_type=value)


def test_clip_by_norm_or_by_value():
    refused(ValueError, "max_norm=1.0 and max_value=2.0 exclude each other", max_norm=1.0, max_value=2.0)
    p = parameter(0.0)
    inner = SGD([{"params": [p], "max_norm": 1.0}], lr=1.0)
    unchanged(inner, lambda: FusedAccumulator(inner, max_value=2.0), ValueError, "max_norm.*max_value")


@pytest.mark.parametrize(("value", "exception"), NUMBERS)
def test_a_groups_own_max_norm(value, exception):
    p = parameter(0.0)
    inner = SGD([{"params": [parameter(0.0)]}, {"params": [p], "max_norm": value}], lr=1.0)
    unchanged(
        inner,
        lambda: FusedAccumulator(inner),
        exception,
        r"param_groups\[1\]\['max_norm'\] must be",
    )
    assert not p._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("reduction", "'mean', 'sum'"),
        ("take", "'step', 'backward'"),
        ("nonfinite", "'skip', 'propagate', 'error'"),
        ("nonfinite_micro_batch", "'keep', 'drop'"),
    ],
)
@pytest.mark.parametrize("value", ["Mean", "", None, 1, True])
def test_words(name, allowed, value):
    refused(ValueError, f"{name} must be one of {allowed}, got {value!r}", **{name: value})


@pytest.mark.parametrize("value", ["float32", torch.int32, torch.complex64, float, 32])
def test_accumulate_dtype(value):
    refused((ValueError, TypeError), "accumulate_dtype must be None or one of", accumulate_dtype=value)


@pytest.mark.parametrize("name", ["master_weights", "shard_optimizer", "fuse_weight_gradients"])
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_are_bools(name, value):
    refused(TypeError, f"{name} must be a bool, got {value!r}", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", nn.Linear(1, 1)),
        ("process_group", object()),
        ("shard_optimizer", True),
        ("wire_dtype", torch.bfloat16),
        ("fuse_weight_gradients", True),
    ],
)
def test_what_is_not_built_yet_says_so(name, value):
    refused(NotImplementedError, rf"^{name}=.* is not supported yet; \w+", **{name: value})


def test_backends():
    refused(
        ValueError,
        "backend must be one of auto, native, triton, reference, got 'cuda'",
        backend="cuda",
    )
    refused(ValueError, "backend must be one of .*None", backend=None)
    refused(RuntimeError, "backend 'triton' cannot run on cpu: .*backend='auto'", backend="triton")


def test_the_environment_chooses_what_auto_means(monkeypatch):
    monkeypatch.setenv("FASTACCUM_BACKEND", "nonsense")
    refused(ValueError, "FASTACCUM_BACKEND=nonsense")


def test_arguments_are_by_name():
    with pytest.raises(TypeError, match="positional"):
        FusedAccumulator(SGD([parameter(0.0)], lr=1.0), 2, None)
    with pytest.raises(TypeError, match="grad_scaler"):
        FusedAccumulator(SGD([parameter(0.0)], lr=1.0)).step(grad_scaler=None)


# ------------------------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize("wrong", [None, SGD, [parameter(0.0)], nn.Linear(1, 1), "SGD"])
def test_something_that_is_no_optimizer(wrong):
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got .*build it first"):
        FusedAccumulator(wrong)


def test_a_wrapper_of_a_wrapper():
    inner = FusedAccumulator(SGD([parameter(0.0)], lr=1.0))
    unchanged(inner, lambda: FusedAccumulator(inner), TypeError, "is a FusedAccumulator already")


def test_optimizers_that_cannot_be_wrapped():
    class OwnLBFGS(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, OwnLBFGS, torch.optim.SparseAdam):
        inner = kind([parameter(0.0)])
        name = kind.__name__.removeprefix("Own")
        unchanged(inner, lambda i=inner: FusedAccumulator(i), ValueError, f"{name} cannot be wrapped: it")


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_differentiable_optimizers(kind):
    inner = kind([parameter(0.0)], lr=1.0, differentiable=True)
    unchanged(inner, lambda: FusedAccumulator(inner), ValueError, "group 0 has differentiable=True")


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (
            torch.zeros(2, dtype=torch.complex64),
            r"group 1 \(shape \[2\]\) is complex: .*view_as_real",
        ),
        (torch.zeros(2, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (torch.zeros(2, device="meta"), "several devices.*cpu, meta.*of their own"),
        (torch.zeros(2).to_sparse(), "sparse_coo.*dense"),
    ],
)
def test_parameters_that_cannot_be_trained(tensor, match):
    good, bad = parameter(0.0), nn.Parameter(tensor, requires_grad=False)
    inner = SGD([{"params": [good]}, {"params": [bad]}], lr=1.0)
    with pytest.raises(ValueError, match=match):
        FusedAccumulator(inner)
    assert not good._post_accumulate_grad_hooks


def test_a_parameter_appended_later_is_checked_too():
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2)
    send(p, 1.0)
    optimizer.step()
    bad = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer.param_groups[0]["params"].append(bad)
    send(p, 3.0)
    with pytest.raises(ValueError, match="complex"):
        optimizer.step()
    assert p.grad.item() == 3.0 and optimizer.micro_step == 1
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    assert p.item() == -2.0


def test_calls_that_are_refused():
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2)
    send(p, 1.0)
    for call, exception, match in (
        (lambda: optimizer.step(3), TypeError, "not callable"),
        (lambda: optimizer.step(weight=1, count=1), ValueError, "not both"),
        (lambda: optimizer.step(weight=-1), ValueError, "weight must be finite and at least 0"),
        (lambda: optimizer.step(count=NAN), ValueError, "count must be finite"),
        (lambda: optimizer.backward(p.sum(), 3), TypeError, "positional"),
        (lambda: optimizer.clip_next(0.0), ValueError, "max_norm must be above 0"),
        (lambda: optimizer.clip_next(None), TypeError, "max_norm must be a number"),
        (lambda: optimizer.grad(parameter(0.0)), ValueError, "no parameter group"),
    ):
        unchanged(optimizer, call, exception, match)
    optimizer.step()
    assert optimizer.micro_step == 1
