"""The Lightning bridge against plain loops: the numbers, schedulers, clipping, loss scaling, checkpoints."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

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
