"""Under stock DDP and FSDP2, used the ordinary way, a window is what the plain loop makes of it.

Two real processes run every check below once, in one process group; each test then looks at what both
of them have brought back.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import io
import math
import pickle
import re
import traceback
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo in this torch", allow_module_level=True)

import torch.utils.checkpoint  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402

pytestmark = pytest.mark.native

RANKS = 2
CHECKS = {}


def check(function):
    """Runs in both processes; what it returns must hold tensors and numbers only."""
    CHECKS[function.__name__] = function
    return function


def work(rank, folder):
    """One rank: every check in the same order, results or the traceback into a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    results = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results[name] = function(rank)
            results[f"{name}: warnings"] = [
                str(w.message) for w in caught if "fastaccum" in str(w.message) or w.filename == __file__
            ]
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/rank{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Name of a check -> what rank 0 and rank 1 returned."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)
    ranks = [torch.load(f"{folder}/rank{rank}") for rank in range(RANKS)]

    def of(name):
        for rank, results in enumerate(ranks):
            assert not isinstance(results[name], str), f"rank {rank}: {results[name]}"
        return [results[name] for results in ranks]

    of.warnings = lambda name: [results[f"{name}: warnings"] for results in ranks]
    return of


# ------------------------------------------------------------------------------------ what is trained


class Net(nn.Module):
    """With a branch that takes part only where it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, branch=True):
        h = self.first(x).tanh()
        return self.last(self.branch(h).tanh() if branch else h)


def data(rank, count):
    """A rank's micro-batches; the scale differs, so that one rank's norm is not the other's."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(5, 4, generator=generator) * (1 + rank) for _ in range(count)]


def synchronised(model, last, how):
    """DDP's synchronisation on every micro-batch, or on the last of a window only."""
    return model.no_sync() if how == "last" and not last else contextlib.nullcontext()


def plain(rank, k, how, branches, spoil, **options):
    """Stock's loop: (parameters, norms)."""
    torch.manual_seed(0)
    net = Net()
    model = DDP(net, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    norms = []
    for i, x in enumerate(data(rank, len(branches))):
        last = (i + 1) % k == 0
        with synchronised(model, last, how):
            (model(x, branches[i]).square().mean() / k * spoil(rank, i)).backward()
        if last:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05, foreach=False)
            norms.append(norm)
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
    return {"params": [p.detach().clone() for p in net.parameters()], "norms": torch.stack(norms)}


def wrapped(rank, k, how, branches, spoil, take="step", **options):
    """The same loop by the wrapper, DDP made before it."""
    torch.manual_seed(0)
    net = Net()
    model = DDP(net, **options)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    optimizer = FusedAccumulator(inner, k, max_norm=0.05, take=take)
    norms, stepped = [], []
    for i, x in enumerate(data(rank, len(branches))):
        with synchronised(model, (i + 1) % k == 0, how):
            (model(x, branches[i]).square().mean() * spoil(rank, i)).backward()
        optimizer.step()
        if optimizer.updated:
            norms.append(optimizer.norm.clone())
            stepped.append(optimizer.stepped)
    return {
        "params": [p.detach().clone() for p in net.parameters()],
        "norms": torch.stack(norms),
        "skipped": int(optimizer.skipped),
        "stepped": stepped,
    }


def nothing(rank, i):
    return 1.0


def one_inf(rank, i, at):
    """An infinite loss in one micro-batch, on the second rank only."""
    return math.inf if (rank, i) == (1, at) else 1.0


def compare(k=4, windows=3, how="last", branch=lambda i: True, spoil=nothing, **options):
    """A check of the wrapper against stock, both under DDP."""

    def run(rank):
        branches = [branch(i) for i in range(k * windows)]
        return {
            "stock": plain(rank, k, how, branches, spoil, **options),
            "ours": wrapped(rank, k, how, branches, spoil, **options),
        }

    return run


UNUSED = {"find_unused_parameters": True}
COMPARED = {
    # The user's no_sync() on all but the last micro-batch of a window.
    "no_sync": compare(),
    "no_sync_bucket_view": compare(gradient_as_bucket_view=True),
    "no_sync_k2": compare(k=2),
    "no_sync_inf_first": compare(spoil=functools.partial(one_inf, at=5)),  # local when it arrives
    "no_sync_inf_last": compare(spoil=functools.partial(one_inf, at=7)),
    "no_sync_unused": compare(branch=lambda i: i % 4 != 3, **UNUSED),  # used before the last one only
    # DDP reduces every micro-batch.
    "always": compare(how="always"),
    "always_k1": compare(k=1, how="always"),
    "always_bucket_view": compare(how="always", gradient_as_bucket_view=True),
    "always_small_buckets": compare(how="always", gradient_as_bucket_view=True, bucket_cap_mb=1e-5),
    "always_inf": compare(how="always", spoil=functools.partial(one_inf, at=5)),
    "always_inf_bucket_view": compare(
        how="always", spoil=functools.partial(one_inf, at=6), gradient_as_bucket_view=True
    ),
    "always_unused": compare(how="always", branch=lambda i: i % 4 == 1, **UNUSED),
    "always_never_used": compare(how="always", branch=lambda i: False, **UNUSED),
    "always_unused_bucket_view": compare(
        how="always", branch=lambda i: i % 2 == 0, gradient_as_bucket_view=True, **UNUSED
    ),
    # Stock's static graph asserts under no_sync(), so it is used without.
    "static_graph": compare(how="always", static_graph=True),
    "static_graph_bucket_view": compare(how="always", static_graph=True, gradient_as_bucket_view=True),
}
CHECKS.update(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_under_ddp_the_wrapper_is_the_plain_loop(both, name):
    results = both(name)
    first, second = (r["stock"]["params"] for r in results)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "the oracle is none"
    for result in results:
        stock, ours = result["stock"], result["ours"]
        torch.testing.assert_close(ours["norms"], stock["norms"], rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(ours["params"], stock["params"], rtol=1e-5, atol=1e-6)
        bad = int((~stock["norms"].isfinite()).sum())
        assert ours["skipped"] == bad == ("inf" in name)
        assert ours["stepped"] == stock["norms"].isfinite().tolist()
    # DDP's own writes are no foreign clip, and its sums were reduced.
    assert all("skipped" in message for rank in both.warnings(name) for message in rank)
    # Not only close: the ranks hold the same bits, or they drift apart.
    a, b = (r["ours"] for r in results)
    assert all(torch.equal(x, y) for x, y in zip(a["params"], b["params"], strict=True))
    assert torch.equal(a["norms"].nan_to_num(), b["norms"].nan_to_num())
    assert (a["skipped"], a["stepped"]) == (b["skipped"], b["stepped"])


# ------------------------------------------------------------------------------------- numbers by hand


class Scaled(nn.Module):
    """Its gradient is its input."""

    def __init__(self, n=1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return (self.weight * x).sum()


def minus_gradients(rank, values, k, how, flush=False, n=1, reduction="mean", **options):
    """The parameter after each update of SGD with lr 1, of micro-batches with these gradients."""
    module = Scaled(n)
    model = DDP(module, **options)
    optimizer = FusedAccumulator(torch.optim.SGD(module.parameters(), lr=1.0), k, reduction=reduction)
    seen = []
    for i, x in enumerate(values):
        last = (i + 1) % k == 0 or i + 1 == len(values)
        with synchronised(model, last, how):
            model(torch.full((n,), float(x))).backward()
        optimizer.step()
        if optimizer.updated or (flush and last and optimizer.flush()):
            seen.append(module.weight.detach().clone())
    return torch.stack(seen)


@check
def x01(rank):
    values = [1 + i + 4 * rank for i in range(4)]
    return {how: minus_gradients(rank, values, 4, how) for how in ("last", "always")}


@pytest.mark.parametrize("how", ["last", "always"])
def test_x01_synchronised_on_the_last_micro_batch(both, how):
    """Inputs 1 + i + 4 r: 4.5; only the first synchronised gives 3 and 6, none 2.5 and 6.5."""
    assert [r[how].tolist() for r in both("x01")] == [[[-4.5]], [[-4.5]]]


@check
def x01_short(rank):
    values = [1 + i + 4 * rank for i in range(6)]
    return {how: minus_gradients(rank, values, 4, how, flush=True) for how in ("last", "always")}


@pytest.mark.parametrize("how", ["last", "always"])
def test_x01_a_short_last_window(both, how):
    """Four micro-batches average 4.5; the two that are left, 5, 6 and 9, 10, average 7.5."""
    assert [r[how].tolist() for r in both("x01_short")] == [[[-4.5], [-12.0]]] * 2


@check
def l04(rank):
    return {
        f"{how}-{view}-{reduction}": minus_gradients(
            rank,
            [rank + 1.0, 3 * (rank + 1.0)] * 2,
            2,
            how,
            n=4,
            reduction=reduction,
            gradient_as_bucket_view=view,
        )
        for how in ("last", "always")
        for view in (False, True)
        for reduction in ("mean", "sum")
    }


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", ["last", "always"])
def test_l04_gradients_that_are_views_of_buckets(both, how, view):
    """Gradients 1 and 2 reduce to 1.5, 3 and 6 to 4.5; DDP writes the next into the same bucket."""
    for rank in both("l04"):
        assert rank[f"{how}-{view}-mean"].tolist() == [[-3.0] * 4, [-6.0] * 4]
        assert rank[f"{how}-{view}-sum"].tolist() == [[-6.0] * 4, [-12.0] * 4]


@check
def state(rank):
    """Saved in the middle of a window on each rank, loaded into fresh objects, continued."""

    def fresh():
        torch.manual_seed(0)
        net = Net()
        model = DDP(net, gradient_as_bucket_view=True)
        return net, model, FusedAccumulator(torch.optim.AdamW(net.parameters(), lr=0.1), 4, max_norm=0.1)

    def run(model, optimizer, inputs):
        for x in inputs:
            model(x).square().mean().backward()
            optimizer.step()

    inputs = data(rank, 8)
    net, model, optimizer = fresh()
    run(model, optimizer, inputs)
    part, part_model, part_optimizer = fresh()
    run(part_model, part_optimizer, inputs[:6])
    saved = copy.deepcopy((part.state_dict(), part_optimizer.state_dict()))
    again, again_model, again_optimizer = fresh()
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(saved[1])
    run(again_model, again_optimizer, inputs[6:])
    return [[p.detach().clone() for p in m.parameters()] for m in (net, again)]


def test_a_window_saved_in_its_middle_goes_on_under_ddp(both):
    a, b = both("state")
    for params in (a[1], b[0], b[1]):
        assert all(torch.equal(x, y) for x, y in zip(a[0], params, strict=True))


# ---------------------------------------------------------------------------------------- under no_sync()

README = Path(__file__).resolve().parent.parent / "README.md"


@check
def readme(rank):
    """The README's loop over 6 micro-batches with windows of 4."""
    if not README.is_file():
        return None
    (block,) = (
        b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "no_sync" in b
    )
    namespace = {}
    exec(block, namespace)
    module, model, optimizer = one(rank, 4)
    batches = [(torch.tensor([1.0 + i + 4 * rank]), torch.zeros(1)) for i in range(6)]
    namespace["train"](model, lambda loss, _: loss, optimizer, batches)
    return module.weight.item()


@pytest.mark.skipif(not README.is_file(), reason="runs from a checkout")
def test_the_readme_s_loop_over_ranks(both):
    assert both("readme") == [-12.0] * 2 and both.warnings("readme") == [[], []]


def one(rank, k=2, **options):
    """A parameter of 1 element under DDP, SGD with lr 1."""
    module = Scaled()
    return module, DDP(module), FusedAccumulator(torch.optim.SGD(module.parameters(), lr=1.0), k, **options)


def send(model, optimizer, value, sync, **given):
    with contextlib.nullcontext() if sync else model.no_sync():
        loss = model(torch.tensor([float(value)]))
        optimizer.backward(loss, **given) if given else loss.backward()


def refusal(call, kind):
    """The message of the error that a call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


@check
def counts(rank):
    """Sums over items: 3 items in all on each rank."""
    module, model, optimizer = one(rank)
    send(model, optimizer, 2 + rank, False, count=1)
    optimizer.step()
    send(model, optimizer, 5 + rank, True, count=2)
    optimizer.step()
    return module.weight.item()


def test_sums_over_items_under_no_sync(both):
    """(2 + 5) / 3 and (3 + 6) / 3 average 8 / 3; that weights are not reduced is said once."""
    assert both("counts") == [pytest.approx(-8 / 3, rel=1e-6)] * 2
    assert all(
        ["all-reduced total" in message for message in rank] == [True] for rank in both.warnings("counts")
    )


@check
def equal_weights(rank):
    module, model, optimizer = one(rank)
    for sync in (False, True):
        send(model, optimizer, 2 + rank, sync, weight=3)
        optimizer.step()
    first = module.weight.item()
    send(model, optimizer, 1, False, weight=3)
    optimizer.step()
    send(model, optimizer, 1, True, weight=4)
    before = module.weight.grad.clone(), optimizer.micro_step
    message = refusal(optimizer.step, ValueError)
    same = torch.equal(before[0], module.weight.grad) and before[1] == optimizer.micro_step == 1
    return first, message, same, module.weight.item()


def test_unequal_weights_under_no_sync_are_refused(both):
    for first, message, same, after in both("equal_weights"):
        assert first == after == -2.5 and same
        assert "weight= must be the same number" in message and "count=" in message


@check
def last_not_reduced(rank):
    """The loop forgets to leave no_sync(): each rank has its own sum, as in stock."""
    module, model, optimizer = one(rank)
    for _ in range(4):
        send(model, optimizer, 1 + rank, False)
        optimizer.step()
    return module.weight.item()


def test_a_window_that_closes_unreduced_is_stock_s_with_a_warning(both):
    assert both("last_not_reduced") == [-2.0, -4.0]
    for rank in both.warnings("last_not_reduced"):
        assert len(rank) == 1 and "no_sync()" in rank[0] and "micro_step + 1" in rank[0]


@check
def flushed(rank):
    module, model, optimizer = one(rank, 4)
    send(model, optimizer, 1 + rank, False)
    optimizer.step()
    flushed = optimizer.flush()
    return flushed, module.weight.item(), module.weight.grad is None, optimizer.micro_step


def test_flush_takes_what_was_not_reduced_with_a_warning(both):
    assert both("flushed") == [(True, -1.0, True, 0), (True, -2.0, True, 0)]
    assert all("no_sync()" in rank[0] for rank in both.warnings("flushed"))


@check
def pending_apart(rank):
    """A micro-batch that was added to unreduced ones cannot be dropped alone; one that was not can."""
    module, model, optimizer = one(rank, 3)
    send(model, optimizer, 1 + rank, False)
    optimizer.step()
    optimizer.zero_grad()  # nothing is pending: what is closed stays
    kept = module.weight.grad.item(), optimizer.grad(module.weight).item()
    send(model, optimizer, 10, False)
    calls = (optimizer.zero_grad, optimizer.flush, optimizer.state_dict)
    messages = [refusal(call, RuntimeError) for call in calls]
    optimizer.discard()
    dropped = module.weight.grad is None and optimizer.micro_step == 0
    for sync in (False, False, True):
        send(model, optimizer, 1 + rank, sync)
        optimizer.step()
    return kept, messages, dropped, module.weight.item()


def test_a_micro_batch_under_no_sync_cannot_be_told_apart_once_added(both):
    for rank, (kept, messages, dropped, after) in enumerate(both("pending_apart")):
        assert kept == (1.0 + rank, 1.0 + rank)
        assert all("wait to be reduced" in message for message in messages)
        assert dropped and after == -1.5


@check
def cleared(rank):
    messages = []
    for again in (False, True):
        module, model, optimizer = one(rank, 3)
        send(model, optimizer, 1, False)
        optimizer.step()
        model.zero_grad()
        if again:  # a fresh gradient in its place
            send(model, optimizer, 1, False)
        messages.append(refusal(optimizer.step, RuntimeError))
        optimizer.discard()
    return messages


def test_unreduced_gradients_that_are_cleared_are_missed(both):
    for messages in both("cleared"):
        assert all("is gone from .grad" in message for message in messages)


@check
def empty_step(rank):
    """A step() without a backward counts, with weight 0, also while gradients wait."""
    results = []
    for given in ({}, {"weight": 2}):
        module, model, optimizer = one(rank, 3)
        send(model, optimizer, 2 + rank, False, **given)
        optimizer.step()
        optimizer.step()
        send(model, optimizer, 4 + rank, True, **given)
        optimizer.step()
        results.append((module.weight.item(), optimizer.updated))
    return results


def test_a_step_without_a_backward_while_gradients_wait(both):
    """(2 + 4) / 2 and (3 + 5) / 2 average 3.5."""
    assert both("empty_step") == [[(-3.5, True)] * 2] * 2


@check
def old_logits(rank):
    """A forward without gradients between forward and backward, of the same DDP module."""
    module, model, optimizer = one(rank, 2, nonfinite_micro_batch="drop")
    for i in range(4):
        loss = model(torch.tensor([1.0 + rank]))
        with torch.no_grad():
            model(torch.ones(1))
        optimizer.backward(loss, weight=1 + i)
        optimizer.step()
    return module.weight.item()


def test_a_forward_without_gradients_between_forward_and_backward(both):
    assert both("old_logits") == [-3.0] * 2
    assert all("all-reduced total" in message for rank in both.warnings("old_logits") for message in rank)


@check
def copied(rank):
    """A DDP module that came by deepcopy and one by pickle."""
    results = []
    for copy_of in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        model = copy_of(DDP(Scaled()))
        optimizer = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=1.0), 2)
        for sync in (False, True):
            send(model, optimizer, 1 + rank, sync)
            optimizer.step()
        results.append(model.module.weight.item())
    return results


def test_copies_of_a_ddp_module_are_known(both):
    assert both("copied") == [[-1.5, -1.5]] * 2


class Many(nn.Module):
    """More parameters than are watched; the gradient of each is the input."""

    def __init__(self, n=150):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(n))

    def forward(self, x):
        return sum((w * x).sum() for w in self.weights if w.requires_grad)


@check
def many(rank):
    """Two DDP modules in one optimizer, of which one is reduced and the other waits; then the other way."""
    parts = [DDP(Many()), DDP(Many())]
    params = [p for part in parts for p in part.parameters()]
    optimizer = FusedAccumulator(torch.optim.SGD(params, lr=1.0), 2)
    for syncs in ((True, False), (True, True), (False, True), (True, True)):
        for part, sync in zip(parts, syncs, strict=True):
            with contextlib.nullcontext() if sync else part.no_sync():
                part(torch.tensor([1.0 + rank])).backward()
        optimizer.step()
    return sorted({p.item() for p in params})


def test_two_modules_of_one_optimizer(both):
    assert both("many") == [[-3.0]] * 2 and both.warnings("many") == [[], []]


@check
def frozen_first(rank):
    """Only the last parameters are trained, as with adapters; a stray forward follows the backward."""
    module = Many()
    for p in list(module.parameters())[:-2]:
        p.requires_grad_(False)
    model = DDP(module)
    optimizer = FusedAccumulator(torch.optim.SGD(module.parameters(), lr=1.0), 2)
    for sync in (False, True):
        with contextlib.nullcontext() if sync else model.no_sync():
            model(torch.tensor([1.0 + rank])).backward()
        model(torch.ones(1))
        optimizer.step()
    model(torch.ones(1)).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()
    return module.weights[-1].item()


def test_where_the_first_parameters_are_frozen(both):
    assert both("frozen_first") == [-1.5] * 2
    assert all(len(rank) == 1 and "max_norm" in rank[0] for rank in both.warnings("frozen_first"))


@check
def checkpointed(rank):
    """Re-entrant checkpointing: a backward within a backward."""
    module = Net()
    model = DDP(module)
    optimizer = FusedAccumulator(torch.optim.SGD(module.parameters(), lr=1.0), 1)
    for x in data(rank, 2):
        x.requires_grad_()
        wrapped = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        wrapped.square().mean().backward()
        optimizer.step()
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first = inner[0].forward
    inner[0].forward = lambda x: torch.utils.checkpoint.checkpoint(first, x, use_reentrant=True)
    model = DDP(inner)
    again = FusedAccumulator(torch.optim.SGD(inner.parameters(), lr=1.0), 1, nonfinite_micro_batch="drop")
    for x in data(rank, 2):
        x.requires_grad_()
        model(x).square().mean().backward()
        again.step()
    return [p.detach().clone() for p in inner.parameters()]


def test_a_backward_within_a_backward(both):
    a, b = both("checkpointed")
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert both.warnings("checkpointed") == [[], []]


@check
def two_losses(rank):
    """DDP reduces the first of two backward calls over one forward; the second waits, as in stock."""
    values = []
    for ours in (True, False):
        module = Scaled()
        model = DDP(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        wrapper = FusedAccumulator(optimizer, 2, reduction="sum") if ours else None
        for i in range(2):
            loss = model(torch.tensor([1.0 + rank + i]))
            (2 * loss).backward(retain_graph=True)
            loss.backward()
            if ours:
                wrapper.step()
        if not ours:
            optimizer.step()
        values.append(module.weight.item())
    return values


def test_two_backward_calls_over_one_forward(both):
    assert all(ours == stock for ours, stock in both("two_losses"))


@check
def saved(rank):
    """Saved while a micro-batch waits to be reduced; continued in fresh objects."""
    module, model, optimizer = one(rank, 3)
    send(model, optimizer, 1 + rank, False)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    again, again_model, again_optimizer = one(rank, 3)
    again_optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    for sync in (False, True):
        send(again_model, again_optimizer, 2 + rank, sync)
        again_optimizer.step()
    return again.weight.item(), optimizer.micro_step


@check
def loaded_with_pending(rank):
    """A window is loaded between a reduced backward and its step()."""
    module, model, optimizer = one(rank, 2)
    for _ in range(4):
        send(model, optimizer, 1 + rank, True)
        optimizer.load_window_state_dict(optimizer.window_state_dict())
        optimizer.step()
    return module.weight.item()


def test_what_was_reduced_is_known_after_a_load(both):
    assert both("loaded_with_pending") == [-3.0] * 2
    assert both.warnings("loaded_with_pending") == [[], []]


def test_unreduced_gradients_are_saved(both):
    """(1 + 2 + 2 + 2 + 3 + 3) / 6."""
    assert both("saved") == [(pytest.approx(-13 / 6, rel=1e-6), 1)] * 2


@check
def evaluated_between(rank):
    """A forward without gradients between backward and step, which sets DDP's flag, changes nothing."""
    module, model, optimizer = one(rank)
    for sync in (False, True, True, True):
        send(model, optimizer, 1 + rank, sync)
        with torch.no_grad():
            model(torch.ones(1))
        optimizer.step()
    return module.weight.item()


def test_a_forward_between_backward_and_step_changes_nothing(both):
    assert both("evaluated_between") == [-3.0] * 2
    assert both.warnings("evaluated_between") == [[], []]


@check
def refused(rank):
    module, model, optimizer = one(rank, take="backward")
    taken = refusal(lambda: send(model, optimizer, 1, True), RuntimeError)
    optimizer.discard()
    dropping, dropping_model, dropping_optimizer = one(rank, nonfinite_micro_batch="drop")
    send(dropping_model, dropping_optimizer, 1, False)
    dropped = refusal(dropping_optimizer.step, RuntimeError)
    scaled, scaled_model, scaled_optimizer = one(rank)
    scaler = torch.amp.GradScaler("cpu")
    with scaled_model.no_sync():
        scaler.scale(scaled_model(torch.ones(1))).backward()
    explicit = refusal(lambda: scaler.step(scaled_optimizer), RuntimeError)
    return taken, dropped, explicit


def test_what_cannot_work_under_ddp_is_refused(both):
    for taken, dropped, explicit in both("refused"):
        assert "take='step'" in taken
        assert "nonfinite_micro_batch='keep'" in dropped
        assert "scaler=" in explicit


@check
def own_scaler(rank):
    """Two windows; the second holds an inf on one rank, in a micro-batch that is not reduced."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    module, model, optimizer = one(rank, scaler=scaler)
    seen = []
    for i, sync in enumerate((False, True, False, True, False, True)):
        value = math.inf if (i, rank) == (2, 1) else 1.0 + rank
        with contextlib.nullcontext() if sync else model.no_sync():
            optimizer.backward(model(torch.tensor([value])))
        optimizer.step()
        if optimizer.updated:
            seen.append((module.weight.item(), optimizer.stepped, scaler.get_scale()))
    return seen


def test_the_wrapper_s_own_scaler_under_no_sync(both):
    assert both("own_scaler") == [[(-1.5, True, 8.0), (-1.5, False, 4.0), (-3.0, True, 4.0)]] * 2


# ----------------------------------------------------------------------------------------------- FSDP2


def mesh_of(shape=(RANKS,)):
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded_net(mesh):
    """The net, each part sharded on its own."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    for part in model.children():
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


MAKE = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=False),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=False),  # the generic path
}


def sharded(rank, how, ours, spoil=nothing, k=4, norm_type=2.0, make="adamw", shape=(RANKS,), windows=2):
    """Windows of a model whose parameters are sharded: stock's loop or the wrapper."""
    model = sharded_net(mesh_of(shape))
    optimizer = MAKE[make](model.parameters())
    wrapper = FusedAccumulator(optimizer, k, max_norm=0.05, norm_type=norm_type) if ours else None
    norms = []
    for i, x in enumerate(data(rank, k * windows)):
        last = i % k == k - 1
        model.set_requires_gradient_sync(last or how == "always")
        loss = model(x).square().mean() * spoil(rank, i)
        if wrapper is not None:
            loss.backward()
            wrapper.step()
            if wrapper.updated:
                norms.append(wrapper.norm.clone())
            continue
        (loss / k).backward()
        if last:
            norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=False))
            norms.append(norm)
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
    state = [full(value) for entry in optimizer.state.values() for value in entry.values()]
    return {
        "params": [full(p).detach().clone() for p in model.parameters()],
        "norms": torch.stack(norms),
        "skipped": int(wrapper.skipped) if ours else None,
        "state": [value.detach().clone() for value in state],
        "kinds": [type(value).__name__ for entry in optimizer.state.values() for value in entry.values()],
    }


def fsdp(how, spoil=nothing, **options):
    def run(rank):
        return {ours: sharded(rank, how, ours == "ours", spoil, **options) for ours in ("stock", "ours")}

    return run


SHARDED = {
    "fsdp2_always": fsdp("always"),
    "fsdp2_last": fsdp("last"),
    "fsdp2_k1": fsdp("always", k=1),
    "fsdp2_last_amsgrad": fsdp("last", make="amsgrad"),
    "fsdp2_last_momentum": fsdp("last", make="momentum"),
    "fsdp2_always_generic": fsdp("always", make="rmsprop"),
    "fsdp2_norm_1": fsdp("always", norm_type=1.0),
    "fsdp2_norm_inf": fsdp("always", norm_type=math.inf),
    "fsdp2_norm_3": fsdp("last", norm_type=3.0),
    "fsdp2_inf": fsdp("always", functools.partial(one_inf, at=5)),
    "fsdp2_inf_last": fsdp("last", functools.partial(one_inf, at=5)),
    "fsdp2_inf_generic": fsdp("always", functools.partial(one_inf, at=5), make="rmsprop"),
    "hsdp_replicated": fsdp("always", shape=(RANKS, 1)),  # every rank holds all: it counts once
}
CHECKS.update(SHARDED)


@pytest.mark.parametrize("name", SHARDED)
def test_under_fsdp2_the_wrapper_is_the_plain_loop(both, name):
    """The norm is that of all shards, and both ranks skip or none."""
    results = both(name)
    for result in results:
        stock, ours = result["stock"], result["ours"]
        torch.testing.assert_close(ours["norms"], stock["norms"], rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(ours["params"], stock["params"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["state"], stock["state"], rtol=1e-4, atol=1e-7)
        assert ours["kinds"] == stock["kinds"], "state is spread as stock's is"
        assert ours["skipped"] == ("inf" in name and "norm" not in name)
    a, b = (r["ours"]["norms"].nan_to_num() for r in results)
    assert torch.equal(a, b)


@check
def fsdp2_held(rank):
    """What FSDP2 has not reduced, the wrapper cannot reach: it says so, and nothing is lost."""
    model = sharded_net(mesh_of())
    optimizer = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    stock = torch.optim.SGD(model.parameters(), lr=1.0).state_dict()
    inputs = data(rank, 3)

    def send(x, sync):
        model.set_requires_gradient_sync(sync)
        model(x).square().mean().backward()

    send(inputs[0], False)
    optimizer.step()
    calls = (optimizer.flush, optimizer.discard, optimizer.state_dict)
    messages = [refusal(call, RuntimeError) for call in calls]
    part = optimizer.param_groups[0]["params"][0]
    messages.append(refusal(lambda: optimizer.grad(part), RuntimeError))
    send(inputs[1], False)
    calls = (optimizer.zero_grad, optimizer.step, lambda: optimizer.load_state_dict(stock))
    messages += [refusal(call, RuntimeError) for call in calls]
    loss = nn.Linear(1, 1)(torch.ones(1)).sum()
    loss.backward()  # of something else
    send(inputs[2], True)  # of the same micro-batch
    optimizer.step()
    return messages, optimizer.updated, [full(p).detach().clone() for p in model.parameters()]


def test_gradients_that_fsdp2_holds_are_named(both):
    torch.manual_seed(0)
    net = Net()
    for rank in range(RANKS):
        for x in data(rank, 3):
            (net(x).square().mean() / 2 / RANKS).backward()
    expected = [p.detach() - p.grad for p in net.parameters()]
    for messages, updated, params in both("fsdp2_held"):
        assert updated and all("set_requires_gradient_sync(True)" in message for message in messages)
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)


@check
def fsdp2_partial(rank):
    """One part reduced, the other not: their weights must agree. Another model is no micro-batch."""
    torch.manual_seed(0)
    from torch.distributed.fsdp import fully_shard

    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    for part in (first, last):
        nn.init.ones_(part.weight)
        fully_shard(part, mesh=mesh_of())
    params = [*first.parameters(), *last.parameters()]
    optimizer = FusedAccumulator(torch.optim.SGD(params, lr=1.0), 3, reduction="mean")

    def send(sync, **given):
        first.set_requires_gradient_sync(sync)
        optimizer.backward(last(first(torch.ones(1, 2))).sum(), **given)

    nn.Linear(1, 1)(torch.ones(1)).sum().backward()
    optimizer.step()  # nothing of ours: weight 0
    send(False, weight=2)
    optimizer.step()
    send(True, weight=3)
    message = refusal(optimizer.step, ValueError)
    return message, optimizer.micro_step


def test_what_fsdp2_holds_in_part(both):
    for message, micro_step in both("fsdp2_partial"):
        assert "weight= must be the same number" in message and micro_step == 2


@check
def fsdp2_state(rank):
    """A window saved in its middle goes on bit for bit; stock and the wrapper load each other's state."""

    def fresh(k):
        model = sharded_net(mesh_of())
        optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters(), lr=0.1), k, max_norm=0.1)
        optimizer.track(parameter_norms=True, noise_scale=True)
        return model, optimizer

    def run(model, optimizer, inputs):
        for x in inputs:
            model(x).square().mean().backward()
            optimizer.step()

    inputs = data(rank, 8)
    model, optimizer = fresh(4)
    run(model, optimizer, inputs)
    part, part_optimizer = fresh(4)
    run(part, part_optimizer, inputs[:6])
    saved = copy.deepcopy((part.state_dict(), part_optimizer.state_dict()))
    again, again_optimizer = fresh(4)
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(saved[1])
    run(again, again_optimizer, inputs[6:])
    same = all(
        torch.equal(full(p), full(q)) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )
    stock = torch.optim.AdamW(model.parameters(), lr=0.1)
    stock.load_state_dict(optimizer.state_dict())
    again_optimizer.load_state_dict(stock.state_dict())
    norms = torch.stack(list(optimizer.parameter_norms.values()))
    grads = [optimizer.grad(p) for p in model.parameters()]
    return {
        "same": same,
        "norms": norms,
        "norm": optimizer.norm.clone(),
        "noise": optimizer.stats()["noise_scale"],
        "no grads": all(g is None for g in grads),
        "dtensor": type(saved[1]["fastaccum"]["gradients"][0]).__name__,
    }


def test_state_under_fsdp2(both):
    results = both("fsdp2_state")
    for result in results:
        assert result["same"] and result["no grads"] and result["dtensor"] == "DTensor"
        torch.testing.assert_close(result["norms"].norm().float(), result["norm"], rtol=1e-6, atol=0)
        assert result["noise"] == results[0]["noise"] and result["noise"] > 0.0
        assert torch.equal(result["norms"], results[0]["norms"])


@check
def fsdp2_drop(rank):
    """A micro-batch that is not finite on one rank's shard only is left out on both."""
    mesh = mesh_of()
    from torch.distributed.tensor import Shard, distribute_tensor

    def parameter(values):
        return nn.Parameter(distribute_tensor(torch.tensor(values), mesh, [Shard(0)]))

    p = parameter([0.0, 0.0])
    optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 3, nonfinite_micro_batch="drop", max_norm=1e9)
    for grad in ([1.0, 2.0], [1.0, math.inf], [3.0, 4.0]):
        p.grad = distribute_tensor(torch.tensor(grad), mesh, [Shard(0)])
        optimizer.step()
    return full(p).tolist(), optimizer.norm.item(), optimizer.stepped


def test_a_micro_batch_is_dropped_on_all_ranks(both):
    assert both("fsdp2_drop") == [([-2.0, -3.0], pytest.approx(13**0.5), True)] * 2


@check
def placements(rank):
    """Sharded, replicated and plain parameters in one norm; a gradient that is a partial sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of()
    spread = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])  # 2 elements here, 1 there
    same = distribute_tensor(torch.zeros(1), mesh, [Replicate()])
    params = [nn.Parameter(t) for t in (spread, same, torch.zeros(1), same.clone())]
    optimizer = FusedAccumulator(torch.optim.SGD(params, lr=1.0), 1, max_norm=5.0)
    params[0].grad = distribute_tensor(torch.tensor([1.0, 2.0, 2.0]), mesh, [Shard(0)])
    params[1].grad = distribute_tensor(torch.tensor([4.0]), mesh, [Replicate()])
    params[2].grad = torch.tensor([5.0])
    params[3].grad = DTensor.from_local(torch.tensor([1.0 + rank]), mesh, [Partial()], run_check=False)
    optimizer.step()
    try:
        FusedAccumulator(torch.optim.SGD([nn.Parameter(spread.clone())], lr=1.0), take="backward")
        message = ""
    except ValueError as error:
        message = str(error)
    return optimizer.norm.item(), [full(p).tolist() for p in params], message


def test_each_element_counts_once_in_the_norm(both):
    """9 + 16 + 25 + 9 = 59; the partial sums 1 and 2 make 3."""
    f = 5.0 / 59**0.5
    for norm, params, message in both("placements"):
        assert norm == pytest.approx(59**0.5, rel=1e-6)
        expected = [[-f, -2 * f, -2 * f], [-4 * f], [-5 * f], [-3 * f]]
        assert params == [pytest.approx(values, rel=1e-5) for values in expected]
        assert "take='step'" in message


@check
def checkpoint(rank):
    """torch.distributed.checkpoint's state, of a wrapper that has not stepped and of one that has."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = sharded_net(mesh_of())
    optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters(), lr=0.1), 2)
    fresh = get_optimizer_state_dict(model, optimizer)
    opened = optimizer.micro_step
    for x in data(rank, 2):
        model(x).square().mean().backward()
        optimizer.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for x in data(rank, 2):
        model(x).square().mean().backward()
        optimizer.step()
    set_optimizer_state_dict(model, optimizer, saved)
    moments = [full(optimizer.state[p]["exp_avg"]).clone() for p in model.parameters()]
    expected = [full(saved["state"][name]["exp_avg"]) for name, _ in model.named_parameters()]
    return len(fresh["state"]), opened, all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))


def test_torch_s_distributed_checkpoint(both):
    assert both("checkpoint") == [(6, 0, True)] * 2


# ----------------------------------------------------------------------------------------- static graph


@check
def x03(rank):
    """Linear(1, 1) with weight and bias 1; gradients of the weight are the inputs, those of the bias 1."""
    module = nn.Linear(1, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.ones_(module.bias)
    model = DDP(module, static_graph=True)
    optimizer = FusedAccumulator(torch.optim.SGD(module.parameters(), lr=1.0), 2)
    seen = []
    for i in range(6):
        model(torch.full((1, 1), 1.0 + i + 4 * rank)).sum().backward()
        optimizer.step()
        if optimizer.updated:
            seen.append([module.weight.item(), module.bias.item()])
    return seen


def test_x03_a_static_graph_gives_the_right_gradients(both):
    """Means 1, 2, 5, 6; 3, 4, 7, 8; 5, 6, 9, 10, synchronised on every micro-batch."""
    assert both("x03") == [[[-2.5, 0.0], [-8.0, -1.0], [-15.5, -2.0]]] * 2
