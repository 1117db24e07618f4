"""What is frozen at first and trained later, and the other way round."""

import copy
from typing import Any

import torch

import overlapkit as ok
from tests.parallel.models import batch, gpt, half, loss_of, train, worst_error
from tests.ranks import run_ranks

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]

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
                train(each, part, steps=1)
                each.requires_grad_(True)
                train(each, part, steps=1)
                each.zero_grad()
                each.blocks[2].requires_grad_(False)
                train(each, part, steps=1)
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
