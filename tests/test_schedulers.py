"""Schedulers and averaged weights on the wrapper: the values of the stock loop, once per update."""

from __future__ import annotations

import copy
import inspect
import io
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler, swa_utils  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import each_take, fused, parameter, send, stock  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD, AdamW, NAdam = torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam
KINDS = [
    pytest.param(SGD, {"momentum": 0.9}, id="SGD"),
    pytest.param(AdamW, {}, id="AdamW"),
    pytest.param(NAdam, {}, id="NAdam"),  # runs its own step
]
each_kind = pytest.mark.parametrize(("kind", "options"), KINDS)

S = lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, [lambda n: 0.9**n, lambda n: n / 4]),  # one group starts at 0
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda n: 1.0 - 0.05 * n),
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 3, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.2, 2, mode="triangular2", cycle_momentum=True),
    "OneCycleLR": lambda o: S.OneCycleLR(o, [0.2, 0.1], total_steps=10, three_phase=True),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=2), S.StepLR(o, 2), S.ExponentialLR(o, 0.9)], [2, 5]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 3), S.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1, min_lr=0.02),
    "SWALR": lambda o: swa_utils.SWALR(o, [0.5, 0.01], anneal_epochs=3),
}
UPDATES = 8
# A metric that stalls twice, so that ReduceLROnPlateau acts, and recovers in between.
METRICS = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]


def test_every_scheduler_of_torch_is_here():
    classes = inspect.getmembers(lr_scheduler, inspect.isclass)
    own = {
        name
        for name, c in classes
        if issubclass(c, lr_scheduler.LRScheduler) and c.__module__ == lr_scheduler.__name__
    }
    assert own - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


def parameters():
    torch.manual_seed(6)
    return [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (3, 2)]


def grads(i):
    g = torch.Generator().manual_seed(i)
    return [torch.randn(n, dtype=torch.float64, generator=g) for n in (3, 2)]


def move(scheduler, update, copied=False):
    """Torch's own deprecation inside SequentialLR is none of ours; anything else is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in")
        if copied:  # stock's copies lose the mark, too, by which a scheduler knows its optimizer
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
        scheduler.step(*([METRICS[update]] if isinstance(scheduler, S.ReduceLROnPlateau) else []))


def knobs(optimizer):
    """All that a scheduler turns, as numbers."""
    return [
        [float(group["lr"]), group.get("momentum"), group.get("betas")] for group in optimizer.param_groups
    ]


def inner_of(kind, options, lr, params):
    lrs = [torch.tensor(rate, dtype=torch.float64) if lr == "tensor" else rate for rate in (0.1, 0.05)]
    listed = [{"params": [p], "lr": rate} for p, rate in zip(params, lrs, strict=True)]
    return stock(kind, listed, lr=0.1, **options)


def make(name, optimizer):
    if name == "CyclicLR" and "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
        pytest.skip("cycles a momentum that is not there")
    return SCHEDULERS[name](optimizer)


def run(kind, options, name, made, *, lr="number", steps=3, again=None):
    """Trains; ``again(optimizer, scheduler)`` may put others in their place inside the third window."""
    params = parameters()
    inner = inner_of(kind, options, lr, params)
    wrap = made != "stock"
    if made == "on the wrapper":
        optimizer = FusedAccumulator(inner, steps)
        scheduler = make(name, optimizer)
    else:
        scheduler = make(name, inner)
        optimizer = FusedAccumulator(inner, steps) if wrap else inner
    seen = [knobs(inner)]
    for update in range(UPDATES):
        for part in range(steps):
            if again is not None and (update, part) == (2, 1):
                optimizer, scheduler, params = again(optimizer, scheduler, params)
            send(params, grads(update * steps + part))
            if wrap:
                optimizer.step()
                assert optimizer.stepped == (part + 1 == steps)
        if not wrap:
            for p in params:
                p.grad /= steps
            optimizer.step()
            optimizer.zero_grad()
        move(scheduler, update, again is not None)
        seen.append(knobs(optimizer))
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    return params, seen


def agree(got, expected):
    (params, seen), (twins, wanted) = got, expected
    assert seen == wanted and any(a != b for a, b in zip(seen, seen[1:], strict=False))
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p, twin, rtol=1e-9, atol=1e-12)


@each_kind
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made", ["on the wrapper", "before wrapping"])
def test_a02_every_knob_of_two_groups_turns_as_in_stock(kind, options, name, made):
    agree(run(kind, options, name, made), run(kind, options, name, "stock"))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_learning_rate_that_is_a_tensor(name, kind):
    """A scheduler writes into the tensor; the fused update must read it anew."""
    options = {"momentum": 0.9} if kind is SGD else {}
    agree(
        run(kind, options, name, "on the wrapper", lr="tensor"),
        run(kind, options, name, "stock", lr="tensor"),
    )


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made", ["on the wrapper", "before wrapping"])
def test_y05_schedulers_live_on_after_load_state_dict(name, made):
    """Loading replaces the groups' dicts; a scheduler must find the new ones."""

    def load(optimizer, scheduler, params):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return optimizer, scheduler, params

    options = {"momentum": 0.9}
    agree(run(SGD, options, name, made, again=load), run(SGD, options, name, "stock"))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_saved_inside_a_window_the_scheduler_goes_on_too(name):
    """Everything through a file into new objects, the scheduler made on the new wrapper."""

    def through_a_file(optimizer, scheduler, params):
        if name == "LambdaLR":
            saved = {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}
        else:
            saved = scheduler.state_dict()
        file = io.BytesIO()
        torch.save([optimizer.state_dict(), saved, [p.detach() for p in params]], file)
        file.seek(0)
        state, saved, values = torch.load(file, weights_only=False)
        params = parameters()
        for p, value in zip(params, values, strict=True):
            p.detach().copy_(value)
        new = FusedAccumulator(inner_of(AdamW, {}, "number", params), 3)
        made = make(name, new)
        new.load_state_dict(state)  # after the scheduler, which sets its first values
        if name == "LambdaLR":
            saved["lr_lambdas"] = [None, None]
        made.load_state_dict(saved)
        return new, made, params

    agree(run(AdamW, {}, name, "on the wrapper", again=through_a_file), run(AdamW, {}, name, "stock"))


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n not in ("LambdaLR", "MultiplicativeLR")])
def test_y07_a_copy_of_optimizer_and_scheduler_goes_on_alone(name):
    """deepcopy inside a window: the pair belongs together, and the original stays where it is."""
    kept = []

    def copied(optimizer, scheduler, params):
        kept.append((optimizer, [p.detach().clone() for p in params], knobs(optimizer), params))
        return copy.deepcopy((optimizer, scheduler, params))

    agree(run(AdamW, {}, name, "on the wrapper", again=copied), run(AdamW, {}, name, "stock"))
    ((optimizer, values, turned, params),) = kept
    assert knobs(optimizer) == turned and optimizer.micro_step == 1
    assert all(torch.equal(p, value) for p, value in zip(params, values, strict=True))


@pytest.mark.parametrize("factor", [0.5, 0.1])
def test_a_plateau_is_noticed_by_updates_not_by_micro_batches(factor):
    """Patience 2: the rate falls after the third update without progress, which is 12 micro-batches."""
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 4)
    scheduler = S.ReduceLROnPlateau(optimizer, factor=factor, patience=2)
    rates = []
    for _ in range(20):
        send(p, 1.0)
        optimizer.step()
        if optimizer.updated:
            scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0] * 15 + [factor] * 5


# ------------------------------------------------------------------------------------- step counters


@each_take
@pytest.mark.parametrize(("kind", "options"), [(AdamW, {}), (NAdam, {})], ids=["AdamW", "NAdam"])
@pytest.mark.filterwarnings("ignore:an update was skipped")
def test_y03_counters_move_once_per_applied_update(kind, options, take):
    """Not for micro-batches, skipped, discarded or empty windows; per parameter, not per optimizer."""
    p, q = parameter(1.0), parameter(1.0)
    optimizer = FusedAccumulator(kind([p, q], lr=0.1, **options), 2, take=take)
    scheduler = S.ExponentialLR(optimizer, 0.5)
    moved = []

    def micro_batch(a, b):
        send([p, q], [a, b])
        optimizer.step()
        if optimizer.stepped:
            scheduler.step()
            moved.append(scheduler.last_epoch)

    def counts():
        return [float(optimizer.state[t].get("step", 0.0)) if optimizer.state[t] else 0.0 for t in (p, q)]

    micro_batch(1.0, None)
    assert counts() == [0.0, 0.0]
    micro_batch(1.0, None)
    assert counts() == [1.0, 0.0]
    micro_batch(1.0, 1.0)
    micro_batch(float("inf"), 1.0)  # skipped
    assert counts() == [1.0, 0.0] and optimizer.updated and not optimizer.stepped
    micro_batch(1.0, 1.0)
    optimizer.discard()
    assert counts() == [1.0, 0.0]
    micro_batch(None, None)
    micro_batch(None, None)  # an empty window
    assert counts() == [1.0, 0.0] and optimizer.updated and not optimizer.stepped
    micro_batch(None, 1.0)
    assert optimizer.flush() and optimizer.stepped
    scheduler.step()
    assert counts() == [1.0, 1.0]
    micro_batch(1.0, None)
    micro_batch(None, 1.0)  # both, each in another micro-batch
    assert counts() == [2.0, 2.0]
    assert moved == [1, 3] and optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_y03_with_a_grad_scaler_a_skipped_window_moves_nothing():
    """12 micro-batches in windows of 4, an inf in the second: two ticks, the scale halved once."""
    p = parameter(0.0)
    optimizer = fused(p, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ticks = []
    scheduler = S.LambdaLR(optimizer, lambda n: ticks.append(n) or 1.0)
    for i in range(12):
        loss = (p * (float("inf") if i == 5 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if optimizer.stepped:
            scheduler.step()
    assert ticks == [0, 1, 2] and p.item() == -2.0 and optimizer.skipped.item() == 1
    assert scaler.get_scale() == 4.0


def test_a_rate_of_0_set_through_the_wrapper_stops_the_update():
    p = parameter(1.0)
    optimizer = fused(p)
    scheduler = S.StepLR(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    send(p, 1.0)
    optimizer.step()
    scheduler.step()
    assert p.item() == 1.0 and optimizer.stepped


# ----------------------------------------------------------------------------------- averaged weights

AVERAGES = {
    "SWA": lambda model: swa_utils.AveragedModel(model),
    "EMA": lambda model: swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "by hand": lambda model: swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: a + (p - a) / (n + 1.0)),
}


@each_kind
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_the_weights_are_stocks(kind, options, name):
    """Averaged once per update from the third on, with SWALR; the norms' statistics renewed at the end."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
        data = [torch.randn(6, 3, dtype=torch.float64) for _ in range(18)]
        inner = stock(kind, model.parameters(), lr=0.1, **options)
        optimizer = FusedAccumulator(inner, 3) if wrap else inner
        average, scheduler = AVERAGES[name](model), swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
        updates = 0
        for i, x in enumerate(data):
            loss = model(x).square().mean()
            (loss if wrap else loss / 3).backward()
            if wrap:
                optimizer.step()
            elif i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            if optimizer.updated if wrap else i % 3 == 2:
                updates += 1
                scheduler.step()
                if updates >= 3:
                    average.update_parameters(model)
        assert average.n_averaged.item() == 4
        swa_utils.update_bn(data, average)
        results.append({**average.state_dict(), **{f"model {k}": v for k, v in model.state_dict().items()}})
        assert not torch.equal(average.module[0].weight, model[0].weight)
    for key, expected in results[0].items():
        torch.testing.assert_close(
            results[1][key], expected, rtol=1e-8, atol=1e-10, msg=lambda m, k=key: k + m
        )


def test_an_average_may_be_copied_into_the_model_while_training():
    """Weights swapped for evaluation and back, inside a window: what is held stays."""
    results = []
    for swap in (False, True):
        torch.manual_seed(9)
        model = nn.Linear(3, 1)
        optimizer = FusedAccumulator(AdamW(model.parameters(), lr=0.1), 2)
        average = swa_utils.AveragedModel(model)
        for i in range(7):
            model(torch.full((1, 3), 1.0 + i)).sum().backward()
            optimizer.step()
            if optimizer.updated:
                average.update_parameters(model)
            if swap:
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict(average.module.state_dict())
                model.load_state_dict(kept)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
