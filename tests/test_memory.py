"""The fourth care: what a training needs, predicted, and held to what the allocator reports.

The truth comes from torch's (Kineto) profiler, which writes down every allocation of the CPU allocator,
inside of operators too, while real windows run. Nothing of `fastaccum.memory` has a part in it.
"""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import fastaccum  # noqa: E402
from fastaccum import FusedAccumulator, memory_plan  # noqa: E402
from tests.oracle import assert_identical, snapshot  # noqa: E402

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
README = Path(__file__).resolve().parents[1] / "README.md"
quick = pytest.mark.quick
pytestmark = pytest.mark.skipif(not torch.autograd.kineto_available(), reason="torch has no profiler")
# Of the measured peak. 5 % is promised; sizes that are measured themselves do better by far.
PROMISED, MEASURED = 0.05, 0.02


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and lose much where several tests share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def allocated(run):
    """The most bytes that were allocated at once on the CPU while something ran."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
        gc.collect()
    events = [
        (e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    now = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        peak = max(peak, now)
    assert len(events) > 100 and now == 0  # all of it was seen, and all of it is gone
    return peak


class Third(nn.Module):
    """A model that nothing was tuned on: recurrent, attentive and convolutional, BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.lstm = nn.LSTM(64, 96, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.1, batch_first=True)
        convolution = nn.Conv1d(96, 48, 5, padding=2)
        self.convolution = nn.Sequential(
            convolution, nn.BatchNorm1d(48), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.2)
        )
        self.head = nn.Linear(48, 500)

    def forward(self, tokens):
        x, _ = self.lstm(self.embed(tokens))
        return self.head(self.convolution((x + self.encoder(x)).transpose(1, 2)).mean(2))


def demo(name):
    """A training of the demo: (model maker, loss, a micro-batch)."""
    pytest.importorskip("sklearn")
    from fastaccum.demo import tasks

    task = getattr(tasks, name)(quick=True)
    batch = task.epochs[0][0]
    return task.model, lambda model, b: task.loss(model, batch._replace(inputs=b[0], targets=b[1])), batch[:2]


def third():
    torch.manual_seed(1)
    batch = (torch.randint(500, (16, 40)), torch.randint(500, (16,)))
    return Third, lambda model, b: F.cross_entropy(model(b[0]), b[1]), batch


CASES = {"cnn": lambda: demo("digits_task"), "gpt": lambda: demo("docstrings_task"), "third": third}
OPTIMIZERS = {
    "adamw": lambda params: AdamW(params, lr=1e-3),
    "sgd": lambda params: SGD(params, lr=0.01, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),  # runs its own step
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "adafactor": lambda params: torch.optim.Adafactor(params),  # small state, and reads numbers
}


# Every optimizer of torch but those that a window's gradient is no use to.
KINDS = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
KINDS = sorted(KINDS - {"Optimizer", "LBFGS", "SparseAdam"})


def wrapped(model, optimizer, steps, take, **options):
    inner = OPTIMIZERS[optimizer](model.parameters())
    return inner if take == "plain" else FusedAccumulator(inner, steps, take=take, **options)


def train(make, loss, batch, optimizer, steps, take, **options):
    """Two windows, as a user runs them: the second finds everything allocated."""
    model = make()
    update = wrapped(model, optimizer, steps, take, **options)
    for i in range(2 * steps):
        inputs = [t.clone() for t in batch]
        loss(model, inputs).backward()
        if take != "plain":
            update.step()
        elif (i + 1) % steps == 0:
            update.step()
            update.zero_grad()


def peaks(make, loss, planned, trained, optimizer, steps, take, **options):
    """(predicted, measured, the plan)."""
    model = make()
    plan = memory_plan(model, wrapped(model, optimizer, steps, take, **options), planned, loss=loss)
    predicted = plan.peak_for(len(trained[0]), steps)
    del model
    peak = allocated(lambda: train(make, loss, trained, optimizer, steps, take, **options))
    return predicted, peak, plan


def close(make, loss, planned, trained, optimizer, steps, take, **options):
    predicted, peak, plan = peaks(make, loss, planned, trained, optimizer, steps, take, **options)
    limit = MEASURED if planned is trained else PROMISED
    assert abs(predicted / peak - 1) <= limit, f"predicted {predicted}, measured {peak}"
    if planned is trained and steps == plan.accumulation_steps:
        assert plan.peak == predicted


# ---------------------------------------------------------------------------------------- the peak


@pytest.mark.parametrize("take", ["step", "backward", "plain"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_within_5_percent_of_the_allocators(case, steps, take):
    make, loss, batch = CASES[case]()
    close(make, loss, batch, batch, "adamw", steps, take)


README_ROW = re.compile(
    r"\| (demo's CNN|demo's GPT|LSTM).*`take=\"(\w+)\"` \| ([\d.]+) MiB \| ([\d.]+) MiB \|"
)


@pytest.mark.skipif(not README.is_file(), reason="runs from a checkout")
def test_the_readmes_table_is_what_is_measured():
    rows = README_ROW.findall(README.read_text())
    assert len(rows) == 6
    for name, take, predicted, measured in rows:
        make, loss, batch = CASES[{"demo's CNN": "cnn", "demo's GPT": "gpt", "LSTM": "third"}[name]]()
        found = peaks(make, loss, batch, batch, "adamw", 3, take)
        for says, is_ in zip((predicted, measured), found, strict=False):
            assert float(says) == pytest.approx(is_ / 2**20, rel=0.01), (name, take, is_ / 2**20)


@pytest.mark.parametrize("take", ["step", "backward", "plain"])
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adafactor"])
def test_other_optimizers(optimizer, take):
    make, loss, batch = third()
    close(make, loss, batch, batch, optimizer, 2, take)


@pytest.mark.parametrize("take", ["step", "backward", "plain"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "nadam"])
def test_where_gradients_are_nearly_all_there_is(optimizer, steps, take):
    """With take="backward" they go bucket by bucket; an optimizer's own step() is the peak."""
    layers = [nn.Linear(768, 768) for _ in range(10)]

    def make():
        return copy.deepcopy(nn.Sequential(*layers))

    def loss(model, b):
        return F.mse_loss(model(b[0]), b[1])

    batch = (torch.randn(4, 768), torch.randn(4, 768))
    close(make, loss, batch, batch, optimizer, steps, take)
    # The same once the optimizer has its state: its step needs as much besides.
    model = make()
    update = wrapped(model, optimizer, steps, take)
    before = memory_plan(model, update, batch, loss=loss)
    loss(model, batch).backward()
    update.step()
    update.zero_grad() if take == "plain" else update.flush()
    assert abs(memory_plan(model, update, batch, loss=loss).peak / before.peak - 1) < 1e-3


def test_wrong_optimizers_and_losses_are_refused():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer holds no parameter of model"):
        memory_plan(model, optimizer, torch.randn(4, 2))
    with pytest.raises(TypeError, match="loss must be a function of .model, micro_batch., got str"):
        memory_plan(other, optimizer, torch.randn(4, 2), loss="mean")

    def backward(model, x):
        value = model(x).sum()
        value.backward(retain_graph=True)
        return value

    with pytest.raises(ValueError, match="and not call backward"):
        memory_plan(other, optimizer, torch.randn(4, 2), loss=backward)
    assert other.weight.grad is None


@pytest.mark.parametrize(("planned", "trained"), [(4, 16), (16, 3), (2, 7)])
@pytest.mark.parametrize("case", ["cnn", "third"])
def test_another_micro_batch_size_is_foretold(case, planned, trained):
    make, loss, batch = CASES[case]()
    close(make, loss, [t[:planned] for t in batch], [t[:trained] for t in batch], "adamw", 3, "step")


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_sixteen_bit_parameters_are_accumulated_in_float32(optimizer):
    make, loss, batch = third()
    close(lambda: make().bfloat16(), loss, batch, batch, optimizer, 2, "step")


def test_master_weights():
    make, loss, batch = third()
    close(lambda: make().bfloat16(), loss, batch, batch, "adamw", 2, "step", master_weights=True)


# ----------------------------------------------------------------------------------- its components


def mlp(width=64):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 8))


def mean_square(model, batch):
    return model(batch).square().mean()


@quick
def test_the_components_are_counted_by_hand():
    model = mlp()
    model.register_buffer("table", torch.zeros(10, dtype=torch.float64))
    optimizer = FusedAccumulator(AdamW(model.parameters()), 4)
    plan = memory_plan(model, optimizer, torch.randn(16, 32), loss=mean_square)
    numels = [64 * 32, 64, 8 * 64, 8]
    gradients = 4 * sum(numels)
    assert plan.parameters == gradients + 80 and plan.gradients == gradients
    assert plan.optimizer_state == 2 * gradients and plan.inputs == 16 * 32 * 4
    assert plan.accumulator == 4 * sum(-(-n // 512) * 512 for n in numels)  # whole strands of 512
    # relu's output (which is the next layer's input too) and the square's input; the first layer's input
    # and all weights are there anyway.
    assert plan.activations == 16 * (64 + 8) * 4
    assert plan.peak == sum(
        (plan.parameters, plan.gradients, plan.accumulator, plan.optimizer_state, plan.activations,
         plan.temporaries, plan.inputs)
    )  # fmt: skip
    assert plan.rows == 16 and plan.accumulation_steps == 4 and plan.temporaries > 0
    assert (
        memory_plan(model, AdamW(model.parameters()), torch.randn(16, 32), loss=mean_square).accumulator == 0
    )


@quick
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_the_state_is_what_a_step_makes(name):
    kind = vars(torch.optim)[name]
    shapes = [(33, 20), (64, 64)] + ([] if name == "Muon" else [(7,), ()])
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def loss(model, batch):
        return batch.mean() * sum(p.square().sum() for p in model)

    optimizer = kind(model.parameters())
    before = memory_plan(model, optimizer, torch.ones(1), loss=loss)
    assert all(not entry for entry in optimizer.state.values()) or name == "Adagrad"
    for p in model:
        p.grad = torch.randn_like(p)
    optimizer.step()
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    made = sum(t.untyped_storage().nbytes() for t in tensors)
    counters = sum(t.untyped_storage().nbytes() for t in tensors if t.numel() == 1)
    # Counters of single numbers need not be foretold; what is there is counted whole.
    assert made - counters <= before.optimizer_state <= made
    assert memory_plan(model, optimizer, torch.ones(1), loss=loss).optimizer_state == made


@quick
def test_an_optimizer_that_cannot_be_foretold_says_what_to_do():
    model = mlp()
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(
            ValueError, match=f"the state of {kind.__name__} cannot be predicted .*take one step"
        ):
            memory_plan(model, kind(list(model.parameters())), torch.randn(4, 32), loss=mean_square)


@quick
def test_groups_dtypes_and_frozen_parameters():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100, dtype=torch.float64), nn.Linear(100, 5))
    model[0].weight.requires_grad_(False)
    groups = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "momentum": 0.0},
        {"params": model[2].parameters(), "max_norm": 1.0},
    ]
    optimizer = FusedAccumulator(SGD(groups, lr=0.1, momentum=0.9), 2)

    def loss(model, batch):
        return model[2](model[1](model[0](batch).double()).float()).sum()

    plan = memory_plan(model, optimizer, torch.randn(3, 100), loss=loss)
    trained = 4 * 100 + 8 * 10100 + 4 * 505
    assert plan.parameters == trained + 40000 and plan.gradients == trained
    assert plan.optimizer_state == 4 * 100 + 4 * 505
    for _ in range(2):
        loss(model, torch.randn(3, 100)).backward()
        optimizer.step()
    assert plan.accumulator == optimizer.memory()["buffer"]


# ------------------------------------------------------------------------------------- what fits


@quick
def test_the_largest_micro_batch_that_fits_is_named():
    model = mlp(256)
    optimizer = FusedAccumulator(AdamW(model.parameters()), 1)
    plan = memory_plan(model, optimizer, torch.randn(8, 32), loss=mean_square, virtual_batch_size=48)
    assert [(f.micro_batch_size, f.accumulation_steps) for f in plan.fits] == [
        (n, 48 // n) for n in (48, 24, 16, 12, 8, 6, 4, 3, 2, 1)
    ]
    assert plan.best.micro_batch_size == 48 and all(f.fits is None for f in plan.fits)
    peaks = {f.micro_batch_size: f.peak for f in plan.fits}
    assert peaks[24] > peaks[16] > peaks[12] > peaks[1]
    for size in (24, 16, 1):
        limited = memory_plan(
            model, optimizer, torch.randn(8, 32), loss=mean_square, virtual_batch_size=48, limit=peaks[size]
        )
        fitting = [f.micro_batch_size for f in limited.fits if f.fits]
        assert (
            fitting == [n for n in peaks if peaks[n] <= peaks[size]]
            and max(fitting) == limited.micro_batch_size
        )
        assert f"{limited.micro_batch_size:>6} rows x {48 // limited.micro_batch_size}" in str(limited)
        assert "   fits" in str(limited)
    nothing = memory_plan(
        model, optimizer, torch.randn(8, 32), loss=mean_square, virtual_batch_size=48, limit=1000
    )
    assert nothing.best is None and nothing.micro_batch_size is None
    assert "nothing fits 0.00 MiB: take='backward'" in str(nothing) and "too much" in str(nothing)
    shared = memory_plan(
        model, optimizer, torch.randn(8, 32), loss=mean_square, virtual_batch_size=48, world_size=4
    )
    assert [(f.micro_batch_size, f.accumulation_steps) for f in shared.fits][:2] == [(12, 1), (6, 2)]


@quick
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_few_rows_are_enough(rows):
    model = mlp(16)
    if rows > 1:
        model.append(nn.BatchNorm1d(8))
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), 2)
    plan = memory_plan(model, optimizer, torch.randn(rows, 32), loss=mean_square)
    many = memory_plan(model, optimizer, torch.randn(64, 32), loss=mean_square)
    assert plan.peak == plan.peak_for(rows, 2)
    assert plan.peak_for(64, 2) == many.peak


# ------------------------------------------------------------------------------------ how it is called


@quick
def test_micro_batches_of_any_structure():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, y=None, scale=1.0):
            value = (self.layer(x) * scale - (0 if y is None else y)).square().mean()
            return value if y is None else type("Output", (), {"loss": value, "logits": x})()

    model = Takes()
    optimizer = SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    sizes = [memory_plan(model, optimizer, batch).inputs for batch in (x, (x,), [x, y], {"x": x, "y": y})]
    assert sizes == [96, 96, 120, 120]
    assert memory_plan(model, optimizer, (x, y, 2.0)).rows == 6  # what is no tensor is passed on


@quick
def test_nothing_is_changed():
    torch.manual_seed(3)
    model = Third()
    optimizer = FusedAccumulator(AdamW(model.parameters()), 3, max_norm=1.0)
    batch = (torch.randint(500, (4, 10)), torch.randint(500, (4,)))

    def loss(model, b):
        return F.cross_entropy(model(b[0]), b[1])

    loss(model, batch).backward()
    optimizer.step()
    loss(model, batch).backward()  # a pending micro-batch in an open window
    before, state = snapshot(optimizer), copy.deepcopy(model.state_dict())
    random = torch.random.get_rng_state()
    memory_plan(model, optimizer, batch, loss=loss, virtual_batch_size=12, limit=1 << 30)
    assert_identical(before, snapshot(optimizer))
    assert_identical(state, model.state_dict())
    assert torch.equal(random, torch.random.get_rng_state()) and model.training

    def fails(model, b):
        F.cross_entropy(model(b[0]), b[1])
        raise OSError("in the middle")

    with pytest.raises(OSError, match="in the middle"):
        memory_plan(model, optimizer, batch, loss=fails)
    assert_identical(before, snapshot(optimizer))
    assert_identical(state, model.state_dict())
    assert torch.equal(random, torch.random.get_rng_state())
    optimizer.step()
    loss(model, batch).backward()
    optimizer.step()
    assert optimizer.updated


@quick
def test_a_running_profiler_is_refused_and_left_alone():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.autograd.profiler_legacy.profile() as running:
        with pytest.raises(RuntimeError, match="[Pp]rofiler"):
            memory_plan(model, optimizer, torch.randn(4, 32), loss=mean_square)
        model(torch.randn(1, 32))
    assert any(event.name == "aten::linear" for event in running.function_events)
    assert not any(p._backward_hooks for p in model.parameters())
    memory_plan(model, optimizer, torch.randn(4, 32), loss=mean_square)
    assert not any(p._backward_hooks for p in model.parameters())


@quick
@pytest.mark.parametrize(
    ("arguments", "exception", "match"),
    [
        (dict(model=[]), TypeError, "model must be a torch.nn.Module, got list"),
        (dict(optimizer=None), TypeError, "optimizer must be a torch.optim.Optimizer, got NoneType"),
        (dict(micro_batch=None), ValueError, "micro_batch must hold a tensor"),
        (dict(micro_batch=torch.zeros(0, 32)), ValueError, "micro_batch must hold a tensor"),
        (dict(micro_batch=torch.tensor(1.0)), ValueError, "micro_batch must hold a tensor"),
        (dict(loss=None), ValueError, "the model does not return a loss: pass loss="),
        (dict(loss=lambda m, b: m(b)), ValueError, r"one number .*shape \[4, 8\] \(requires_grad=True\)"),
        (dict(loss=lambda m, b: b.sum()), ValueError, r"one number with a gradient.*requires_grad=False"),
        (dict(loss=lambda m, b: 1.0), ValueError, "one number with a gradient, got float"),
        (dict(limit=100), ValueError, "limit goes with virtual_batch_size"),
        (dict(limit=0, virtual_batch_size=8), ValueError, "limit must be at least 1"),
        (dict(limit=1e9, virtual_batch_size=8), TypeError, "limit must be an int"),
        (dict(virtual_batch_size=0), ValueError, "virtual_batch_size must be at least 1"),
        (dict(virtual_batch_size=9, world_size=2), ValueError, "not a multiple of world_size=2"),
        (dict(world_size=0), ValueError, "world_size must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, exception, match):
    model = mlp()
    call = {
        "model": model,
        "optimizer": FusedAccumulator(SGD(model.parameters(), lr=0.1)),
        "micro_batch": torch.randn(4, 32),
        "loss": mean_square,
        **arguments,
    }
    with pytest.raises(exception, match=match):
        memory_plan(call.pop("model"), call.pop("optimizer"), call.pop("micro_batch"), **call)


@quick
def test_models_that_cannot_be_planned():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    plan = memory_plan(model, optimizer, torch.randn(4, 32), loss=mean_square)
    for wrong, exception in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(exception, match="micro_batch_size must be"):
            plan.peak_for(wrong, 1)
        with pytest.raises(exception, match="accumulation_steps must be"):
            plan.peak_for(4, wrong)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of this model requires a gradient"):
        memory_plan(model, optimizer, torch.randn(4, 32), loss=mean_square)
    split = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        memory_plan(split, SGD(split.parameters(), lr=0.1), torch.randn(4, 4), loss=mean_square)


@quick
def test_the_name_is_public():
    assert "memory_plan" in fastaccum.__all__ and fastaccum.memory_plan is memory_plan
