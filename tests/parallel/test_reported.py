"""What users reported of sharding elsewhere: each report stands for a class; its right value is kept here."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

import overlapkit as ok
from overlapkit.parallel import describe
from tests.parallel.models import (
    WIDTH,
    ZEROS_FOR_UNUSED,
    Block,
    batch,
    gpt,
    half,
    loss_of,
    train,
    trained_alone,
    worst_error,
)
from tests.ranks import run_ranks


class Branches(nn.Module):
    """Blocks, and then one of two projections of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.left(x) if left else self.right(x)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@ZEROS_FOR_UNUSED
def test_parameters_that_only_some_ranks_use():
    """pytorch#158719: gradients of different parameters were added up, or ranks hung."""

    def job(rank: int) -> tuple[float, bool]:
        torch.manual_seed(0)
        model = Branches()
        truth = copy.deepcopy(model).double()
        ok.shard(model, units=BLOCKS)
        x = torch.randn(3, WIDTH)
        model(x, rank == 0).sum().backward()
        sum(truth(x.double(), left).sum() / 2 for left in (True, False)).backward()
        without = ok.shard(Branches(), units=BLOCKS, reduce_unused=False)
        without(x, True).sum().backward()  # all ranks alike
        return worst_error(model, truth)[1], without.right.weight.grad is None

    for error, left_out in run_ranks(2, job):
        assert error < 2e-6
        assert left_out


def test_reducing_unused_parameters_needs_a_torch_that_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    with pytest.raises(ValueError, match="reduce_unused=True needs torch 2.13, this is"):
        ok.shard(gpt(), reduce_unused=True)
    ok.shard(gpt())
    with pytest.raises(ValueError, match="reduce_unused=1"):
        ok.shard(gpt(), reduce_unused=1)


def test_tied_weights_over_ranks_of_which_one_holds_nothing():
    """pytorch#176076: the last rank never updated, and from 2.13 on it raises."""

    def job(rank: int) -> float:
        errors = []
        for options in ({}, {"units": [*BLOCKS, ["embed", "norm", "head"]]}):
            model = gpt(tied=True)  # 11 rows: 3, 3, 3 and 2; the blocks' 7: 2, 2, 2 and 1
            model.embed.weight = model.head.weight = nn.Parameter(model.embed.weight[:5].detach().clone())
            truth = trained_alone_of_five(model)
            ok.shard(model, **options)
            train_five(model)
            errors.append(max(worst_error(model, truth)))
        return max(errors)

    assert max(run_ranks(4, job)) < 2e-6


def train_five(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step) % 5).backward()
        optimizer.step()


def trained_alone_of_five(model: nn.Module) -> nn.Module:
    alone = copy.deepcopy(model).double()
    train_five(alone)
    return alone


def _held(model: nn.Module) -> int:
    """Elements in memory now, over all parameters of this rank."""
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())


def test_after_a_forward_without_gradients_each_rank_holds_its_shard():
    """pytorch#149029 and #147179: parameters stayed gathered, whole or among a few ranks."""

    def job(rank: int) -> list[bool]:
        found = []
        plan = ok.parallel.ShardPlan(units=(("blocks.0",), ("norm", "head")), reshard=(2, False))
        for options in ({}, {"reshard": 2}, {"plan": plan}, {"units": []}, {"reshard": False}):
            model = ok.shard(gpt(), **options)
            before = _held(model)
            with torch.no_grad():
                model(batch(0))
            found.append(_held(model) == before)
        truth = trained_alone(gpt())
        train(model, half(rank, 4))  # its optimizer is made after that forward
        return [*found, max(worst_error(model, truth)) < 2e-6]

    assert run_ranks(4, job) == [[True] * 6] * 4


def test_a_root_that_shall_be_freed_is_freed():
    """pytorch#154655: the root ignored reshard_after_forward=True."""

    def job(rank: int) -> list[str]:
        model = ok.shard(gpt(tied=True), reshard=True)
        loss = loss_of(model, batch(0))
        held = _held(model)
        model.timings()
        loss.backward()
        gathers = [span.name for span in model.timings() if span.name.startswith("all_gather")]
        return [str(held == _held(model)), *gathers]

    order = ["(root)", "blocks.2", "blocks.1", "blocks.0"]
    assert run_ranks(2, job) == [["True", *(f"all_gather {name}" for name in order)]] * 2


def test_ranks_with_other_units_are_told_at_once():
    def job(rank: int) -> str:
        with pytest.raises(ValueError, match="differ") as error:
            ok.shard(gpt(depth=3 + (rank == 2)))
        return str(error.value)

    for text in run_ranks(4, job):
        assert text.startswith("rank(s) 2 differ from rank 0 in what shard is to do: give it the same model")


class SharedTable(nn.Module):
    """Encoder and decoder look words up in one table; the output projection is another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.embed(tokens.flip(-1))
        for block in self.encoder:
            seen = block(seen)
        x = self.embed(tokens) + seen.mean(1, keepdim=True)
        for block in self.decoder:
            x = block(x)
        return self.head(x)


class Routed(nn.Module):
    """A block of experts, of which a token visits one; some see no token at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = choice == place
            if rows.any():
                out = out.masked_scatter(rows.unsqueeze(-1), weights[rows].unsqueeze(-1) * expert(x[rows]))
        return x + out


class RoutedGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Routed(), Routed()])
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@ZEROS_FOR_UNUSED
def test_encoder_and_decoder_with_one_table_and_experts_that_stay_idle():
    def job(rank: int) -> list[float]:
        errors = []
        for make in (SharedTable, RoutedGpt):
            torch.manual_seed(1)
            model = make()
            truth = trained_alone(model)
            assert describe(model).units[0].name == "embed"
            ok.shard(model)
            train(model, half(rank, 4))
            for parameter in truth.parameters():  # of an expert that was idle on all ranks: ours is zero
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            errors.append(max(worst_error(model, truth)))
        return errors

    for errors in run_ranks(4, job):
        assert max(errors) < 2e-6
