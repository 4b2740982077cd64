"""Two models to run forward and backward on: ResNet-50 and a character GPT of the demo's size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride sits in the 3x3."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != outer:
            conv = nn.Conv2d(channels, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [batch, channels, height, width] to [batch, 4 * inner, height', width']."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50(classes: int = 1000, width: int = 64) -> nn.Module:
    """ResNet-50 (He et al. 2015, with the stride in the 3x3), 25.6 M parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
            channels = 4 * inner
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention and feed-forward on [batch, length, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A character GPT with a tied head."""

    def __init__(
        self,
        vocab: int = 128,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocab] of tokens [batch, length]."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class Bare(torch.autograd.Function):
    """A loss with no compute: its backward makes one fresh gradient per parameter, no more."""

    @staticmethod
    def forward(ctx, templates: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        """Zero."""
        ctx.templates = templates
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """New tensors with the templates' values."""
        return (None, *torch._foreach_mul(ctx.templates, 1.0))


class Link(torch.autograd.Function):
    """One link of a chain whose backward makes one parameter's gradient, when its turn comes."""

    @staticmethod
    def forward(ctx, chain: torch.Tensor, param: torch.Tensor, make: Callable, index: int) -> torch.Tensor:
        """Passes ``chain`` on."""
        ctx.make, ctx.index = make, index
        return chain.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """A gradient made now and owned by nobody else."""
        return grad, ctx.make(ctx.index), None, None


def chain_loss(params: Sequence[torch.Tensor], make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """A scalar whose backward makes the gradients one by one, last parameter first, and does nothing else.

    Args:
        params: leaves.
        make: the gradient of the parameter of that number; a new tensor.
    """
    chain = torch.zeros((), requires_grad=True)
    for index, param in enumerate(params):
        chain = Link.apply(chain, param, make, index)
    return chain
