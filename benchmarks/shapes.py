"""Parameter shapes that the benchmarks run on, written out so that nothing is downloaded."""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]


def gpt2(layers: int = 12, width: int = 768, vocab: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2; by default the 124 M one, whose output head is tied to the embedding (148 tensors)."""
    norm = [(width,), (width,)]
    block = [
        *norm,
        (width, 3 * width), (3 * width,), (width, width), (width,),  # attention
        *norm,
        (width, 4 * width), (4 * width,), (4 * width, width), (width,),  # feed-forward
    ]  # fmt: skip
    return [(vocab, width), (context, width), *(block * layers), *norm]


def resnet50(classes: int = 1000) -> Shapes:
    """ResNet-50 with batch norm: 161 tensors, 25.6 M elements, in the order of the modules."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            for conv in ((inner, channels, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)):
                shapes += [conv, conv[:1], conv[:1]]
            if block == 0:  # the projection on the shortcut
                shapes += [(4 * inner, channels, 1, 1), (4 * inner,), (4 * inner,)]
            channels = 4 * inner
    return [*shapes, (classes, channels), (classes,)]


def llama_layers(layers: int = 1, width: int = 4096, hidden: int = 11008) -> Shapes:
    """Decoder layers of a 7 B Llama (Touvron et al. 2023): 202 M elements each, of its 32.

    All of them are 27 GB of float32 parameters, and as much for each moment.
    """
    layer = [*[(width, width)] * 4, *[(hidden, width)] * 2, (width, hidden), (width,), (width,)]
    return layer * layers


def many_small(count: int = 2000, size: int = 512) -> Shapes:
    """Many tensors of few elements: the cost per tensor, not per byte."""
    return [(size,)] * count


def one_huge(size: int = 100_000_000) -> Shapes:
    """One tensor: the cost per byte, not per tensor."""
    return [(size,)]


def numel(shapes: Shapes) -> int:
    """Number of elements over all shapes."""
    return sum(math.prod(shape) for shape in shapes)


NAMED = {
    "gpt2-124m": gpt2,
    "resnet50": resnet50,
    "2000x512": many_small,
    "one-100m": one_huge,
    # Same tensor count and proportions as the big ones, small enough for a smoke test.
    "tiny": lambda: gpt2(layers=2, width=16, vocab=97, context=8),
}


def named(name: str) -> Shapes:
    """The shapes called ``name``.

    Raises:
        KeyError: there are none of that name; the message lists the names.
    """
    if name not in NAMED:
        raise KeyError(f"no shapes called {name!r}; there are {', '.join(NAMED)}")
    return NAMED[name]()
