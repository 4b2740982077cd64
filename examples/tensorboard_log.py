"""Norm, clip share, skipped updates, noise scale and bytes moved, in TensorBoard."""

import torch
from torch.utils.tensorboard import SummaryWriter

from fastaccum import FusedAccumulator

model, writer = torch.nn.Linear(8, 1), SummaryWriter("runs")
optimizer = FusedAccumulator(torch.optim.AdamW(model.parameters(), lr=0.01), 4, max_norm=1.0)
optimizer.track(noise_scale=True)
for _ in range(20):
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    if optimizer.updated:
        optimizer.log(writer)
writer.close()
