"""The Accelerate bridge against plain loops: numbers, schedulers, clipping, loss scaling, ranks, refusals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from fastaccum.bridges.accelerate import FusedAccelerator  # noqa: E402

BATCHES, STEPS = 10, 4  # windows of 4, 4 and 2 micro-batches
pytestmark = pytest.mark.filterwarnings("error:.*(changed in place|backward calls|lr_scheduler).*")


def forget():
    """Accelerate's state is one for the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def _fresh():
    forget()


def model_and_data(dtype=torch.float64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)
    inputs = torch.randn(BATCHES, 3, 5, dtype=dtype)
    rows = list(zip(inputs, inputs.sum(-1, True), strict=True))
    return model, torch.utils.data.DataLoader(rows, batch_size=1)


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.7**update)


def plain_loop(epochs=2, max_norm=None, short=STEPS):
    """Windows written out; ``short`` is what the short last one's losses are divided by."""
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler, norms = decay(optimizer), []
    batches = list(data)
    for _ in range(epochs):
        for first in range(0, BATCHES, STEPS):
            window = batches[first : first + STEPS]
            for batch in window:
                (loss_of(model, batch) / (STEPS if len(window) == STEPS else short)).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model, norms, scheduler.get_last_lr()


def documented_loop(accelerator, epochs=2, clip=None, sgd=True, dtype=torch.float64):
    """The loop of Accelerate's guide to gradient accumulation."""
    model, data = model_and_data(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler, norms = decay(optimizer), []
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                norm = None
                if clip is not None and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if norm is not None:
                    norms.append(float(norm))
    return model, norms, scheduler.get_last_lr(), optimizer


def same_weights(a, b, atol=1e-13):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_documented_loop_gives_the_plain_loops_numbers(reduction, clip):
    wanted, norms, rate = plain_loop(max_norm=clip, short=STEPS if reduction == "sum" else 2)
    assert clip is None or min(norms) > clip
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS, reduction=reduction)
    model, seen, last, optimizer = documented_loop(accelerator, clip=clip)
    same_weights(model, wanted)
    assert last == pytest.approx(rate, rel=1e-12)
    if clip is not None:
        assert seen == pytest.approx(norms, rel=1e-6)
    assert optimizer.optimizer is accelerator.accumulators[0]
    assert accelerator.accumulators[0].micro_step == 0


def test_sum_is_what_the_stock_accelerator_does():
    stock = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    wanted, norms, rate, _ = documented_loop(stock, clip=0.3)
    forget()
    fused = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model, seen, last, _ = documented_loop(fused, clip=0.3)
    same_weights(model, wanted)
    assert last == rate and seen == pytest.approx(norms, rel=1e-6)


def test_max_norm_clips_without_a_call_in_the_loop():
    wanted, _, _ = plain_loop(max_norm=0.3)
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS, max_norm=0.3)
    same_weights(documented_loop(accelerator)[0], wanted)


def test_gradients_are_held_once_per_window_and_not_in_grad():
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=3)
    model, data = model_and_data()
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    counts = []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        counts.append(accelerator.accumulators[0].micro_step)
    assert counts == [1, 2, 0, 1, 2, 0, 1, 2, 0, 0]


def test_the_optimizer_may_step_after_the_block():
    wanted, _, _ = plain_loop(epochs=1)
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, decay(optimizer), data)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
        # The window's last micro-batch waits for step(), which closes both.
        assert accelerator.accumulators[0].pending == accelerator.sync_gradients
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    same_weights(model, wanted)


def test_a_block_that_fails_leaves_the_window_as_it_was():
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=2)
    model, data = model_and_data()
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    with pytest.raises(RuntimeError, match="out of memory"):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, next(iter(data))))
            raise RuntimeError("out of memory")
    assert accelerator.accumulators[0].micro_step == 0 and accelerator.accumulators[0].pending
    accelerator.accumulators[0].zero_grad()
    assert not accelerator.accumulators[0].pending


def test_loss_scaling():
    """With a scaler, as float16 has it: here of a CPU, at a scale that must not be seen in the numbers."""
    wanted, norms, rate = plain_loop(max_norm=0.3)
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    model, seen, last, _ = documented_loop(accelerator, clip=0.3)
    same_weights(model, wanted)
    assert seen == pytest.approx(norms, rel=1e-6) and last == pytest.approx(rate, rel=1e-12)
    assert accelerator.scaler.get_scale() > 2.0**12, "it must grow in between"


def test_a_state_saved_inside_a_window_goes_on_bit_for_bit(tmp_path):
    def run(save=False, load=False):
        forget()
        accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS, max_norm=0.3)
        model, data = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        if load:
            accelerator.load_state(str(tmp_path))
            data = accelerator.skip_first_batches(data, 6)
        for i, batch in enumerate(data):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if save and i == 5:
                accelerator.save_state(str(tmp_path))
                assert accelerator.accumulators[0].micro_step == 2
        return model

    same_weights(run(save=True), run(load=True), atol=0)


def test_what_does_not_fit_is_refused():
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=2)
    model, _ = model_and_data()
    other, _ = model_and_data()
    with pytest.raises(ValueError, match=r"accumulation_steps=4.*gradient_accumulation_steps=2"):
        accelerator.prepare(FusedAccumulator(torch.optim.SGD(other.parameters(), lr=0.1), 4))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="all parameters of one .* got some of 1"):
        accelerator.clip_grad_norm_(list(model.parameters())[1:], 1.0)
    with pytest.raises(ValueError, match="got some of 0"):
        accelerator.clip_grad_norm_(torch.zeros(1, requires_grad=True), 1.0)
    with pytest.raises(ValueError, match="norm_type=1"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(NotImplementedError, match="max_value"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    for name in ("accumulation_steps", "reduction", "max_norm"):
        with pytest.raises(ValueError, match=f"cannot hold '{name}'"):
            FusedAccelerator(cpu=True, accumulator_options={name: 1})
    with pytest.raises(ValueError, match="reduction must be"):
        FusedAccelerator(cpu=True, reduction="median")
    with pytest.raises(AttributeError, match="the framework's to count"):
        optimizer.optimizer.accumulation_steps = 3


def registered(accelerator):
    lists = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    return [len(known) for known in (*lists, accelerator.accumulators)]


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_where_prepare_refuses_nothing_stays_registered(tmp_path, mixed):
    accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=STEPS, mixed_precision=mixed)
    model, data = model_and_data(torch.float32)
    forward = model.forward
    # Known from the optimizer alone: nothing is touched.
    with pytest.raises(ValueError, match="LBFGS cannot be wrapped"):
        accelerator.prepare(data, model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="was given a FusedAccumulator"):
        accelerator.prepare(data, model, FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 4))
    assert model.forward == forward and registered(accelerator) == [0] * 5
    # Known when it is wrapped: here the second of two, whose parameters are the first's.
    sgd, again = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(
        ValueError, match="owned by the optimizer of a FusedAccelerator; call free_memory"
    ) as no:
        accelerator.prepare(data, model, sgd, again, decay(sgd))
    assert registered(accelerator) == [0] * 5
    # Nor does the first, which the error's frames still hold, own the parameters.
    prepared, optimizer, loader, _ = accelerator.prepare(model, sgd, data, decay(sgd))
    assert no.traceback and registered(accelerator) == [1] * 5
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, batch))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(tmp_path))
    assert len(list(tmp_path.glob("model*"))) == len(list(tmp_path.glob("optimizer*"))) == 1


def test_options_are_checked_before_anything_is_initialised():
    for kwargs, error, words in (
        ({"accumulator_options": {"foo": 1}}, TypeError, "accumulator_options has 'foo', which FusedAcc"),
        ({"accumulator_options": {"take": 1}}, ValueError, "accumulator_options cannot be used: take must"),
        ({"accumulator_options": {"max_value": 1.0}, "max_norm": 0.5}, ValueError,
         "accumulator_options cannot be used: max_norm=0.5 and max_value=1.0 exclude each other"),
        ({"max_norm": -1.0}, ValueError, "max_norm must be above 0"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            FusedAccelerator(cpu=True, mixed_precision="bf16", **kwargs)
    assert not PartialState._shared_state and not AcceleratorState._shared_state


def test_free_memory_hands_the_model_over():
    def two(kind):
        forget()
        model, data = model_and_data()
        for _ in range(2):
            accelerator = kind(cpu=True, gradient_accumulation_steps=STEPS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if kind is FusedAccelerator and kept:
                with pytest.raises(ValueError, match="FusedAccelerator; call free_memory"):
                    accelerator.prepare(optimizer)
                kept[-1][0].free_memory()
            prepared, optimizer, loader = accelerator.prepare(model, optimizer, data)
            for batch in loader:
                with accelerator.accumulate(prepared):
                    accelerator.backward(loss_of(prepared, batch))
                    optimizer.step()
                    optimizer.zero_grad()
            kept.append((accelerator, optimizer))
        return model

    kept = []
    model = two(FusedAccelerator)
    assert kept[0][1].state_dict()["fastaccum"]["windows"] == 3  # and its state can still be saved
    same_weights(model, two(accelerate.Accelerator))


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_engines_with_an_optimizer_of_their_own_are_refused(monkeypatch, engine):
    """None of them runs here: what an Accelerator that has one says of itself."""
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", DistributedType[engine])
    with pytest.raises(NotImplementedError, match=f"one process and with DDP, not with .*{engine}"):
        FusedAccelerator(cpu=True)


def test_a_plain_accelerator_serves_a_fused_accumulator():
    """Without the bridge: the accumulator counts, the accelerator does not."""
    wanted, _, _ = plain_loop(epochs=1, max_norm=0.3, short=2)
    accelerator = accelerate.Accelerator(cpu=True)
    model, data = model_and_data()
    fused = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), STEPS, max_norm=0.3)
    scheduler = decay(fused)
    model, optimizer, data = accelerator.prepare(model, fused, data)
    for batch in data:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        if fused.updated:
            scheduler.step()
    assert fused.flush()
    same_weights(model, wanted)


RANKS = """
import sys, torch
from fastaccum.bridges.accelerate import FusedAccelerator
from tests.bridges.test_accelerate import model_and_data, loss_of, STEPS
accelerator = FusedAccelerator(cpu=True, gradient_accumulation_steps=2, max_norm=0.3)
model, data = model_and_data()
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
assert len(data) == 5 and accelerator.num_processes == 2, (len(data), accelerator.num_processes)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
accelerator.end_training()
"""


def test_two_ranks_give_the_windows_of_all_their_batches(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    common |= {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-c", RANKS, str(tmp_path / "model.pt")]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, cwd=root,
                         stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    model, data = model_and_data()
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), list(data)
    # A window of two micro-batches on two ranks is four batches; the last one is divided by as many.
    for first in range(0, BATCHES, 4):
        for batch in batches[first : first + 4]:
            (loss_of(model, batch) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    for name, p in model.state_dict().items():
        torch.testing.assert_close(saved[name], p, rtol=0, atol=1e-13)
    assert not any("Warning: this rank" in text for text in errors), errors
