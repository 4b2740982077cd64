"""What must not grow: calls with the number of tensors, memory with time. And offsets."""

from __future__ import annotations

import copy
import gc
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from fastaccum import FusedAccumulator, clip_grad_norm_, get_total_norm  # noqa: E402
from fastaccum.layout import CHUNK, STRAND, Layout  # noqa: E402
from fastaccum.slots import Slot, make_plans  # noqa: E402
from tests.oracle import each_take, send  # noqa: E402

pytestmark = pytest.mark.native
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def calls(function):
    """Operator calls, by the profiler, beyond what autograd does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    names = [e.name for e in profile.events() if e.name.startswith(("aten::", "fastaccum::"))]
    return len(names)


def filled(n):
    params = [nn.Parameter(torch.ones(16)) for _ in range(n)]
    for p in params:
        p.grad = torch.ones(16)
    return params


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("momentum", [False, True])
def test_p01_calls_per_window_do_not_grow_with_the_number_of_tensors(kind, steps, momentum):
    if kind is AdamW and momentum:
        pytest.skip("AdamW has it always")

    def window(n):
        params = filled(n)
        options = {"momentum": 0.9} if momentum else {}
        optimizer = FusedAccumulator(kind(params, lr=0.1, **options), steps, max_norm=1.0)

        def run(measure):
            count = 0
            for _ in range(steps):
                for p in params:
                    p.grad = torch.ones(16)
                count += calls(optimizer.step) if measure else optimizer.step() or 0
            assert optimizer.stepped
            return count

        run(False)
        return run(True)

    few, many = window(3), window(200)
    assert 0 < many <= few, f"{few} calls for 3 tensors, {many} for 200"


@pytest.mark.parametrize("clip", [True, False])
def test_p01_the_functions_detach_each_tensor_and_no_more(clip):
    def count(n):
        params = filled(n)
        grads = [p.grad for p in params]

        def run():
            clip_grad_norm_(params, 1.0) if clip else get_total_norm(grads)

        run()  # makes the tables
        return calls(run)

    # A detach is two calls, and no pass over memory; clipping takes the tensors a second time.
    assert count(200) - count(3) <= 197 * (4 if clip else 2)


@pytest.mark.parametrize(
    ("kind", "take"), [(AdamW, "step"), (SGD, "backward"), (torch.optim.RMSprop, "step")]
)
def test_nothing_grows_over_a_thousand_windows(kind, take):
    params = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = FusedAccumulator(kind(params, lr=1e-3), 2, take=take, max_norm=1.0)
    grad = torch.ones(5)

    def windows(n):
        for _ in range(n):
            params[0].sum().backward()
            optimizer.step()
            params[1].grad = grad
            optimizer.step()
        gc.collect()
        return sys.getallocatedblocks(), len(gc.get_objects())

    windows(50)
    blocks, objects = windows(10)
    more_blocks, more_objects = windows(1000)
    assert more_objects - objects < 50 and more_blocks - blocks < 500


@each_take
def test_buffers_and_outputs_are_made_once(take):
    params = [nn.Parameter(torch.ones(700)) for _ in range(4)]
    optimizer = FusedAccumulator(SGD(params, lr=1e-3), 3, take=take)
    seen = []
    for _ in range(4):
        for _ in range(3):
            send(params, [torch.ones(700)] * 4)
            optimizer.step()
        buffers = optimizer._window.buffers
        seen.append([b.data.data_ptr() for b in buffers] + [optimizer.norm.data_ptr()])
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert optimizer.memory()["buffer"] == 4 * 1024 * 4  # 700 padded to whole strands


def test_one_micro_batch_needs_no_buffer():
    params = [nn.Parameter(torch.ones(700)) for _ in range(4)]
    optimizer = FusedAccumulator(SGD(params, lr=1e-3), 1)
    for _ in range(3):
        send(params, [torch.ones(700)] * 4)
        optimizer.step()
        assert optimizer.memory()["buffer"] == 0 and optimizer.memory()["kept"] == 0


def test_the_first_micro_batch_is_kept_and_not_copied():
    p = nn.Parameter(torch.ones(700))
    optimizer = FusedAccumulator(SGD([p], lr=1e-3), 3)
    send(p, torch.ones(700))
    where = p.grad.data_ptr()
    optimizer.step()
    (kept,) = optimizer._window.kept.values()
    assert kept.data_ptr() == where
    assert optimizer.memory()["buffer"] == 0 and optimizer.memory()["kept"] == 2800


class Live(TorchDispatchMode):
    """The largest number of bytes that tensors made meanwhile held at once."""

    def __init__(self):
        super().__init__()
        self.peak, self._held = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._held[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self._held = {key: pair for key, pair in self._held.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return result


@each_take
def test_p02_memory_does_not_grow_with_the_micro_batches(take):
    """A backward per micro-batch of a sum over its tokens, divided once by the window's: nothing piles up."""

    def window(k):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        exact = copy.deepcopy(model).double()
        optimizer = FusedAccumulator(SGD(model.parameters(), lr=1.0), k, take=take)
        before = [p.detach().clone() for p in model.parameters()]
        batches = [(torch.randn(256, 16), torch.arange(256) < 1 + 31 * i) for i in range(k)]
        with Live() as live:
            for x, is_token in batches:
                loss = (model(x).square().flatten() * is_token).sum()
                optimizer.backward(loss, count=int(is_token.sum()))
                optimizer.step()
        assert optimizer.stepped
        tokens = torch.cat([x[is_token] for x, is_token in batches])
        exact(tokens.double()).square().mean().backward()
        for old, p, truth in zip(before, model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close((old - p.detach()).double(), truth.grad, rtol=1e-4, atol=1e-6)
        return live.peak

    few, many = window(3), window(8)  # from the third on there is a buffer, too
    assert 256 * 64 * 4 < many <= 1.01 * few, f"{few} bytes for 3 micro-batches, {many} for 8"


# ------------------------------------------------------------------------------------------ offsets


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 1])
def test_l08_offsets_beyond_32_bits(size):
    sizes = [5, size, 7, size, 0, 3]
    layout = Layout.of(sizes, [0, 0, 0, 1, 1, 1])
    end = 0
    for offset, n, group in zip(layout.offsets, sizes, [0, 0, 0, 1, 1, 1], strict=True):
        assert offset % STRAND == 0 and offset >= end
        assert layout.spans[group][1] * CHUNK <= offset
        assert offset + n <= layout.spans[group][2] * CHUNK
        end = offset + n
    assert layout.numel >= end > 2 * size and layout.n_chunks * CHUNK >= layout.numel
    assert layout.spans[0][2] == layout.spans[1][1]


class Fake:
    """As much of a parameter as laying out needs."""

    dtype = torch.float32

    def __init__(self, numel):
        self._numel = numel

    def numel(self):
        return self._numel

    def is_contiguous(self):
        return True

    def stride(self):
        return (1,)


def test_l08_plans_hold_64_bit_tables():
    slots = [Slot(Fake(n), i, 0) for i, n in enumerate([2**31 + 1, 9, 2**32 + 1, 1])]
    (plan,), spans, _, chunks = make_plans(slots, [0], None)
    assert plan.segments.dtype == torch.int64
    offsets, numels = plan.segments.T.tolist()
    assert numels == [2**31 + 1, 9, 2**32 + 1, 1] and offsets[1] > 2**31 and offsets[3] > 2**32
    assert spans == [(0, 0, chunks)] and chunks * CHUNK >= offsets[3] + 1
