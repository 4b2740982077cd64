"""The demo: its data, its loops, its verdict, and one quick run from end to end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from fastaccum import demo

for package in demo.EXTRA:
    pytest.importorskip(package, reason='needs pip install "fastaccum[demo]"')

from fastaccum.demo import data  # noqa: E402
from fastaccum.demo.compare import FACTOR, FLOOR, judge  # noqa: E402
from fastaccum.demo.loops import fused_loop, plain_loop  # noqa: E402
from fastaccum.demo.meter import Meter, Window  # noqa: E402
from fastaccum.demo.models import CharGPT, DigitsCNN  # noqa: E402
from fastaccum.demo.tasks import Task, digits_task, docstrings_task  # noqa: E402

quick = pytest.mark.quick


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where several tests share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- data


@quick
def test_rows_of_text_are_the_same_every_time_and_differ_in_length():
    rows, again = data.text_rows(40, longest=96), data.text_rows(40, longest=96)
    assert all(map(torch.equal, rows, again))
    assert len({len(row) for row in rows}) > 10
    assert max(map(len, rows)) <= 1 + 96


@quick
def test_too_few_docstrings_are_refused(tmp_path):
    (tmp_path / "module.py").write_text('"""One docstring, with an umlaut: ü."""\n')
    (row,) = data.text_rows(1, longest=96, root=tmp_path)
    assert row[0] == data.START and row[-2] == data.UNKNOWN
    with pytest.raises(RuntimeError, match="expected 2 rows .* found 1"):
        data.text_rows(2, longest=96, root=tmp_path)


@quick
def test_digits_are_split_without_overlap():
    train, held_out = data.digits(train_rows=1440)
    again, _ = data.digits(train_rows=1440)
    assert torch.equal(train.inputs, again.inputs)
    assert (train.items, held_out.items) == (1440, 357)
    assert train.inputs.shape == (1440, 1, 8, 8) and 0 <= train.inputs.min() < train.inputs.max()


@quick
def test_padding_neither_counts_nor_changes_the_loss():
    task = docstrings_task(quick=True)
    rows = [torch.tensor([data.START, *range(length)]) for length in (1, 5, 30)]
    model = task.model(torch.float64)
    together = data.pad(rows)
    alone = [data.pad([row]) for row in rows]
    assert together.items == sum(batch.items for batch in alone) == 36
    total = sum(task.loss(model, batch, "sum") for batch in alone)
    torch.testing.assert_close(task.loss(model, together, "sum"), total, rtol=1e-12, atol=0)
    torch.testing.assert_close(task.loss(model, together) * 36, total, rtol=1e-12, atol=0)


@quick
@pytest.mark.parametrize("small", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("make", [digits_task, docstrings_task])
def test_every_epoch_ends_with_a_short_window_and_a_later_window_sees_its_update(make, small):
    task = make(quick=small)
    assert all(len(epoch) % task.accumulation_steps for epoch in task.epochs)
    assert len({len(epoch) for epoch in task.epochs}) == 1
    assert task.windows >= task.exact_windows > task.windows_per_epoch
    counts = {batch.items for epoch in task.epochs for batch in epoch}
    assert (len(counts) > 1) == task.weighted


# --- loops and verdict


class Accumulator:
    """`FusedAccumulator` as the demo uses it, in plain PyTorch, with a divisor to get wrong."""

    def __init__(self, model: nn.Module, task: Task, divisor: Callable[[Accumulator], float]):
        self.inner = torch.optim.AdamW(model.parameters(), lr=task.lr)
        self.model, self.task, self.divisor = model, task, divisor
        self.sums = {p: torch.zeros_like(p) for p in model.parameters()}
        self.weight, self.total, self.micro_step, self.updated = 1.0, 0.0, 0, False

    def memory(self) -> dict[str, int]:
        return {"buffer": sum(s.nbytes for s in self.sums.values()), "kept": 0}

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        self.weight = weight
        loss.backward()

    def step(self) -> None:
        self.updated = False
        for parameter, total in self.sums.items():
            total.add_(parameter.grad, alpha=self.weight)
            parameter.grad = None
        self.total += self.weight
        self.micro_step += 1
        if self.micro_step == self.task.accumulation_steps:
            self.flush()

    def flush(self) -> bool:
        if self.micro_step == 0:
            return False
        for parameter, total in self.sums.items():
            parameter.grad = total / self.divisor(self)
            total.zero_()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        self.inner.step()
        self.inner.zero_grad()
        self.total, self.micro_step, self.updated = 0.0, 0, True
        return True


def small(task: Task) -> Task:
    """The same training of a model that takes milliseconds."""
    models = {
        "digits": lambda: DigitsCNN(width=4),
        "docstrings": lambda: CharGPT(width=16, layers=1, heads=2, longest=96),
    }
    return replace(task, make_model=models[task.name])


def run(windows: Iterator[Window], task: Task) -> list[float]:
    """Runs a training to its end and returns the loss of every window."""
    losses = [window.loss for window in windows]
    assert len(losses) == task.windows
    return losses


def plain(task: Task, dtype: torch.dtype = torch.float32, **options: bool) -> list[float]:
    model = task.model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, **options)
    return run(plain_loop(task, model, optimizer, Meter(model)), task)


def accumulated(task: Task, divisor: Callable[[Accumulator], float]) -> list[float]:
    model = task.model()
    return run(fused_loop(task, model, Accumulator(model, task, divisor), Meter(model)), task)


def mean_of_the_window(accumulator: Accumulator) -> float:
    return accumulator.total


def full_window_always(accumulator: Accumulator) -> float:
    """Divides a short window as if it were full: the fault of dividing each loss by K."""
    steps = accumulator.task.accumulation_steps
    return accumulator.total * steps / accumulator.micro_step


@quick
@pytest.mark.parametrize("make", [digits_task, docstrings_task])
def test_the_verdict_accepts_the_true_mean_and_refuses_a_wrong_divisor(make):
    task = small(make(quick=True))
    # Without clipping a wrong divisor shows at once; Adam alone hides much of it.
    task = replace(task, max_norm=math.inf)
    exact = plain(task, torch.float64)
    stock = {
        "loop": plain(task),
        "foreach": plain(task, foreach=True),
        "fused": plain(task, fused=True),
    }
    assert judge(accumulated(task, mean_of_the_window), exact, stock).agreed
    assert not judge(accumulated(task, full_window_always), exact, stock).agreed


@quick
def test_the_verdict_refuses_unweighted_micro_batches():
    task = small(docstrings_task(quick=True))
    exact = plain(task, torch.float64)
    stock = {"loop": plain(task)}
    unweighted = plain(replace(task, weighted=False))
    assert not judge(unweighted, exact, stock).agreed


@quick
def test_the_limit_is_four_times_the_largest_error_of_stock():
    exact = [1.0, 2.0]
    stock = {"loop": [1.0, 2.0 + 1e-5], "fused": [1.0 - 2e-5, 2.0]}
    limit = FACTOR * 2e-5 + FLOOR
    # Only the windows that the float64 run took part in count.
    longer = {name: [*losses, 3.0] for name, losses in stock.items()}
    verdict = judge([1.0 + 0.99 * limit, 2.0, 77.0], exact, longer)
    assert verdict.agreed and verdict.windows == 2
    assert verdict.limit == pytest.approx(limit)
    assert not judge([1.0, 2.0 - 1.01 * limit], exact, stock).agreed


@quick
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["fastaccum", "exact", "stock"])
def test_a_loss_that_is_not_finite_never_agrees(who, bad):
    losses = {name: [1.0, 1.0] for name in ("fastaccum", "exact", "stock")}
    losses[who] = [1.0, bad]
    verdict = judge(losses["fastaccum"], losses["exact"], {"loop": losses["stock"]})
    assert not verdict.agreed


@quick
def test_a_run_that_is_too_short_is_an_error():
    with pytest.raises(ValueError):
        judge([1.0], exact=[1.0, 1.0], stock={"loop": [1.0, 1.0]})


@quick
def test_the_peak_of_stock_is_all_gradients_and_the_one_in_flight():
    task = small(digits_task(quick=True))
    model = task.model()
    meter = Meter(model)
    run(plain_loop(task, model, torch.optim.AdamW(model.parameters()), meter), task)
    sizes = [p.nbytes for p in model.parameters()]
    measured = [window.gradient_bytes for window in meter.windows]
    # The gradient that arrives may be a small one, but the largest arrives at some time.
    assert measured.pop(Meter.MEMORY_WINDOW) == sum(sizes) + max(sizes)
    assert measured == [None] * len(measured)
    for window in meter.windows:
        assert min(window.seconds.values()) > 0


# --- the command


@quick
def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(demo.EXTRA, "no_such_module", "no-such-package")
    assert demo.main(["--quick"]) == 2
    message = capsys.readouterr().err
    assert "no-such-package" in message and 'pip install "fastaccum[demo]"' in message


def test_quick_demo_runs_from_end_to_end(tmp_path):
    out, table = tmp_path / "plots", tmp_path / "table.json"
    command = ["-m", "fastaccum", "demo", "--quick", "--json", str(table), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("AGREES") == 2

    document = json.loads(table.read_text())
    assert document["agreed"] is True
    assert document["versions"]["torch"] and document["hardware"]["cores"]
    assert document["backend"] in ("native", "reference")
    assert set(document["trainings"]) == {"digits", "docstrings"}
    for training in document["trainings"].values():
        assert training["agreed"] and training["verdict"]["error"] <= training["verdict"]["limit"]
        assert set(training["runs"]) == {"plain loop", "stock best", "fastaccum"}
        for figures in training["runs"].values():
            assert len(figures["losses"]) == training["windows"]
            assert min(figures["milliseconds_per_window"].values()) > 0
            assert figures["peak_gradient_bytes"] >= 4 * training["parameters"]
    assert document["trainings"]["digits"]["runs"]["fastaccum"]["held_out_accuracy"] > 0.5
    for name in ("loss_curves.png", "time_split.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
