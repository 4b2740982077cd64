"""What is trained: model, micro-batches and their order, loss, and the settings of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import IGNORED, MicroBatch, digits, pad, text_rows
from .models import CharGPT, DigitsCNN

SEED = 1234


@dataclass(frozen=True)
class Task:
    """One training, the same for everyone who runs it."""

    name: str
    title: str
    unit: str  # what MicroBatch.items counts
    make_model: Callable[[], nn.Module]
    epochs: list[list[MicroBatch]]
    held_out: MicroBatch | None
    accumulation_steps: int
    lr: float
    weighted: bool  # by items; otherwise every micro-batch counts the same
    exact_epochs: int  # how many of the epochs the float64 run takes part in
    max_norm: float = 1.0

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Makes the model, always from the same float32 values."""
        torch.manual_seed(SEED)
        return self.make_model().to(dtype)

    def loss(self, model: nn.Module, batch: MicroBatch, reduction: str = "mean") -> Tensor:
        """Cross entropy, over the positions that are not padding."""
        logits, targets = forward(model, batch.inputs), batch.targets
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction
        )

    def weight(self, batch: MicroBatch) -> int:
        """What a micro-batch counts in its window."""
        return batch.items if self.weighted else 1

    @property
    def windows_per_epoch(self) -> int:
        """How many windows an epoch has, with the short one at its end."""
        return -(-len(self.epochs[0]) // self.accumulation_steps)

    @property
    def windows(self) -> int:
        """How many windows the training has."""
        return len(self.epochs) * self.windows_per_epoch

    @property
    def exact_windows(self) -> int:
        """How many of them the float64 run takes part in."""
        return self.exact_epochs * self.windows_per_epoch


def forward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Calls the model on inputs of its own precision."""
    dtype = next(model.parameters()).dtype
    return model(inputs.to(dtype) if inputs.is_floating_point() else inputs)


@torch.no_grad()
def accuracy(model: nn.Module, batch: MicroBatch) -> float:
    """The share of rows whose most probable class is the right one."""
    return (forward(model, batch.inputs).argmax(-1) == batch.targets).double().mean().item()


def digits_task(quick: bool) -> Task:
    """Handwritten digits, in micro-batches of 32 rows; an epoch's last window holds one of them."""
    rows, micro_batches, epochs = (32, 13, 2) if quick else (32, 45, 4)
    train, held_out = digits(train_rows=1440)
    generator = torch.Generator().manual_seed(SEED)

    def epoch() -> list[MicroBatch]:
        order = torch.randperm(train.items, generator=generator)
        parts = order.split(rows)[:micro_batches]
        return [MicroBatch(train.inputs[i], train.targets[i], len(i)) for i in parts]

    return Task(
        name="digits",
        title="CNN with GroupNorm on handwritten digits",
        unit="rows",
        make_model=lambda: DigitsCNN(width=32),
        epochs=[epoch() for _ in range(epochs)],
        held_out=held_out,
        accumulation_steps=4,
        lr=3e-3,
        weighted=False,
        exact_epochs=epochs,
    )


def docstrings_task(quick: bool) -> Task:
    """Python's docstrings, in micro-batches of two; an epoch's last window holds one of them."""
    rows, micro_batches, epochs, exact_epochs = (2, 9, 2, 2) if quick else (2, 25, 12, 4)
    longest = 96
    texts = text_rows(rows * micro_batches * epochs, longest)
    # The docstrings of one module stand side by side: mix them over the epochs.
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED))
    batches = [pad([texts[i] for i in part.tolist()]) for part in order.split(rows)]
    return Task(
        name="docstrings",
        title="character GPT on Python's docstrings",
        unit="tokens",
        make_model=lambda: CharGPT(width=160, layers=4, heads=5, longest=longest),
        epochs=[batches[n : n + micro_batches] for n in range(0, len(batches), micro_batches)],
        held_out=None,
        accumulation_steps=4,
        lr=1e-3,
        weighted=True,
        # Float64 costs more than all the others together, so it goes along for the first epochs.
        exact_epochs=exact_epochs,
    )
