"""Accelerate's documented loop: only the Accelerator is another one."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from fastaccum.bridges.accelerate import FusedAccelerator

accelerator = FusedAccelerator(gradient_accumulation_steps=4, max_norm=1.0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(20, 8), torch.ones(20, 1)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
print(f"norm of the last window {accelerator.accumulators[0].norm:.3f}")
