"""What a user's code looks like to a type checker: `make lint` checks it, nothing runs it.

Where the package does not say what it should, mypy fails here; an ignored error that does not come is one.
"""

import torch

import fastaccum
from fastaccum import FusedAccumulator, backends, ops
from fastaccum import FusedAcumulator as _  # type: ignore[attr-defined]  # noqa: F401

choices: dict[str, dict[str, list[str]]] = fastaccum.backends()
reasons: list[str] = backends(torch.device("cpu"))["cpu"]["triton"]
backends(device=0.5)  # type: ignore[arg-type]
names: tuple[str, ...] = ops.NAMES
version: str = fastaccum.__version__
report: str = fastaccum.report()

model = torch.nn.Linear(2, 1)
optimizer = FusedAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), 2, max_norm=1.0)
FusedAccumulator(torch.optim.SGD(model.parameters()), acumulation_steps=2)  # type: ignore[call-arg]
norm: torch.Tensor = fastaccum.clip_grad_norm_(model.parameters(), 1.0)
fastaccum.clip_grad_norm(model.parameters(), 1.0)  # type: ignore[attr-defined]
rates: fastaccum.WarmUp | None = None
steps: int = fastaccum.accumulation_steps_for(64, 8)
