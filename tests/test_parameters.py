"""Parameters of every kind, and gradients that come and go: contract item 11."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from fastaccum.ops import DTYPES  # noqa: E402
from tests.oracle import (  # noqa: E402
    each_backend,
    each_dtype,
    each_take,
    error,
    parameter,
    run_window,
    send,
    stock,
    twins,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
RMSprop = torch.optim.RMSprop
KINDS = [
    pytest.param(SGD, {"momentum": 0.9, "weight_decay": 0.1}, id="SGD"),
    # float16 has no 1e-8: there the loop itself would divide by 0.
    pytest.param(Adam, {"weight_decay": 0.1, "amsgrad": True, "eps": 1e-3}, id="Adam"),
    pytest.param(AdamW, {"eps": 1e-3}, id="AdamW"),
    pytest.param(RMSprop, {"momentum": 0.9, "eps": 1e-3}, id="RMSprop"),
]
each_kind = pytest.mark.parametrize(("kind", "options"), KINDS)


def layouts(dtype=torch.float32):
    """The same shape seen through every layout, then the odd sizes."""
    base = torch.randn(4, 6, dtype=torch.float64)
    of = {
        "rows": base.clone(),
        "transposed": base.t().contiguous().t(),
        "gaps": torch.randn(4, 18, dtype=torch.float64)[:, ::3],
        "transposed gaps": torch.randn(12, 8, dtype=torch.float64)[::2, 1::2].t(),
        "offset": torch.randn(25, dtype=torch.float64)[1:].view(4, 6),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels last 3d": torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
        "0-dim": torch.randn(()),
        "one": torch.randn(1),
        "empty": torch.randn(0, 3),
        "odd": torch.randn(517),
    }
    cast = {}
    for name, tensor in of.items():
        if "gaps" in name or name == "offset":
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(dtype)
            cast[name] = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        else:
            cast[name] = tensor.to(dtype)  # keeps the strides
    return {name: nn.Parameter(tensor) for name, tensor in cast.items()}


def grads_like(params, missing=0.0):
    return [
        None if torch.rand(()) < missing else torch.randn(p.shape, dtype=torch.float64).to(p.dtype)
        for p in params
    ]


def trained(params, kind, options, windows, *, wrap, lr=0.05, **accumulator):
    """Trains like the contract says and by the wrapper, or by the plain loop alone."""
    inner = stock(kind, params, lr=lr, **options)
    if not wrap:
        for micro_batches in windows:
            run_window(params, inner, micro_batches)
        return
    optimizer = FusedAccumulator(inner, len(windows[0]), **accumulator)
    for micro_batches in windows:
        for _, grads in micro_batches:
            send(params, grads)
            optimizer.step()
        assert optimizer.updated


def assert_like_the_loop(params, kind, options, windows, **accumulator):
    """The error against float64 is at most 4 times the plain loop's in the same dtype."""
    truth, loop = twins(params, torch.float64), twins(params)
    trained(truth, kind, options, windows, wrap=False)
    trained(loop, kind, options, windows, wrap=False)
    trained(params, kind, options, windows, wrap=True, **accumulator)
    for p, t, q in zip(params, truth, loop, strict=True):
        assert error([p], [t]) <= 4 * error([q], [t]) + 1e-6, (p.shape, p.stride(), p.dtype)


@each_backend
@each_kind
@each_dtype
def test_l03_every_layout_trains_as_the_loop_does(backend, kind, options, dtype):
    named = layouts(dtype)
    params = list(named.values())
    strides = [p.stride() for p in params]
    windows = [[(1.0, grads_like(params)) for _ in range(2)] for _ in range(3)]
    assert_like_the_loop(params, kind, options, windows, backend=backend)
    assert [p.stride() for p in params] == strides


@each_take
@each_kind
def test_dtypes_mix(take, kind, options):
    params = [p for dtype in DTYPES for p in layouts(dtype).values()]
    windows = [[(1.0, grads_like(params)) for _ in range(2)] for _ in range(2)]
    assert_like_the_loop(params, kind, options, windows, take=take)


@each_backend
@each_take
@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_every_micro_batch_misses_some_parameters(backend, take, kind, options, steps):
    torch.manual_seed(5)
    params = list(layouts().values()) + list(layouts(torch.float64).values())
    windows = [[(1.0, grads_like(params, 0.7)) for _ in range(steps)] for _ in range(5)]
    assert_like_the_loop(params, kind, options, windows, take=take, backend=backend)


def test_l03_the_case_from_the_field():
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = FusedAccumulator(SGD([p], lr=1.0), 2)
    for _ in range(2):
        p.grad = torch.arange(6.0).view(3, 2).t()
        optimizer.step()
    assert p.tolist() == [[0, -2, -4], [-1, -3, -5]]
    for steps in (1, 2):
        optimizer.accumulation_steps = steps
        base = torch.ones(1)
        for _ in range(steps):
            p.grad = base.expand(2, 3)  # every element is the same memory
            optimizer.step()
        assert base.item() == 1.0
    assert p.tolist() == [[-2, -4, -6], [-3, -5, -7]]


@each_dtype
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_l06_neighbours_of_a_misaligned_parameter_are_not_touched(dtype, kind):
    wholes, params = [], []
    for shift in (1, 2):
        for n in (1, 3, 7, 15, 17, 999):
            whole = torch.full((n + 8,), 3.0, dtype=dtype)
            wholes.append((whole, shift, n))
            params.append(nn.Parameter(whole[shift : shift + n]))
    assert all(p.data_ptr() == w[s:].data_ptr() for p, (w, s, _) in zip(params, wholes, strict=True))
    optimizer = FusedAccumulator(kind(params, lr=0.5), 2)
    truth = twins(params, torch.float64)
    reference = stock(kind, truth, lr=0.5)
    micro_batches = []
    for step in range(2):
        grads = []
        for p in params:
            p.grad = torch.randn(p.numel() + 5).to(dtype)[3 - step : p.numel() + 3 - step]
            grads.append(p.grad)
        micro_batches.append((1.0, grads))
        optimizer.step()
    run_window(truth, reference, micro_batches)
    assert error(params, truth) < 4 * torch.finfo(dtype).eps
    for whole, shift, n in wholes:
        assert (whole[:shift] == 3.0).all() and (whole[shift + n :] == 3.0).all()


@each_backend
@pytest.mark.parametrize("kind", [SGD, Adam, RMSprop])
@pytest.mark.parametrize(
    "sizes",
    [[1, 1, 0, 1, 0], [0], [0, 0, 3], [3, 0], [0] * 100, [2] * 35 + [0] + [2] * 40],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
def test_u07_l07_empty_parameters_are_no_ops(backend, kind, sizes):
    params = [nn.Parameter(torch.ones(n)) for n in sizes]
    optimizer = FusedAccumulator(stock(kind, params, lr=0.1), 2, max_norm=1e9, backend=backend)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.stepped
    assert optimizer.norm.item() == pytest.approx(sum(sizes) ** 0.5)
    moved = {SGD: 0.9, Adam: 0.9, RMSprop: 0.0}[kind]
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, moved), rtol=1e-4, atol=1e-4)
        if kind is Adam:
            assert optimizer.state[p]["step"].item() == 1  # as stock counts it


@pytest.mark.parametrize("n", [29, 30, 31, 36, 37, 110, 111, 320, 321, 2000])
def test_l07_any_number_of_tensors(n):
    params = [nn.Parameter(torch.zeros(1 + i % 3)) for i in range(n)]
    optimizer = FusedAccumulator(SGD(params, lr=1.0), 2)
    for _ in range(2):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, float(i))
        optimizer.step()
    assert all((p == -float(i)).all() for i, p in enumerate(params))


def test_float32_gradients_of_sixteen_bit_parameters():
    for kind in (SGD, AdamW, RMSprop):
        p = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        if not hasattr(p, "grad_dtype"):
            pytest.skip("no Tensor.grad_dtype in this torch")
        p.grad_dtype = torch.float32
        optimizer = FusedAccumulator(kind([p], lr=1.0), 2, reduction="sum")
        for _ in range(2):
            p.grad = torch.full((5,), 1 + 2.0**-12)
            optimizer.step()
        assert optimizer.norm.item() == pytest.approx(5**0.5 * 2 * (1 + 2.0**-12), rel=1e-6)
        if kind is SGD:
            assert (p == -2).all()


# ------------------------------------------------------------------------- no gradient, no update


@each_backend
@each_take
@pytest.mark.parametrize("kind", [SGD, Adam, RMSprop])
def test_y08_a_parameter_without_a_gradient_is_left_alone(backend, take, kind):
    p, q = parameter(1.0), parameter(1.0)
    optimizer = FusedAccumulator(stock(kind, [p, q], lr=0.1), 2, take=take, backend=backend)
    seen = []
    for active in (True, False, True):
        for _ in range(2):
            send([p, q], [1.0 if active else None, 1.0])
            optimizer.step()
        seen.append(p.item())
    if kind is SGD:
        assert p.item() == pytest.approx(0.8)
    assert seen[0] == seen[1] != seen[2]
    if kind is Adam:
        assert optimizer.state[p]["step"].item() == 2 and optimizer.state[q]["step"].item() == 3
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.19)
    assert p.grad is None


@each_backend
def test_a06_no_gradient_means_no_decay_and_no_momentum(backend):
    p, q, other = parameter(1.0), parameter(1.0), parameter(0.0)
    adamw = FusedAccumulator(AdamW([p, q, other], lr=0.1, weight_decay=0.5), backend=backend)
    send([p, q, other], [None, 0.0, 1.0])
    adamw.step()
    assert p.item() == 1.0 and q.item() == pytest.approx(0.95)
    assert p not in adamw.state or not adamw.state[p]
    del adamw
    p, q, other = parameter(1.0), parameter(1.0), parameter(0.0)
    sgd = FusedAccumulator(SGD([p, q, other], lr=0.1, momentum=0.9), backend=backend)
    send([p, q, other], [1.0, 1.0, 1.0])
    sgd.step()
    send([p, q, other], [None, 0.0, 1.0])
    sgd.step()
    assert p.item() == pytest.approx(0.9) and q.item() == pytest.approx(0.81)


@each_take
@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
def test_parameters_may_be_frozen_and_unfrozen(take, kind):
    p, q = parameter(1.0), parameter(1.0)
    p.requires_grad_(False)
    optimizer = FusedAccumulator(stock(kind, [p, q], lr=0.1, weight_decay=0.1), 2, take=take)
    moved = []
    for frozen in (True, False, True, True, False):
        p.requires_grad_(not frozen)
        before = p.item()
        for _ in range(2):
            send([p, q], [None if frozen else 1.0, 1.0])
            optimizer.step()
        moved.append(p.item() != before)
    assert moved == [False, True, False, False, True]


def test_a_parameter_frozen_inside_a_window_keeps_what_it_has():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = FusedAccumulator(SGD([p, q], lr=1.0), 2)
    send([p, q], [4.0, 4.0])
    optimizer.step()
    p.requires_grad_(False)
    send([p, q], [None, 4.0])
    optimizer.step()
    assert (p.item(), q.item()) == (-2.0, -4.0)  # what the plain loop does
    send([p, q], [None, 4.0])
    optimizer.step()
    send([p, q], [None, 4.0])
    optimizer.step()
    assert (p.item(), q.item()) == (-2.0, -8.0)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@each_take
def test_a_parameter_listed_twice_is_updated_once(take):
    p = parameter(0.0)
    optimizer = FusedAccumulator(SGD([p, p], lr=1.0), 2, take=take)
    for grad in (1.0, 3.0):
        send(p, grad)
        optimizer.step()
    assert p.item() == -2.0 and optimizer.norm.item() == 2.0


@each_take
@each_kind
def test_tied_weights_train_as_in_the_plain_loop(take, kind, options):
    def build():
        torch.manual_seed(3)
        embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        head.weight = embedding.weight
        return embedding, head

    tokens = torch.randint(7, (6, 2, 3))
    models = [build(), build()]
    optimizers = [stock(kind, models[i][0].parameters(), lr=0.1, **options) for i in range(2)]
    fused = FusedAccumulator(optimizers[0], 2, take=take)
    for i, x in enumerate(tokens):
        losses = [nn.functional.cross_entropy(h(e(x)).flatten(0, 1), x.flatten()) for e, h in models]
        losses[0].backward()
        fused.step()
        (losses[1] / 2).backward()
        if i % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight, rtol=1e-5, atol=1e-6)
