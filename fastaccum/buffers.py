"""A model's buffers as they were: a forward pass may write them, or put new tensors in their place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class Buffers:
    """Remembers every buffer of a model, the tensor and its values.

    Args:
        model: the model.
        but: tensors that are not put back.
    """

    def __init__(self, model: nn.Module, but: Iterable[Tensor] = ()) -> None:
        left_out = set(map(id, but))
        self._kept = [
            (module, name, buffer, None if buffer is None or is_lazy(buffer) else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if id(buffer) not in left_out
        ]

    def put_back(self) -> None:
        """Puts back tensors and values; buffers that were registered since stay."""
        with torch.no_grad():
            for module, name, buffer, value in self._kept:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
