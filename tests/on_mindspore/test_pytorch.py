"""Bit for bit what the PyTorch front end does with the same numbers: it is the same core.

FASTACCUM_TORCH_PYTHON names an interpreter that has torch and fastaccum; `make test-mindspore` gives the one
of .venv. Without it the comparison cannot be made and these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mindspore import nn
from mindspore.experimental import optim

from fastaccum.mindspore import FusedAccumulator
from tests.on_mindspore.setting import arrays, parameters, tensors

TORCH = os.environ.get("FASTACCUM_TORCH_PYTHON", "")
pytestmark = pytest.mark.skipif(not TORCH, reason="FASTACCUM_TORCH_PYTHON names no interpreter with torch")

CASES = {
    "AdamW": lambda p: optim.AdamW(p, 1e-3, (0.9, 0.999), 1e-8, 0.01),
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    "nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=0.05),
}
STEPS, MAX_NORM = 3, 5.0
WEIGHTS = (2.0, 3.0, 7.0, 1.0, 1.0, 4.0, 5.0, 0.5)  # two windows and a short one


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case, tmp_path):
    micro = [arrays(i) for i in range(len(WEIGHTS))]
    params = parameters()
    given = {f"p{k}": p.asnumpy().copy() for k, p in enumerate(params)}
    given |= {f"g{i}_{k}": g for i, grads in enumerate(micro) for k, g in enumerate(grads)}
    facts = {"case": case, "n": len(params), "steps": STEPS, "max_norm": MAX_NORM, "weights": WEIGHTS}
    np.savez(tmp_path / "in.npz", **given, **facts)
    root = Path(__file__).resolve().parents[2]
    script = Path(__file__).with_name("torch_side.py")
    done = subprocess.run(
        [TORCH, str(script), str(tmp_path / "in.npz"), str(tmp_path / "out.npz")],
        cwd=root,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wanted = np.load(tmp_path / "out.npz")
    accumulator = FusedAccumulator(CASES[case](params), STEPS, max_norm=MAX_NORM)
    for grads, weight in zip(micro, WEIGHTS, strict=True):
        accumulator.step(tensors(grads), weight=weight)
    assert accumulator.flush()
    for k, p in enumerate(params):
        assert np.array_equal(p.asnumpy(), wanted[f"p{k}"]), p.name
    assert accumulator.norm.asnumpy() == wanted["norm"]
