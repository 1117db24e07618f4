"""The table: bytes against a hand computation, and text that names every unit."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.parallel import describe
from tests.parallel.models import batch, gpt, loss_of
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


def _large() -> nn.Module:
    """Like a decoder of 8 billion parameters; on the meta device it takes no memory."""
    with torch.device("meta"):
        model = gpt(2)
        model.embed, model.head = nn.Embedding(128_256, 4096), nn.Linear(4096, 128_256, bias=False)
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4096, 50_001, bias=False)) for _ in range(32))
    return model


def test_a_laptop_plans_for_many_ranks():
    rows = {row.name: row for row in describe(_large(), mp_policy="bf16", ranks=64).units}
    block = -(-50_001 // 64) * 64 * 4096
    assert rows["blocks.7"].gathered == 2 * block
    assert rows["blocks.7"].reduced == 4 * block
    assert rows["blocks.7"].kept == 4 * block // 64
    assert (rows["blocks.7"].all_reduced, rows["blocks.7"].reshard) == (0, True)
    copied = describe(_large(), mp_policy="bf16", ranks=(8, 8))
    block = -(-50_001 // 8) * 8 * 4096
    assert (copied.ranks, copied.copies) == (8, 8)
    assert copied.units[8].all_reduced == 4 * block // 8
    last = str(copied).splitlines()[-1]
    gathered = sum(row.gathered for row in copied.units)
    again = sum(row.gathered for row in copied.units if row.name.startswith("blocks"))
    assert last == (
        f"On 8 x 8 ranks, a step gathers {gathered / 2**20:,.3f} MiB in forward and {again / 2**20:,.3f} in "
        f"backward, and reduces {2 * gathered / 2**20:,.3f} and {gathered / 4 / 2**20:,.3f} between copies."
    )
    assert "all-reduced MiB" in str(copied).splitlines()[0]


@pytest.mark.parametrize("shape", [(64,), (8, 8)])
def test_ranks_mean_what_a_mesh_of_that_shape_means(shape: tuple[int, ...]):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "share")[-len(shape) :])
        planned = describe(gpt(), ranks=shape if len(shape) == 2 else 64)
        assert describe(gpt(), mesh) == planned
        model = ok.shard(gpt(), mesh)
        loss_of(model, batch(0)).backward()
        found = [(span.name, span.bytes) for span in model.timings() if span.bytes is not None]
        row = planned.units[1]
        assert (f"all_gather {row.name}", row.gathered) in found
        assert (f"reduce_scatter {row.name}", row.reduced) in found
        assert ((f"all_reduce {row.name}", row.all_reduced) in found) == (len(shape) == 2)
        kept = sum(p.to_local().untyped_storage().nbytes() for p in model.blocks[0].parameters())
        assert kept == row.kept
    finally:
        torch.distributed.destroy_process_group()


BAD_RANKS = [
    ({"ranks": 0}, "ranks=0: give a number of ranks, or"),
    ({"ranks": True}, "ranks=True"),
    ({"ranks": (2,)}, r"ranks=\(2,\)"),
    ({"ranks": (2, 2, 2)}, "ranks="),
    ({"ranks": 4, "reshard": 3}, "reshard=3: .* divide the 4 ranks"),
    ({"ranks": 4, "mesh": "cpu"}, "mesh and ranks=4 are both given"),
]


@pytest.mark.parametrize(("options", "message"), BAD_RANKS)
def test_bad_ranks(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        describe(gpt(), **options)


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
