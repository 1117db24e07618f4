"""Small neighbouring blocks share a unit: the rule by hand, and that such a unit gathers once and trains."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn

import overlapkit as ok
from overlapkit.parallel import describe
from overlapkit.parallel.merging import merge_small
from tests.parallel.models import Gpt, batch, gpt, half, loss_of, train, trained_alone, worst_error
from tests.ranks import run_ranks

MIB = 2**20 // 4  # elements of float32


def _block(name: str, mib: float, dtype: torch.dtype = torch.float32, trained: bool = True) -> Any:
    weight = torch.empty(int(mib * MIB), dtype=dtype, device="meta")
    return name, {"weight": nn.Parameter(weight, requires_grad=trained)}


def _named(blocks: list[Any], least: float, dtype: torch.dtype | None = None) -> list[str]:
    return [
        "+".join(name.rpartition(".")[2] for name in group) for group in merge_small(blocks, least, dtype)
    ]


def _list(sizes: list[float], **options: Any) -> list[Any]:
    return [_block(f"b.{place}", size, **options) for place, size in enumerate(sizes)]


CASES: dict[str, tuple[list[Any], float, list[str]]] = {
    "large ones stay alone": (_list([8] * 3), 8, ["0", "1", "2"]),
    "off": (_list([1] * 20), 0, [str(place) for place in range(20)]),
    "pairs": (_list([4] * 20), 8, [f"{place}+{place + 1}" for place in range(0, 20, 2)]),
    "not more than an eighth of all": (
        _list([1] * 16),
        8,
        [f"{place}+{place + 1}" for place in range(0, 16, 2)],
    ),
    "never fewer than eight of eight": (_list([0.1] * 8), 8, [str(place) for place in range(8)]),
    "until it is enough": (_list([1, 2, 9, 1, 8, *[8] * 8]), 8, ["0+1+2", "3+4", *map(str, range(5, 13))]),
    "the rest joins the one before": (_list([8] * 9 + [1]), 8, [*map(str, range(8)), "8+9"]),
    "lists stay apart": (
        [_block("a.0", 1), _block("a.1", 1), _block("b.2", 1), _block("b.3", 1), _block("c.4", 64)],
        8,
        ["0+1", "2+3", "4"],
    ),
    "a missing one parts": (
        [_block("a.0", 1), None, _block("a.2", 1), _block("a.3", 1), _block("c.4", 64)],
        8,
        ["0", "2+3", "4"],
    ),
    "frozen and trained stay apart": (
        [*_list([1, 1], trained=False), _block("b.2", 1), _block("b.3", 1), _block("c.4", 64)],
        8,
        ["0+1", "2+3", "4"],
    ),
    "dtypes stay apart": (
        [*_list([1, 1], dtype=torch.bfloat16), _block("b.2", 1), _block("b.3", 1), _block("c.4", 64)],
        8,
        ["0+1", "2+3", "4"],
    ),
    "none": ([], 8, []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule(name: str):
    blocks, least, expected = CASES[name]
    assert _named(blocks, least) == expected


def test_bytes_are_those_that_are_gathered():
    assert _named(_list([8] * 16), 8) == [str(place) for place in range(16)]
    assert _named(_list([8] * 16), 8, torch.bfloat16)[:2] == ["0+1", "2+3"]


def test_an_option_of_shard_and_describe():
    names = [row.name for row in describe(Gpt(16)).units]
    assert names[:3] == ["embed", "blocks.0+blocks.1", "blocks.2+blocks.3"]
    assert names[-2:] == ["norm+head", "(root)"]
    assert len(describe(Gpt(16), min_unit_mb=0).units) == 16 + 3


BAD = [
    ({"min_unit_mb": -1}, "min_unit_mb=-1"),
    ({"min_unit_mb": True}, "min_unit_mb=True"),
    ({"min_unit_mb": float("inf")}, "min_unit_mb=inf"),
    ({"min_unit_mb": "8"}, "min_unit_mb='8'"),
    ({"min_unit_mb": 4, "units": ["blocks.0"]}, "min_unit_mb=4 merges .* listed"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
@pytest.mark.parametrize("function", [ok.shard, describe])
def test_bad_options(function: Any, options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        function(gpt(), **options)


def test_merged_units_gather_once_and_train_as_one_process():
    def job(rank: int) -> tuple[float, list[str]]:
        model = gpt(depth=16, frozen=("embed", "blocks.0", "blocks.1"))
        truth = trained_alone(model)
        rows = describe(model).units
        assert [row.name for row in rows if row.regathers] == [
            f"blocks.{n}+blocks.{n + 1}" for n in range(2, 16, 2)
        ]
        ok.shard(model)
        train(model, half(rank))
        error = max(worst_error(model, truth))
        model.timings()
        loss_of(model, batch(5)).backward()
        return error, [span.name for span in model.timings() if span.name.startswith("all_gather")]

    for error, gathers in run_ranks(2, job):
        assert error < 2e-6
        pairs = [f"all_gather blocks.{place}+blocks.{place + 1}" for place in range(0, 16, 2)]
        backward = list(reversed(pairs[1:]))  # not the frozen first pair: backward ends before it
        assert gathers == ["all_gather embed", *pairs, "all_gather norm+head", *backward]


class Skipping(Gpt):
    """Leaves out some of its blocks, as layer drop and early exits do."""

    skipped: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for place, block in enumerate(self.blocks):
            x = x if place in self.skipped else block(x)
        return self.head(self.norm(x))


def test_a_step_may_leave_out_blocks_of_a_merged_unit_and_whole_units():
    def job(rank: int) -> float:
        torch.manual_seed(5)
        model = Skipping(16)
        truth = copy.deepcopy(model).double()
        ok.shard(model)
        for each, part in ((truth, lambda rows: rows), (model, half(rank))):
            for skipped in ((2,), (0,), (2, 3, 15), ()):
                each.skipped = skipped
                train(each, part, steps=1)
        return max(worst_error(model, truth))

    assert max(run_ranks(2, job)) < 4e-6
