"""Compiled models train as eager ones do, and compiled code that calls the ops is one graph, made once."""

from __future__ import annotations

import copy
import shutil

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo import compiled_autograd  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from fastaccum import FusedAccumulator, ops  # noqa: E402
from fastaccum.layout import Layout  # noqa: E402
from tests.cases import hyper_row  # noqa: E402
from tests.oracle import each_take  # noqa: E402

pytestmark = pytest.mark.native

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
BACKENDS = [
    pytest.param({"backend": "aot_eager"}, id="aot_eager"),
    pytest.param({"backend": "inductor"}, id="inductor", marks=needs_compiler),
    # CUDA graphs on a GPU; on a CPU the mode must do no harm.
    pytest.param({"mode": "reduce-overhead"}, id="reduce-overhead", marks=needs_compiler),
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.randn(9, 4, 5)


def train(model, forward, data, take, **options):
    """Three windows of 3 micro-batches, AdamW clipped; returns the parameters."""
    options = {"max_norm": 0.1, **options}
    optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters(), lr=0.01), 3, take=take, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for x in data:
        forward(x).square().mean().backward()
        optimizer.step()
        if optimizer.updated:
            scheduler.step()
    return [p.detach() for p in model.parameters()]


@each_take
@pytest.mark.parametrize("how", BACKENDS)
def test_a_compiled_model_trains_as_eager(how, take):
    model, data = model_and_data()
    compiled = copy.deepcopy(model)
    wanted = train(model, model, data, take)
    got = train(compiled, torch.compile(compiled, **how), data, take)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@each_take
def test_the_wrapper_may_come_before_compiling_and_does_not_recompile_the_model(take):
    """The hooks, ``.grad`` that comes and goes, and new windows are nothing that the graph depends on."""
    model, data = model_and_data()
    twin = copy.deepcopy(model)
    wanted = train(twin, twin, data, take)
    counter = CompileCounterWithBackend("aot_eager")
    optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters(), lr=0.01), 3, take=take, max_norm=0.1)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for x in data:
        compiled(x).square().mean().backward()
        optimizer.step()
        if optimizer.updated:
            scheduler.step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], wanted, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_a_module_compiled_in_place():
    model, data = model_and_data()
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager")
    wanted = train(model, model, data, "step")
    torch.testing.assert_close(train(compiled, compiled, data, "step"), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fullgraph", [False, True], ids=["parts", "fullgraph"])
def test_compiled_autograd(fullgraph):
    """The whole backward is one traced graph, accumulation and hooks with it: what lies in .grad counts."""
    model, data = model_and_data()
    twin = copy.deepcopy(model)
    wanted = train(twin, twin, data, "step")
    optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters(), lr=0.01), 3, max_norm=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    counter = CompileCounterWithBackend("aot_eager")
    for x in data:
        loss = model(x).square().mean()
        with compiled_autograd._enable(torch.compile(backend=counter, fullgraph=fullgraph)):
            loss.backward()
        optimizer.step()
        if optimizer.updated:
            scheduler.step()
    assert counter.frame_count >= 1
    torch.testing.assert_close([p.detach() for p in model.parameters()], wanted, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------- the ops

SIZES = (600, 0, 7)
KINDS = {"adam_": ("exp_avgs", "exp_avg_sqs"), "sgd_": ("momentum_buffers",)}


class Window:
    """All tensors of a closing window: two micro-batches, the norm, the decision, an update."""

    def __init__(self, kind):
        torch.manual_seed(1)
        layout = Layout.of(SIZES)
        n, chunks, f64 = len(SIZES), layout.n_chunks, {"dtype": torch.float64}
        self.kind = kind
        self.segments = torch.tensor(list(zip(layout.offsets, SIZES, strict=True)))
        self.index, self.group = torch.arange(n), torch.zeros(n, dtype=torch.int64)
        self.buffer, self.partials = torch.zeros(layout.numel), torch.zeros(2, chunks, **f64)
        self.present = torch.zeros(n, dtype=torch.uint8)
        self.params = [torch.randn(size) for size in SIZES]
        self.states = [[torch.zeros(size) for size in SIZES] for _ in KINDS[kind]]
        self.norm, self.group_norms = torch.zeros(()), torch.zeros(1, **f64)
        self.factor, self.skip = torch.zeros(1, **f64), torch.zeros((), dtype=torch.int32)
        self.skipped = torch.zeros((), dtype=torch.int64)
        self.spans = torch.tensor([[0, 0, chunks]])
        self.steps, self.scalars = torch.zeros(n), torch.zeros(n, ops.SCALAR_COLUMNS, **f64)
        self.views = [
            self.buffer[offset : offset + size] for offset, size in zip(layout.offsets, SIZES, strict=True)
        ]

    def run(self, first, second, weight, max_norm, divisor, hyper):
        """What the accumulator does with the ops, in one function."""
        tables = (self.buffer, self.present)
        ops.gather_(*tables, None, self.segments, first, self.index)
        ops.gather_(*tables, self.partials, self.segments, second, self.index, weight=weight)
        ops.finish_(
            self.norm, self.group_norms, self.factor, self.skip, self.skipped, self.partials, self.spans,
            max_norm, weight, divisor,
            steps=self.steps, scalars=self.scalars, row=self.index, group=self.group, hyper=hyper,
        )  # fmt: skip
        states = [*self.states, []] if self.kind == "adam_" else self.states
        update = ops.adam_ if self.kind == "adam_" else ops.sgd_
        update(
            self.params, *states, [], self.views, self.segments, self.index, self.group, self.index, hyper,
            self.scalars, self.factor, self.skip,
        )  # fmt: skip
        return self.norm * 2.0

    def results(self):
        return [
            *self.params,
            *[s for state in self.states for s in state],
            self.norm,
            self.steps,
            self.skipped,
        ]


def changing(i):
    """The scalars of window i: every one of them another than in the window before."""
    f64 = {"dtype": torch.float64}
    torch.manual_seed(10 + i)
    grads = [[torch.randn(size) for size in SIZES] for _ in range(2)]
    if i == 2:
        grads[1][0][5] = float("inf")  # a skipped window is the same graph
    weight, max_norm = torch.tensor(0.5 + i, **f64), torch.full((1,), 3.0 / (i + 1), **f64)
    row = hyper_row(lr=0.1 / (i + 1), beta2=0.9, weight_decay=0.01 * i, eps=1e-8, momentum=0.9)
    return *grads, weight, max_norm, torch.tensor(2.0 + i, **f64), torch.tensor([row], **f64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_whole_window_is_one_graph_made_once(kind, how):
    """No graph break, nothing compiled again when lr, step, weights and limits change; stock's values."""
    eager, traced = Window(kind), Window(kind)
    counters.clear()
    compiled = torch.compile(traced.run, backend=how, fullgraph=True, dynamic=False)
    for i in range(4):
        stance = "fail_on_recompile" if i else "default"
        eager.present.zero_(), traced.present.zero_()
        wanted = eager.run(*changing(i))
        with torch.compiler.set_stance(stance):
            got = compiled(*changing(i))
        # The first call traces twice: the views of the buffer alias it. One graph remains.
        assert counters["stats"]["unique_graphs"] == 1, f"window {i} was compiled again"
        assert not counters["graph_break"]
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), "the mutation is not seen in the graph"
        for a, b in zip(traced.results(), eager.results(), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"window {i}"
    assert eager.skipped == 1 and eager.steps.tolist() == [3.0, 3.0, 3.0]


def test_explain_finds_no_break():
    window = Window("adam_")
    found = torch._dynamo.explain(window.run)(*changing(0))
    assert found.graph_break_count == 0 and found.graph_count == 1, found.break_reasons


@pytest.mark.parametrize("name", ["max_value", "norm_type"])
def test_python_numbers_of_the_ops_compile_too(name):
    """They are constants of the graph: another value is another graph, with its right result."""
    tensors = [torch.tensor([3.0, -4.0])]
    layout = Layout.of([2])
    segments, index = torch.tensor([[0, 2]]), torch.arange(1)
    partials = torch.zeros(2, layout.n_chunks, dtype=torch.float64)
    factor = torch.ones(1, dtype=torch.float64)

    def clamp(value):
        ops.scale_(tensors, factor, max_value=value)
        return tensors[0] + 0.0

    def norm(value):
        ops.norm_(partials, segments, tensors, index, norm_type=value)
        return partials[0] + 0.0

    if name == "max_value":
        function, values, wanted = clamp, (3.5, 2.0), ([3.0, -3.5], [2.0, -2.0])
    else:
        function, values, wanted = norm, (1.0, float("inf")), ([7.0], [4.0])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for value, right in zip(values, wanted, strict=True):
        assert compiled(value).tolist() == right
