"""Whole windows and their ends: what accumulation, norm, clip and update cost after backward.

Bytes per float32 element, K micro-batches, AdamW (parameter, two moments: 12 read, 12 written):

    fastaccum  K = 1   norm 4 + update 28 (gradient 4 read)              = 32
               K > 1   each add 12, the norm folded into the last; 28    = 12(K-1) + 28
    stock      any K   each add 12; norm 4; clip 8; update 28            = 12(K-1) + 40
"""

from __future__ import annotations

import math
from functools import partial

import torch

from benchmarks import providers
from benchmarks.case import Case, Prepared
from benchmarks.shapes import many_small, named, numel


def window_bytes(provider: str, steps: int, elements: int) -> dict[str, int]:
    """Bytes of a window and of its last `close`, by the formulas above."""
    add = 12 if steps > 1 else 0
    if provider.startswith("fastaccum"):
        end = 28 if steps > 1 else 32
    else:
        end = 40
    return {
        "window": (add * (steps - 1) + end) * elements,
        "window end": (add + end) * elements,
    }


def assert_agree(made: dict[str, providers.WindowProvider], templates: list[torch.Tensor]) -> None:
    """Every provider has the same norm, moments and parameters after the same window.

    PyTorch sums a tensor's norm in float32, which is wrong by 9e-4 for the embedding of GPT-2; so
    its norm gets that much room, and its own clip factor is taken out before moments are compared.
    The moments say more than the parameters: AdamW's first update is nearly the gradient's sign,
    so that a wrong factor would hide in it.

    Raises:
        AssertionError: naming the provider and what differs.
    """
    true = math.sqrt(sum(float(t.double().square().sum()) for t in templates))
    (first_name, first), *others = made.items()
    for name, provider in made.items():
        room = 1e-6 if name.startswith("fastaccum") else 2e-3
        assert abs(provider.norm() / true - 1.0) < room, f"norm: {name}: {provider.norm()} / {true}"
    for name, other in others:
        factor = other.norm() / first.norm()
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            try:
                pairs = zip(other.state(key), first.state(key), strict=True)
            except KeyError:
                continue  # a peer that names its state differently is held to its parameters
            for a, b in pairs:
                assert torch.allclose(a * factor**power, b, rtol=1e-4, atol=1e-12), (
                    f"{key}: {name} / {first_name}"
                )
        for a, b in zip(other.params, first.params, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"params: {name} / {first_name}"


def prepare(shapes, steps: int, names: list[str]) -> Prepared:
    """Builds the providers, runs one window on each and compares the results."""
    templates = providers.fill(shapes, 10.0 / numel(shapes) ** 0.5, seed=2)  # norm 10: it clips
    made, missing = providers.build(names, lambda name: providers.WINDOW_PROVIDERS[name](shapes, steps))
    for name, provider in list(made.items()):
        try:
            provider.sample(templates)
        except providers.Unavailable as reason:
            missing[name] = str(reason)
            del made[name]
    assert_agree(made, templates)
    return Prepared(
        samplers={name: partial(made[name].sample, templates) for name in made},
        bytes={name: window_bytes(name, steps, numel(shapes)) for name in made},
        missing=missing,
        facts={"tensors": len(shapes), "elements": numel(shapes), "norm": _norm(made)},
    )


def _norm(made: dict[str, providers.WindowProvider]) -> float | None:
    return next(iter(made.values())).norm() if made else None


def _memory(elements: int, count: int) -> int:
    # Each provider: parameter, two moments. Once: templates, and up to four sets of gradients.
    return 4 * elements * (3 * count + 5)


def _case(label: str, shapes, steps: int, names: list[str], **options) -> Case:
    return Case(
        name=f"window/{label}/K={steps}",
        prepare=partial(prepare, shapes, steps, names),
        memory=_memory(numel(shapes), len(names)),
        **{"roofline": True, **options},
    )


def cases() -> list[Case]:
    """All window cases, the goals' shapes first."""
    best = ["fastaccum", "stock best"]
    both = [*best, "stock loop"]
    peers = [*both, "fastaccum reference", "torch-optimi", "deepspeed"]
    found = []
    for steps, names, rounds in ((1, both, 11), (2, best, 15), (4, both, 9), (16, best, 7)):
        options = {"rounds": rounds, "quick": steps == 1, "quick_rounds": 3}
        found.append(_case("gpt2-124m", named("gpt2-124m"), steps, names, **options))
    found.append(_case("gpt2-124m", named("gpt2-124m"), 64, best, rounds=3))
    for steps in (1, 4):
        options = {"rounds": 31, "quick": True, "quick_rounds": 7}
        names = both if steps == 4 else best
        found.append(_case("resnet50", named("resnet50"), steps, names, **options))
    options = {"rounds": 101, "quick": True, "quick_rounds": 15}
    found.append(_case("2000x512", named("2000x512"), 1, both, **options))
    found.append(_case("one-100m", named("one-100m"), 1, best, rounds=9))
    found.append(_case("one-100m", named("one-100m"), 4, best, rounds=7))
    found.append(_case("peers-16m", [(1 << 20,)] * 16, 2, peers, rounds=11))
    for power in (4, 5, 6, 7, 8):  # growth over total size, 16 tensors
        shapes = [(10**power // 16,)] * 16
        rounds = 51 if power < 7 else 9
        found.append(_case(f"total-1e{power}", shapes, 1, best, rounds=rounds))
    for count in (1, 10, 100, 1000, 10_000):  # growth over the number of tensors
        rounds = 101 if count < 1000 else 31
        found.append(_case(f"tensors-{count}", many_small(count), 1, both, rounds=rounds))
    # For the tests of the command itself.
    found.append(_case("tiny", named("tiny"), 2, peers, rounds=3, roofline=False))
    return found
