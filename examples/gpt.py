"""A small GPT of the common kind: RMSNorm, rotary positions, SwiGLU, a head that may share the embedding."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both (B, T, hidden), in two kernels."""
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (B, H, T, D/H); the halves of a head are the pairs' two members."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over x (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend; cos and sin are (T, D/H/2)."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, swiglu: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        hidden = 32 * round(width * 8 / 3 / 32)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.swiglu = swiglu

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer over x (B, T, D)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(self.swiglu(self.gate(y), self.up(y)))


class GPT(nn.Module):
    """A language model; calling it with tokens and targets (B, T) of int64 gives the mean loss in nats."""

    def __init__(
        self,
        vocab: int,
        width: int,
        layers: int,
        heads: int,
        window: int,
        tied: bool = False,
        swiglu: Callable[[Tensor, Tensor], Tensor] = plain_swiglu,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, swiglu) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.loss = nn.CrossEntropyLoss()
        if tied:
            self.head.weight = self.embedding.weight
        for matrix in (p for p in self.parameters() if p.dim() > 1):
            nn.init.normal_(matrix, std=0.02)
        frequency = 10_000 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angle = torch.outer(torch.arange(window), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy, a scalar."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
