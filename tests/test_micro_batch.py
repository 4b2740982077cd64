"""find_micro_batch_size: memory that really runs out, and nothing that is left behind."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import fastaccum  # noqa: E402
from fastaccum import FusedAccumulator, find_micro_batch_size, memory_plan  # noqa: E402
from fastaccum.micro_batch import is_out_of_memory  # noqa: E402
from tests.oracle import assert_identical, each_take, snapshot, unchanged  # noqa: E402

pytestmark = pytest.mark.quick
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Hungry(torch.autograd.Function):
    """Asks the allocator for more memory than any machine has when there are too many rows."""

    @staticmethod
    def forward(ctx, x, limit, where):
        ctx.too_many = len(x) > limit
        ctx.where = where
        if ctx.too_many and where == "forward":
            torch.empty(1 << 60, dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.too_many and ctx.where == "backward":
            torch.empty(1 << 60, dtype=torch.uint8)
        return grad, None, None


class Model(nn.Module):
    """Memory runs out in its middle: the last layer's gradients have arrived by then."""

    def __init__(self, limit=4, where="backward"):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.limit, self.where = limit, where

    def forward(self, x):
        x = Hungry.apply(self.norm(self.first(x)), self.limit, self.where)
        return self.last(nn.functional.dropout(x, 0.1)).square().mean()


def test_real_errors_are_known_from_others():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    for error in (
        torch.OutOfMemoryError("x"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("x")):
        assert not is_out_of_memory(error)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("virtual", "limit", "start", "world", "tried"),
    [
        (32, 4, None, 1, [32, 16, 8, 4]),
        (32, 5, None, 1, [32, 16, 8, 4]),
        (32, 100, None, 1, [32]),
        (64, 4, 16, 2, [16, 8, 4]),
        (60, 7, None, 1, [60, 30, 15, 6]),  # halves that do not divide give way to what does
        (7, 3, None, 1, [7, 1]),
    ],
)
def test_it_halves_until_it_runs_and_keeps_the_virtual_batch(where, virtual, limit, start, world, tried):
    model = Model(limit, where).eval()
    optimizer = FusedAccumulator(AdamW(model.parameters()), 3)
    sizes = []

    def step_fn(rows):
        sizes.append(rows)
        for _ in range(2):
            model(torch.randn(rows, 5)).backward()
            optimizer.step()

    found = find_micro_batch_size(step_fn, virtual, optimizer=optimizer, start=start, world_size=world)
    assert sizes == tried and found.micro_batch_size == tried[-1]
    assert found.micro_batch_size * found.accumulation_steps * world == virtual
    assert optimizer.accumulation_steps == 3 and optimizer.micro_step == 0 and not optimizer.state


@each_take
@pytest.mark.parametrize("steps_itself", [False, True])
@pytest.mark.parametrize("kind", [SGD, AdamW, torch.optim.RMSprop])
def test_nothing_is_left_behind(take, steps_itself, kind):
    torch.manual_seed(5)
    model = Model(limit=2)
    optimizer = FusedAccumulator(kind(model.parameters(), lr=0.1), 2, max_norm=1.0, take=take)
    for _ in range(2):
        model(torch.randn(2, 5)).backward()
        optimizer.step()
    before, state = snapshot(optimizer), copy.deepcopy(model.state_dict())
    random, updated, norm = torch.random.get_rng_state(), optimizer.updated, optimizer.norm.clone()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def step_fn(rows):
        for _ in range(5):  # more than a window
            optimizer.zero_grad()
            model(torch.randn(rows, 5)).backward()
            if steps_itself:
                optimizer.step()

    assert find_micro_batch_size(step_fn, 8, optimizer=optimizer, model=model) == (2, 4)
    assert_identical(before, snapshot(optimizer))
    assert_identical(state, model.state_dict())
    assert torch.equal(random, torch.random.get_rng_state())
    assert optimizer.updated is updated and torch.equal(optimizer.norm, norm) and not calls


@pytest.mark.parametrize("failing", [True, False])
@pytest.mark.parametrize("held", [1, 2])
def test_an_open_window_loses_nothing_and_counts_nothing_twice(failing, held):
    """Against float64: a window of the rows that were closed, tries between them or not."""
    torch.manual_seed(6)
    model = Model(limit=2).double().eval()
    twin = copy.deepcopy(model)
    twin.limit = 1 << 30
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), 3)
    optimizer.track(noise_scale=True)
    other = copy.deepcopy(model)
    alone = FusedAccumulator(SGD(other.parameters(), lr=0.1), 3)
    alone.track(noise_scale=True)
    rows = [torch.randn(2, 5, dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(7)
    for i, x in enumerate(rows):
        if i == held:

            def step_fn(n):
                model(torch.full((n, 5), 1e3, dtype=torch.float64)).backward()
                optimizer.step()
                if failing and n == 2:
                    raise OSError("something else")
                model(torch.full((n, 5), 1e3, dtype=torch.float64)).backward()

            if failing:
                with pytest.raises(OSError, match="something else"):
                    find_micro_batch_size(step_fn, 8, optimizer=optimizer)
            else:
                assert find_micro_batch_size(step_fn, 8, optimizer=optimizer) == (2, 4)
            assert optimizer.micro_step == held and all(p.grad is None for p in model.parameters())
        model(x).backward()
        optimizer.step()
    assert optimizer.updated
    torch.manual_seed(7)  # dropout is on: the tries must not have drawn from the same numbers
    for x in rows:
        other(x).backward()
        alone.step()
    torch.manual_seed(7)
    (sum(twin(x) for x in rows) / 3).backward()
    SGD(twin.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    # What is measured besides is what it is without tries.
    assert optimizer.stats() == alone.stats()


def test_an_out_of_memory_in_training_is_run_again_in_halves():
    """What the README shows: the failed rows as two micro-batches, weighted by their rows."""
    torch.manual_seed(8)
    model = Model(limit=2).double().eval()
    model.forward = lambda x: (
        model.last(Hungry.apply(model.norm(model.first(x)), 2, "backward")).square().mean()
    )
    twin = copy.deepcopy(model)
    del twin.forward
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), accumulation_steps=100)
    data = [torch.randn(n, 5, dtype=torch.float64) for n in (2, 4, 1, 3)]

    def run(rows):
        try:
            optimizer.backward(model(rows), weight=len(rows))
        except RuntimeError as error:
            assert is_out_of_memory(error)
            optimizer.zero_grad()
            halves = rows.chunk(2)
        else:
            optimizer.step()
            return
        for half in halves:
            run(half)

    for rows in data:
        run(rows)
    assert optimizer.micro_step == 6
    optimizer.flush()
    everything = torch.cat(data)
    twin.last(twin.norm(twin.first(everything))).square().mean().backward()
    SGD(twin.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_when_nothing_fits_that_is_said_and_nothing_is_changed():
    model = Model(limit=0)
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), 2)

    def call():
        find_micro_batch_size(lambda n: model(torch.randn(n, 5)).backward(), 4, optimizer=optimizer)

    model.eval()
    unchanged(optimizer, call, torch.OutOfMemoryError, "of 1 row runs out of memory too: RuntimeError")
    assert optimizer.accumulation_steps == 2


def test_state_that_is_not_made_yet_is_reserved():
    """The reserve is seen by the tries: as much as two moments take."""
    from torch.profiler import ProfilerActivity, profile

    model = nn.Linear(1000, 500)
    sizes = {}
    for reserve in (True, False):
        optimizer = FusedAccumulator(AdamW(model.parameters()), 2)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            find_micro_batch_size(lambda n: None, 2, optimizer=optimizer, reserve_state=reserve)
        events = prof.profiler.kineto_results.events()
        sizes[reserve] = max((e.nbytes() for e in events if e.name() == "[memory]"), default=0)
        del optimizer
    assert sizes[True] == 2 * 4 * 500_500 and sizes[False] < 100_000


@pytest.mark.parametrize(
    ("arguments", "exception", "match"),
    [
        (dict(step_fn=3), TypeError, "step_fn must be callable"),
        (dict(virtual_batch_size=0), ValueError, "virtual_batch_size must be at least 1"),
        (dict(virtual_batch_size=8.0), TypeError, "virtual_batch_size must be an int"),
        (dict(start=3), ValueError, "start=3 does not divide the 8 rows .*: 1, 2, 4 do"),
        (dict(start=0), ValueError, "start must be at least 1"),
        (dict(world_size=3), ValueError, "not a multiple of .*world_size=3"),
        (dict(model=3), TypeError, "model must be a torch.nn.Module"),
        (dict(optimizer=SGD([nn.Parameter(torch.zeros(1))], lr=1)), TypeError, "FusedAccumulator, got SGD"),
        (dict(reserve_state=1), TypeError, "reserve_state must be a bool"),
    ],
)
def test_wrong_arguments(arguments, exception, match):
    ran = []
    call = {"step_fn": ran.append, "virtual_batch_size": 8, **arguments}
    with pytest.raises(exception, match=match):
        find_micro_batch_size(**call)
    assert not ran


class Averaging(nn.Linear):
    """Puts a new tensor in the place of a buffer."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.average = 0.9 * self.average + 1
        return super().forward(x)


def test_a_buffer_that_is_assigned_anew_is_put_back():
    model = Averaging()
    average = model.average
    find_micro_batch_size(lambda n: model(torch.randn(n, 3)).sum().backward(), 2, model=model)
    assert model.average is average and average.item() == 0.0
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    memory_plan(model, optimizer, torch.randn(8, 3), loss=lambda model, x: model(x).sum())
    assert model.average is average and average.item() == 0.0


def test_nothing_is_updated_while_sizes_are_tried():
    model = nn.Linear(3, 1)
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), 3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()

    def step(n):
        model(torch.ones(n, 3)).sum().backward()
        optimizer.step()
        optimizer.flush()

    with pytest.raises(RuntimeError, match="step_fn must not call flush"):
        find_micro_batch_size(step, 2, optimizer=optimizer)
    assert torch.equal(model.weight, before) and optimizer.micro_step == 1
    assert optimizer.flush() and not torch.equal(model.weight, before)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_ran_out_of_memory_are_run_again_in_parts(weighted):
    """The README's recipe gives the window of the whole micro-batches, in float64."""
    torch.manual_seed(0)
    rows = torch.randn(3, 8, 5, dtype=torch.float64)
    weights = {"weight": 8} if weighted else {}
    results = []
    for parts in (1, 2):
        torch.manual_seed(1)
        model = nn.Linear(5, 1, dtype=torch.float64)
        optimizer = FusedAccumulator(SGD(model.parameters(), lr=1.0), 3)
        for i, x in enumerate(rows):
            if i != 1 or parts == 1:
                optimizer.backward(model(x).square().mean(), **weights)
            else:
                for part in x.split(4):
                    optimizer.backward(model(part).square().sum() / 8, **weights)
            optimizer.step()
        assert optimizer.updated
        results.append(model.weight.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-14)


def test_a_pending_micro_batch_and_a_window_that_cannot_be_kept_are_refused():
    model = Model(limit=100).eval()
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), 3)
    model(torch.randn(2, 5)).backward()

    def call():
        find_micro_batch_size(lambda n: None, 4, optimizer=optimizer)

    unchanged(optimizer, call, RuntimeError, "a micro-batch is pending.*zero_grad")
    optimizer.step()
    call()
    assert optimizer.micro_step == 1
    optimizer.discard()
    del optimizer
    optimizer = FusedAccumulator(SGD(model.parameters(), lr=0.1), 3, take="backward")
    model(torch.randn(2, 5)).backward()
    with pytest.raises(RuntimeError, match="a micro-batch is pending"):
        call()
    optimizer.step()
    unchanged(optimizer, call, ValueError, "take='backward' adds gradients into the open window")
    optimizer.flush()
    call()


def test_the_name_is_public():
    assert "find_micro_batch_size" in fastaccum.__all__
    assert fastaccum.find_micro_batch_size is find_micro_batch_size
