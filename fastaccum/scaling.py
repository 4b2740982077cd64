"""Loss scaling for mixed precision: what a micro-batch's gradients were multiplied by, and what was found.

Two protocols. With ``scaler=`` the wrapper scales the loss in ``backward()`` and updates the scaler once per
window. In the explicit one the loop calls ``scaler.step(wrapper)``, which sets ``grad_scale`` and
``found_inf`` on the wrapper for the time of its ``step()``; ``grad_scale`` None says that ``unscale_`` has
divided the gradients already. Either way the division is part of the add's factor and costs no pass.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

_owners: weakref.WeakKeyDictionary[GradScaler, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def check_scaler(scaler: Any) -> GradScaler | None:
    """Raises TypeError or ValueError unless a scaler can be given to a new wrapper."""
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
    owner = _owners.get(scaler)
    if owner is not None and owner() is not None:
        raise ValueError(
            "this scaler belongs to another FusedAccumulator, which updates it once per window: leave "
            "scaler= out and use scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update() "
            "with both"
        )
    return scaler


class Scaling:
    """The loss scale of one wrapper.

    Attributes:
        scaler: the one given as ``scaler=``, if it is enabled.
        late: what an update of it that waits for the pending micro-batch has to go by.
    """

    def __init__(self, owner: Any, scaler: GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._owner = weakref.ref(owner)
        self.late: Tensor | None = None  # found_inf of a window that was flushed beside a micro-batch
        if scaler is not None:
            _owners[scaler] = self._owner

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as its backward must see it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def of_micro_batch(self) -> tuple[Tensor | None, Tensor | None]:
        """(what the pending gradients were multiplied by, GradScaler's found_inf), None where there is none.

        Raises:
            RuntimeError: ``scaler.step(wrapper)`` was called where the wrapper steps by itself, or the
                scaler's numbers have no data.
        """
        owner: Any = self._owner()
        told = vars(owner)
        if "found_inf" not in told:
            return (None, None) if self.scaler is None else (self.scaler._scale, None)
        if self.scaler is not None:
            raise RuntimeError(
                "scaler.step(optimizer) was called on a FusedAccumulator that has the scaler as scaler=: "
                "call optimizer.step() alone, or leave scaler= out for the explicit protocol (scaler.scale, "
                "scaler.step, scaler.update)"
            )
        device = owner._outcome.device
        found = told["found_inf"]  # the number 0 where there was no gradient to look at
        found = _beside(found, "found_inf", device) if isinstance(found, Tensor) else None
        return _beside(told.get("grad_scale"), "grad_scale", device), found

    def end_window(self, found_inf: Tensor, is_pending: bool) -> None:
        """Grows or shrinks the wrapper's own scale; later, if pending gradients carry the present one."""
        if self.scaler is None:
            return
        if is_pending:
            self.late = found_inf.clone()
        else:
            self._update(found_inf)

    def end_micro_batch(self) -> None:
        """Nothing is pending: an update that had to wait is made."""
        if self.late is not None:
            late, self.late = self.late, None
            self._update(late)

    def catch_up(self, late: Tensor | None) -> None:
        """In a copy, which has no pending gradients: makes the update that waits for the original's."""
        if late is not None:
            self._update(late)

    def _update(self, found_inf: Tensor) -> None:
        assert self.scaler is not None
        self.scaler.scale(found_inf)  # one that was copied or loaded has no scale before its first use
        state = self.scaler._per_optimizer_states[id(self._owner())]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        self.scaler.update()


def _beside(scalar: Tensor | None, name: str, device: torch.device) -> Tensor | None:
    """A scaler's number where the gradients are: its own device is the default GPU, theirs may be another."""
    if scalar is None or scalar.device == device:
        return scalar
    if scalar.is_meta or device.type == "meta":
        raise RuntimeError(
            f"{name} is on {scalar.device}, the gradients are on {device}: a tensor without data cannot "
            "decide an update. Make the GradScaler for the gradients' device, and move the model there first"
        )
    return scalar.to(device, non_blocking=True)


def unscaled(factor: float | Tensor, scale: Tensor | None, synchronous: bool) -> float | Tensor:
    """The factor of an add whose gradients carry a loss scale; on a GPU the scale is not read."""
    if scale is None:
        return factor
    if synchronous and not isinstance(factor, Tensor):
        return factor / float(scale)
    return scale.double().reciprocal().view(()) * factor
