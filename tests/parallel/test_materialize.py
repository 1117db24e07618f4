"""materialize: values on the meta device become those of one process; nothing stays without a value."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overlapkit as ok
from overlapkit.parallel import materialize, meta_parameters
from tests.parallel.models import Block, Gpt, WIDTH, batch, half, loss_of, train, worst_error
from tests.ranks import run_ranks


class Angles(nn.Module):
    """A non-persistent buffer that its constructor computes, as rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", 1 / torch.arange(1.0, WIDTH + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles


class ResetAngles(Angles):
    def reset_parameters(self) -> None:
        self.angles = 1 / torch.arange(1.0, WIDTH + 1, device=self.angles.device)


class Parts(nn.Module):
    """Initialisation of every kind: views, other distributions, integers, buffers, children from above."""

    def __init__(self, angles: type[nn.Module] = ResetAngles) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.statistics = nn.BatchNorm1d(5)
        self.angles = angles()
        self.mixed = Mixed()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.angles(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.mixed(self.norm(self.statistics(x))))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(2 * WIDTH))
        self.register_buffer("count", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.square.weight)
        first, second = self.scale.chunk(2)
        with torch.no_grad():
            first.normal_()
            second.copy_(torch.randn(WIDTH))
            self.square.bias.data.uniform_(1, 2)
        self.count.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.square(x) * self.scale[:WIDTH] + self.scale[WIDTH:]


def built(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def differences(model: nn.Module, truth: nn.Module) -> list[str]:
    """Names whose values are not the same to the bit."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(truth.named_parameters()), **dict(truth.named_buffers())}
    assert list(found) == list(wanted)
    wholes = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
    return [name for name, whole in wholes.items() if not torch.equal(whole, wanted[name])]


def test_in_one_process_values_are_those_of_the_constructor():
    model = on_meta(Parts)
    torch.manual_seed(3)
    assert materialize(ok.shard(model)) is model
    after = torch.rand(1)
    assert differences(model, built(Parts)) == []
    assert torch.equal(after, torch.rand(1)), "the generator is where the constructor leaves it"
    assert not any(parameter.requires_grad for parameter in ()) and model.embed.weight.requires_grad


def test_sharded_values_are_those_of_one_process():
    def job(rank: int) -> list[Any]:
        found = []
        for options in ({}, {"units": []}, {"mp_policy": "bf16"}):
            model = ok.shard(on_meta(Parts), **options)
            torch.manual_seed(3)
            materialize(model)
            found.append(differences(model, built(Parts)))
        truth = copy.deepcopy(built(Parts)).double()
        train(truth)
        model = ok.shard(on_meta(Parts))
        torch.manual_seed(3)
        materialize(model)
        return found

    assert run_ranks(3, job) == [[[], [], []]] * 3
