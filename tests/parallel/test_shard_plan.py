"""ShardPlan: JSON there and back, strict checks, and what shard and describe make of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import overlapkit as ok
from overlapkit.parallel import ShardPlan, describe
from tests.parallel.models import gpt, half, train, trained_alone, worst_error
from tests.ranks import run_ranks

FULL = ShardPlan(
    units=(("embed",), ("blocks.0", "blocks.1"), ("blocks.2",), ("norm", "head")),
    reshard=(True, 2, False, False),
    forward_prefetch=2,
    backward_prefetch=0,
    recompute="every:2",
    bucket_caps_mb=(1, 12.5),
    checkpoint_every=50,
)


@pytest.mark.parametrize("plan", [FULL, ShardPlan(), ShardPlan(units=()), ShardPlan(recompute="none")])
def test_json_there_and_back(plan: ShardPlan, tmp_path: Path):
    again = ShardPlan.from_json(plan.to_json())
    assert again == plan
    assert [type(each) for each in again.reshard or ()] == [type(each) for each in plan.reshard or ()]
    plan.save(tmp_path / "plan.json")
    assert ShardPlan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_json_is_what_is_decided_and_a_format():
    assert json.loads(ShardPlan(units=[["a", "b"]], forward_prefetch=0).to_json()) == {
        "format": 1,
        "units": [["a", "b"]],
        "forward_prefetch": 0,
    }


BAD_FIELDS = [
    ({"units": "auto"}, r"units='auto': give for each unit"),
    ({"units": ("embed",)}, r"units=\('embed',\)"),
    ({"units": ((),)}, "units="),
    ({"units": (("",),)}, "without the root"),
    ({"units": (("a",), ("b", "a"))}, "'a' is named twice"),
    ({"reshard": (True,)}, "reshard has 1 values and units is None"),
    ({"units": (("a",),), "reshard": (True, False)}, "reshard has 2 values and units has 1"),
    ({"units": (("a",),), "reshard": (1,)}, r"reshard=\(1,\).* above 1"),
    ({"units": (("a",),), "reshard": True}, "reshard=True"),
    ({"forward_prefetch": -1}, "forward_prefetch=-1"),
    ({"forward_prefetch": True}, "forward_prefetch=True"),
    ({"backward_prefetch": 1.0}, "backward_prefetch=1.0"),
    ({"recompute": "all"}, "recompute='all': give 'none', 'full'"),
    ({"recompute": "every:0"}, "recompute='every:0'"),
    ({"recompute": True}, "recompute=True"),
    ({"bucket_caps_mb": ()}, r"bucket_caps_mb=\(\)"),
    ({"bucket_caps_mb": (0,)}, "above 0"),
    ({"bucket_caps_mb": (float("inf"),)}, "inf"),
    ({"bucket_caps_mb": (True,)}, "True"),
    ({"bucket_caps_mb": 25}, "bucket_caps_mb=25"),
    ({"checkpoint_every": 0}, "checkpoint_every=0: give a number of steps"),
]


@pytest.mark.parametrize(("values", "message"), BAD_FIELDS)
def test_bad_fields_also_from_json(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ShardPlan(**values)
    with pytest.raises(ValueError, match=message):
        ShardPlan.from_json(json.dumps({"format": 1, **values}))


BAD_TEXTS = [
    ("{", "not JSON"),
    ("[]", "JSON of a list"),
    ("{}", "format=None, this version reads 1"),
    ('{"format": 2}', "format=2"),
    ('{"format": true}', "format=True"),
    ('{"format": 1, "unit": []}', "unknown field 'unit'; there are units, reshard"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
def test_bad_texts_name_their_file(text: str, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        ShardPlan.from_json(text)
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=f"plan.json: ShardPlan: .*{message}"):
        ShardPlan.load(tmp_path / "plan.json")


def test_describe_shows_what_the_plan_decides_and_the_rules_the_rest():
    plan = ShardPlan(units=FULL.units, reshard=(True, False, 2, True), forward_prefetch=2)
    rows = describe(gpt(), plan=plan).units
    assert [(row.name, row.modules, row.reshard) for row in rows] == [
        ("embed", ("embed",), True),
        ("blocks.0+blocks.1", ("blocks.0", "blocks.1"), False),
        ("blocks.2", ("blocks.2",), 2),
        ("norm+head", ("norm", "head"), True),
        ("(root)", (), False),
    ]
    assert rows[0].forward_prefetch == ("blocks.0+blocks.1", "blocks.2")
    assert rows[3].backward_prefetch == ("blocks.2",)  # the rule's one
    undecided = describe(gpt(), plan=ShardPlan(units=FULL.units)).units
    assert [row.reshard for row in undecided] == [True, True, True, False, False]
    assert describe(gpt(), plan=ShardPlan()) == describe(gpt())


def test_a_plan_of_its_own_description_describes_the_same():
    rows = describe(gpt()).units[:-1]
    plan = ShardPlan(units=tuple(row.modules for row in rows), reshard=tuple(row.reshard for row in rows))
    assert describe(gpt(), plan=plan) == describe(gpt())


def test_two_ranks_train_as_one_by_a_plan():
    plan = ShardPlan(units=FULL.units, reshard=(True, True, False, False), forward_prefetch=2)

    def job(rank: int) -> tuple[float, list[str], bool]:
        model = gpt()
        truth = trained_alone(model)
        expected = describe(model, plan=plan)
        ok.shard(model, plan=plan)
        train(model, half(rank))
        error = max(worst_error(model, truth))
        gathers = [span.name for span in model.timings() if span.name.startswith("all_gather")]
        return error, gathers[: len(gathers) // 2], describe(model) == expected

    for error, gathers, same in run_ranks(2, job):
        assert error < 2e-6
        # Forward: all four; backward: the two blocks in one, the lookup needs none, two stay gathered.
        assert [name.removeprefix("all_gather ") for name in gathers] == [
            "embed",
            "blocks.0+blocks.1",
            "blocks.2",
            "norm+head",
            "blocks.0+blocks.1",
        ]
        assert same


BAD_PLANS = [
    ({"plan": 3}, TypeError, "plan=3: give an overlapkit.parallel.ShardPlan"),
    (
        {"plan": ShardPlan(units=(("embed",), ("blocks.7", "blocks.8")))},
        ValueError,
        r"no module 'blocks.7'.* another model",
    ),
    ({"plan": FULL, "units": ["blocks.0"]}, ValueError, "units=.* and the plan decides it too"),
    ({"plan": FULL, "reshard": True}, ValueError, "reshard=True .* and the plan"),
    ({"plan": FULL, "forward_prefetch": 3}, ValueError, "forward_prefetch=3 .* and the plan"),
    ({"plan": FULL, "backward_prefetch": 2}, ValueError, "backward_prefetch=2 .* and the plan"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_PLANS)
@pytest.mark.parametrize("function", [ok.shard, describe])
def test_bad_plans(function: Any, options: Any, kind: Any, message: str):
    model = gpt()
    with pytest.raises(kind, match=message):
        function(model, **options)
    assert not any("FSDP" in type(module).__name__ for module in model.modules())


def test_an_option_at_its_default_or_undecided_by_the_plan_is_no_conflict():
    plan = ShardPlan(forward_prefetch=2)
    rows = describe(gpt(), plan=plan, forward_prefetch=1, backward_prefetch=2).units
    assert rows[0].forward_prefetch == ("blocks.0", "blocks.1")
    assert rows[-1].backward_prefetch == ("blocks.2", "blocks.1")


def test_a_reshard_that_does_not_divide_the_ranks_names_the_unit():
    def job(rank: int) -> str:
        plan = ShardPlan(units=(("blocks.0",), ("blocks.1",)), reshard=(True, 3))
        with pytest.raises(ValueError, match="plan: unit blocks.1: reshard=3: .* divide the 2 ranks"):
            ok.shard(gpt(), plan=plan)
        return torch.__version__

    run_ranks(2, job)
