"""The two models, small and smooth: no layer whose kinks would make a training chaotic."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import VOCABULARY


class DigitsCNN(nn.Sequential):
    """Three convolutions with GroupNorm and a linear layer: [rows, 1, 8, 8] -> [rows, 10]."""

    def __init__(self, width: int) -> None:
        """Makes `width` channels in the first convolution, four times as many in the last."""
        super().__init__(
            *self.block(1, width),
            *self.block(width, 2 * width),
            nn.AvgPool2d(2),
            *self.block(2 * width, 4 * width),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width * 4, 10),
        )

    @staticmethod
    def block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        """One convolution; without a bias, most of which GroupNorm would take away again."""
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return convolution, nn.GroupNorm(4, outputs), nn.GELU()


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        """Makes a block of `width` channels, shared out among the heads."""
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        # No bias: the loss does not depend on a key's bias, and Adam would turn the rounding
        # noise that is its gradient into steps of full size.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [rows, length, width] to the same shape."""
        split = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in split)
        # Rows are padded at their end, so the causal mask already hides the padding.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class CharGPT(nn.Module):
    """A character-level GPT: [rows, length] -> [rows, length, VOCABULARY], embeddings tied."""

    def __init__(self, width: int, layers: int, heads: int, longest: int) -> None:
        """Makes a model for rows of at most `longest` tokens."""
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens to the logits of the token that follows each."""
        positions = torch.arange(tokens.shape[1])
        hidden = self.blocks(self.token(tokens) + self.position(positions))
        return F.linear(self.norm(hidden), self.token.weight)
