"""The two training loops. Each is a generator that pauses after every window.

So the runs can take turns, window by window, and the noise of the machine hits all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import fastaccum

from .meter import ACCUMULATION, FORWARD_BACKWARD, WINDOW_END, Meter, Window
from .tasks import Task


def plain_loop(
    task: Task, model: nn.Module, optimizer: Optimizer, meter: Meter, foreach: bool | None = None
) -> Iterator[Window]:
    """The loop people write, made right for token weights and for the short last window.

    It must know a window before it starts, to divide by the window's own count.
    """
    meter.follow_accumulation()
    for epoch in task.epochs:
        for start in range(0, len(epoch), task.accumulation_steps):
            window = epoch[start : start + task.accumulation_steps]
            total = sum(map(task.weight, window))
            for batch in window:
                with meter.time(FORWARD_BACKWARD):
                    loss = task.loss(model, batch, "sum" if task.weighted else "mean") / total
                    loss.backward()
                weight = task.weight(batch)
                meter.add_micro_batch(loss.item() * total / weight, batch.items, weight)
            meter.look_at_memory()
            with meter.time(WINDOW_END):
                clip_grad_norm_(model.parameters(), task.max_norm, foreach=foreach)
                optimizer.step()
                optimizer.zero_grad()
            yield meter.close_window()


def fused_loop(
    task: Task, model: nn.Module, optimizer: fastaccum.FusedAccumulator, meter: Meter
) -> Iterator[Window]:
    """The same with `FusedAccumulator`; nothing about the window needs to be known before."""
    meter.follow_accumulation()
    meter.buffer_bytes = lambda: sum(optimizer.memory().values())
    for epoch in task.epochs:
        for batch in epoch:
            with meter.time(FORWARD_BACKWARD):
                loss = task.loss(model, batch)
                if task.weighted:
                    optimizer.backward(loss, weight=batch.items)
                else:
                    loss.backward()
            meter.add_micro_batch(loss.item(), batch.items, task.weight(batch))
            meter.look_at_memory()
            # The last add of a window is part of its end, for it also yields the norm.
            last = optimizer.micro_step + 1 == task.accumulation_steps
            with meter.time(WINDOW_END if last else ACCUMULATION):
                optimizer.step()
            if optimizer.updated:
                yield meter.close_window()
        with meter.time(WINDOW_END):
            left_over = optimizer.flush()
        if left_over:
            yield meter.close_window()
