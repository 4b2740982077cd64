"""Whole windows and their ends: what accumulation, norm, clip and update cost after backward.

Bytes per element of e bytes (float32: 4, bf16: 2), K micro-batches; s is what the update reads and writes
beside the gradient, 6e for Adam and AdamW (parameter, two moments), 4e for SGD with momentum:

    fastaccum  K = 1   norm e, update e + s                                 float32 AdamW: 32
               K > 1   adds 2e + 4 first, then e + 8 each, the norm         12(K-1) + 28
                       folded into the last; update 4 + s
    stock      any K   adds 3e each; norm e; clip 2e; update e + s          12(K-1) + 40

The buffer is float32: with bf16 gradients fastaccum moves more bytes than stock, which sums them in bf16.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from benchmarks import harness, providers
from benchmarks.case import Case, Prepared
from benchmarks.shapes import llama_layers, many_small, named, numel


def window_bytes(
    provider: str, steps: int, elements: int, update: str = "AdamW", e: int = 4
) -> dict[str, int]:
    """Bytes of a window and of its last `close`, by the formulas above."""
    state = 4 * e if update == "SGD" else 6 * e
    if not provider.startswith("fastaccum"):
        adds, end = [3 * e] * (steps - 1), 4 * e + state
    elif steps == 1:
        adds, end = [], 2 * e + state
    else:
        adds, end = [2 * e + 4, *[e + 8] * (steps - 2)], 4 + state
    return {"window": (sum(adds) + end) * elements, "window end": (sum(adds[-1:]) + end) * elements}


def assert_agree(made: dict[str, providers.WindowProvider], templates: list[torch.Tensor]) -> None:
    """Every provider has the same norm, state and parameters after the same window.

    PyTorch sums a tensor's norm in float32, which is wrong by 9e-4 for the embedding of GPT-2 and by 1.1e-2
    for one tensor of 1e8 elements; so its norm gets that much room, and its own clip factor is taken out
    before moments are compared.
    The moments say more than the parameters: AdamW's first update is nearly the gradient's sign,
    so that a wrong factor would hide in it. In bf16, which stock sums in and has 8 bits, they are held
    to 3 %.

    Raises:
        AssertionError: naming the provider and what differs.
    """
    true = math.sqrt(sum(float(t.double().square().sum()) for t in templates))
    (first_name, first), *others = made.items()
    rough = first.dtype == torch.bfloat16
    for name, provider in made.items():
        room = 1e-6 if name.startswith("fastaccum") and not rough else 2e-2
        assert abs(provider.norm() / true - 1.0) < room, f"norm: {name}: {provider.norm()} / {true}"
    for name, other in others:
        factor = other.norm() / first.norm()
        for key, power in () if other.own_state else providers.STATES[first.update].items():
            try:
                pairs = zip(other.state(key), first.state(key), strict=True)
            except KeyError:
                continue  # a peer that names its state differently is held to its parameters
            rtol = 3e-2 if rough else 1e-4
            for a, b in pairs:
                close = torch.allclose(a * factor**power, b, rtol=rtol, atol=1e-5 if rough else 1e-12)
                assert close, f"{key}: {name} / {first_name}"
        rtol, atol = (1e-2, 1e-4) if rough else (1e-5, 1e-6)
        for a, b in zip(other.params, first.params, strict=True):
            assert torch.allclose(a, b, rtol=rtol, atol=atol), f"params: {name} / {first_name}"


def prepare(
    shapes, steps: int, names: list[str], update: str = "AdamW", dtype: torch.dtype = torch.float32
) -> Prepared:
    """Builds the providers, runs one window on each and compares the results."""
    templates = providers.fill(shapes, 10.0 / numel(shapes) ** 0.5, seed=2)  # norm 10: it clips
    templates = [t.to(dtype) for t in templates]
    make = providers.WINDOW_PROVIDERS
    made, missing = providers.build(names, lambda name: make[name](shapes, steps, update, dtype))
    for name, provider in list(made.items()):
        try:
            provider.sample(templates)
        except providers.Unavailable as reason:
            missing[name] = str(reason)
            del made[name]
    assert_agree(made, templates)
    return Prepared(
        samplers={name: partial(made[name].sample, templates) for name in made},
        bytes={name: window_bytes(name, steps, numel(shapes), update, dtype.itemsize) for name in made},
        missing=missing,
        facts={
            "tensors": len(shapes),
            "elements": numel(shapes),
            "update": update,
            "dtype": str(dtype),
            "norm": _norm(made),
        },
    )


def _norm(made: dict[str, providers.WindowProvider]) -> float | None:
    return next(iter(made.values())).norm() if made else None


def _memory(elements: int, count: int) -> int:
    # Each provider: parameter, two moments. Once: templates, and up to four sets of gradients.
    return 4 * elements * (3 * count + 5)


def layers_that_fit(count: int) -> int:
    """How many of the 7 B model's 32 layers this machine has the memory for, with so many providers."""
    share = int(0.6 * harness.total_memory())  # the rest is the system's, and what others hold
    return max(1, min(32, share // _memory(numel(llama_layers(1)), count)))


def _case(
    label: str, shapes, steps: int, names: list[str], update: str = "AdamW", dtype=torch.float32, **options
) -> Case:
    name = f"window/{label}/K={steps}"
    if (update, dtype) != ("AdamW", torch.float32):
        name += f"/{update.lower()}-{'bf16' if dtype == torch.bfloat16 else 'float32'}"
    return Case(
        name=name,
        prepare=partial(prepare, shapes, steps, names, update, dtype),
        memory=_memory(numel(shapes), len(names)),
        **{"roofline": True, **options},
    )


def cases() -> list[Case]:
    """All window cases, the goals' shapes first."""
    best = ["fastaccum", "stock best"]
    both = [*best, "stock loop"]
    everybody = list(providers.WINDOW_PROVIDERS)
    found = []
    for steps, names, rounds in ((1, both, 11), (2, best, 15), (4, both, 9), (16, best, 5)):
        options = {"rounds": rounds}
        found.append(_case("gpt2-124m", named("gpt2-124m"), steps, names, **options))
    found.append(_case("gpt2-124m", named("gpt2-124m"), 64, best, rounds=3))
    for steps, rounds in ((1, 31), (2, 21), (4, 31), (16, 9), (64, 3)):
        options = {"rounds": rounds, "quick": steps == 1, "quick_rounds": 5}
        names = both if steps in (1, 4) else best
        found.append(_case("resnet50", named("resnet50"), steps, names, **options))
    for update in providers.UPDATES:
        for dtype in (torch.float32, torch.bfloat16):
            if (update, dtype) != ("AdamW", torch.float32):  # is above
                found.append(_case("resnet50", named("resnet50"), 4, best, update, dtype, rounds=15))
    found.append(_case("7b-layers", llama_layers(layers_that_fit(len(best))), 4, best, rounds=5))
    options = {"rounds": 101, "quick": True, "quick_rounds": 9}
    found.append(_case("2000x512", named("2000x512"), 1, both, **options))
    for steps, rounds in ((2, 61), (4, 41), (16, 15)):
        names = both if steps == 4 else best
        found.append(_case("2000x512", named("2000x512"), steps, names, rounds=rounds))
    found.append(_case("one-100m", named("one-100m"), 1, best, rounds=9))
    found.append(_case("one-100m", named("one-100m"), 4, best, rounds=7))
    found.append(_case("everybody-16m", [(1 << 20,)] * 16, 4, everybody, rounds=11))
    for power in (4, 5, 6, 7, 8, 8.5):  # growth over total size, 16 tensors
        shapes = [(int(10**power) // 16,)] * 16
        rounds = 51 if power < 7 else 9 if power == 7 else 5
        found.append(_case(f"total-1e{power}", shapes, 1, best, rounds=rounds))
    for count in (1, 10, 100, 1000, 10_000):  # growth over the number of tensors
        rounds = 101 if count < 1000 else 31
        found.append(_case(f"tensors-{count}", many_small(count), 1, both, rounds=rounds))
    # For the tests of the command itself.
    found.append(_case("tiny", named("tiny"), 2, [*both, "fastaccum triton"], rounds=3, roofline=False))
    return found
