"""The Lightning bridge against plain loops: the numbers, schedulers, clipping, loss scaling, checkpoints."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)

from fastaccum import FusedAccumulator  # noqa: E402
from fastaccum.bridges.lightning import FusedWindows  # noqa: E402

BATCHES, STEPS = 10, 4  # windows of 4, 4 and 2 micro-batches
pytestmark = pytest.mark.filterwarnings("error:.*(changed in place|backward calls|lr_scheduler.step).*")


class Module(LightningModule):
    def __init__(self, kind=torch.optim.SGD, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
        self.kind, self.options = kind, options or {"lr": 0.1, "momentum": 0.9}

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), **self.options)
        return [optimizer], [{"scheduler": decay(optimizer), "interval": "step"}]


class Notes(Callback):
    """What is there after every batch."""

    def __init__(self, windows):
        self.windows, self.norms, self.held, self.rates = windows, [], [], []

    def on_train_batch_end(self, trainer, module, *args):
        self.held.append(self.windows.accumulator.micro_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if self.held[-1] == 0:
            self.norms.append(float(self.windows.accumulator.norm))


def data():
    torch.manual_seed(1)
    inputs = torch.randn(BATCHES, 3, 5, dtype=torch.float64)
    return torch.utils.data.DataLoader(list(zip(inputs, inputs.sum(-1, True), strict=True)), batch_size=1)


def loss_of(net, batch):
    return (net(batch[0]) - batch[1]).square().mean()


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.7**update)


def plain_loop(epochs=2, max_norm=None, mean=False, steps=(STEPS, STEPS)):
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler, norms, rates, batches = decay(optimizer), [], [], list(data())
    for epoch in range(epochs):
        for first in range(0, BATCHES, steps[epoch]):
            window = batches[first : first + steps[epoch]]
            for batch in window:
                (loss_of(module.net, batch) / (len(window) if mean else steps[epoch])).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm or float("inf"))))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return module, norms, rates


def fit(module, *callbacks, ckpt_path=None, epochs=2, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fixed = {"accelerator": "cpu", "accumulate_grad_batches": STEPS, "enable_checkpointing": False}
    options = {**quiet, **fixed, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(num_workers|LeafSpec|log_every_n_steps).*")
        trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
        trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer


def same_weights(a, b, atol=1e-13):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_the_numbers_are_the_plain_loops(reduction, max_norm):
    wanted, norms, rates = plain_loop(max_norm=max_norm, mean=reduction == "mean")
    assert max_norm is None or min(norms) > max_norm
    windows = FusedWindows(max_norm=max_norm, reduction=reduction)
    notes, module = Notes(windows), Module()
    trainer = fit(module, windows, notes)
    same_weights(module, wanted)
    assert notes.held == [1, 2, 3, 0, 1, 2, 3, 0, 1, 0] * 2
    assert notes.norms == pytest.approx(norms, rel=1e-6)
    ends = [i for i, held in enumerate(notes.held) if held == 0]
    assert [notes.rates[i] for i in ends] == pytest.approx(rates, rel=1e-12)
    assert trainer.global_step == 6


def test_sum_is_what_lightning_does_alone():
    stock, module = Module(), Module()
    fit(stock, gradient_clip_val=0.3)
    fit(module, FusedWindows(max_norm=0.3))
    same_weights(module, stock)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_schedule_of_accumulation_is_followed(reduction):
    wanted, _, _ = plain_loop(mean=reduction == "mean", steps=(4, 3))
    module = Module()
    schedule = GradientAccumulationScheduler(scheduling={0: 4, 1: 3})
    fit(module, FusedWindows(reduction=reduction), schedule, accumulate_grad_batches=1)
    same_weights(module, wanted)


def test_loss_scaling():
    """As 16-mixed has it, on a CPU and without autocast, at a scale that must not be seen in the numbers."""

    class Scaled(MixedPrecision):
        def forward_context(self):
            return torch.autocast("cpu", enabled=False)

    wanted, _, _ = plain_loop(max_norm=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    module = Module()
    fit(module, FusedWindows(max_norm=0.3), plugins=[Scaled("16-mixed", "cpu", scaler)])
    same_weights(module, wanted)
    assert scaler.get_scale() > 2.0**12, "it must grow in between"


def test_training_resumes_from_a_checkpoint_bit_for_bit(tmp_path):
    options = {"kind": torch.optim.AdamW, "lr": 0.05}
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, again = Module(**options), Module(**options)
    fit(whole, FusedWindows(max_norm=0.3), keep, epochs=3, enable_checkpointing=True)
    trainer = fit(again, FusedWindows(max_norm=0.3), epochs=3, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert trainer.global_step == 9
    same_weights(whole, again, atol=0)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["optimizer_states"][0]
    assert saved["fastaccum"]["micro_step"] == 0 and saved["state"]


def test_a_module_can_be_fitted_again():
    module, windows = Module(), FusedWindows()
    first = fit(module, windows, epochs=1)
    assert type(first.optimizers[0]) is torch.optim.SGD and windows.accumulator is None
    second = fit(module, FusedWindows(), epochs=1)
    fit(module, windows, epochs=1)
    assert second.global_step == 3 == first.global_step


class Fails(Module):
    """Its sixth batch raises, unless told otherwise."""

    boom = True

    def training_step(self, batch, batch_idx):
        if self.boom and batch_idx == 5:
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)


def fit_that_fails(module, *callbacks, **options):
    kept = {}

    class Keep(Callback):
        def setup(self, trainer, module, stage):
            kept["trainer"] = trainer

    with pytest.raises(RuntimeError, match="boom"):
        fit(module, *callbacks, Keep(), epochs=1, **options)
    return kept["trainer"]


@pytest.mark.parametrize("again", ["another", "the same"])
def test_a_fit_that_failed_lets_go(again):
    stock, module, windows = Fails(), Fails(), FusedWindows(max_norm=0.3)
    fit_that_fails(stock, gradient_clip_val=0.3)
    first = fit_that_fails(module, windows)
    same_weights(module, stock)
    assert windows.accumulator is None and type(first.optimizers[0]) is torch.optim.SGD
    module.boom = stock.boom = False
    stock.zero_grad()  # of the window that failed; fastaccum's is gone with its fit()
    fit(stock, epochs=1, gradient_clip_val=0.3)
    fit(module, FusedWindows(max_norm=0.3) if again == "another" else windows, epochs=1)
    same_weights(module, stock)
    own = FusedAccumulator(torch.optim.SGD(module.parameters(), lr=0.1), 2)
    with pytest.raises(ValueError, match="owned by another FusedAccumulator"):
        fit(module, windows, epochs=1)
    assert own.micro_step == 0 and windows.accumulator is None


def test_a_fit_inside_a_fit_is_told_whose_the_module_is():
    told = []

    class Second(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 5:
                module_of = module.trainer
                with pytest.raises(ValueError) as caught:
                    fit(module, FusedWindows(), epochs=1)
                told.append(str(caught.value))
                module.trainer = module_of

    fit(Module(), FusedWindows(), Second(), epochs=1)
    assert "owned by the FusedWindows of another Trainer; wait until its fit() has ended" in told[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_saved_after_fit_holds_what_one_saved_in_it_would(tmp_path, fails):
    class Low(Fails):
        def __init__(self):
            super().__init__(torch.optim.AdamW, lr=0.05)
            self.net.bfloat16()
            self.boom = fails

        def training_step(self, batch, batch_idx):
            batch = [part.bfloat16() for part in batch]
            return super().training_step(batch, batch_idx)

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == (4 if fails else 9):
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    def saved(name):
        return torch.load(tmp_path / name, weights_only=True)["optimizer_states"][0]

    module, windows = Low(), FusedWindows(accumulator_options={"master_weights": True})
    trainer = fit_that_fails(module, windows, Save()) if fails else fit(module, windows, Save(), epochs=1)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    inside, after = saved("inside.ckpt"), saved("after.ckpt")
    masters = after["fastaccum"]["master_weights"]
    assert len(masters) == 4
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values()), "more than the parameters"
    assert after["fastaccum"]["micro_step"] == (1 if fails else 0)
    assert after["fastaccum"]["windows"] == (1 if fails else 3)
    same(inside, after)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    else:
        assert a == b


@pytest.mark.parametrize("manual", [False, True])
def test_a_fit_without_an_optimizer_is_lightnings(manual):
    class Nothing(Module):
        def configure_optimizers(self):
            return None

    module, before, windows = Nothing(), Module(), FusedWindows(max_norm=0.3, reduction="mean")
    module.automatic_optimization = not manual
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        trainer = fit(module, windows, epochs=1, accumulate_grad_batches=1)
    assert windows.accumulator is None
    assert trainer.global_step == (0 if manual else BATCHES)
    same_weights(module, before, atol=0)
    fit(Module(), windows, epochs=1)  # and the same callback with one


def test_options_are_checked_at_construction():
    for options, error, words in (
        ({"foo": 1}, TypeError, "accumulator_options has 'foo', which FusedAccumulator does not take"),
        (
            {"max_value": 1.0},
            ValueError,
            "accumulator_options cannot be used: max_norm=0.3 and max_value=1.0",
        ),
        ({"norm_type": 0}, ValueError, "accumulator_options cannot be used: norm_type must be above 0"),
    ):
        with pytest.raises(error, match=words):
            FusedWindows(max_norm=0.3, accumulator_options=options)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy])
def test_engines_of_their_own_are_refused(kind):
    """None of them runs here: what the callback asks of a Trainer that has one."""
    module, windows = Module(), FusedWindows()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = SimpleNamespace(strategy=kind.__new__(kind), optimizers=[plain], gradient_clip_val=None)
    with pytest.raises(NotImplementedError, match=f"one device and with DDP, not with {kind.__name__}"):
        windows.on_fit_start(trainer, module)
    assert trainer.optimizers == [plain] and windows.accumulator is None
    trainer.strategy = DDPStrategy()
    windows.on_fit_start(trainer, module)
    assert trainer.optimizers == [windows.accumulator]


def test_a_batch_without_a_loss_is_left_out():
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (1, 3) else super().training_step(batch, batch_idx)

    stock, module = Skips(), Skips()
    fit(stock, epochs=1)
    fit(module, FusedWindows(), epochs=1)
    same_weights(module, stock)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"gradient_clip_val=0.3 .* FusedWindows\(max_norm=0.3\)"):
        fit(Module(), FusedWindows(), gradient_clip_val=0.3)

    class Wrapped(Module):
        def configure_optimizers(self):
            return FusedAccumulator(torch.optim.SGD(self.parameters(), lr=0.1), 4)

    with pytest.raises(ValueError, match="returned a FusedAccumulator"):
        fit(Wrapped(), FusedWindows())

    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="needs automatic optimization"):
        fit(manual, FusedWindows(), accumulate_grad_batches=1)
    for name in ("accumulation_steps", "reduction", "max_norm", "scaler"):
        with pytest.raises(ValueError, match=f"cannot hold '{name}'"):
            FusedWindows(accumulator_options={name: 1})
    with pytest.raises(ValueError, match="max_norm"):
        FusedWindows(max_norm=-1.0)
