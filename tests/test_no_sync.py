"""From the second window on, a window on a GPU waits for nothing and allocates nothing.

With the emulated CUDA kernels as the backend: every op that torch dispatches inside the accumulator is
looked at, so a read of a value or a new tensor shows without a GPU.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

torch = pytest.importorskip("torch")

from fastaccum import FusedAccumulator, dispatch  # noqa: E402
from tests import emulated, no_sync  # noqa: E402

pytestmark = pytest.mark.skipif(emulated.reason_against() is not None, reason=str(emulated.reason_against()))


@pytest.fixture
def on_gpu(monkeypatch):
    """The emulated kernels, watched; a set of what may be dispatched besides."""
    made, original = emulated.backend(), dispatch.load
    monkeypatch.setattr(
        dispatch,
        "load",
        lambda name, device=dispatch.CPU: made if name == "native" else original(name, device),
    )
    besides: set[str] = set()
    no_sync.watch(monkeypatch, besides)
    return besides


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(33, 7), (513,), (), (2, 3, 4, 5), (0,), (9000,)]
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def train(optimizer, params, windows, steps, *, missing=(), weights=None, before=lambda window: None):
    for window in range(windows):
        before(window)
        for i in range(steps):
            losses = [p.float().square().sum() for k, p in enumerate(params) if k not in missing]
            loss = torch.stack(losses).sum()
            if weights is None:
                loss.backward()
                optimizer.step()
            else:
                optimizer.backward(loss, weight=weights[i])
                optimizer.step()


KINDS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, maximize=True),
    "tensor lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), capturable=False),
}
OPTIONS = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "inf norm": {"max_norm": 0.5, "norm_type": float("inf")},
    "3-norm": {"max_norm": 0.5, "norm_type": 3.0},
    "clamped": {"max_value": 0.1},
    "propagate": {"nonfinite": "propagate"},
    "sum": {"reduction": "sum"},
}


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("take", ["step", "backward"])
@pytest.mark.parametrize(("kind", "options"), [
    *itertools.product(["adamw"], OPTIONS), *itertools.product(KINDS, ["clipped"]),
])  # fmt: skip
def test_a_steady_window_neither_waits_nor_allocates(on_gpu, kind, options, take, steps):
    params = parameters()
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "max_norm": 1.0}]
    if "clamped" in options:
        del groups[1]["max_norm"]
    optimizer = FusedAccumulator(KINDS[kind](groups), steps, take=take, **OPTIONS[options])
    train(optimizer, params, 1, steps)
    with no_sync.steady():
        train(optimizer, params, 3, steps)
    assert optimizer.updated and optimizer.norm > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_nor_with_other_dtypes_and_missing_gradients(on_gpu, dtype):
    params = [*parameters(), *parameters(dtype)]
    optimizer = FusedAccumulator(torch.optim.AdamW(params, lr=0.01, eps=1e-3), 2, max_norm=1.0)
    train(optimizer, params, 1, 2)
    train(optimizer, params, 1, 2, missing=(1, 7))
    with no_sync.steady():
        train(optimizer, params, 2, 2, missing=(1, 7))


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("take", ["step", "backward"])
def test_nor_with_weights(on_gpu, kind, take):
    params = parameters()
    optimizer = FusedAccumulator(torch.optim.AdamW(params, lr=0.01), 2, take=take)
    weights = [3.0, 5.0] if kind == "float" else [torch.tensor(3.0), torch.tensor(5)]
    train(optimizer, params, 1, 2, weights=weights)
    if kind == "tensor":
        on_gpu.add("_to_copy")  # the user's own weight becomes float64
    with no_sync.steady():
        train(optimizer, params, 2, 2, weights=weights)


def test_nor_at_a_flush(on_gpu):
    params = parameters()
    optimizer = FusedAccumulator(torch.optim.AdamW(params, lr=0.01), 4, max_norm=1.0)
    for steady in (False, True):
        for held in (1, 2, 3):
            with no_sync.steady() if steady else contextlib.nullcontext():
                train(optimizer, params, 1, held)
                assert optimizer.flush()


def test_a_schedule_changes_nothing(on_gpu):
    params = parameters()
    inner = torch.optim.AdamW(params, lr=0.01)
    optimizer = FusedAccumulator(inner, 2)
    train(optimizer, params, 1, 2)

    def set_lr(window: int) -> None:
        inner.param_groups[0]["lr"] = 0.01 / (window + 1)

    on_gpu.add("lift_fresh")  # the table of options, made anew on the host; it travels by value
    with no_sync.steady():
        train(optimizer, params, 3, 2, before=set_lr)


def test_a_skipped_window_is_counted_on_the_device(on_gpu):
    params = parameters()
    optimizer = FusedAccumulator(torch.optim.AdamW(params, lr=0.01), 2)
    train(optimizer, params, 1, 2)
    for _ in range(2):
        params[0].square().sum().backward()
        optimizer.step()
    before = [p.detach().clone() for p in params]
    steps = [optimizer.state[p]["step"].clone() for p in params]
    with no_sync.steady():
        for bad in (False, True):
            (params[0].square().sum() * (float("nan") if bad else 1.0)).backward()
            optimizer.step()
    assert optimizer.updated and optimizer.skipped == 1 and not optimizer.stepped
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert [optimizer.state[p]["step"].item() for p in params] == [s.item() for s in steps]


# ------------------------------------------------------------------ what may wait, because it is asked to


def one(**options):
    param = torch.nn.Parameter(torch.ones(600))
    return param, FusedAccumulator(torch.optim.SGD([param], lr=0.1), 1, **options)


def test_error_reads_the_flag(on_gpu):
    param, optimizer = one(nonfinite="error")
    with no_sync.Forbid(set()), pytest.raises(no_sync.Forbidden, match="_local_scalar_dense"):
        param.grad = torch.ones(600)
        optimizer.step()


def test_stepped_reads_the_flag(on_gpu):
    param, optimizer = one()
    param.grad = torch.ones(600)
    optimizer.step()
    with no_sync.Forbid(set()), pytest.raises(no_sync.Forbidden, match="_local_scalar_dense"):
        _ = optimizer.stepped


def test_the_generic_path_reads_the_flag_once(on_gpu):
    param = torch.nn.Parameter(torch.ones(600))
    optimizer = FusedAccumulator(torch.optim.Rprop([param], lr=0.1), 1)
    param.grad = torch.ones(600)
    optimizer.step()  # watched, but for the inner step
    assert not torch.equal(param, torch.ones(600))


def test_a_gradient_that_others_hold_is_copied_to_be_kept(on_gpu):
    param = torch.nn.Parameter(torch.ones(600))
    optimizer = FusedAccumulator(torch.optim.SGD([param], lr=1.0), 2)
    held = torch.ones(600)
    for value in (1.0, 3.0):
        held.fill_(value)
        param.grad = held.view(600)
        optimizer.step()
    assert torch.equal(param, torch.full((600,), -1.0))


def test_a_read_is_seen(on_gpu, monkeypatch):
    """The watch itself: a planted read, and a planted allocation, raise."""
    from fastaccum.outcome import Outcome

    original = Outcome.decide

    def reading(self, *args):
        original(self, *args)
        bool(self.skip)

    monkeypatch.setattr(Outcome, "decide", reading)
    param, optimizer = one()
    param.grad = torch.ones(600)
    with pytest.raises(no_sync.Forbidden, match="_local_scalar_dense"):
        optimizer.step()

    def allocating(self, *args):
        original(self, *args)
        self.norm / 2

    monkeypatch.setattr(Outcome, "decide", allocating)
    param, optimizer = one()
    param.grad = torch.ones(600)
    optimizer.step()
    param.grad = torch.ones(600)
    with no_sync.steady(), pytest.raises(no_sync.Forbidden, match="div"):
        optimizer.step()
