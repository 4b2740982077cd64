"""What the wrapper warns of, each once: loops that are probably not what was meant."""

from __future__ import annotations

import os
import sys
import warnings

from fastaccum.arrivals import Arrivals

_PACKAGE = os.path.dirname(__file__) + os.sep

_TEXTS = {
    "own count": (
        "every micro-batch so far held exactly accumulation_steps={steps} backward calls. If the loop calls "
        "step() only on every N-th iteration (`if (i + 1) % N == 0`), delete that condition: call step() "
        "after every backward, the wrapper counts by itself"
    ),
    "clipped": (
        "a pending gradient was changed in place after backward. If that was a clip, it clipped this "
        "micro-batch only, not the window: pass max_norm= to FusedAccumulator, or call "
        "fastaccum.clip_grad_norm_(optimizer, max_norm)"
    ),
    "skipped": (
        "an update was skipped: the window's gradient holds inf or NaN. `skipped` counts such windows, "
        "nonfinite='error' stops at the first, and this warning comes once"
    ),
    "unreduced": (
        "the window closes with gradients that DDP has not reduced: its last micro-batch ran under "
        "no_sync(), so ranks will update differently unless you reduce .grad yourself. Run the last "
        "micro-batch without no_sync(): the one with optimizer.micro_step + 1 == "
        "optimizer.accumulation_steps, and the last before flush()"
    ),
    "weights": (
        "this rank's window is divided by this rank's own weights, while gradients are averaged over ranks: "
        "give every rank the same number (the all-reduced total divided by the world size), or ranks will "
        "update differently. This warning comes once"
    ),
}


class Advice:
    """The warnings of one wrapper."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._same_backward_calls = 0

    def give(self, key: str, **values: object) -> None:
        """Warns, the first time, at the line outside of this package that led here."""
        if key in self._given:
            return
        self._given.add(key)
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            level, frame = level + 1, frame.f_back
        warnings.warn(_TEXTS[key].format(**values), UserWarning, stacklevel=level)

    def withhold(self, key: str) -> None:
        """Never warns of this."""
        self._given.add(key)

    def look_at(self, arrivals: Arrivals, steps: int) -> None:
        """Looks whether the pending micro-batch seems to be a whole window: the loop counts by itself."""
        if steps == 1 or "own count" in self._given:
            return
        self._same_backward_calls = self._same_backward_calls + 1 if arrivals.repeated(steps) else 0
        if self._same_backward_calls >= 2:
            self.give("own count", steps=steps)

    def look_for_clip(self, arrivals: Arrivals) -> None:
        """Looks whether somebody else has changed a pending gradient."""
        if "clipped" not in self._given and arrivals.changed_in_place():
            self.give("clipped")
