"""stats(), log(), norms per parameter and group, the noise scale, the warning of skipped updates."""

from __future__ import annotations

import math
import pickle

import pytest

torch = pytest.importorskip("torch")

from fastaccum import FusedAccumulator  # noqa: E402


def parameter(values):
    return torch.nn.Parameter(torch.tensor(values))


def feed(optimizer, param, *gradients, **kwargs):
    for gradient in gradients:
        param.grad = torch.tensor(gradient)
        optimizer.step(**kwargs)


def test_stats_and_log():
    p = parameter([1.0, 1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.1), 2)
    assert optimizer.stats() == {"window": 0, "norm": 0.0, "skipped": 0.0}
    feed(optimizer, p, [3.0, 0.0], [3.0, 8.0])
    moved = 2 * 4 * (3 + 3)  # two gradients read, the sum written; it is read, p read and written
    assert optimizer.stats() == {
        "window": 1, "norm": 5.0, "skipped": 0.0, "clip_share": 0.0, "bytes_moved": moved
    }  # fmt: skip
    with pytest.warns(UserWarning, match="an update was skipped: .*holds inf or NaN"):
        feed(optimizer, p, [3.0, 0.0], [math.nan, 8.0])
    stats = optimizer.stats()
    assert math.isnan(stats["norm"]) and (stats["window"], stats["skipped"]) == (2, 1.0)
    written = []

    class Writer:
        def add_scalar(self, name, value, step):
            written.append((name, step))

    optimizer.log(Writer())
    optimizer.log(Writer(), step=70, prefix="")
    names = ["norm", "skipped", "clip_share", "bytes_moved"]
    assert written == [*((f"fastaccum/{name}", 2) for name in names), *((name, 70) for name in names)]


class Points:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.steps = []

    def add_scalar(self, name, value, step):
        if name == "fastaccum/norm":
            self.steps.append(step)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_the_step_of_log_goes_on_after_a_resume(how, watched):
    p, points = parameter([1.0]), Points()
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.1), 2)
    for _ in range(3):
        feed(optimizer, p, [1.0], [1.0])
        optimizer.log(points)
    feed(optimizer, p, [1.0])
    if how == "pickle":
        resumed = pickle.loads(pickle.dumps(optimizer))
    else:
        resumed = FusedAccumulator(torch.optim.SGD([parameter([1.0])], lr=0.1), 2, max_norm=0.5)
        if watched:
            feed(resumed, resumed.param_groups[0]["params"][0], [9.0], [9.0])
            resumed.stats()
        resumed.load_state_dict(optimizer.state_dict())
    q = resumed.param_groups[0]["params"][0]
    for gradients in ([[1.0]], [[1.0], [1.0]]):
        feed(resumed, q, *gradients)
        resumed.log(points)
    assert points.steps == [1, 2, 3, 4, 5]
    assert resumed.stats()["window"] == 5
    if watched and how == "state_dict":  # since it was first looked at: nothing of a window is lost
        assert resumed.stats()["clip_share"] == 1.0
    # Back to an earlier state in the same wrapper: the curve goes back with it.
    optimizer.flush()
    optimizer.log(points)
    optimizer.load_state_dict(resumed.state_dict())
    optimizer.log(points)
    assert points.steps[5:] == [4, 5]


def test_a_state_without_the_count_loads_and_one_with_it_is_checked():
    p = parameter([1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.1), 1)
    feed(optimizer, p, [1.0], [1.0])
    older = optimizer.state_dict()
    assert older["fastaccum"].pop("windows") == 2
    fresh, points = FusedAccumulator(torch.optim.SGD([parameter([1.0])], lr=0.1), 1), Points()
    fresh.load_state_dict(older)
    optimizer.load_state_dict(older)  # what this one has counted itself stays
    for wrapper in (fresh, optimizer):
        feed(wrapper, wrapper.param_groups[0]["params"][0], [1.0])
        wrapper.log(points)
    assert points.steps == [1, 3]
    for wrong in (-1, 2.5, None):
        older["fastaccum"]["windows"] = wrong
        with pytest.raises(ValueError, match=f"windows={wrong}, it must be an int of at least 0"):
            fresh.load_state_dict(older)


def test_log_needs_a_writer():
    optimizer = FusedAccumulator(torch.optim.SGD([parameter([1.0])], lr=0.1), 1)
    for wrong in (None, "runs", object()):
        with pytest.raises(TypeError, match=r"log\(\) needs a writer with add_scalar.*SummaryWriter"):
            optimizer.log(wrong)


def test_clip_share_counts_updates_that_a_limit_scaled_down():
    p, q = parameter([0.0]), parameter([0.0])
    groups = [{"params": [p]}, {"params": [q], "max_norm": 10.0}]
    optimizer = FusedAccumulator(torch.optim.SGD(groups, lr=0.1), 1, max_norm=2.0)

    def window(a, b):
        p.grad, q.grad = torch.tensor([a]), torch.tensor([b])
        optimizer.step()

    window(3.0, 0.0)  # before anybody looks
    optimizer.stats()
    for a, b, share in ((2.5, 1.0, 1 / 1), (1.5, 9.0, 1 / 2), (1.5, 11.0, 2 / 3), (3.0, 30.0, 3 / 4)):
        window(a, b)
        assert optimizer.stats()["clip_share"] == pytest.approx(share)
    with pytest.warns(UserWarning, match="skipped"):
        window(math.inf, 0.0)  # not applied, so not clipped
    assert optimizer.stats()["clip_share"] == pytest.approx(3 / 5)
    optimizer.step()  # holds nothing; its norm is the last one's no more
    assert optimizer.stats()["clip_share"] == pytest.approx(3 / 6)
    by_value = FusedAccumulator(torch.optim.SGD([parameter([0.0])], lr=0.1), 1, max_value=1.0)
    by_value.stats()
    feed(by_value, by_value.param_groups[0]["params"][0], [3.0])
    assert "clip_share" not in by_value.stats()


def traffic(kind, dtype, steps, options=None, **kwargs):
    """Bytes per element of the second window."""
    p = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    optimizer = FusedAccumulator(kind([p], lr=0.1, **(options or {})), steps, **kwargs)
    optimizer.stats()
    for _ in range(2 * steps):
        (p * 1.0).sum().backward()
        optimizer.step()
    return optimizer.stats()["bytes_moved"] / p.numel()


# The costs that the design states: 12 (K - 1) + 28 for AdamW in float32, 32 at K = 1; with bfloat16 gradients
# the second micro-batch takes 8, a later one 10.
SGD, ADAMW, FLOAT, SIXTEEN = torch.optim.SGD, torch.optim.AdamW, torch.float32, torch.bfloat16


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_bytes_moved_are_those_of_the_cost_table(steps):
    adds = {1: 0, 2: 12, 4: 36}[steps]
    norm = 4 if steps == 1 else 0
    assert traffic(ADAMW, FLOAT, steps) == adds + norm + 28
    assert traffic(ADAMW, FLOAT, steps, {"amsgrad": True}) == adds + norm + 36
    assert traffic(SGD, FLOAT, steps, {"momentum": 0.9}) == adds + norm + 20
    assert traffic(SGD, FLOAT, steps) == adds + norm + 12
    # p and two moments of 2 bytes; the sum is a bfloat16 gradient itself at K = 1
    wide = 2 if steps == 1 else 4
    adds = {1: 2, 2: 8, 4: 8 + 2 * 10}[steps]
    assert traffic(ADAMW, SIXTEEN, steps) == adds + wide + 12
    # p written, a master and two moments in float32 read and written
    assert traffic(ADAMW, SIXTEEN, steps, master_weights=True) == adds + wide + 2 + 24


def test_bytes_moved_elsewhere():
    # A copy of the first micro-batch; later ones; the norm is a pass, as the adds are over by then.
    assert traffic(ADAMW, FLOAT, 3, take="backward") == 8 + 2 * 12 + 4 + 28
    assert traffic(ADAMW, FLOAT, 2, norm_type=3.0) == 12 + 2 * 4 + 28
    # Any other optimizer: up to the gradient that it is given.
    assert traffic(torch.optim.RMSprop, FLOAT, 2) == 12 + 4 + 4
    p = parameter([0.0, 0.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.1), 3)
    optimizer.stats()
    feed(optimizer, p, [1.0, 1.0], [1.0, 1.0])
    optimizer.flush()  # its norm is a pass of its own
    assert optimizer.stats()["bytes_moved"] == 2 * (12 + 4 + 12)
    for _ in range(3):
        optimizer.step()
    assert optimizer.stats()["bytes_moved"] == 0


def test_the_warning_of_skips_comes_once(recwarn):
    p = parameter([1.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.1), 1)
    feed(optimizer, p, [math.inf], [1.0], [math.nan])
    assert len([w for w in recwarn if "skipped" in str(w.message)]) == 1
    propagating = FusedAccumulator(torch.optim.SGD([q := parameter([1.0])], lr=0.1), 1, nonfinite="propagate")
    feed(propagating, q, [math.nan])
    assert len([w for w in recwarn if "skipped" in str(w.message)]) == 1


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("steps", [1, 2])
def test_norms_per_parameter_and_group(norm_type, steps):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (3, 700, 5)]
    frozen = torch.nn.Parameter(torch.zeros(2))
    groups = [{"params": params[:2]}, {"params": [params[2], frozen]}]
    optimizer = FusedAccumulator(torch.optim.SGD(groups, lr=0.1), steps, norm_type=norm_type, max_norm=1e-3)
    optimizer.track(parameter_norms=True)
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    for i in range(steps):
        for p, total in zip(params, sums, strict=True):
            p.grad = torch.randn(p.shape)
            total += (i + 1) * p.grad.double()
        optimizer.step(weight=i + 1)
    means = [total / sum(range(1, steps + 1)) for total in sums]
    wanted = [torch.linalg.vector_norm(m, norm_type) for m in means]
    norms = optimizer.parameter_norms
    assert set(norms) == set(params)
    for p, w in zip(params, wanted, strict=True):
        torch.testing.assert_close(norms[p], w, rtol=1e-6, atol=0)
    of_groups = optimizer.group_norms
    torch.testing.assert_close(
        of_groups[0], torch.linalg.vector_norm(torch.cat(means[:2]), norm_type), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(of_groups[1], wanted[2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["plain", "weight", "count"])
@pytest.mark.parametrize("gd", [([3.0, 4.0], [1.0, -1.0]), ([1.0, 0.0], [0.1, 0.2])])
def test_the_noise_scale_of_g_plus_and_minus_d_has_a_closed_form(gd, kind):
    """|g|^2 - |d|^2 is the signal and 2 |d|^2 the noise per micro-batch."""
    g, d = map(torch.tensor, gd)
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.0), 2)
    optimizer.track(noise_scale=True)
    assert math.isnan(optimizer.stats()["noise_scale"])
    for _ in range(3):
        for sign in (1, -1):
            p.grad = (g + sign * d) * (5.0 if kind == "count" else 1.0)
            optimizer.step(**({} if kind == "plain" else {kind: 5.0}))
    wanted = 2 * (d @ d) / (g @ g - d @ d)
    stats = optimizer.stats()
    assert stats["noise_scale"] == pytest.approx(wanted.item(), rel=1e-5)
    assert stats["recommended_accumulation_steps"] == max(1, math.ceil(wanted.item()))


def test_the_noise_scale_without_a_signal_and_where_it_cannot_be():
    p = parameter([0.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.0), 2)
    optimizer.track(noise_scale=True)
    feed(optimizer, p, [1.0], [-1.0])
    assert optimizer.stats()["noise_scale"] == math.inf
    with pytest.warns(UserWarning, match="skipped"):
        feed(optimizer, p, [1.0], [math.nan])
    assert optimizer.stats()["noise_scale"] == math.inf
    optimizer.track()
    assert "noise_scale" not in optimizer.stats()
    other = FusedAccumulator(torch.optim.SGD([parameter([0.0])], lr=0.0), 2, take="backward")
    with pytest.raises(ValueError, match="needs whole micro-batches"):
        other.track(noise_scale=True)


def test_the_estimate_finds_the_noise_that_was_put_in():
    """Gradients of mean 1 in 64 elements with noise of variance 4: tr / |G|^2 = 4."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(64))
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=0.0), 8)
    optimizer.track(noise_scale=True)
    for _ in range(8 * 200):
        p.grad = 1.0 + 2.0 * torch.randn(64)
        optimizer.step()
    assert optimizer.stats()["noise_scale"] == pytest.approx(4.0, rel=0.2)
