"""The Trainer bridge against plain loops: numbers, schedules, clipping, logs, checkpoints, refusals."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from fastaccum.bridges.transformers import FusedTrainer, FusedTraining  # noqa: E402

torch.set_num_threads(1)
ROWS, LENGTH, VOCABULARY = 10, 12, 32


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    # Without it the Trainer does not know that this model shifts its labels, and counts the first token of
    # each row, which nothing predicts: it goes by the class's name, and looks for "ForCausalLM" in it.
    model.loss_type = "ForCausalLM"
    return model


def rows():
    """Rows with very different numbers of tokens to predict, as padding makes them."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for i in range(ROWS):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[2 + i :] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def arguments(folder, **options):
    # Two epochs of windows of 4, 4 and 2 micro-batches.
    fixed = {"num_train_epochs": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    order = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "linear", "warmup_steps": 2}
    return TrainingArguments(
        folder, **{**fixed, **quiet, **order, "learning_rate": 0.05, "use_cpu": True, **options}
    )


def sum_over_tokens(outputs, labels, num_items_in_batch=None):
    """The causal loss, in the logits' dtype: the model's own would round to float32."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, wanted, ignore_index=-100, reduction="sum") / num_items_in_batch


def make(folder, model, kind=FusedTrainer, *, sgd=True, **options):
    names = ("optimizers", "callbacks", "compute_loss_func", "accumulator_options")
    extra = {name: options.pop(name) for name in names if name in options}
    args = arguments(folder, **options)
    if sgd and "optimizers" not in extra:
        extra["optimizers"] = (torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9), None)
    return kind(model=model, args=args, train_dataset=rows(), **extra)


def plain_loop(model, max_norm, epochs=2, window=4):
    """Token-weighted windows, written out; (norms before clipping, learning rates)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data, updates = rows(), epochs * -(-ROWS // window)
    lines = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / 2 if step < 2 else (updates - step) / (updates - 2)
    )
    norms, rates = [], []
    for _ in range(epochs):
        for first in range(0, ROWS, window):
            held = data[first : first + window]
            tokens = sum(int((row["labels"][1:] != -100).sum()) for row in held)
            for row in held:
                logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
                loss = cross_entropy(logits, row["labels"][1:], ignore_index=-100, reduction="sum") / tokens
                loss.backward()
            limit = max_norm or float("inf")
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            lines.step()
    return norms, rates


def same_weights(a, b, **tolerance):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def moved(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("max_norm", [0.0, 0.75])
@pytest.mark.parametrize("take", ["step", "backward"])
def test_the_weights_norms_and_rates_are_the_plain_loops_in_float64(tmp_path, max_norm, take):
    model = gpt2().double()
    start, wanted = copy.deepcopy(model), copy.deepcopy(model)
    norms, rates = plain_loop(wanted, max_norm)
    assert min(norms) > 0.75, "the limit must bite"
    trainer = make(
        tmp_path, model, compute_loss_func=sum_over_tokens, max_grad_norm=max_norm,
        accumulator_options={"take": take},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(changed in place|backward calls|lr_scheduler).*")
        trainer.train()
    same_weights(model, wanted, rtol=0, atol=1e-12)
    assert moved(model, start) > 1e-2
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["grad_norm"] for entry in logged] == pytest.approx(norms, rel=1e-6)  # it is a float32
    assert [entry["learning_rate"] for entry in logged] == pytest.approx(rates, abs=1e-12)
    assert trainer.state.global_step == 6 and trainer.accumulator.micro_step == 0


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_models_own_loss_and_the_default_optimizer_are_the_stock_trainers(tmp_path, accumulation):
    model, wanted = gpt2(), gpt2()
    options = {"sgd": False, "max_grad_norm": 0.5, "learning_rate": 1e-3, "adam_epsilon": 1e-3}
    options["gradient_accumulation_steps"] = accumulation
    stock = make(tmp_path / "stock", wanted, transformers.Trainer, **options)
    stock.train()
    trainer = make(tmp_path / "fused", model, **options)
    trainer.train()
    assert isinstance(trainer.accumulator.optimizer, torch.optim.AdamW)
    same_weights(model, wanted, rtol=0, atol=2e-6)
    for mine, theirs in zip(trainer.state.log_history, stock.state.log_history, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert (key in mine) == (key in theirs)
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4)


def test_a_loss_that_is_a_mean_per_micro_batch_is_averaged_over_those_there_are(tmp_path):
    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

        def forward(self, input_ids, labels):
            return {"loss": (self.weight * input_ids[0, :2]).sum() ** 2}

    model = Rows()
    trainer = make(tmp_path, model, max_grad_norm=0.0, num_train_epochs=1, lr_scheduler_type="constant",
                   warmup_steps=0, learning_rate=1e-4)  # fmt: skip
    trainer.train()
    wanted = Rows()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=1e-4, momentum=0.9)
    for first, size in ((0, 4), (4, 4), (8, 2)):
        optimizer.zero_grad()
        for row in rows()[first : first + size]:
            (wanted(row["input_ids"][None], None)["loss"] / size).backward()
        optimizer.step()
    same_weights(model, wanted, rtol=1e-12, atol=0)


def test_training_resumes_from_a_checkpoint_bit_for_bit(tmp_path):
    options = {"max_grad_norm": 1.0, "save_strategy": "steps", "save_steps": 2, "sgd": False}
    whole, again = gpt2(), gpt2()
    make(tmp_path, whole, **options).train()
    trainer = make(tmp_path, again, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == 6
    same_weights(whole, again, rtol=0, atol=0)
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert saved["fastaccum"]["micro_step"] == 0 and saved["state"]


def test_callbacks_see_the_window(tmp_path):
    seen = []

    class Look(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            seen.append(trainer.accumulator.micro_step)

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            # The window's last micro-batch is still apart.
            assert all(p.grad is not None for p in model.parameters())
            seen.append("before")

        def on_optimizer_step(self, args, state, control, **kwargs):
            assert trainer.accumulator.updated
            seen.append("after")

    model = gpt2()
    trainer = make(tmp_path, model, callbacks=[Look()], num_train_epochs=1)
    trainer.train()
    whole = [1, 2, 3, "before", "after"]
    assert seen == [*whole, *whole, 1, "before", "after"]


@pytest.mark.parametrize("stop", ["should_epoch_stop", "should_training_stop"])
def test_what_a_stop_inside_a_window_leaves_is_dropped(tmp_path, caplog, stop):
    stopped, held = [], []

    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            held.append(trainer.accumulator.micro_step)
            if state.global_step == 2 and not stopped:
                stopped.append(True)
                setattr(control, stop, True)

    trainer = make(tmp_path, gpt2(), callbacks=[Stop()])
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level("WARNING"):
            trainer.train()
            if stop == "should_training_stop":
                trainer.train()
    finally:
        transformers.utils.logging.disable_propagation()
    whole = [1, 2, 3, 1, 2, 3, 1]
    again = [] if stop == "should_epoch_stop" else whole
    assert held == [*whole, *whole, *again]
    # The Trainer clears what a stopped training left by itself, and says nothing.
    told = "ended after 1 micro-batches without an update" in caplog.text
    assert told == (stop == "should_epoch_stop")


def test_a_second_train_takes_new_arguments_over(tmp_path):
    model = gpt2()
    trainer = make(tmp_path, model, num_train_epochs=1)
    trainer.train()
    first = trainer.accumulator
    trainer.args.max_grad_norm = 0.25
    trainer.train()
    assert trainer.accumulator is first and first.max_norm == 0.25
    trainer.args.max_grad_norm = 0.0
    trainer.train()
    assert first.max_norm is None


def test_what_does_not_fit_is_refused(tmp_path):
    model = gpt2()
    for name in ("accumulation_steps", "reduction", "max_norm", "scaler"):
        with pytest.raises(ValueError, match=f"accumulator_options cannot hold '{name}'"):
            make(tmp_path, model, accumulator_options={name: 1})
    with pytest.raises(TypeError, match="must be a dict"):
        make(tmp_path, model, accumulator_options=[1])
    wrapped = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 4)
    with pytest.raises(ValueError, match="FusedTrainer makes its own"):
        make(tmp_path, model, optimizers=(wrapped, None))


def test_it_goes_before_any_trainer(tmp_path):
    class Mine(FusedTraining, transformers.Seq2SeqTrainer):
        pass

    model = gpt2()
    args = transformers.Seq2SeqTrainingArguments(**{
        **{key: value for key, value in arguments(tmp_path).to_dict().items() if key in ("max_grad_norm",)},
        "output_dir": str(tmp_path), "max_steps": 1, "gradient_accumulation_steps": 2, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 1,
    })  # fmt: skip
    trainer = Mine(model=model, args=args, train_dataset=rows())
    trainer.train()
    assert trainer.accumulator.stepped
