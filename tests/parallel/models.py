"""Small models of odd sizes, and a training step whose truth is one process in fp64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

# What FSDP2 imports in its first calls takes a second: here once, instead of in every forked rank.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

VOCABULARY, WIDTH, TOKENS = 11, 7, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Embedding, blocks, norm, head: the names that every decoder has."""

    def __init__(self, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(depth: int = 3, tied: bool = False, frozen: tuple[str, ...] = ()) -> Gpt:
    torch.manual_seed(5)
    model = Gpt(depth, tied)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def even_gpt() -> Gpt:
    """Of widths that tensor parallelism can halve."""
    torch.manual_seed(5)
    model = Gpt()
    for block in model.blocks:
        block.up, block.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
    return model


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """Make its blocks tensor-parallel over `mesh`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows, steps: int = 2
) -> None:
    """SGD on `part` of each batch, gradients left in place after the last step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, part(batch(step))).backward()
        optimizer.step()


ZEROS_FOR_UNUSED = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="before torch 2.13 every rank must use every parameter",
)


def trained_alone(model: nn.Module, steps: int = 2) -> nn.Module:
    """The truth: the same steps on the whole batches, in fp64, in one process."""
    alone = copy.deepcopy(model).double()
    train(alone, steps=steps)
    return alone


def worst_error(model: nn.Module, truth: nn.Module) -> tuple[float, float]:
    """Largest absolute difference of parameters and of gradients, gathered from all ranks."""
    errors = [0.0, 0.0]
    expected = dict(truth.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected[name.removeprefix("module.")]
        assert (parameter.grad is None) == (wanted.grad is None), name
        pairs = (
            [(parameter, wanted)]
            if wanted.grad is None
            else [(parameter, wanted), (parameter.grad, wanted.grad)]
        )
        for place, (got, want) in enumerate(pairs):
            whole = got.full_tensor() if hasattr(got, "full_tensor") else got
            errors[place] = max(errors[place], (whole.detach().double() - want.detach()).abs().max().item())
    return errors[0], errors[1]


def half(rank: int, world: int = 2) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rows of a batch that this rank trains on."""
    return lambda rows: rows.chunk(world)[rank]
