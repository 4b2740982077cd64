"""Checkpoints: with stock, inside a window, refused ones: contract item 14 for one process."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import (  # noqa: E402
    assert_identical,
    each_backend,
    each_take,
    parameter,
    send,
    stock,
    unchanged,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS = [
    pytest.param(SGD, {}, id="SGD"),
    pytest.param(SGD, {"momentum": 0.9, "nesterov": True}, id="SGD-momentum"),
    pytest.param(Adam, {"amsgrad": True}, id="Adam"),
    pytest.param(AdamW, {"lr": torch.tensor(0.01)}, id="AdamW-tensor-lr"),
    pytest.param(torch.optim.RMSprop, {"momentum": 0.9}, id="RMSprop"),
    pytest.param(torch.optim.Adagrad, {}, id="Adagrad"),
]
each_kind = pytest.mark.parametrize(("kind", "options"), KINDS)


def build(kind, options, steps=4, wrap=True, **accumulator):
    """Parameters of several dtypes and layouts in two groups, always the same."""
    torch.manual_seed(4)
    params = [
        nn.Parameter(torch.randn(5, 3)),
        nn.Parameter(torch.randn(3, 4).t().clone(memory_format=torch.preserve_format)),
        nn.Parameter(torch.randn(6, dtype=torch.float64)),
        nn.Parameter(torch.randn(9).bfloat16()),
        nn.Parameter(torch.randn(2)),
    ]
    options = {"lr": 0.01, **copy.deepcopy(options)}
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    inner = stock(kind, groups, **options)
    return params, FusedAccumulator(inner, steps, **accumulator) if wrap else inner


def micro_batch(params, seed, *, skip=()):
    g = torch.Generator().manual_seed(seed)
    grads = [torch.randn(p.shape, generator=g).to(p.dtype) for p in params]
    send(params, [None if i in skip else grad for i, grad in enumerate(grads)])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ----------------------------------------------------------------------------- inside a window


@each_backend
@each_kind
@each_take
@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_y04_saved_inside_a_window_training_goes_on_bit_for_bit(backend, kind, options, take, held):
    def run(break_at):
        params, optimizer = build(kind, options, backend=backend, take=take, max_norm=0.5)
        for i in range(12):
            if i == break_at:
                state = through_a_file(optimizer.state_dict())
                values = [p.detach().clone() for p in params]
                del optimizer
                params, optimizer = build(kind, options, backend=backend, take=take, max_norm=0.5)
                with torch.no_grad():
                    for p, value in zip(params, values, strict=True):
                        p.copy_(value)
                optimizer.load_state_dict(state)
                assert optimizer.micro_step == held
            micro_batch(params, i, skip={4} if i % 4 < 3 else {0})
            optimizer.step()
        return params, optimizer.state_dict(), optimizer.norm

    assert_identical(run(None), run(4 + held), "after the break")


@pytest.mark.parametrize("kind", [SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("weights", ["weight", "count"])
@pytest.mark.parametrize("held", [1, 2])
def test_weights_and_counters_travel(kind, weights, held):
    def run(break_at):
        p = parameter(0.0)
        optimizer = FusedAccumulator(stock(kind, [p], lr=1.0), 3)
        send(p, float("nan"))
        optimizer.step(**{weights: 1})
        optimizer.flush()
        for i in range(3):
            if i == break_at:
                state = through_a_file(optimizer.state_dict())
                p = parameter(p.item())
                optimizer = FusedAccumulator(stock(kind, [p], lr=1.0), 3)
                optimizer.load_state_dict(state)
                with pytest.raises(ValueError, match="weighted throughout"):
                    send(p, 1.0)
                    optimizer.step()
                optimizer.zero_grad()
                assert optimizer.skipped.item() == 1 and optimizer.skipped.dtype == torch.int64
            send(p, float(i + 1))
            optimizer.step(**{weights: i + 2})
        return p, optimizer.norm

    assert_identical(run(None), run(held))


def test_the_window_alone_travels():
    a, b = parameter(0.0), parameter(0.0)
    first, second = (FusedAccumulator(SGD([p], lr=1.0), 3) for p in (a, b))
    send(a, 3.0)
    first.step()
    send(b, 100.0)
    second.step()
    second.load_window_state_dict(through_a_file(first.window_state_dict()))
    assert second.micro_step == 1 and second.grad(b).item() == 3.0
    for _ in range(2):
        send(b, 6.0)
        second.step()
    assert b.item() == -5.0


def test_y04_a_checkpoint_of_a_closed_window_starts_at_0():
    params, optimizer = build(AdamW, {}, steps=1)
    micro_batch(params, 1)
    optimizer.step()
    state = optimizer.state_dict()
    params, optimizer = build(AdamW, {}, steps=4)  # any number will do
    micro_batch(params, 2)
    optimizer.step()
    optimizer.load_state_dict(state)
    assert optimizer.micro_step == 0 and optimizer.grad(params[0]) is None
    assert optimizer.state[params[0]]["step"].item() == 1


# -------------------------------------------------------------------------------- stock's format


@each_kind
@pytest.mark.parametrize("to_stock", [True, False])
def test_stock_loads_ours_and_we_load_stocks(kind, options, to_stock):
    """After the exchange both go on as the one that was not exchanged."""
    _, plain = build(kind, options, wrap=False)
    runs = []
    for exchange in (False, True):
        wrapped = to_stock
        params, optimizer = build(kind, options, 1, wrap=wrapped)
        for i in range(6):
            if i == 3 and exchange:
                state = through_a_file(optimizer.state_dict())
                if not to_stock:
                    assert "fastaccum" not in state
                values = [p.detach().clone() for p in params]
                del optimizer
                wrapped = not wrapped
                params, optimizer = build(kind, options, 1, wrap=wrapped)
                with torch.no_grad():
                    for p, value in zip(params, values, strict=True):
                        p.copy_(value)
                optimizer.load_state_dict(state)
            micro_batch(params, i)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((params, optimizer.state_dict()["state"]))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        rtol = 2e-2 if a.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10)
    for number, entry in runs[0][1].items():
        assert list(entry) == list(runs[1][1][number])
        assert float(entry.get("step", 0)) == float(runs[1][1][number].get("step", 0))
    del plain


@each_kind
def test_keys_names_dtypes_and_devices_are_stocks(kind, options):
    states = []
    for wrap in (True, False):
        params, optimizer = build(kind, options, 1, wrap=wrap)
        for i in range(2):
            micro_batch(params, i, skip={1})
            optimizer.step()
            optimizer.zero_grad()
        states.append(optimizer.state_dict())
    ours, theirs = states
    assert set(ours) - set(theirs) == {"fastaccum"}
    assert_identical(ours["param_groups"], theirs["param_groups"])
    assert set(ours["state"]) == set(theirs["state"])
    for number, entry in theirs["state"].items():
        assert list(ours["state"][number]) == list(entry)
        for key, value in entry.items():
            mine = ours["state"][number][key]
            assert type(mine) is type(value), key
            if isinstance(value, torch.Tensor):
                assert (mine.dtype, mine.shape, mine.device) == (
                    value.dtype,
                    value.shape,
                    value.device,
                )


def test_entries_own_their_memory():
    params, optimizer = build(AdamW, {})
    for i in range(5):
        micro_batch(params, i)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    state = optimizer.state_dict()

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for v in value.values():
                yield from tensors(v)
        elif isinstance(value, (list, tuple)):
            for v in value:
                yield from tensors(v)

    for tensor in tensors(state):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    for grad in state["fastaccum"]["gradients"].values():
        grad.fill_(float("nan"))
    assert_identical(before["fastaccum"], optimizer.state_dict()["fastaccum"])


@each_kind
def test_loading_copies(kind, options):
    params, optimizer = build(kind, options, 2)
    for i in range(3):
        micro_batch(params, i)
        optimizer.step()
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    others, second = build(kind, options, 2)
    second.load_state_dict(state)
    for i in range(3):
        micro_batch(others, i)
        second.step()
    assert_identical(before, state)
    assert_identical(before["state"], optimizer.state_dict()["state"])


# ------------------------------------------------------------------------------ groups and state


def test_y05_groups_are_the_inner_optimizers_at_all_times():
    p = parameter(1.0)
    inner = SGD([p], lr=0.1)
    optimizer = FusedAccumulator(inner)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    for _ in range(2):
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state and optimizer.defaults is inner.defaults
        optimizer.load_state_dict(optimizer.state_dict())
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for scheduler in schedulers:
        optimizer.param_groups[0]["lr"] = 1.0
        send(p, 0.0)
        optimizer.step()
        scheduler.step()
        assert inner.param_groups[0]["lr"] == pytest.approx(0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0
    send(p, 1.0)
    optimizer.step()
    assert p.item() == 1.0


def test_groups_and_state_may_be_assigned():
    p = parameter(1.0)
    inner = SGD([p], lr=0.1, momentum=0.5)
    optimizer = FusedAccumulator(inner)
    groups = [{**inner.param_groups[0], "lr": 1.0}]
    optimizer.param_groups = groups
    assert inner.param_groups is groups
    state = {p: {"momentum_buffer": torch.tensor([8.0])}}
    optimizer.state = state
    assert inner.state is state
    send(p, 1.0)
    optimizer.step()
    assert p.item() == 1.0 - (0.5 * 8.0 + 1.0)
    optimizer.defaults = {"lr": 3.0}
    assert inner.defaults == {"lr": 3.0}


def test_the_inner_optimizers_own_load_and_state_set_by_hand_are_followed():
    p, q = parameter(1.0), parameter(1.0)
    inner, reference = Adam([p], lr=0.1), stock(Adam, [q], lr=0.1)
    optimizer = FusedAccumulator(inner)
    for i in range(6):
        if i == 2:
            state = copy.deepcopy(reference.state_dict())
            inner.load_state_dict(state)
        if i == 4:
            for entry, other in ((inner.state[p], reference.state[q])[::1],):
                entry["exp_avg"], other["exp_avg"] = torch.ones(1), torch.ones(1)
                entry["step"], other["step"] = torch.tensor(7.0), torch.tensor(7.0)
        for param, step in ((p, optimizer.step), (q, reference.step)):
            param.grad = torch.tensor([1.0 + i])
            step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
        assert inner.state[p]["step"].item() == reference.state[q]["step"].item()


def test_state_dict_hooks_of_the_wrapper():
    p = parameter(1.0)
    optimizer = FusedAccumulator(SGD([p], lr=0.1))
    order = []
    optimizer.register_state_dict_pre_hook(lambda opt: order.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: order.append(state.pop("mine")))
    optimizer.register_load_state_dict_post_hook(lambda opt: order.append("loaded"))
    state = optimizer.state_dict()
    assert state["mine"] == 1
    optimizer.load_state_dict(state)
    assert order == ["pre", 1, "loaded"] and state["mine"] == 1


# ------------------------------------------------------------------------------ refused checkpoints


def checkpoint():
    params, optimizer = build(Adam, {"amsgrad": True})
    for i in range(6):
        micro_batch(params, i)
        optimizer.step()
    return optimizer.state_dict()


def without(*path):
    def change(state):
        inside = state
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]

    return change


def put(value, *path):
    def change(state):
        inside = state
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return change


WINDOW = [
    "version", "accumulation_steps", "micro_step", "weight_kind", "total_weight", "kept",
    "kept_weight", "gradients", "skipped",
]  # fmt: skip
REFUSED = {
    "no state": (without("state"), "no 'state'"),
    "no groups": (without("param_groups"), "no 'param_groups'"),
    "a group missing": (without("param_groups", 1), "parameter groups of"),
    "a parameter missing": (without("param_groups", 0, "params", 0), "parameter groups of"),
    "a moment missing": (without("state", 1, "exp_avg_sq"), "parameter 1.*exp_avg_sq"),
    "a step missing": (without("state", 2, "step"), "parameter 2.*step"),
    "a moment's shape": (
        put(torch.zeros(3), "state", 1, "exp_avg"),
        r"exp_avg of parameter 1.*\[3\]",
    ),
    "a moment of another kind": (put(3, "state", 1, "exp_avg"), "exp_avg of parameter 1"),
    "a group without its options": (without("param_groups", 0, "betas"), "betas"),
    # From here on in the open window's entry.
    "another window version": (put(99, "fastaccum", "version"), "version 99.*newer"),
    "no window version": (put("a", "fastaccum", "version"), "version"),
    "an entry of another kind": (put(3, "fastaccum"), "'fastaccum' entry is not whole"),
    "an unknown parameter": (put({99: torch.ones(1)}, "fastaccum", "gradients"), "parameter 99"),
    "a gradient's shape": (
        put(torch.ones(3), "fastaccum", "gradients", 0),
        r"gradient of parameter 0.*\[3\]",
    ),
    "a gradient of another kind": (
        put("a", "fastaccum", "gradients", 0),
        "gradient of parameter 0",
    ),
    "a complex gradient": (
        put(torch.ones(5, 3, dtype=torch.complex64), "fastaccum", "gradients", 0),
        "gradient of parameter 0",
    ),
    "a list of gradients": (put([torch.ones(1)], "fastaccum", "gradients"), "gradients"),
    "another K": (put(7, "fastaccum", "accumulation_steps"), "accumulation_steps=7"),
    "more than K": (put(5, "fastaccum", "micro_step"), "5 micro-batches"),
    "less than none": (put(-1, "fastaccum", "micro_step"), "micro_step|micro-batches"),
    "half a micro-batch": (put(1.5, "fastaccum", "micro_step"), "micro_step|micro-batches"),
    "a negative weight": (put(-1.0, "fastaccum", "total_weight"), "total.weight"),
    "a NaN weight": (put(float("nan"), "fastaccum", "total_weight"), "total.weight"),
    "a weight of another kind": (put("a", "fastaccum", "total_weight"), "total.weight"),
    "an unknown weighting": (put("rows", "fastaccum", "weight_kind"), "weight_kind.*rows"),
    "a kept weight of another kind": (put(None, "fastaccum", "kept_weight"), "kept_weight"),
    "a count of another kind": (put("many", "fastaccum", "skipped"), "skipped"),
    **{f"no {key}": (without("fastaccum", key), f"not whole.*{key}") for key in WINDOW},
}


OF_THE_WINDOW = [change for name, (change, _) in REFUSED.items() if name not in list(REFUSED)[:9]]


@pytest.mark.parametrize(("change", "match"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changes(change, match):
    params, optimizer = build(Adam, {"amsgrad": True})
    for i in range(9, 14):
        micro_batch(params, i)
        optimizer.step()
    micro_batch(params, 20)
    state = copy.deepcopy(checkpoint())
    change(state)
    kept = copy.deepcopy(state)
    unchanged(optimizer, lambda: optimizer.load_state_dict(state), (ValueError, TypeError), match)
    assert_identical(kept, state)
    if change in OF_THE_WINDOW:
        entry = state["fastaccum"]
        unchanged(
            optimizer,
            lambda: optimizer.load_window_state_dict(entry),
            (ValueError, TypeError),
            match,
        )
    for i in range(3):
        micro_batch(params, i)
        optimizer.step()
    assert optimizer.stepped


@pytest.mark.parametrize("foreign", [SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("kind", [Adam, SGD])
def test_another_optimizers_checkpoint_is_refused(kind, foreign):
    if kind is foreign:
        return
    options = {"momentum": 0.9} if foreign is SGD else {}
    params, other = build(foreign, options, wrap=False)
    micro_batch(params, 1)
    other.step()
    params, optimizer = build(kind, {})
    micro_batch(params, 1)
    optimizer.step()
    unchanged(
        optimizer,
        lambda: optimizer.load_state_dict(other.state_dict()),
        ValueError,
        "betas|dampening",
    )


def test_not_a_checkpoint_at_all():
    _, optimizer = build(Adam, {})
    for wrong in (None, [], 3, nn.Linear(2, 2).state_dict()):
        unchanged(
            optimizer,
            lambda w=wrong: optimizer.load_state_dict(w),
            (ValueError, TypeError),
            "state",
        )
    for wrong in (None, [], 3, {}):
        unchanged(
            optimizer,
            lambda w=wrong: optimizer.load_window_state_dict(w),
            (ValueError, TypeError),
            "not whole",
        )
