"""How many bytes a window moves between memory and the processor, from sizes alone: what it must cost.

Per parameter element, where its gradient takes g bytes, the window's sum s and the buffer b::

    first micro-batch, kept as it came              0       take="backward": b + g
    second: both read, one written                  b + 2g                   2b + g
    later: buffer read and written, gradient read   2b + g                   2b + g
    norm, where the last add has not summed it      s       twice for a norm_type other than 1, 2 and inf
    update: the sum read; parameter and state read and written; a 16-bit parameter beside its master written

Copies that are made of a gradient which something else could write to, sparse gradients and what DDP moves
are not in it, and every parameter of the window counts as if each micro-batch had brought it a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastaccum.window import Finished, Window


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Traffic:
    """The bytes of the last window; worked out again only when something about it changed."""

    def __init__(self) -> None:
        self.bytes = 0
        self._key: tuple[Any, ...] = ()

    def window(
        self, window: Window, finished: Finished, micro_batches: int, take: str, norm_type: float, update: int
    ) -> None:
        """Notes a window that is about to be decided.

        Args:
            window: with all its gradients.
            finished: the same, by parameter.
            micro_batches: how many it holds.
            take: ``"step"`` or ``"backward"``.
            norm_type: p.
            update: bytes per window of everything that the update moves but the sum.
        """
        key = (finished.selection, micro_batches, bool(window.kept), window.has_partials, norm_type, update)
        if key == self._key:
            return
        self._key = key
        sums = size(finished.grads)
        gradients = sum(s.data.numel() * s.param.element_size() for s in finished.selection.slots)
        added = 0
        if not window.kept:
            pair = take == "step" and micro_batches > 1
            added = sums + 2 * gradients if pair else sums + gradients
            added += (micro_batches - (2 if pair else 1)) * (2 * sums + gradients)
        passes = 0 if window.has_partials else 1 if norm_type in (1.0, 2.0, math.inf) else 2
        self.bytes = added + passes * sums + sums + update

    def nothing(self) -> None:
        """Notes a window without a gradient."""
        self.bytes, self._key = 0, ()
