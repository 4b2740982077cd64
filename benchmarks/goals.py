"""The goals of the CPU path, and what a run has to say about each.

A goal is a number to compare a measurement with, never a test: a missed goal is printed, not
raised.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.stats import CANNOT_TELL, Estimate


@dataclass(frozen=True)
class Goal:
    """One line of the goals' table.

    Attributes:
        work: what is done, in words.
        case: name of the case.
        section: ``against`` (somebody's time / ours), ``share`` (of the triad's bandwidth),
            ``ratio`` (our time / somebody's) or ``facts``.
        provider: whose number.
        metric: which of the case's metrics.
        target: the goal.
        at_most: whether smaller is better.
    """

    work: str
    case: str
    section: str
    provider: str
    metric: str
    target: float
    at_most: bool = False

    def measured(self, results: dict[str, dict]) -> Estimate | None:
        """The estimate in ``results`` (by case name), None where it was not measured."""
        found = results.get(self.case, {}).get(self.section, {}).get(self.provider, {})
        found = found.get(self.metric) if isinstance(found, dict) else None
        if found is None:
            return None
        return Estimate(found["value"], found["spread"])

    def verdict(self, estimate: Estimate | None) -> str:
        """``met``, ``missed``, ``cannot tell`` or ``not measured``."""
        if estimate is None:
            return "not measured"
        side = estimate.against(self.target) * (-1 if self.at_most else 1)
        return {1: "met", -1: "missed", 0: CANNOT_TELL}[side]


def _window(shapes: str, steps: int, target: float) -> Goal:
    work = f"whole window, {shapes}, K = {steps}, against stock best"
    case = f"window/{shapes}/K={steps}"
    return Goal(work, case, "against", "stock best", "window", target)


def _end(steps: int, section: str, provider: str, target: float, words: str) -> Goal:
    work = f"window end, gpt2-124m, K = {steps}, {words}"
    return Goal(work, f"window/gpt2-124m/K={steps}", section, provider, "window end", target)


GOALS = [
    _window("gpt2-124m", 1, 1.4),
    _window("gpt2-124m", 2, 1.4),
    _window("gpt2-124m", 4, 1.3),
    _window("gpt2-124m", 16, 1.0),
    _end(4, "against", "stock best", 1.6, "against stock best"),
    _end(4, "against", "stock loop", 5.0, "against the loop with a default AdamW"),
    _end(4, "share", "fastaccum", 0.9, "share of the triad's bandwidth"),
    _window("2000x512", 1, 6.0),
    _window("resnet50", 1, 1.4),
    _window("resnet50", 4, 1.3),
    Goal("clip_grad_norm_ that clips, gpt2-124m", "clip/gpt2-124m/clips", "against", "torch",
         "clip", 2.0),
    Goal("clip_grad_norm_ with nothing to clip, gpt2-124m", "clip/gpt2-124m/within", "against",
         "torch", "clip", 4.0),
    Goal("micro-batch that is not the last, GPT, over plain backward", "microbatch/gpt", "over",
         "plain", "micro-batch", 1.02, at_most=True),
    Goal("micro-batch that is not the last, ResNet-50 at batch 8, over plain backward",
         "microbatch/resnet50", "over", "plain", "micro-batch", 1.02, at_most=True),
    Goal("micro-batch that is not the last, 2000x512, no compute, over plain backward",
         "microbatch/2000x512", "over", "plain", "micro-batch", 1.25, at_most=True),
    *(
        Goal(f"peak gradient memory over its formula, {mode}", f"memory/{shapes}/{mode}",
             "peak", "measured / formula", "bytes", 1.02, at_most=True)
        for shapes in ("resnet50",)
        for mode in ("K=1", "step", "backward")
    ),
]  # fmt: skip
