"""The table: bytes against a hand computation, and text that names every unit."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import describe
from tests.parallel.models import gpt
from tests.ranks import run_ranks

BLOCK = 7 + 7 + 13 * 7 + 13 + 7 * 13 + 7


def test_before_sharding_and_without_ranks():
    model = gpt(2)
    rows = describe(model).units
    assert [row.name for row in rows] == ["embed", "blocks.0", "blocks.1", "norm+head", "(root)"]
    assert [row.elements for row in rows] == [77, BLOCK, BLOCK, 14 + 77, 0]
    assert [row.gathered for row in rows] == [4 * row.elements for row in rows]
    assert [row.forward_prefetch for row in rows] == [
        ("blocks.0",),
        ("blocks.1",),
        ("norm+head",),
        (),
        ("embed",),
    ]
    assert [row.backward_prefetch for row in rows] == [(), (), ("blocks.0",), ("blocks.1",), ("blocks.1",)]
    assert rows[3].parameters == ("norm.weight", "norm.bias", "head.weight")
    assert type(model).__name__ == "Gpt"


def test_dtypes_and_frozen_parameters_by_hand():
    model = gpt(2, frozen=("norm", "embed"))
    rows = {row.name: row for row in describe(model, mp_policy="bf16").units}
    assert (rows["embed"].gathered, rows["embed"].reduced) == (2 * 77, 0)
    assert (rows["norm+head"].gathered, rows["norm+head"].reduced) == (2 * (14 + 77), 4 * 77)
    assert (rows["blocks.0"].gathered, rows["blocks.0"].reduced) == (2 * BLOCK, 4 * BLOCK)
    plain = {row.name: row for row in describe(gpt(2).double()).units}
    assert (plain["embed"].gathered, plain["embed"].reduced) == (8 * 77, 8 * 77)


def test_an_integer_parameter_keeps_its_dtype():
    model = nn.Linear(3, 2)
    model.table = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
    (row,) = describe(model, mp_policy="bf16").units
    assert row.gathered == 2 * (6 + 2) + 8 * 5


def test_padding_follows_the_ranks_that_share():
    def job(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "share"))
        line = describe(gpt(), init_device_mesh("cpu", (4,))).units[0].gathered
        return [
            describe(gpt()).ranks,
            describe(gpt(), mesh).ranks,
            line,
            describe(gpt(), mesh).units[0].gathered,
        ]

    # The embedding has 11 rows of 7: 12 rows on 4 ranks as on 2.
    assert run_ranks(4, job) == [[4, 2, 12 * 7 * 4, 12 * 7 * 4]] * 4


def test_after_sharding_it_tells_what_was_done():
    def job(rank: int) -> bool:
        model, again = gpt(), gpt()
        before = describe(model, forward_prefetch=2)
        ok.shard(model, forward_prefetch=2)
        return describe(model) == before and describe(again) != before

    assert run_ranks(2, job) == [True, True]


def test_text_has_a_line_for_each_unit_and_a_total():
    lines = str(describe(gpt(2))).splitlines()
    assert lines[0].split()[:2] == ["unit", "parameters"]
    assert [line.split()[0] for line in lines[1:-1]] == [
        "embed",
        "blocks.0",
        "blocks.1",
        "norm+head",
        "(root)",
        "total",
    ]
    assert lines[-2].split()[1] == str(77 + 2 * BLOCK + 91)
    assert (
        lines[-1]
        == "On 1 rank(s), a step gathers 0.002 MiB in forward and 0.002 in backward, and reduces 0.002."
    )
    assert lines[1].split()[-2:] == ["True", "blocks.0"]
