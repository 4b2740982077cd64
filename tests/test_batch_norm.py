"""The second care: layers that normalise over a micro-batch."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import fastaccum  # noqa: E402
from fastaccum import (  # noqa: E402
    FusedAccumulator,
    convert_batch_norm,
    virtual_batch_norm_statistics,
    warn_of_small_batches,
)
from fastaccum.batch_norm import FrozenBatchNorm  # noqa: E402
from tests.oracle import assert_identical  # noqa: E402

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def convolutions(channels=(24, 40), dtype=torch.float32):
    """Two BatchNorm2d and a BatchNorm1d, with parameters and statistics as after a training."""
    a, b = channels
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, a, 3, padding=1), nn.BatchNorm2d(a, eps=0.01), nn.GELU()),
        nn.Conv2d(a, b, 3, stride=2),
        nn.BatchNorm2d(b),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(16),
        nn.BatchNorm1d(16),
    ).to(dtype)
    model(torch.randn(4, 3, 8, 8, dtype=dtype))
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                layer.weight.normal_(1.0, 0.2)
                layer.bias.normal_()
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
    return model


def per_channel(values, x):
    return values.view(1, -1, *[1] * (x.dim() - 2))


def unchanged(model, call, exception, match):
    before = copy.deepcopy(model.state_dict())
    modules = {name: (id(module), module.training) for name, module in model.named_modules()}
    with pytest.raises(exception, match=match):
        call()
    assert_identical(before, model.state_dict())
    assert modules == {name: (id(module), module.training) for name, module in model.named_modules()}
    assert not any(module._forward_pre_hooks for module in model.modules())


# ------------------------------------------------------------------------------------- conversion


def test_group_norm_normalises_each_rows_groups():
    model = convolutions()
    old = model[0][1], model[2], model[6]
    parameters = list(model.parameters())
    optimizer = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert convert_batch_norm(model.train(), "group", groups=8) is model
    new = model[0][1], model[2], model[6]
    # At most 8 groups; 2 channels or more in each, 8 or more in place of a BatchNorm1d.
    assert [(m.num_groups, m.num_channels) for m in new] == [(8, 24), (8, 40), (2, 16)]
    assert all(map(lambda p, q: p is q, parameters, model.parameters()))  # the optimizer has them still
    for layer, was in zip(new, old, strict=True):
        assert layer.eps == was.eps and layer.training
        x = torch.randn(5, layer.num_channels, *([4, 3] if was is not old[2] else []))
        # By hand, in float64.
        groups = x.double().view(5, layer.num_groups, -1)
        apart = groups - groups.mean(2, keepdim=True)
        exact = apart / (apart.square().mean(2, keepdim=True) + was.eps).sqrt()
        exact = exact.view_as(x) * per_channel(was.weight, x) + per_channel(was.bias, x)
        torch.testing.assert_close(layer(x).double(), exact.detach(), rtol=1e-5, atol=1e-5)
    # Now accumulation is exact: two halves give what the whole gives.
    twin = copy.deepcopy(model).double()
    rows = torch.randn(6, 3, 8, 8)
    for half in rows.split(3):
        model(half).square().mean().backward()
        optimizer.step()
    twin(rows.double()).square().mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("groups", [1, 5, 32])
def test_groups_divide_the_channels_and_are_not_too_small(kind, groups):
    least = 8 if kind is nn.BatchNorm1d else 2
    for channels in [*range(2, 70), 97, 128, 96 * 7]:
        number = convert_batch_norm(kind(channels), "group", groups=groups).num_groups
        valid = [n for n in range(1, groups + 1) if channels % n == 0 and channels / n >= least]
        assert number == max(valid, default=1)
    assert convert_batch_norm(kind(48), "group", channels_per_group=3).num_groups == 16


def test_a_group_of_one_channel():
    layer = convert_batch_norm(nn.BatchNorm2d(1), "group")
    assert layer.num_groups == 1 and layer(torch.randn(2, 1, 4, 4)).std() > 0.5
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    unchanged(
        model,
        lambda: convert_batch_norm(model, "group"),
        ValueError,
        "1 is a BatchNorm1d: a GroupNorm with one channel",
    )


@pytest.mark.parametrize("to", ["group", "frozen", "sync"])
def test_what_the_old_layer_was_is_kept(to):
    shared = nn.BatchNorm2d(4, dtype=torch.float64)
    shared.weight.requires_grad_(False)
    shared.running_mean.fill_(2.0)
    plain = nn.BatchNorm2d(4, affine=False).eval()
    plain.running_mean.fill_(1.0)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, plain])})
    convert_batch_norm(model, to)
    a, (b, c) = model["a"], model["b"]
    assert (
        a.weight is b.weight is shared.weight
        and not a.weight.requires_grad
        and a.weight.dtype == torch.float64
    )
    assert a.bias is shared.bias and a.bias.requires_grad and a.training
    assert c.weight is None and c.bias is None and not c.training
    if to == "group":
        assert a is b and not hasattr(a, "running_mean")
    else:
        assert a.running_mean is b.running_mean is shared.running_mean


def test_a_model_that_is_a_batch_norm_is_replaced():
    for to, kind in (("group", nn.GroupNorm), ("sync", nn.SyncBatchNorm), ("frozen", FrozenBatchNorm)):
        layer = nn.BatchNorm2d(4)
        layer.running_mean.fill_(1.0)
        assert type(convert_batch_norm(layer, to)) is kind


def test_sync_keeps_statistics_and_what_evaluation_gives():
    model = convolutions().eval()
    x = torch.randn(4, 3, 8, 8)
    expected, state = model(x), copy.deepcopy(model.state_dict())
    convert_batch_norm(model, "sync")
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) == 3
    assert_identical(state, model.state_dict())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_frozen_uses_the_statistics_in_training_too_and_keeps_them():
    model = convolutions()
    state = copy.deepcopy(model.state_dict())
    old = model[2]
    convert_batch_norm(model.train(), "frozen")
    assert_identical(state, model.state_dict())
    assert repr(model[2]) == "FrozenBatchNorm(40, eps=1e-05)"
    x = torch.randn(3, 40, 5, 5, requires_grad=True)
    inverse = (old.running_var.double() + old.eps).rsqrt()
    scale = (old.weight * inverse).detach()
    exact = (x - per_channel(old.running_mean, x)).double() * per_channel(scale, x) + per_channel(old.bias, x)
    out = model[2](x)
    torch.testing.assert_close(out.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    # An affine map: its gradient knows nothing of the other rows.
    out.sum().backward()
    torch.testing.assert_close(x.grad.double(), per_channel(scale, x).expand_as(x), rtol=1e-5, atol=1e-6)
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert_identical(state, model.state_dict())
    assert all(p.grad is not None for p in model.parameters())


def test_freezing_what_has_seen_no_data_warns():
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[0].running_mean.fill_(1.0)
    with pytest.warns(UserWarning, match=r"statistics of 1 \(2 of 3 BatchNorm layers\).*no data") as caught:
        convert_batch_norm(model, "frozen")
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("call", [
    lambda m: convert_batch_norm(m, "group"),
    lambda m: warn_of_small_batches(m),
    lambda m: virtual_batch_norm_statistics(m, [torch.zeros(2, 2)]),
])  # fmt: skip
def test_models_without_batch_norm_are_refused(call):
    model = nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, track_running_stats=True), nn.GroupNorm(1, 2))
    unchanged(model, lambda: call(model), ValueError, "this Sequential has no BatchNorm")
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="1 is a lazy BatchNorm"):
        call(lazy)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
        call([])


@pytest.mark.parametrize(
    ("arguments", "exception", "match"),
    [
        (dict(to="layer"), ValueError, "to must be one of 'group', 'sync', 'frozen', got 'layer'"),
        (dict(to="group", groups=0), ValueError, "groups must be at least 1"),
        (dict(to="group", groups=2.0), TypeError, "groups must be an int"),
        (dict(to="group", channels_per_group=0), ValueError, "channels_per_group must be at least 1"),
        (
            dict(to="group", channels_per_group=16),
            ValueError,
            "0.1 has 24 .*=16 does not divide: 1, 2, 3, 4, 6",
        ),
        (dict(to="group", channels_per_group=12), ValueError, "2 has 40 channels"),
        (dict(to="group", process_group=object()), ValueError, "process_group goes with to='sync'"),
    ],
)
def test_wrong_arguments_change_nothing(arguments, exception, match):
    model = convolutions()
    unchanged(model, lambda: convert_batch_norm(model, **arguments), exception, match)


def test_frozen_needs_statistics():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
    model[0].running_mean.fill_(1.0)
    unchanged(model, lambda: convert_batch_norm(model, "frozen"), ValueError, "1 keeps no running statistics")


# ---------------------------------------------------------------------------------------- warning


@pytest.mark.frames
def test_a_small_batch_is_warned_of_once_at_the_first_micro_batch():
    model = convolutions().train()
    warn_of_small_batches(model, 13)  # 2 x 8 x 8 and 2 x 3 x 3 are enough, 2 rows are not
    with pytest.warns(UserWarning, match="layer 6 normalises by 2 values .* fewer than 13.* 141 %") as caught:
        for _ in range(3):
            model(torch.randn(2, 3, 8, 8))
    (warning,) = caught
    assert "convert_batch_norm" in str(warning.message) and warning.filename == __file__
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("minimum", "rows", "layer"),
    [(2 * 64 + 1, 2, "0.1"), (2 * 64, 2, "2"), (10, 2, "2"), (9, 2, "2"), (32, 32, None), (33, 32, "6")],
)
def test_values_are_rows_times_positions(minimum, rows, layer):
    model = convolutions()
    warn_of_small_batches(model, minimum)
    model.eval()(torch.randn(1, 3, 8, 8))  # uses its statistics: nothing to warn of yet
    model.train()
    expected = {"0.1": rows * 64, "2": rows * 9, "6": rows}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(rows, 3, 8, 8))
    first = next((name for name, values in expected.items() if values < minimum), None)
    assert [f"layer {first} normalises by {expected[first]} " in str(w.message) for w in caught] == (
        [True] if first else []
    )
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_without_running_statistics_evaluation_counts_too():
    layer = nn.BatchNorm1d(2, track_running_stats=False).eval()
    warn_of_small_batches(layer)
    with pytest.warns(UserWarning, match=r"\(the model\) normalises by 3 values"):
        layer(torch.randn(3, 2))


def test_sync_batch_norm_sees_the_values_of_all_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layer = convert_batch_norm(nn.BatchNorm1d(2), "sync")
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        for rows, words in ((8, ()), (7, ("28 values",))):
            warn_of_small_batches(layer)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with pytest.raises(
                    ValueError, match="SyncBatchNorm expected input"
                ):  # it trains on GPUs only
                    layer(torch.randn(rows, 2))
            assert len(caught) == len(words) and all(w in str(caught[0].message) for w in words)
    finally:
        torch.distributed.destroy_process_group()


def test_the_watch_can_be_ended_and_refuses_nonsense():
    model = convolutions()
    warn_of_small_batches(model).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()(torch.randn(2, 3, 8, 8))
    for minimum, exception in ((1, ValueError), (2.5, TypeError), (True, TypeError)):
        unchanged(model, lambda m=minimum: warn_of_small_batches(model, m), exception, "minimum must be")


class BatchNormAct(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize("to", ["group", "sync", "frozen"])
def test_a_layer_that_does_more_than_a_batch_norm_is_refused(to):
    model = nn.Sequential(nn.BatchNorm2d(4), BatchNormAct(4))
    unchanged(
        model, lambda: convert_batch_norm(model, to), ValueError, "1 is a BatchNormAct, which does more"
    )
    model = nn.Sequential(nn.BatchNorm2d(4))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(ValueError, match="0 is a ParametrizedBatchNorm2d, which does more"):
        convert_batch_norm(model, to)


@pytest.mark.parametrize("argument", ["groups", "channels_per_group"])
def test_groups_go_with_group_only(argument):
    model = nn.Sequential(nn.BatchNorm2d(4))
    unchanged(
        model,
        lambda: convert_batch_norm(model, "frozen", **{argument: 2}),
        ValueError,
        rf"groups of channels .{argument}=. go with",
    )
    model = nn.Sequential(nn.BatchNorm1d(4))
    unchanged(
        model,
        lambda: convert_batch_norm(model, "group", channels_per_group=1),
        ValueError,
        "one channel in a group",
    )


def test_a_frozen_layer_loads_a_state_without_the_number_of_batches():
    source = nn.BatchNorm2d(2)
    state = {name: value + 1 for name, value in source.state_dict().items() if "tracked" not in name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = convert_batch_norm(source, "frozen")
    frozen.load_state_dict(state)
    assert frozen.running_mean.tolist() == [1.0, 1.0]


def test_a_copy_of_a_watched_model_is_not_watched(recwarn):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    warn_of_small_batches(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in [*copies, model, model, *copies]:
        one(torch.randn(2, 4))
    assert [str(w.message)[:17] for w in recwarn] == ["BatchNorm layer 1"]


class Named(nn.Module):
    """Calls its layer by keyword."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(input=x)


def test_a_layer_that_is_called_by_keyword(recwarn):
    model = Named()
    warn_of_small_batches(model)
    model(torch.randn(2, 4))
    assert len(recwarn) == 1
    rows = torch.randn(8, 4)
    virtual_batch_norm_statistics(model, [rows])
    torch.testing.assert_close(model.norm.running_mean, rows.mean(0))


# ------------------------------------------------------------------------------------- statistics


class Branches(nn.Module):
    """Its second layer sees large micro-batches only, its third none; a buffer counts the passes."""

    def __init__(self, anew):
        super().__init__()
        self.first, self.second, self.third = (nn.BatchNorm1d(4) for _ in range(3))
        self.anew = anew
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1 if self.anew else self.passes.add_(1)
        x = self.first(x)
        return self.second(x) if len(x) > 2 else x


@pytest.mark.parametrize("order", [(2, 8), (8, 2)])
@pytest.mark.parametrize("anew", [False, True])
def test_layers_that_only_some_micro_batches_reach_and_buffers_of_others(order, anew):
    model, rows = Branches(anew), torch.randn(10, 4) * 3 + 2
    passes = model.passes
    parts = dict(zip((2, 8), rows.split([2, 8]), strict=True))
    with pytest.warns(UserWarning, match="no micro-batch reaches third .1 of 3"):
        virtual_batch_norm_statistics(model, [parts[n] for n in order])
    seen = (parts[8] - rows.mean(0)) / (rows.var(0, correction=0) + model.first.eps).sqrt()
    torch.testing.assert_close(model.second.running_mean, seen.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.second.running_var, seen.var(0), rtol=1e-5, atol=1e-6)
    assert model.third.running_var.tolist() == [1.0] * 4
    assert model.passes is passes and passes.item() == 0.0


def test_a_frozen_layer_and_values_that_are_not_finite():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[0].eval()  # in a model that trains
    rows = torch.randn(8, 4) + 1
    virtual_batch_norm_statistics(model, [rows])
    assert model[0].running_mean.tolist() == [0.0] * 4
    torch.testing.assert_close(model[1].running_mean, rows.mean(0), rtol=1e-5, atol=1e-6)
    rows[3, 2] = math.nan
    unchanged(
        model, lambda: virtual_batch_norm_statistics(model, [rows]), ValueError, "1 values .*not finite"
    )


def whole_batch(model, rows):
    """What torch's own layers take from one training pass over everything, in float64."""
    twin = copy.deepcopy(model).double().train()
    for layer in twin.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = 1.0
        if isinstance(layer, nn.Dropout):
            layer.eval()
    twin(rows.double())
    return {name: value for name, value in twin.state_dict().items() if "running" in name}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", [[12], [3, 3, 3, 3], [1, 7, 2, 2]])
@pytest.mark.parametrize("batch", ["tensor", "pair", "mapping", "forward"])
def test_statistics_are_those_of_one_pass_over_everything(dtype, sizes, batch):
    model = convolutions(dtype=dtype)
    model.insert(3, nn.Dropout(0.5))
    # Rows that differ much from micro-batch to micro-batch: averages of variances would be far off.
    rows = (
        torch.randn(12, 3, 8, 8, dtype=dtype) * torch.linspace(0.2, 3, 12, dtype=dtype).view(-1, 1, 1, 1) + 5
    )
    expected = whole_batch(model, rows)
    assert len(expected) == 6
    parts = rows.split(sizes)
    forward = None
    if batch == "pair":
        parts = [(x, torch.zeros(len(x))) for x in parts]
    elif batch == "mapping":
        parts = [{"input": x} for x in parts]
    elif batch == "forward":
        parts, forward = [{"rows": x} for x in parts], lambda model, b: model(b["rows"])
    model.train()
    model[3].eval()
    before = copy.deepcopy(model.state_dict())
    buffers = {name: id(b) for name, b in model.named_buffers()}
    virtual_batch_norm_statistics(model, parts, forward=forward)
    after = model.state_dict()
    for name, value in expected.items():
        tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(after[name].double(), value, **tolerance)
    others = [name for name in before if name not in expected]
    assert_identical({n: before[n] for n in others}, {n: after[n] for n in others})
    assert buffers == {name: id(b) for name, b in model.named_buffers()}
    assert model.training and not model[3].training and model[0][1].training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_parallel_branches_and_layers_that_are_not_reached():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.left, self.right = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, x):
            return self.out(self.left(x) * self.right(x.square() + x))

    model = Two().double()
    rows = torch.randn(8, 3, dtype=torch.float64)
    expected = whole_batch(model, rows)
    # `right` keeps no statistics and sees each micro-batch: one micro-batch, then.
    virtual_batch_norm_statistics(model, [rows])
    for name, value in expected.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-13)
    assert model.unused.running_mean.tolist() == [0.0] * 3 and model.unused.running_var.tolist() == [1.0] * 3


def test_a_shuffled_data_loader():
    model = convolutions(dtype=torch.float64)
    rows = torch.randn(10, 3, 8, 8, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4, shuffle=True)
    virtual_batch_norm_statistics(model, loader)
    for name, value in whole_batch(model, rows).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-11, atol=1e-12)


def test_what_cannot_be_measured_changes_nothing():
    model = convolutions()
    rows = torch.randn(4, 3, 8, 8)

    def refused(loader, exception, match, model=model, **options):
        unchanged(model, lambda: virtual_batch_norm_statistics(model, loader, **options), exception, match)

    refused((x for x in [rows]), TypeError, "loader is a generator, which can be gone through only once")
    refused(iter([rows]), TypeError, "only once")
    refused(5, TypeError, "loader must be an iterable of micro-batches, got int")
    refused([], ValueError, "loader holds no micro-batch")
    refused([rows[:1]], ValueError, "holds 1 values per channel for 6: a variance needs two")
    refused([rows], ValueError, "reaches no BatchNorm", forward=lambda model, batch: batch)

    calls = []

    def fails(model, batch):
        calls.append(1)
        if len(calls) == 5:  # the first layer has its statistics by then
            raise OSError("disk")
        return model(batch)

    refused([rows, rows], OSError, "disk", forward=fails)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.norm(x) + x)

    refused([torch.randn(4, 3)], ValueError, "norm runs 2 times in one forward pass", Twice())

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.b(self.a(x)) if x.sum() > 0 else self.a(self.b(x))

    refused([torch.ones(4, 3), -torch.ones(4, 3)], RuntimeError, "depends on the micro-batch", Moody())
    nothing = nn.BatchNorm1d(3, track_running_stats=False)
    refused([rows], ValueError, "keeps running statistics", nothing)


def test_the_names_are_public():
    for name in ("convert_batch_norm", "warn_of_small_batches", "virtual_batch_norm_statistics"):
        assert name in fastaccum.__all__ and name in dir(fastaccum)
