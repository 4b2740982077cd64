"""A short training with an installed fastaccum, on whatever backend it has."""

import torch

import fastaccum

torch.manual_seed(0)
data, target = torch.randn(10, 8), torch.randn(10, 1)


def train(wrap):
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if wrap:
        optimizer = fastaccum.FusedAccumulator(optimizer, accumulation_steps=2, max_norm=0.5)
    for rows in range(0, 10, 2 if wrap else 4):
        stop = rows + (2 if wrap else 4)
        torch.nn.functional.mse_loss(model(data[rows:stop]), target[rows:stop]).backward()
        if not wrap:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if not wrap:
            optimizer.zero_grad()
    if wrap:
        assert optimizer.flush()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


torch.testing.assert_close(train(wrap=True), train(wrap=False))
print(f"fastaccum {fastaccum.__version__} from {fastaccum.__file__}: torch {torch.__version__}, ok")
