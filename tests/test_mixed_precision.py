"""GradScaler by both protocols, dropped micro-batches, 16-bit parameters with float32 masters."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch.amp import GradScaler  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402

INF = math.inf
each_backend = pytest.mark.parametrize("backend", ["native", "reference"])


def scaler_of(scale=8.0, **options):
    return GradScaler("cpu", init_scale=scale, **{"growth_interval": 1000, **options})


def parameter(values):
    return torch.nn.Parameter(torch.tensor(values))


def explicit(optimizer, scaler, loss, *, unscale=False, update=True):
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    if update:
        scaler.update()


@each_backend
@pytest.mark.parametrize("unscale", [False, True])
def test_u05_the_gradient_is_unscaled_once(unscale, backend):
    p = parameter([0.0, 0.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, max_norm=1.0, backend=backend)
    scaler = scaler_of()
    for gradient in ([3.0, 0.0], [3.0, 8.0]):
        explicit(optimizer, scaler, (p * torch.tensor(gradient)).sum(), unscale=unscale)
    assert optimizer.norm.item() == 5.0
    torch.testing.assert_close(p.detach(), torch.tensor([-0.6, -0.8]), rtol=1e-6, atol=0)
    assert not hasattr(optimizer, "grad_scale") and scaler.get_scale() == 8.0


@each_backend
@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
def test_x05_a_scalers_number_without_data_is_refused(name, backend):
    """It would be read where the gradients are; nothing has changed, and the loop may go on."""
    p = parameter([1.0, 1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, backend=backend)
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    for i in range(2):
        p.grad = torch.full((2,), float(i))
        numbers = {"grad_scale": None, "found_inf": torch.zeros(())}
        vars(optimizer).update({**numbers, name: torch.ones((), device="meta")})
        with pytest.raises(RuntimeError, match=f"{name} is on meta, the gradients are on cpu"):
            optimizer.step()
        assert not fired and optimizer.micro_step == i and p.grad.tolist() == [i, i]
        vars(optimizer).update(numbers)
        optimizer.step()
    assert optimizer.stepped and p.tolist() == [0.5, 0.5]


@each_backend
@pytest.mark.parametrize("steps", [1, 2])
def test_u03_found_inf_alone_stops_the_update(steps, backend):
    p = parameter([1.0, 1.0])
    optimizer = FusedAccumulator(torch.optim.AdamW([p], lr=0.1), steps, backend=backend)
    for i in range(steps):
        p.grad = torch.ones(2)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(i == 0))
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    assert optimizer.updated and not optimizer.stepped and optimizer.skipped.item() == 1
    assert p.tolist() == [1.0, 1.0]
    # Where the device decides, state is made before: zeros, as if there were none.
    assert not any(bool(value.any()) for value in optimizer.state[p].values())
    for _ in range(steps):  # the next window is a new one
        p.grad = torch.ones(2)
        optimizer.step()
    assert optimizer.stepped


@each_backend
def test_a_scale_that_changes_inside_a_window_is_compensated(backend):
    p = parameter([0.0, 0.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 3, backend=backend)
    scaler = scaler_of(1024.0)
    for i, gradient in enumerate(([3.0, 0.0], [3.0, 9.0], [0.0, 3.0])):
        explicit(optimizer, scaler, (p * torch.tensor(gradient)).sum(), update=False)
        scaler.update(2.0 ** (5 - 3 * i))
    assert p.tolist() == [-2.0, -4.0]


@each_backend
def test_an_inf_in_one_micro_batch_counts_once_and_shrinks_the_scale(backend):
    p = parameter([1.0, 1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0, momentum=0.9), 3, backend=backend)
    scaler = scaler_of(8.0)
    for i in range(3):
        explicit(optimizer, scaler, (p * torch.tensor([1.0, INF if i == 1 else 1.0])).sum())
    assert optimizer.skipped.item() == 1 and p.tolist() == [1.0, 1.0] and scaler.get_scale() == 4.0
    for _ in range(3):
        explicit(optimizer, scaler, p.sum())
    assert p.tolist() == [0.0, 0.0] and optimizer.skipped.item() == 1


@each_backend
@pytest.mark.parametrize("take", ["step", "backward"])
@pytest.mark.parametrize("how", ["plain", "weight", "count"])
def test_the_wrappers_own_scaler(take, how, backend):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    twin = copy.deepcopy(model)
    scaler = scaler_of(2.0**10, growth_interval=2)
    optimizers = [
        FusedAccumulator(
            torch.optim.AdamW(m.parameters(), lr=0.01), 2, max_norm=0.5, take=take, scaler=s, backend=backend
        )
        for m, s in ((model, scaler), (twin, None))
    ]
    for i in range(8):
        x = torch.randn(3 + i % 2, 5)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            loss = m(x).square()
            loss = loss.sum() if how == "count" else loss.mean()
            optimizer.backward(loss, **({} if how == "plain" else {how: len(x)}))
            optimizer.step()
    assert scaler.get_scale() == 2.0**12  # four windows, two growths
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):  # powers of two: no rounding at all
        assert torch.equal(a, b)
    for optimizer in optimizers:
        assert optimizer.stepped


@pytest.mark.parametrize("by", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("bad", [False, True])
def test_what_the_scaler_found_travels_with_the_open_window(by, bad):
    """A window of the explicit protocol goes on elsewhere, and is skipped there only if it held an inf."""
    p = parameter([0.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2)
    scaler = scaler_of()
    explicit(optimizer, scaler, (p * (INF if bad else 2.0)).sum())
    if by == "state_dict":
        q = parameter([0.0])
        other = FusedAccumulator(torch.optim.SGD([q], lr=1.0), 2, nonfinite="propagate")
        other.load_state_dict(optimizer.state_dict())
    else:
        other = copy.deepcopy(optimizer) if by == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        ((q,),) = (group["params"] for group in other.param_groups)
    explicit(other, scaler, (q * 4.0).sum())
    assert other.stepped is not bad and q.item() == (0.0 if bad else -3.0)


@pytest.mark.parametrize("by", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_has_a_copy_of_the_scaler(by):
    p = parameter([0.0])
    scaler = scaler_of()
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler)
    optimizer.backward((p * 2.0).sum())
    optimizer.step()
    other, its_scaler = by((optimizer, scaler))
    ((q,),) = (group["params"] for group in other.param_groups)
    for grad in (INF, 4.0, 4.0):
        other.backward((q * grad).sum())
        assert q.grad.item() == grad * its_scaler.get_scale()
        other.step()
    assert its_scaler.get_scale() == 4.0 and scaler.get_scale() == 8.0
    optimizer.backward((p * 4.0).sum())
    optimizer.step()
    assert p.item() == -3.0 and q.item() == -4.0 and scaler.get_scale() == 8.0


@pytest.mark.parametrize("then", ["step", "zero_grad"])
def test_the_own_scale_waits_for_a_micro_batch_that_is_pending_at_a_flush(then):
    p = parameter([0.0])
    scaler = scaler_of(growth_interval=1)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler)
    optimizer.backward((p * 2.0).sum())
    optimizer.step()
    optimizer.backward((p * 4.0).sum())
    assert optimizer.flush() and p.item() == -2.0 and scaler.get_scale() == 8.0
    getattr(optimizer, then)()
    assert scaler.get_scale() == 16.0
    assert optimizer.flush() is (then == "step")
    assert p.item() == (-6.0 if then == "step" else -2.0)
    assert scaler.get_scale() == (32.0 if then == "step" else 16.0)


@pytest.mark.parametrize("by", ["deepcopy", "checkpoint"])
def test_a_window_that_came_from_elsewhere_counts_for_the_scale(by):
    p = parameter([0.0])
    scaler = scaler_of(growth_interval=1)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler)
    optimizer.backward((p * 2.0).sum())
    optimizer.step()
    if by == "deepcopy":
        other, its_scaler = copy.deepcopy((optimizer, scaler))
    else:
        its_scaler = scaler_of(growth_interval=1)
        its_scaler.load_state_dict(scaler.state_dict())
        other = FusedAccumulator(torch.optim.SGD([parameter([0.0])], lr=1.0), 2, scaler=its_scaler)
        other.load_state_dict(optimizer.state_dict())
    assert other.flush() and its_scaler.get_scale() == 16.0 and scaler.get_scale() == 8.0


@pytest.mark.parametrize("by", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_without_what_is_pending_has_the_scale_that_waited_for_it(by):
    p = parameter([0.0])
    scaler = scaler_of(growth_interval=1)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler)
    optimizer.backward((p * 2.0).sum())
    optimizer.step()
    optimizer.backward((p * 4.0).sum())
    optimizer.flush()
    other, its_scaler = by((optimizer, scaler))
    assert its_scaler.get_scale() == 16.0 and scaler.get_scale() == 8.0
    ((q,),) = (group["params"] for group in other.param_groups)
    other.backward((q * 4.0).sum())
    other.step()
    assert other.flush() and q.item() == -6.0 and its_scaler.get_scale() == 32.0


def test_the_own_scale_shrinks_after_a_window_that_is_not_finite():
    p = parameter([1.0])
    scaler = scaler_of(8.0)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler)
    for factor in (1.0, INF, 1.0, 1.0):
        optimizer.backward((p * factor).sum())
        optimizer.step()
    assert optimizer.skipped.item() == 1 and p.item() == 0.0 and scaler.get_scale() == 4.0


def test_a_scaler_belongs_to_one_wrapper_and_is_updated_by_it_alone():
    scaler, p, q = scaler_of(), parameter([1.0]), parameter([1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), scaler=scaler)
    with pytest.raises(ValueError, match="belongs to another FusedAccumulator.*scaler.step"):
        FusedAccumulator(torch.optim.SGD([q], lr=1.0), scaler=scaler)
    optimizer.backward(p.sum())
    with pytest.raises(RuntimeError, match="has the scaler as scaler=.*explicit protocol"):
        scaler.step(optimizer)
    assert p.item() == 1.0
    with pytest.raises(TypeError, match="scaler must be a torch.amp.GradScaler"):
        FusedAccumulator(torch.optim.SGD([q], lr=1.0), scaler=2.0)
    del optimizer
    FusedAccumulator(torch.optim.SGD([q], lr=1.0), scaler=scaler)


def test_a_backward_beside_the_scaler_is_refused():
    p = parameter([1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), scaler=scaler_of())
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"must go through optimizer.backward\(loss\)"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(p.sum())
    optimizer.step()
    assert p.item() == 0.0


def test_a_disabled_scaler_does_nothing():
    p = parameter([1.0])
    scaler = GradScaler("cpu", enabled=False)
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), scaler=scaler)
    p.sum().backward()
    optimizer.step()
    assert p.item() == 0.0
    q = parameter([1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([q], lr=1.0), 1)
    explicit(optimizer, scaler, q.sum())
    assert q.item() == 0.0


def test_the_explicit_protocol_needs_take_step():
    p = parameter([1.0])
    optimizer, scaler = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, take="backward"), scaler_of()
    scaler.scale(p.sum()).backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="too late with take='backward'"):
        optimizer.step()


def test_two_optimizers_on_one_scaler():
    p, q = parameter([1.0]), parameter([1.0])
    scaler = scaler_of()
    ours = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2)
    stock = torch.optim.SGD([q], lr=0.25)
    for _ in range(2):
        scaler.scale((p * q).sum()).backward()
        scaler.step(ours)
        scaler.step(stock)
        scaler.update()
        stock.zero_grad()
    assert q.item() == 0.5 and p.item() == pytest.approx(1 - (1.0 + 0.75) / 2)


@each_backend
def test_unscale_is_no_foreign_clip(backend, recwarn):
    p = parameter([1.0])
    optimizer, scaler = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, backend=backend), scaler_of()
    for _ in range(4):
        explicit(optimizer, scaler, p.sum(), unscale=True)
    assert not [w for w in recwarn if "changed in place" in str(w.message)]


# -------------------------------------------------------------------------------------- micro-batches


@each_backend
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_bad_micro_batch_is_dropped_with_its_weight(bad, at, weighted, backend):
    p = parameter([0.0, 0.0])
    optimizer = FusedAccumulator(
        torch.optim.SGD([p], lr=1.0), 4, nonfinite_micro_batch="drop", backend=backend
    )
    total, weights = torch.zeros(2), 0.0
    for i in range(4):
        gradient, weight = torch.tensor([1.0 + i, -2.0 * i]), float(i + 1) if weighted else 1.0
        if i == at:
            gradient[1] = bad
        else:
            total, weights = total + weight * gradient, weights + weight
        p.grad = gradient
        optimizer.step(**({"weight": weight} if weighted else {}))
    assert optimizer.stepped and optimizer.skipped.item() == 0
    torch.testing.assert_close(p.detach(), -total / weights, rtol=1e-6, atol=0)


def test_a_window_of_bad_micro_batches_updates_nothing():
    p = parameter([1.0])
    optimizer = FusedAccumulator(torch.optim.AdamW([p], lr=1.0), 2, nonfinite_micro_batch="drop")
    for _ in range(2):
        p.grad = torch.tensor([math.nan])
        optimizer.step()
    assert optimizer.updated and not optimizer.stepped and p.item() == 1.0
    with pytest.raises(ValueError, match="needs a whole micro-batch"):
        FusedAccumulator(
            torch.optim.SGD([parameter([1.0])], lr=1.0), take="backward", nonfinite_micro_batch="drop"
        )


# -------------------------------------------------------------------------------------- master weights


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_masters_train_as_float32_does(dtype, kind, backend):
    make = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    }[kind]
    torch.manual_seed(0)
    start = [torch.randn(40, 30).to(dtype), torch.randn(513).to(dtype), torch.randn(3)]
    narrow = [torch.nn.Parameter(t.clone()) for t in start]
    wide = [torch.nn.Parameter(t.float()) for t in start]
    ours = FusedAccumulator(make(narrow), 2, master_weights=True, max_norm=1.0, backend=backend)
    truth = FusedAccumulator(make(wide), 2, max_norm=1.0, backend="reference")
    for _ in range(12):
        for p, q in zip(narrow, wide, strict=True):
            gradient = torch.randn(p.shape).to(p.dtype)
            p.grad, q.grad = gradient, gradient.float()
        ours.step()
        truth.step()
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(p, q.to(p.dtype))
    assert ours.state[narrow[0]][{"adamw": "exp_avg", "sgd": "momentum_buffer"}[kind]].dtype == torch.float32


def test_masters_travel_in_the_checkpoint_and_follow_the_parameter():
    torch.manual_seed(0)
    start = torch.randn(600).bfloat16()

    def build():
        p = torch.nn.Parameter(start.clone())
        return p, FusedAccumulator(torch.optim.AdamW([p], lr=1e-3), 1, master_weights=True)

    def train(p, optimizer, seed, n=5):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n):
            p.grad = torch.randn(600, generator=generator).bfloat16()
            optimizer.step()

    p, optimizer = build()
    train(p, optimizer, 1)
    memory = io.BytesIO()
    torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, memory)
    memory.seek(0)
    saved = torch.load(memory, weights_only=True)
    assert saved["optimizer"]["fastaccum"]["master_weights"][0].dtype == torch.float32
    train(p, optimizer, 2)
    q, other = build()
    with torch.no_grad():
        q.copy_(saved["p"])
    other.load_state_dict(saved["optimizer"])
    train(q, other, 2)
    assert torch.equal(p, q)
    masters = optimizer.state_dict()["fastaccum"]["master_weights"][0]
    assert torch.equal(masters, other.state_dict()["fastaccum"]["master_weights"][0])
    with torch.no_grad():
        p[:300] = 7.0  # the user's own write wins; elsewhere the lower bits stay
    now = optimizer.state_dict()["fastaccum"]["master_weights"][0]
    assert bool((now[:300] == 7.0).all()) and torch.equal(now[300:], masters[300:])


def test_masters_are_saved_without_a_graph_when_the_parameter_was_written():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.001), master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[0] = 5.0
    (master,) = optimizer.state_dict()["fastaccum"]["master_weights"].values()
    torch.testing.assert_close(master, torch.tensor([5.0, 0.999, 0.999]), rtol=1e-6, atol=0)
    assert not master.requires_grad
    copy.deepcopy(copy.deepcopy(optimizer))


def test_masters_need_a_fused_rule():
    with pytest.raises(ValueError, match="works with SGD, Adam and AdamW, not with RMSprop"):
        FusedAccumulator(torch.optim.RMSprop([parameter([1.0])]), master_weights=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    twin = copy.deepcopy(model)
    scaler, twins_scaler = scaler_of(2.0**8), scaler_of(2.0**8)
    ours = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 4, max_norm=1.0)
    stock = torch.optim.SGD(twin.parameters(), lr=0.1)
    for i in range(8):
        x, y = torch.randn(6, 16), torch.randint(2, (6,))
        for m, s, scale in ((model, scaler, 1.0), (twin, twins_scaler, 0.25)):
            with torch.autocast("cpu", dtype=dtype):
                loss = torch.nn.functional.cross_entropy(m(x).float(), y) * scale
            s.scale(loss).backward()
        scaler.step(ours)
        scaler.update()
        if i % 4 == 3:
            twins_scaler.unscale_(stock)
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            twins_scaler.step(stock)
            twins_scaler.update()
            stock.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each_backend
@pytest.mark.parametrize("unscale", [False, True])
def test_a_bad_micro_batch_is_dropped_under_the_explicit_protocol(unscale, backend):
    """Gradients 1, inf, 2, 3: the mean of the other three is 2."""
    p = parameter([0.0])
    sgd = torch.optim.SGD([p], lr=1.0)
    optimizer = FusedAccumulator(sgd, 4, nonfinite_micro_batch="drop", backend=backend)
    scaler = scaler_of()
    for gradient in (1.0, INF, 2.0, 3.0):
        explicit(optimizer, scaler, (p * gradient).sum(), unscale=unscale)
    assert p.item() == -2.0 and optimizer.stepped and optimizer.skipped == 0


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_the_own_scaler_always_skips_what_is_not_finite(nonfinite):
    """It finds its scale by skipping, whatever is asked for elsewhere."""
    p, scaler = parameter([0.0]), scaler_of()
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler, nonfinite=nonfinite)
    for gradient in (1.0, INF, 1.0, 1.0):
        optimizer.backward((p * gradient).sum())
        optimizer.step()
    assert p.item() == -1.0 and optimizer.skipped == 1 and scaler.get_scale() == 4.0


def test_an_update_of_the_scaler_that_fails_does_not_repeat_the_optimizer_s(monkeypatch):
    p, scaler = parameter([0.0]), scaler_of()
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2, scaler=scaler)
    for _ in range(2):
        optimizer.backward(p.sum())
        if optimizer.micro_step:
            monkeypatch.setattr(scaler, "update", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
        else:
            optimizer.step()
    assert p.item() == -1.0 and not optimizer.flush() and optimizer.micro_step == 0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_foreign_clip_under_a_scaler_is_warned_of(unscale, clip, recwarn):
    """unscale_, and the check that scaler.step() makes, are none."""
    params = [parameter([1.0, 2.0]) for _ in range(3)]
    optimizer = FusedAccumulator(torch.optim.SGD(params, lr=1.0), 2)
    scaler = scaler_of()
    for _ in range(2):
        scaler.scale(sum(p.sum() for p in params)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert [("max_norm" in str(w.message)) for w in recwarn] == [True] * clip
