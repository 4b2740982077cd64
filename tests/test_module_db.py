"""Every module of PyTorch, fed what PyTorch's own tests feed it, accumulates as by hand.

The database is ``torch.testing._internal.common_modules.module_db``: inputs that others wrote. It brings
gradients of every shape that a backward of PyTorch makes, empty and absent ones too.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # torch.testing._internal imports it

from torch import Tensor, nn  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import each_take  # noqa: E402

pytestmark = pytest.mark.native

SAMPLES = {"step": 2, "backward": 1}  # of each module; attention lists over a hundred
K = 3


class Shifted(nn.Module):
    """A module whose input is shifted by a parameter (zero), so that one without parameters learns too."""

    def __init__(self, module, args, kwargs):
        super().__init__()
        self.module = module
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
        self.place = places[0] if places else None
        if self.place is not None:
            self.shift = nn.Parameter(torch.zeros_like(args[self.place]))

    def forward(self, *args, **kwargs):
        args = list(args)
        if self.place is not None:
            args[self.place] = args[self.place] + self.shift
        return self.module(*args, **kwargs)


def scalar(outputs):
    """A loss in which no two elements weigh the same: a plain sum of a softmax has no gradient."""
    floats = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    return sum((t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in floats)


def draw(info, seed):
    """The samples of a module, with other values for another seed."""
    torch.manual_seed(seed)
    # Listed with float64 random samples whatever the dtype, which fractional pooling then refuses.
    dtype = torch.float64 if "Fractional" in info.name else torch.float32
    return info.module_inputs_func(info, "cpu", dtype, False, True)


def samples(info, most):
    """(number, module, the inputs of K micro-batches) for some of the listed samples, evenly chosen."""
    drawn = [draw(info, seed) for seed in range(K)]
    count = len(drawn[0])
    chosen = sorted({i * (count - 1) // max(1, most - 1) for i in range(most)})
    for i in chosen:
        constructor = drawn[0][i].constructor_input
        inputs = [d[i].forward_input for d in drawn]
        torch.manual_seed(0)
        module = info.module_cls(*constructor.args, **constructor.kwargs).train()
        if info.is_lazy:
            module(*copy.deepcopy(inputs[0].args), **copy.deepcopy(inputs[0].kwargs))
        yield i, Shifted(module, inputs[0].args, inputs[0].kwargs), inputs


def columns(module):
    """Lays the parameters out column by column, as a transposed or channels-last model has them."""
    for p in module.parameters():
        if p.dim() > 1:
            p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)


def loss_of(model, forward_input, seed):
    torch.manual_seed(seed)  # dropout and fractional pooling draw
    args, kwargs = copy.deepcopy((forward_input.args, forward_input.kwargs))
    return scalar(model(*args, **kwargs))


def mean_gradients(model, inputs):
    """By hand: each micro-batch's gradients by themselves, averaged in float64; None where there is none."""
    params = list(model.parameters())
    sums = [None] * len(params)
    for seed, forward_input in enumerate(inputs):
        grads = torch.autograd.grad(loss_of(model, forward_input, seed), params, allow_unused=True)
        for i, grad in enumerate(grads):
            if grad is not None:
                dense = (grad.to_dense() if grad.layout != torch.strided else grad).double()
                sums[i] = dense if sums[i] is None else sums[i] + dense
    return [None if s is None else s / len(inputs) for s in sums]


@each_take
@pytest.mark.filterwarnings("ignore:an update was skipped")
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_three_micro_batches_are_their_mean(info, take):
    learned = refused = 0
    for i, model, inputs in samples(info, SAMPLES[take]):
        if i:
            columns(model)
        by_hand = copy.deepcopy(model)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=1.0), K, take=take)
        for seed, forward_input in enumerate(inputs):
            loss_of(model, forward_input, seed).backward()
            optimizer.step()
        means = mean_gradients(by_hand, inputs)
        assert all(p.grad is None for p in model.parameters())
        # Some listed inputs have no finite gradient (the root of a pool of zeros): no update then.
        finite = all(bool(m.isfinite().all()) for m in means if m is not None)
        assert optimizer.stepped == finite, f"sample {i}"
        if not finite:
            assert all(torch.equal(p, start) for p, start in zip(model.parameters(), before, strict=True))
            refused += 1
            continue
        for (name, p), start, mean in zip(model.named_parameters(), before, means, strict=True):
            if mean is None:
                assert torch.equal(p, start), f"sample {i}, {name}: moved without a gradient"
                continue
            learned += bool(mean.any())
            wanted = start.double() - mean
            scale = float(mean.abs().max() + start.abs().max()) if mean.numel() else 0.0
            torch.testing.assert_close(
                p.detach().double(), wanted, rtol=1e-6, atol=4e-7 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
        for (name, b), other in zip(model.named_buffers(), by_hand.buffers(), strict=True):
            assert torch.equal(b, other), f"sample {i}, {name}: the forward ran otherwise"
    assert learned or refused, "no gradient arrived: this module shows nothing"
