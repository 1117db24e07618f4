"""What users reported of sharding elsewhere: each report stands for a class; its right value is kept here."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import overlapkit as ok
from overlapkit.optim import clip_grad_norm_
from overlapkit.parallel import describe
from tests.parallel.models import (
    WIDTH,
    Block,
    batch,
    even_gpt,
    gpt,
    half,
    loss_of,
    split,
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


FREEZING: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "the first": (("embed", "blocks.0"), {}),
    "a middle one": (("blocks.1",), {}),
    "the head": (("norm", "head"), {}),
    "in one unit": (("blocks.1",), {"units": []}),
    "all but one": (("embed", "blocks.0", "blocks.1", "norm", "head"), {}),
}


def test_what_is_frozen_at_first_trains_later_and_the_other_way_round():
    def job(rank: int) -> dict[str, float]:
        errors = {}
        for name, (frozen, options) in FREEZING.items():
            model = gpt(frozen=frozen)
            truth = copy.deepcopy(model).double()
            ok.shard(model, **options)
            for each, part in ((truth, lambda rows: rows), (model, half(rank))):
                train(each, part)
                each.requires_grad_(True)
                train(each, part)
                each.zero_grad()
                each.blocks[2].requires_grad_(False)
                train(each, part)
            errors[name] = max(worst_error(model, truth))
        return errors

    for errors in run_ranks(2, job):
        assert errors.keys() == FREEZING.keys()
        assert max(errors.values()) < 4e-6


def test_a_unit_frozen_in_the_first_forward_trains_later_in_bf16():
    """FSDP2 notes dtypes in the first forward, and then raised in backward."""

    def job(rank: int) -> list[Any]:
        found = []
        for frozen, options in ((("blocks.1",), {}), (("embed", "norm", "head"), {"units": BLOCKS})):
            model = ok.shard(gpt(frozen=frozen), mp_policy="bf16", **options)
            first = model(batch(0)[:, :-1]).float().sum()
            flags = [parameter.requires_grad for parameter in model.get_submodule(frozen[0]).parameters()]
            first.backward()
            model.zero_grad()
            model.requires_grad_(True)
            loss_of(model, half(rank)(batch(0))).backward()
            always = ok.shard(gpt(), mp_policy="bf16", **options)
            loss_of(always, half(rank)(batch(0))).backward()
            pairs = zip(model.parameters(), always.parameters(), strict=True)
            found.append(
                (any(flags), all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs))
            )
        return found

    assert run_ranks(2, job) == [[(False, True), (False, True)]] * 2


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
            train(model, half(rank, 4))
            found.append(max(worst_error(model, truth)) < 2e-6)
        return found

    assert run_ranks(4, job) == [[True] * 10] * 4


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


TENSOR_PARALLEL = {
    4: ((2, 2), ("dp", "tp"), "dp"),
    8: ((2, 2, 2), ("copy", "share", "tp"), ("copy", "share")),
}


@pytest.mark.parametrize("world", TENSOR_PARALLEL)
def test_tensor_parallel_models_train_and_clip_as_one_process(world: int):
    """pytorch#180346: torch's own clip_grad_norm_ fails on the two meshes that gradients are on."""
    shape, names, data = TENSOR_PARALLEL[world]

    def job(rank: int) -> tuple[float, float, float]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model, truth = split(even_gpt(), mesh["tp"]), even_gpt().double()
        table = describe(model, mesh[data])
        ok.shard(model, mesh[data])
        assert describe(model) == table
        part = half(rank // 2, world // 2)
        optimizers = [
            ok.AdamW(model.parameters(), lr=0.1, max_norm=0.05),
            torch.optim.AdamW(truth.parameters(), lr=0.1),
        ]
        for step in range(2):
            loss_of(model, part(batch(step))).backward()
            loss_of(truth, batch(step)).backward()
            norm = clip_grad_norm_(model.parameters(), 1e9)
            expected = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.05)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        gathered = next(row.gathered for row in table.units if row.name == "blocks.0")
        return worst_error(model, truth)[0], abs(float(norm) - float(expected)), gathered

    for error, norm_error, gathered in run_ranks(world, job):
        assert error < 1e-4  # Adam's first steps divide by gradients
        assert norm_error < 1e-5
        assert gathered == 4 * (8 + 8 + 6 * 7 + 6 + 8 * 6 + 8)  # of 12 rows 6; 7 rows padded to 8


def test_meshes_that_do_not_go_with_tensor_parallel_ones():
    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        bad = [
            (None, "mesh is not given"),
            (init_device_mesh("cpu", (4,)), "or that one has no names"),
            (mesh["tp"], "mesh has 'tp', too"),
            (mesh, "mesh has 'tp', too"),
        ]
        model = split(even_gpt(), mesh["tp"])
        for other, message in bad:
            with pytest.raises(ValueError, match=rf"blocks.0.up.weight is split .*{message}.*mesh\['dp'\]"):
                ok.shard(model, other)
        with pytest.raises(ValueError, match=re.escape("blocks.0.up.weight is a DTensor")):
            ok.replicate(model)

    run_ranks(4, job)
