"""A profile with round figures, and a small model to profile."""

import torch
from torch import Tensor, nn

from overlapkit.plan.costs import Profile, UnitProfile

MIB = 2**20


def block(number: int, elements: int = 1 << 20, forward: float = 0.010) -> UnitProfile:
    return UnitProfile(
        (f"blocks.{number}",),
        True,
        elements,
        (elements // 2, elements // 2),
        4 * elements,
        forward,
        2 * forward,
        6 * MIB,
        MIB,
    )


def made(blocks: int = 4, tokens: int | None = 1000, forward: float = 0.010) -> Profile:
    """An embedding, blocks of 4 MiB and 10 ms forward, a head, and a root without parameters."""
    embedding = UnitProfile(("embed",), False, 1 << 19, (1 << 19,), 1 << 21, 0.001, 0.001, 0, 0)
    head = UnitProfile(("norm", "head"), False, 1 << 19, (1 << 19,), 1 << 21, 0.002, 0.004, MIB, MIB)
    root = UnitProfile((), False, 0, (), 0, 0.0, 0.0, 0, 0)
    middle = (block(number, forward=forward) for number in range(blocks))
    return Profile((embedding, *middle, head, root), tokens)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Small(nn.Module):
    """Returns its loss."""

    def __init__(self, width: int = 16, blocks: int = 3, tokens: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for each in self.blocks:
            hidden = each(hidden)
        logits = self.head(self.norm(hidden.flatten(0, 1)))
        return nn.functional.cross_entropy(logits, y.flatten())
