"""The Triton kernels as a backend: every op of the table, and whole trainings, in the interpreter.

    TRITON_INTERPRET=1 python -m pytest tests/test_triton_backend.py

Sizes are small: the interpreter does half a million elements a second.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

torch = pytest.importorskip("torch")

from fastaccum import FusedAccumulator, dispatch, gpu, launchers  # noqa: E402
from tests.bits import assert_same, clone  # noqa: E402
from tests.cases import CASES  # noqa: E402

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy's, of inf and NaN
]
SIZES = [600, 0, 33]
DTYPES = {"adam_": 1, "sgd_": 1}  # a dtype more costs a minute


def grid():
    for case in CASES:
        for i, variant in enumerate(case.variants):
            for dtype in case.dtypes[: DTYPES.get(case.name, 2)]:
                yield pytest.param(case, variant, dtype, id=f"{case.name}-{i}-{str(dtype)[6:]}")


@pytest.fixture(scope="module")
def triton_backend():
    return gpu.Backend(launchers.TritonLauncher(dispatch.CPU), dispatch.CPU)


@pytest.mark.parametrize(("case", "variant", "dtype"), list(grid()))
def test_every_op_is_the_reference_bit_for_bit(triton_backend, case, variant, dtype):
    n = 1500 if case.unit == "chunks" else SIZES
    args, kwargs = case.make("cpu", dtype, n, 0, **variant.options)
    wanted_args, wanted = clone(args), clone(kwargs)
    getattr(triton_backend, case.name)(*args, **kwargs)
    case.reference(*wanted_args, **wanted)
    assert_same(case.named(args, kwargs), case.named(wanted_args, wanted), variant.desc, exact=variant.exact)


def trained(backend, kind, take, **options):
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((40, 30), (7,), ())]
    params.append(torch.nn.Parameter(torch.randn(3, 5).bfloat16()))
    optimizer = FusedAccumulator(kind(params), 2, take=take, backend=backend, **options)
    norms = []
    for i in range(7):
        sums = [(p.float() * torch.randn(p.shape)).square().sum() for p in params[: 4 - i % 2]]
        optimizer.backward(torch.stack(sums).sum(), weight=i % 3 + 1)
        optimizer.step()
        norms.append(optimizer.norm.item())
    optimizer.flush()
    return [p.detach() for p in params], [*norms, optimizer.norm.item()]


@pytest.mark.parametrize("take", ["step", "backward"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_training_is_the_native_one_bit_for_bit(take, kind):
    make = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    }[kind]
    got, norms = trained("triton", make, take, max_norm=1.0)
    wanted, wanted_norms = trained("native", make, take, max_norm=1.0)
    assert norms == wanted_norms
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_the_choice_says_why():
    assert dispatch.reasons_against("triton", torch.device("cpu")) == []
    assert dispatch.choose("triton", torch.device("cpu")) == "triton"
