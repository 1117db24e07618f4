"""Units: every parameter in exactly one, in forward order; ties, lists and prefetch."""

import pytest
import torch.nn as nn

from overlapkit.parallel.units import ROOT, find_ignored, prefetch_order, resolve_units
from tests.parallel.models import Block, Gpt


def _table(model: nn.Module, units: object = "auto", reshard: object = "auto", ignored: object = ()):
    resolved = resolve_units(model, units, reshard, find_ignored(model, ignored))
    owned = [id(p) for unit in resolved for p in unit.parameters.values()]
    kept = {id(p) for p in find_ignored(model, ignored)}
    assert len(owned) == len(set(owned)), "a parameter in two units"
    assert set(owned) == {id(p) for p in model.parameters()} - kept, "a parameter in no unit"
    return [(unit.name, unit.reshard, unit.regathers) for unit in resolved]


def test_a_decoder():
    assert _table(Gpt(2)) == [
        ("embed", True, False),
        ("blocks.0", True, True),
        ("blocks.1", True, True),
        ("norm+head", False, False),
        (ROOT, False, False),
    ]


def test_tied_weights_meet_in_the_root():
    model = Gpt(2, tied=True)
    assert [name for name, *_ in _table(model)] == ["blocks.0", "blocks.1", ROOT]
    *_, root = resolve_units(model, "auto", "auto", set())
    assert list(root.parameters) == ["embed.weight", "norm.weight", "norm.bias"]


def test_blocks_that_share_a_weight_leave_for_the_root():
    model = Gpt(3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    assert [name for name, *_ in _table(model)] == ["embed", "blocks.1", "norm+head", ROOT]


def test_blocks_that_share_a_module_leave_for_the_root():
    model = Gpt(3)
    model.blocks[2].norm = model.blocks[0].norm
    assert [name for name, *_ in _table(model)] == ["embed", "blocks.1", "norm+head", ROOT]


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_reshard_for_all_units(reshard: object):
    rows = _table(Gpt(1), ["embed", "blocks.0"], reshard)
    assert [row[1] for row in rows] == [reshard] * 3
    assert [row[2] for row in rows] == [False, bool(reshard), bool(reshard)]  # a lookup needs no weight


def test_listed_units_by_module_name_and_group():
    model = Gpt(2)
    rows = _table(model, [model.blocks[0], "blocks.1", ["norm", model.head]])
    assert [name for name, *_ in rows] == ["blocks.0", "blocks.1", "norm+head", ROOT]


def test_a_listed_unit_inside_another_keeps_its_parameters():
    model = Gpt(2)
    inner, outer, _, root = resolve_units(model, ["blocks.0.up", "blocks.0", "embed"], "auto", set())
    assert list(inner.parameters) == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert len(outer.parameters) == 4
    assert "blocks.1.up.weight" in root.parameters


def test_ignored_parameters_are_in_no_unit():
    model = Gpt(2)
    rows = _table(model, ignored=["blocks.0", model.norm.weight, "embed.weight", model.head])
    assert [name for name, *_ in rows] == ["blocks.1", "norm+head", ROOT]


def test_prefetch_order_by_hand():
    units = resolve_units(Gpt(3), "auto", "auto", set())  # embed, blocks 0 to 2, head, root: places 0 to 5
    assert prefetch_order(units, 1, 1) == [
        ([1], []),
        ([2], []),  # the embedding before it is not gathered again
        ([3], [1]),
        ([4], [2]),
        ([], [3]),
        ([0], [3]),
    ]
    assert prefetch_order(units, 2, 3)[3:] == [([4], [2, 1]), ([], [3, 2, 1]), ([0, 1], [3, 2, 1])]
    assert prefetch_order(units, 0, 0) == [([], [])] * 6


def test_backward_prefetches_no_frozen_units_that_it_does_not_reach():
    for tied, expected in ((False, [[], [], [], [2], [3], [3]]), (True, [[], [0], [1], [2]])):
        model = Gpt(3, tied)  # tied: the table in the root is trained, and forward begins with it
        for part in (model.blocks[0], *([] if tied else [model.embed])):
            part.requires_grad_(False)
        units = resolve_units(model, "auto", "auto", set())
        assert [behind for _, behind in prefetch_order(units, 1, 1)] == expected


BAD_UNITS = [
    ("blocks", ValueError, "'auto'"),
    (3, TypeError, "units=3"),
    (Block(), TypeError, "a list"),
    (["nowhere"], ValueError, "'nowhere'; its children are: embed, blocks, norm, head, act"),
    ([Block()], ValueError, "Block is not a module of the model"),
    ([4], TypeError, "4 is neither"),
    (["embed", "embed"], ValueError, "'embed' is listed twice"),
    (["blocks"], ValueError, "'blocks' has no forward"),
    ([""], ValueError, "leave it out"),
    ([["blocks.0", "blocks.0.up"]], ValueError, "lies inside"),
    ([[]], ValueError, "no parameters"),
    (["act"], ValueError, "'act' has no parameters"),
]


@pytest.mark.parametrize(("units", "kind", "message"), BAD_UNITS)
def test_bad_units(units: object, kind: type[Exception], message: str):
    model = Gpt(1)
    model.act = nn.ReLU()
    with pytest.raises(kind, match=message):
        resolve_units(model, units, "auto", set())


def test_listed_units_may_not_tear_a_tied_weight_apart():
    model = Gpt(1, tied=True)
    with pytest.raises(ValueError, match="embed.weight and head.weight are one tied parameter"):
        resolve_units(model, ["embed", "head"], "auto", set())
    with pytest.raises(ValueError, match="head.weight and embed.weight are one tied parameter"):
        resolve_units(model, ["head"], "auto", set())
    together = resolve_units(model, [["embed", "head"]], "auto", set())
    assert list(together[0].parameters) == ["embed.weight"]


BAD_IGNORED = [
    ("embed", TypeError, "a list"),
    (5, TypeError, "a list"),
    (["nowhere"], ValueError, "'nowhere'"),
    ([nn.Parameter(nn.Linear(2, 3).weight)], ValueError, r"shape \(3, 2\)"),
    ([None], TypeError, "None is neither"),
]


@pytest.mark.parametrize(("ignored", "kind", "message"), BAD_IGNORED)
def test_bad_ignored(ignored: object, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        find_ignored(Gpt(1), ignored)
