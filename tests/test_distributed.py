"""Under stock DDP and FSDP2, used the ordinary way, a window is what the plain loop makes of it.

Two real processes run every check below once, in one process group; each test then looks at what both
of them have brought back.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import math
import traceback

import pytest

torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo in this torch", allow_module_level=True)

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
        timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    results = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            results[name] = function(rank)
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
            rank, [rank + 1.0] * 4, 2, how, n=4, reduction=reduction, gradient_as_bucket_view=view
        )
        for how in ("last", "always")
        for view in (False, True)
        for reduction in ("mean", "sum")
    }


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", ["last", "always"])
def test_l04_gradients_that_are_views_of_buckets(both, how, view):
    """Gradients 1 and 2 reduce to 1.5, and twice to 3; DDP writes the next into the same bucket."""
    for rank in both("l04"):
        assert rank[f"{how}-{view}-mean"].tolist() == [[-1.5] * 4, [-3.0] * 4]
        assert rank[f"{how}-{view}-sum"].tolist() == [[-3.0] * 4, [-6.0] * 4]


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


# ----------------------------------------------------------------------------------------------- FSDP2


def sharded(rank, how, ours, spoil=nothing):
    """Two windows of 4 micro-batches of a model whose parameters are sharded: stock's loop or the wrapper."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = Net()
    for part in (model.first, model.branch, model.last):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    wrapper = FusedAccumulator(optimizer, 4, max_norm=0.05) if ours else None
    norms = []
    for i, x in enumerate(data(rank, 8)):
        last = i % 4 == 3
        model.set_requires_gradient_sync(last or how == "always")
        loss = model(x).square().mean() * spoil(rank, i)
        if wrapper is not None:
            loss.backward()
            wrapper.step()
            if wrapper.updated:
                norms.append(wrapper.norm.clone())
            continue
        (loss / 4).backward()
        if last:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False).full_tensor()
            norms.append(norm)
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
    params = [p.full_tensor().detach().clone() for p in model.parameters()]
    return {"params": params, "norms": torch.stack(norms), "skipped": int(wrapper.skipped) if ours else None}


def fsdp(how, spoil=nothing):
    def run(rank):
        return {"stock": sharded(rank, how, False, spoil), "ours": sharded(rank, how, True, spoil)}

    return run


SHARDED = {
    "fsdp2_always": fsdp("always"),
    "fsdp2_last": fsdp("last"),
    "fsdp2_inf": fsdp("always", functools.partial(one_inf, at=5)),
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
        assert ours["skipped"] == ("inf" in name)
    a, b = (r["ours"]["norms"].nan_to_num() for r in results)
    assert torch.equal(a, b)
