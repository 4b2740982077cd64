"""The PyTorch front end on the numbers of a file; runs in the other environment, which has no MindSpore.

``python torch_side.py IN.npz OUT.npz``: parameters p0..., gradients of micro-batch i g{i}_0..., the case's
name; writes the parameters after all windows, and the norm of the last.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from fastaccum import FusedAccumulator

CASES = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
}


def main(source: str, target: str) -> None:
    """Trains, window by window."""
    data = np.load(source)
    n, steps = int(data["n"]), int(data["steps"])
    params = [torch.nn.Parameter(torch.from_numpy(data[f"p{k}"].copy())) for k in range(n)]
    optimizer = FusedAccumulator(CASES[str(data["case"])](params), steps, max_norm=float(data["max_norm"]))
    for i, weight in enumerate(data["weights"]):
        for k, param in enumerate(params):
            param.grad = torch.from_numpy(data[f"g{i}_{k}"].copy())
        optimizer.step(weight=float(weight))
    optimizer.flush()
    found = {f"p{k}": param.detach().numpy() for k, param in enumerate(params)}
    np.savez(target, norm=optimizer.norm.numpy(), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
