"""recompute -> compile blocks -> shard or replicate -> optimizer: another order is an error that says so."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn

import overlapkit as ok
from overlapkit.parallel import compile_blocks, recompute
from tests.parallel.models import gpt
from tests.ranks import one_rank_group


def _compiled_whole(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _compiled_around(model: nn.Module) -> nn.Module:
    model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
    return model


def _sharded_block(model: nn.Module) -> nn.Module:
    ok.shard(model.blocks[1])
    return model


STEPS: dict[str, Callable[[nn.Module], Any]] = {
    "recompute": lambda model: recompute(model, "full"),
    "compile_blocks": lambda model: compile_blocks(model, {"backend": "eager"}),
    "shard": ok.shard,
    "replicate": ok.replicate,
}

WRONG = [
    (_compiled_whole, ("recompute", "compile_blocks", "shard", "replicate"), "call {} first, then compile"),
    (
        STEPS["compile_blocks"],
        ("recompute",),
        "model.blocks.0 is compiled already: .* recompute, then compile",
    ),
    (_compiled_around, ("recompute",), "model.blocks.0 is compiled already"),
    (STEPS["recompute"], ("recompute",), "model.blocks.0 recomputes already"),
    (
        ok.shard,
        ("recompute", "compile_blocks", "shard", "replicate"),
        "model is sharded already: call {} once",
    ),
    (
        _sharded_block,
        ("recompute", "compile_blocks", "shard", "replicate"),
        "model.blocks.1 is sharded already",
    ),
    (
        ok.replicate,
        ("recompute", "compile_blocks", "shard", "replicate"),
        "wrapped in DistributedDataParallel",
    ),
]


@pytest.mark.parametrize(("earlier", "steps", "message"), WRONG)
def test_wrong_orders(earlier: Any, steps: tuple[str, ...], message: str):
    with one_rank_group():
        model = earlier(gpt())
        for step in steps:
            with pytest.raises(ValueError, match=message.format(step)):
                STEPS[step](model)


@pytest.mark.parametrize("last", ["shard", "replicate"])
def test_the_right_order(last: str):
    with one_rank_group():
        model = STEPS[last](compile_blocks(recompute(gpt(), "full"), {"backend": "eager"}))
        ok.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("make", "group"),
    [(ok.AdamW, True), (lambda p: torch.optim.SGD([{"params": list(p)[-1:]}], lr=0.1), False)],
)
def test_an_optimizer_that_has_the_parameters_already(make: Any, group: bool):
    model, other = gpt(), gpt()
    optimizer = make(model.parameters())
    ok.shard(other)  # nobody has its parameters
    message = f"{type(optimizer).__name__} already, .* call shard first"
    # In one process, too: with more, the script would be wrong.
    with one_rank_group() if group else nullcontext(), pytest.raises(ValueError, match=message):
        ok.shard(model, recompute="full")
    assert type(model.head.weight) is nn.Parameter
    assert "forward" not in vars(model.blocks[0])
    optimizer.me = optimizer  # nobody has it now, but it is there until the collector comes
    del optimizer
    ok.shard(model)


def test_a_module_inside_of_ddp():
    with one_rank_group():
        model = gpt()
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(model))
        with pytest.raises(ValueError, match="DistributedDataParallel already, .* before Distributed"):
            ok.shard(model)
        assert wrapped.module[0] is model
