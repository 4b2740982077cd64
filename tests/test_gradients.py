"""What is asked of all gradients at once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fastaccum import FusedAccumulator  # noqa: E402
from fastaccum.gradients import gone, of, ordinary  # noqa: E402

pytestmark = pytest.mark.quick

PLAIN = torch.arange(1.0, 7.0).reshape(2, 3)
ODD = {
    "transposed": PLAIN.t().contiguous().t(),
    "expanded": torch.ones(1, 3).expand(2, 3),
    "sparse": PLAIN.to_sparse(),
    "negative bit": torch._neg_view(PLAIN),
    "with a graph": (PLAIN.clone().requires_grad_() * 2.0),
}


@pytest.mark.parametrize("kind", list(ODD))
def test_one_that_is_not_ordinary_is_found_among_those_that_are(kind):
    assert ordinary([PLAIN, PLAIN]) and ordinary([])
    assert not ordinary([PLAIN, ODD[kind], PLAIN])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_compressed_sparse_one_is_not_ordinary():
    assert not ordinary([PLAIN.to_sparse_csr()])


def test_gone_is_a_parameter_with_nothing_in_grad():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    assert gone(of(params)) and not gone(of([]))
    params[0].grad = torch.zeros(2)  # never compared with None, which would be an elementwise ==
    assert gone(of(params))
    params[1].grad = torch.zeros(2)
    assert not gone(of(params))


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kind", ["transposed", "expanded", "sparse", "negative bit", "with a graph"])
def test_such_a_gradient_updates_a_row_major_parameter_as_a_plain_one_does(kind, steps):
    """Whatever way it lies, and whether it comes first, in the middle or last."""
    for at in range(steps):
        param, other = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
        optimizer = FusedAccumulator(torch.optim.SGD([param, other], lr=1.0), steps, reduction="sum")
        expected = torch.zeros(2, 3)
        for i in range(steps):
            grad = ODD[kind] if i == at else PLAIN
            param.grad, other.grad = grad.clone() if kind != "negative bit" else grad, PLAIN.clone()
            expected -= (
                grad.detach().resolve_neg().to_dense() if kind == "sparse" else grad.detach().resolve_neg()
            )
            optimizer.step()
        assert torch.equal(param.detach(), expected), at
