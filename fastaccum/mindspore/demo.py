"""LeNet-5 on scikit-learn's handwritten digits: MindSpore's own accumulation against ``TrainStep``.

``python -m fastaccum.mindspore.demo [--quick] [--json FILE]`` trains from the same weights on the same
micro-batches, window by window in turn. The last window of an epoch is shorter. It ends with status 0 if the
trainings agree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import fastaccum
from fastaccum.mindspore import FusedAccumulator, TrainStep, library

ACCUMULATION_STEPS = 3  # a division that rounds, unlike that by 4
ROWS = 32
MAX_NORM = 1.0
SEED = 1234
# Two ways of writing MindSpore's own loop differ in rounding only, and the difference grows with the
# training: it is the measure.
FACTOR, FLOOR = 4.0, 1e-6
RULE = f"difference <= {FACTOR:g} x that of two ways of writing MindSpore's own loop + {FLOOR:g}"

Batch = tuple[Tensor, Tensor]


class LeNet5(nn.Cell):
    """LeNet-5 (LeCun et al. 1998) with tanh: [rows, 1, 32, 32] -> [rows, 10].

    Args:
        seed: of the weights, which are drawn by numpy, so that they are the same everywhere.
    """

    def __init__(self, seed: int = SEED) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)

        def made(name: str, *shape: int) -> Parameter:
            bound = np.prod(shape[1:]) ** -0.5
            return Parameter(Tensor(rng.uniform(-bound, bound, shape).astype(np.float32)), name=name)

        self.conv1, self.conv2 = made("conv1", 6, 1, 5, 5), made("conv2", 16, 6, 5, 5)
        self.fc1, self.fc2, self.fc3 = made("fc1", 120, 400), made("fc2", 84, 120), made("fc3", 10, 84)
        sizes = {"b1": 6, "b2": 16, "b3": 120, "b4": 84, "b5": 10}
        self.b1, self.b2, self.b3, self.b4, self.b5 = (
            Parameter(Tensor(np.zeros(n, np.float32)), name=name) for name, n in sizes.items()
        )
        self.pool = nn.AvgPool2d(2, 2)

    def construct(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(ops.tanh(ops.conv2d(x, self.conv1, self.b1)))
        x = self.pool(ops.tanh(ops.conv2d(x, self.conv2, self.b2)))
        x = ops.tanh(ops.matmul(x.reshape((-1, 400)), self.fc1.T) + self.b3)
        x = ops.tanh(ops.matmul(x, self.fc2.T) + self.b4)
        return ops.matmul(x, self.fc3.T) + self.b5


def digits(train_rows: int = 1440) -> tuple[tuple[np.ndarray, np.ndarray], Batch]:
    """Training and held-out rows of scikit-learn's 1797 digits: 8 x 8 pixels, each four times each way.

    Returns:
        ``((images float32 [n, 1, 32, 32], labels int32 [n]), held-out batch)``.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.kron(bunch.images.astype(np.float32) / 16, np.ones((1, 4, 4), np.float32))[:, None]
    labels = bunch.target.astype(np.int32)
    # Neighbouring rows come from one writer, so the split is drawn at random, always the same.
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:train_rows], order[train_rows:]
    return (images[train], labels[train]), (Tensor(images[held_out]), Tensor(labels[held_out]))


def epochs(images: np.ndarray, labels: np.ndarray, count: int, micro_batches: int) -> list[list[Batch]]:
    """The micro-batches of each epoch, in an order of its own."""
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(count):
        order = rng.permutation(len(labels))
        parts = [order[i * ROWS : (i + 1) * ROWS] for i in range(micro_batches)]
        found.append([(Tensor(images[part]), Tensor(labels[part])) for part in parts])
    return found


class Training:
    """One way of training; :meth:`window` runs a window and returns its loss."""

    def __init__(self) -> None:
        self.net = LeNet5()
        self.network = nn.WithLossCell(self.net, nn.CrossEntropyLoss())
        self.optimizer = nn.Momentum(self.net.trainable_params(), 0.4, 0.9)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def window(self, batches: Sequence[Batch]) -> None:
        """Runs a window and notes its mean loss and its time."""
        start = time.perf_counter()
        losses = self.run(batches)
        self.optimizer.parameters[0].asnumpy()  # waits for the update
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(np.mean([float(loss) for loss in losses])))

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward, backward, accumulate, update."""
        raise NotImplementedError

    def accuracy(self, batch: Batch) -> float:
        """The share of rows whose most probable class is the right one."""
        return float((self.net(batch[0]).argmax(-1) == batch[1]).astype(mindspore.float32).mean())


class Sums(Training):
    """MindSpore's operators: sum the gradients, divide by their number, clip, update."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = mindspore.value_and_grad(self.network, None, self.optimizer.parameters)

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """See the base class."""
        losses: list[Tensor] = []
        total: Any = None
        for inputs, labels in batches:
            loss, grads = self.gradients(inputs, labels)
            losses.append(loss)
            grads = self.share(grads, len(batches))
            total = grads if total is None else tuple(map(ops.add, total, grads))
        mean = self.mean(total, len(batches))
        norm = ops.sqrt(sum(ops.reduce_sum(ops.square(g)) for g in mean))
        factor = ops.minimum(MAX_NORM / (norm + 1e-6), 1.0)
        # As variables: a plain tuple is a constant, for which the optimizer would be compiled every time.
        self.optimizer(mindspore.mutable(tuple(ops.mul(g, factor) for g in mean)))
        return losses

    def share(self, grads: tuple[Tensor, ...], held: int) -> tuple[Tensor, ...]:
        """What is added."""
        return grads

    def mean(self, total: tuple[Tensor, ...], held: int) -> tuple[Tensor, ...]:
        """What is clipped."""
        return tuple(ops.div(g, held) for g in total)


class Shares(Sums):
    """The same, but each micro-batch's gradient is divided before it is added."""

    def share(self, grads: tuple[Tensor, ...], held: int) -> tuple[Tensor, ...]:
        """See the base class."""
        return tuple(ops.div(g, held) for g in grads)

    def mean(self, total: tuple[Tensor, ...], held: int) -> tuple[Tensor, ...]:
        """See the base class."""
        return total


class Fused(Training):
    """``TrainStep`` of fastaccum."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = FusedAccumulator(self.optimizer, ACCUMULATION_STEPS, max_norm=MAX_NORM)
        self.step = TrainStep(self.network, self.accumulator)

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """See the base class."""
        losses = [self.step(inputs, labels) for inputs, labels in batches]
        if self.accumulator.micro_step:
            self.accumulator.flush()
        return losses


WAYS: dict[str, Callable[[], Training]] = {"MindSpore": Sums, "MindSpore, shares": Shares, "fastaccum": Fused}


def main(argv: list[str] | None = None) -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastaccum.mindspore.demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer windows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here")
    options = parser.parse_args(argv)
    (images, labels), held_out = digits()
    data = epochs(images, labels, *((1, 13) if options.quick else (2, 44)))
    trainings = {name: make() for name, make in WAYS.items()}
    windows = [
        epoch[i : i + ACCUMULATION_STEPS] for epoch in data for i in range(0, len(epoch), ACCUMULATION_STEPS)
    ]
    for number, window in enumerate(windows):
        for training in trainings.values():
            training.window(window)
        if number % 6 == 0 or number + 1 == len(windows):
            shown = ", ".join(f"{name} {t.losses[-1]:.6f}" for name, t in trainings.items())
            print(f"window {number + 1:>3} of {len(windows)}: loss {shown}", flush=True)
    measure, difference = (
        max(abs(a - b) for a, b in zip(trainings[name].losses, trainings["MindSpore"].losses, strict=True))
        for name in ("MindSpore, shares", "fastaccum")
    )
    agreed = bool(difference <= FACTOR * measure + FLOOR)
    full = [i for i, window in enumerate(windows) if i > 1 and len(window) == ACCUMULATION_STEPS]
    rows = {
        name: {
            "final loss": t.losses[-1],
            "held-out accuracy": t.accuracy(held_out),
            "milliseconds per window": 1e3 * median(t.seconds[i] for i in full),
            "losses": t.losses,
        }
        for name, t in trainings.items()
    }
    print(f"\n{'LeNet-5 on digits':<20}{'final loss':>12}{'held out':>10}{'ms/window':>11}")
    for name, row in rows.items():
        cells = f"{row['final loss']:>12.6f}{row['held-out accuracy']:>10.2%}"
        print(f"{name:<20}{cells}{row['milliseconds per window']:>11.1f}")
    word = "AGREES" if agreed else "DISAGREES"
    print(f"{word}: the largest difference of a loss is {difference:.1e} (measure {measure:.1e}; {RULE})")
    if options.json:
        document = {
            "versions": {"mindspore": mindspore.__version__, "fastaccum": fastaccum.__version__},
            "machine": {"cores": os.cpu_count(), "system": platform.platform(terse=True)},
            "instruction level": library.instruction_level(),
            "rule": RULE,
            "measure": measure,
            "difference": difference,
            "agreed": agreed,
            "trainings": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"written: {options.json}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
