"""Whole trainings: the error against float64 is at most 4 times stock's own, plus 1e-6."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import each_backend, each_take, error, parameter, run_window, send, twins  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = pytest.mark.native
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def grid(**choices):
    return [dict(zip(choices, row, strict=True)) for row in itertools.product(*choices.values())]


SGD_GRID = [
    options
    for options in grid(
        momentum=[0.0, 0.9], dampening=[0.0, 0.5], nesterov=[False, True],
        weight_decay=[0.0, 0.1, -0.1], maximize=[False, True],
    )
    if not options["nesterov"] or (options["momentum"] and not options["dampening"])
]  # fmt: skip
ADAM_GRID = grid(
    betas=[(0.9, 0.999), (0.0, 0.5)], weight_decay=[0.0, 0.1, -0.1], amsgrad=[False, True],
    maximize=[False, True],
)  # fmt: skip
EXTRA = [
    (SGD, {"lr": torch.tensor(0.05), "momentum": 0.9}),
    (Adam, {"lr": torch.tensor(0.01)}),
    (Adam, {"lr": 0.01, "eps": 0.0}),
    (Adam, {"lr": 0.01, "eps": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (AdamW, {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.8), torch.tensor(0.9))}),
    (AdamW, {"lr": 0.01, "foreach": True}),
    (AdamW, {"lr": 0.01, "fused": True}),
    (SGD, {"lr": 0.0}),
]
OTHERS = [
    (torch.optim.Adadelta, {}), (torch.optim.Adafactor, {"lr": 0.05}), (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}), (torch.optim.ASGD, {}), (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}), (torch.optim.RMSprop, {"centered": True}), (torch.optim.Rprop, {}),
    (torch.optim.Muon, {}),
]  # fmt: skip
WINDOWS, STEPS = 12, 3


def name(value):
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, dict):
        return "-".join(f"{k}={v}" for k, v in value.items() if v is not False) or "default"
    return None


def flavours(kind):
    """How stock can run it; a yardstick only, never a value to agree with."""
    signature = kind.__init__.__code__.co_varnames
    choices = [{"foreach": False}, {"foreach": True}] if "foreach" in signature else [{}]
    return choices + ([{"fused": True}] if "fused" in signature else [])


def holds_tensors(options):
    betas = options.get("betas", ())
    return any(isinstance(v, torch.Tensor) for v in (*options.values(), *betas))


def problem(dtype, matrices=False):
    torch.manual_seed(12)
    shapes = [(30, 17), (40, 25)] if matrices else [(30, 17), (40,), (), (600,)]
    params = [nn.Parameter(torch.randn(s, dtype=torch.float64).to(dtype)) for s in shapes]
    windows = [
        [(float(1 + (i + k) % 3), [torch.randn(s).to(dtype) for s in shapes]) for k in range(STEPS)]
        for i in range(WINDOWS)
    ]
    return params, windows


def make(kind, params, weight_decay=0.0, **options):
    """Stock's constructors refuse a negative decay; a group that is given one takes it."""
    if weight_decay > 0:
        options["weight_decay"] = weight_decay
    optimizer = kind(params, **options)
    if weight_decay < 0:
        optimizer.param_groups[0]["weight_decay"] = weight_decay
    return optimizer


def plain(params, kind, options, windows, **clip):
    optimizer = make(kind, params, **options)
    for window in windows:
        run_window(params, optimizer, window, **clip)


def assert_as_good_as_stock(kind, options, dtype=torch.float32, matrices=False, **accumulator):
    params, windows = problem(dtype, matrices)
    options = {"lr": 0.05, **options}
    chosen = {k: v for k, v in options.items() if k not in ("foreach", "fused")}
    truth = twins(params, torch.float64)
    loop = {"foreach": False} if "foreach" in kind.__init__.__code__.co_varnames else {}
    clip = {"max_norm": 20.0}
    plain(truth, kind, {**chosen, **loop}, windows, **clip)
    yardstick = 0.0
    for flavour in flavours(kind):
        if flavour.get("foreach") and holds_tensors(options):
            continue  # stock refuses
        others = twins(params)
        plain(others, kind, {**chosen, **flavour}, windows, **clip)
        yardstick = max(yardstick, error(others, truth))
    optimizer = FusedAccumulator(make(kind, params, **options), STEPS, **clip, **accumulator)
    for window in windows:
        for weight, grads in window:
            send(params, grads)
            optimizer.step(weight=weight)
        assert optimizer.stepped
    assert error(params, truth) <= 4 * yardstick + 1e-6
    if isinstance(options["lr"], float) and options["lr"]:
        assert error(twins(problem(dtype, matrices)[0]), truth) > 1e-4  # it has trained


@pytest.mark.quick
@pytest.mark.parametrize("options", SGD_GRID, ids=name)
def test_sgd(options):
    assert_as_good_as_stock(SGD, options)


@pytest.mark.quick
@pytest.mark.parametrize("kind", [Adam, AdamW], ids=name)
@pytest.mark.parametrize("options", ADAM_GRID, ids=name)
def test_adam(kind, options):
    assert_as_good_as_stock(kind, {"lr": 0.01, **options})


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "options"), EXTRA, ids=name)
def test_other_options(kind, options):
    assert_as_good_as_stock(kind, options)


@pytest.mark.parametrize(("kind", "options"), [(SGD, {"momentum": 0.9, "nesterov": True}),
                                               (Adam, {"amsgrad": True, "weight_decay": 0.1}),
                                               (AdamW, {"maximize": True})], ids=name)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@each_backend
def test_other_dtypes(kind, options, dtype, backend):
    # float16 has no 1e-8: there stock divides by 0.
    options = {**options, "eps": 1e-3} if kind is not SGD else options
    assert_as_good_as_stock(kind, {"lr": 0.01, **options}, dtype, backend=backend)


@pytest.mark.parametrize(("kind", "options"), OTHERS, ids=name)
@each_backend
def test_every_other_optimizer_runs_its_own_step(kind, options, backend):
    assert_as_good_as_stock(kind, options, matrices=kind is torch.optim.Muon, backend=backend)


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "options"), OTHERS[2:8], ids=name)
def test_the_generic_path_is_the_plain_loop_bit_for_bit(kind, options):
    """K a power of 2 and no clipping: every operation is the loop's own."""
    torch.manual_seed(1)
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, 50)), parameter(2.0)] for _ in range(2))
    optimizer = FusedAccumulator(kind(ours, lr=0.1, **options), 4)
    reference = kind(theirs, lr=0.1, **options)
    for i in range(12):
        grads = [torch.randn(50), torch.randn(1)]
        send(ours, grads)
        optimizer.step()
        send(theirs, [g / 4 for g in grads])
        if i % 4 == 3:
            reference.step()
            reference.zero_grad()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.quick
@each_backend
def test_u06_decay_is_adams_or_adamws(backend):
    def once(kind, p, grad, wrap, **options):
        param = parameter(p)
        optimizer = wrap(make(kind, [param], **options))
        param.grad = torch.tensor([grad])
        optimizer.step()
        return param.item(), optimizer.state.get(param, {})

    def wrap(inner):
        return FusedAccumulator(inner, backend=backend)

    # Both alive at once: the mode must belong to the optimizer.
    live = [wrap(kind([parameter(1.0)], lr=0.1, weight_decay=0.5)) for kind in (Adam, AdamW)]
    for p, grad, lr, decay in ((2.0, -0.5, 0.1, 0.5), (2.0, -0.5, 0.1, -0.5), (1.0, 1.0, 0.5, 0.4)):
        adam, state = once(Adam, p, grad, wrap, lr=lr, weight_decay=decay)
        coupled = grad + decay * p
        assert adam == pytest.approx(p - lr * (1 if coupled > 0 else -1), rel=1e-6)
        assert state["exp_avg"].item() == pytest.approx(0.1 * coupled, rel=1e-6)
        adamw, state = once(AdamW, p, grad, wrap, lr=lr, weight_decay=decay)
        assert adamw == pytest.approx(p * (1 - lr * decay) - lr * (1 if grad > 0 else -1), rel=1e-6)
        assert state["exp_avg"].item() == pytest.approx(0.1 * grad, rel=1e-6)
    assert once(Adam, 2.0, -0.5, wrap, lr=0.1, weight_decay=0.5)[0] == pytest.approx(1.9)
    assert once(AdamW, 2.0, -0.5, wrap, lr=0.1, weight_decay=0.5)[0] == pytest.approx(2.0)
    # SGD: decay joins the gradient, before the momentum.
    for decay in (0.4, -0.4):
        sgd, state = once(SGD, 1.0, 1.0, wrap, lr=0.5, weight_decay=decay, momentum=0.9)
        assert sgd == pytest.approx(1 - 0.5 * (1 + decay))
        assert state["momentum_buffer"].item() == pytest.approx(1 + decay)
    del live


@pytest.mark.quick
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_options_may_change_while_training(kind):
    """lr, decay, betas and momentum, per group, between and inside windows."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    truth = twins(params, torch.float64)

    def groups(of):
        return [{"params": [of[0]]}, {"params": [of[1]], "lr": 0.3}]

    options = {"lr": 0.1, "foreach": False, "fused": False}
    reference = kind(groups(truth), **options)
    optimizer = FusedAccumulator(kind(groups(params), **options), 2)
    # Stock keeps a buffer while the momentum is 0 and goes on with it later; so do we.
    changes = [{}, {"lr": 0.5}, {"weight_decay": 0.2}, {"maximize": True}]
    changes += [{"momentum": 0.5}, {"momentum": 0.0}] if kind is SGD else [{"betas": (0.5, 0.6)}]
    changes += [{"momentum": 0.5}] if kind is SGD else [{"eps": 1e-3}, {"lr": torch.tensor(0.2)}]
    for i, change in enumerate(changes):
        window = [(1.0, [torch.randn(4), torch.randn(3)]) for _ in range(2)]
        for k, (_, grads) in enumerate(window):
            if k == i % 2:
                for group in (optimizer.param_groups[i % 2], reference.param_groups[i % 2]):
                    group.update(change)
            send(params, grads)
            optimizer.step()
        run_window(truth, reference, window)
        assert error(params, truth) < 2e-6, change


@pytest.mark.quick
@each_take
def test_a_model_is_trained_as_by_the_plain_loop(take):
    """Real layers, a short last window per epoch, clipping."""

    def build():
        torch.manual_seed(21)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        ).to(memory_format=torch.channels_last)

    data = [(torch.randn(4, 1, 8, 8), torch.randint(3, (4,))) for _ in range(7)]
    criterion = nn.CrossEntropyLoss()

    def plain_loop(dtype, **options):
        model = build().to(dtype)
        optimizer = AdamW(model.parameters(), lr=0.01, **options)
        for _ in range(3):
            for begin in range(0, 7, 3):
                batches = data[begin : begin + 3]
                for x, y in batches:
                    (criterion(model(x.to(dtype)), y) / len(batches)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    truth = plain_loop(torch.float64, foreach=False)
    runs = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    yardstick = max(error(plain_loop(torch.float32, **options), truth) for options in runs)
    model = build()
    optimizer = FusedAccumulator(AdamW(model.parameters(), lr=0.01), 3, max_norm=0.5, take=take)
    updates = 0
    for _ in range(3):
        for x, y in data:
            criterion(model(x), y).backward()
            optimizer.step()
            updates += optimizer.updated
        updates += optimizer.flush()
    assert updates == 9
    assert error(list(model.parameters()), truth) <= 4 * yardstick + 1e-6
