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


def momenta(trainer):
    return [state["momentum_buffer"].clone() for state in trainer.optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("take", ["step", "backward"])
def test_trainers_take_turns_on_one_model(tmp_path, take):
    """As stock ones do: each goes on with its own optimizer, and what one leaves is not the other's."""

    def three_turns(kind, **extra):
        model = gpt2().double()
        common = {"compute_loss_func": sum_over_tokens, "max_grad_norm": 0.75, "num_train_epochs": 1}
        first = make(tmp_path, model, kind, **common, **extra)
        second = make(tmp_path, model, kind, **common, **extra)
        first.train()
        kept = momenta(first)
        second.train()
        assert all(map(torch.equal, kept, momenta(first)))
        first.train()
        return model, first, second

    wanted, stock, _ = three_turns(transformers.Trainer)
    model, first, second = three_turns(FusedTrainer, accumulator_options={"take": take})
    same_weights(model, wanted, rtol=0, atol=1e-12)
    for mine, theirs in zip(momenta(first), momenta(stock), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    # Six windows of the first, three of the second; each has its own count and state.
    assert [t.accumulator.window_state_dict()["windows"] for t in (first, second)] == [6, 3]
    FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 4)  # and the model is the user's again
    with pytest.raises(ValueError, match="owned by another FusedAccumulator"):
        wrapper = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 4)
        assert wrapper
        first.train()


def test_master_weights_outlive_a_training(tmp_path):
    model = gpt2().bfloat16()
    trainer = make(tmp_path, model, max_grad_norm=0.0, accumulator_options={"master_weights": True})
    trainer.train()
    torch.save(trainer.optimizer.state_dict(), tmp_path / "optimizer.pt")
    masters = torch.load(tmp_path / "optimizer.pt", weights_only=True)["fastaccum"]["master_weights"]
    assert len(masters) == len(list(model.parameters()))
    for number, param in enumerate(trainer.accumulator._roster.params):
        assert torch.equal(masters[number].bfloat16(), param)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values()), "more than the parameters"


@pytest.mark.parametrize("take", ["step", "backward"])
@pytest.mark.parametrize("where", ["forward", "backward", "before the update"])
def test_a_training_that_failed_lets_go_too(tmp_path, where, take):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("boom")

    class Boom(FusedTrainer):
        calls = 0

        def compute_loss(self, model, *args, **kwargs):
            self.calls += 1
            if self.calls != 6 or where == "before the update":
                return super().compute_loss(model, *args, **kwargs)
            if where == "forward":
                raise RuntimeError("boom")
            # Fails in the middle: the layers above have their gradients by then.
            handle = model.transformer.h[0].register_forward_hook(lambda m, i, out: Fails.apply(out))
            try:
                return super().compute_loss(model, *args, **kwargs)
            finally:
                handle.remove()

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if where == "before the update" and state.global_step == 1 and trainer.calls == 8:
                raise RuntimeError("boom")

    model = gpt2()
    options = {"max_grad_norm": 0.5, "accumulator_options": {"take": take}}
    trainer = make(tmp_path, model, Boom, callbacks=[Stop()], **options)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert trainer.state.global_step == 1
    wanted = copy.deepcopy(model)
    torch.save(trainer.optimizer.state_dict(), tmp_path / "optimizer.pt")  # it can be saved
    make(tmp_path, model, **options).train()
    make(tmp_path, wanted, transformers.Trainer, max_grad_norm=0.5).train()
    same_weights(model, wanted, rtol=0, atol=2e-6)
    trainer.train()  # and goes on
    assert trainer.state.global_step == 6


def test_a_trainer_beside_one_that_trains_is_told_whose_the_model_is(tmp_path):
    class Second(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 1 and not told:
                with pytest.raises(ValueError) as caught:
                    make(tmp_path, model).train()
                told.append(str(caught.value))

    told, model, wanted = [], gpt2(), gpt2()
    make(tmp_path, model, callbacks=[Second()]).train()
    assert "owned by a FusedTrainer; wait until its train() has ended" in told[0]
    make(tmp_path, wanted).train()
    same_weights(model, wanted, rtol=0, atol=0)


BAD_OPTIONS = [
    (
        {"foo": 1},
        TypeError,
        "accumulator_options has 'foo', which FusedAccumulator does not take: .*max_value",
    ),
    ({"max_value": -1.0}, ValueError, "accumulator_options cannot be used: max_value must be above 0"),
    ({"take": "later"}, ValueError, "accumulator_options cannot be used: take must be one of"),
    ({"backend": "fast"}, ValueError, "accumulator_options cannot be used: backend must be one of"),
    ({"master_weights": 1}, TypeError, "accumulator_options cannot be used: master_weights must be a bool"),
    ({"wire_dtype": torch.bfloat16}, NotImplementedError, "accumulator_options cannot be used: wire_dtype="),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPTIONS)
def test_options_are_checked_at_construction(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        make(tmp_path, gpt2(), accumulator_options=options, max_grad_norm=0.0)


def test_max_grad_norm_is_checked_at_construction_in_its_own_name(tmp_path):
    model = gpt2()
    for wrong in (-1.0, float("nan"), None):
        with pytest.raises(ValueError, match="^max_grad_norm must be a number of at least 0"):
            make(tmp_path, model, max_grad_norm=wrong)
    clips_by_value = {"accumulator_options": {"max_value": 1e-3}}
    with pytest.raises(ValueError, match=r"^max_grad_norm=1.0 .*max_value.*set max_grad_norm=0"):
        make(tmp_path, model, **clips_by_value)
    trainer = make(tmp_path, model, max_grad_norm=0.0, **clips_by_value)
    trainer.train()
    # It may change between trainings: refused then, and nothing is lost.
    trainer.args.max_grad_norm = 0.5
    with pytest.raises(ValueError, match="set max_grad_norm=0"):
        trainer.train()
    trainer.args.max_grad_norm = 0.0
    trainer.train()
    assert trainer.state.global_step == 6


def test_fp16_fsdp_and_deepspeed_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="fp16=True scales the loss.*use bf16=True"):
        make(tmp_path, gpt2(), fp16=True)

    class Engine(FusedTrainer):
        """Neither runs here: what the Trainer knows of them once its Accelerator is made."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled, self.is_deepspeed_enabled = engine == "FSDP", engine == "DeepSpeed"

    for engine in ("FSDP", "DeepSpeed"):
        with pytest.raises(NotImplementedError, match=f"FusedTrainer does not work with {engine}: .*DDP"):
            make(tmp_path, gpt2(), Engine, sgd=False)


def test_the_wrong_order_of_bases_is_refused():
    words = r"^Mine has Trainer before FusedTraining.*class Mine\(FusedTraining, \.\.\.\)"
    for base in (transformers.Trainer, transformers.Seq2SeqTrainer):
        with pytest.raises(TypeError, match=words):
            type("Mine", (base, FusedTraining), {})
        right = type("Mine", (FusedTraining, base), {})
        type("More", (right,), {})
    type("Last", (transformers.Seq2SeqTrainer, FusedTrainer), {})  # before Trainer all the same


def test_grad_norm_may_be_logged_without_a_training(tmp_path):
    trainer = make(tmp_path, gpt2())
    trainer.log({"grad_norm": 2.0})
    assert trainer.state.log_history[-1]["grad_norm"] == 2.0


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
