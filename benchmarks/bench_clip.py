"""`fastaccum.clip_grad_norm_` against the function of the same name in torch.

Bytes per float32 element: the norm reads 4; a clip reads and writes, 8. torch multiplies by the
factor also when it is 1; with nothing to clip, 4 suffice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import providers
from benchmarks.case import Case, Prepared
from benchmarks.shapes import named, numel


class Clip:
    """Clips its own gradients again and again, each time to half of what is left of them."""

    def __init__(self, clip: Callable, shapes, clips: bool) -> None:
        self.clip, self.clips = clip, clips
        self.params = [p.requires_grad_() for p in providers.fill(shapes, 0.02, seed=1)]
        for p, grad in zip(self.params, providers.fill(shapes, 1e-3, seed=2), strict=True):
            p.grad = grad
        self.limit = self.norm = float(clip(self.params, 1e9))

    def sample(self) -> dict[str, float]:
        """One call."""
        if self.clips:
            self.limit *= 0.5
            if self.limit < 1e-6 * self.norm:  # before the squares leave float32's range
                self.limit = self.norm
                torch._foreach_mul_([p.grad for p in self.params], 2.0**19)
        limit = self.limit if self.clips else 1e9
        start = time.perf_counter()
        self.clip(self.params, limit)
        return {"clip": time.perf_counter() - start}


def _clip_of(name: str) -> Callable:
    if name == "torch":
        return torch.nn.utils.clip_grad_norm_
    return providers.require("fastaccum", "clip_grad_norm_")


def prepare(shapes, clips: bool) -> Prepared:
    """Compares the norms and the clipped gradients, then hands over both functions."""
    made, missing = providers.build(["fastaccum", "torch"], lambda name: Clip(_clip_of(name), shapes, clips))
    for clip in made.values():
        clip.sample()
    first, *others = made.values()
    for other in others:
        # torch sums in float32, which costs it up to 9e-4 here; its own norm explains its clip.
        torch.testing.assert_close(other.norm, first.norm, rtol=2e-3, atol=0.0)
        factor = other.norm / first.norm if clips else 1.0
        rate = first.limit / other.limit if clips else 1.0
        for a, b in zip(other.params, first.params, strict=True):
            assert torch.allclose(a.grad * (factor * rate), b.grad, rtol=1e-5, atol=0.0), (
                "clipped gradients differ"
            )
    elements = numel(shapes)
    moved = {"torch": 12 * elements, "fastaccum": (12 if clips else 4) * elements}
    return Prepared(
        samplers={name: clip.sample for name, clip in made.items()},
        bytes={name: {"clip": moved[name]} for name in made},
        missing=missing,
        facts={"tensors": len(shapes), "elements": elements},
    )


def cases() -> list[Case]:
    """The drop-in at GPT-2's shapes and at the small ones."""
    found = []
    for label, rounds in (("gpt2-124m", 21), ("2000x512", 101)):
        shapes = named(label)
        for clips in (True, False):
            found.append(
                Case(
                    name=f"clip/{label}/{'clips' if clips else 'within'}",
                    prepare=partial(prepare, shapes, clips),
                    memory=4 * numel(shapes) * 5,
                    rounds=rounds,
                    quick=True,
                    roofline=True,
                )
            )
    return found
