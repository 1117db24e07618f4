"""What of a setting is gathered, kept, copied and waited for, against sums worked out by hand."""

import math
from dataclasses import replace

import pytest

from overlapkit.parallel import ShardPlan
from overlapkit.plan.choosing import _shard_plans, choose
from overlapkit.plan.failures import Failures
from overlapkit.plan.links import Fabric, Wire
from overlapkit.plan.memory import memory_of
from overlapkit.plan.setting import Job, slowest, work_of
from overlapkit.plan.simulation import play, simulate
from overlapkit.plan.step import Rules
from tests.plan.models import MIB, made

SLOW = Fabric(Wire(100 * MIB))
FAST = Fabric(Wire(1e15), node_size=1 << 14)


def test_what_lies_before_the_first_trained_unit_is_not_gathered_again() -> None:
    frozen = [
        replace(unit, gradients=()) if unit.name in ("embed", "blocks.0") else unit for unit in made().units
    ]
    job = Job(replace(made(), units=tuple(frozen)), SLOW, 2)
    plan = ShardPlan(units=tuple(unit.modules for unit in frozen[:-1]))
    assert [work.regathers for work in work_of(job, plan)] == [False, False, True, True, True, False, False]
    names = [transfer.name for transfer in play(job, plan, "shard").transfers]
    assert names.count("all_gather blocks.0") == 1
    assert "reduce_scatter blocks.0" not in names


def test_what_is_freed_and_not_gathered_again_is_not_held_and_a_part_is_where_it_is_kept() -> None:
    units = tuple(replace(u, backward_needs=False) if u.name == "embed" else u for u in made().units)
    job = Job(replace(made(), units=units), replace(SLOW, node_size=16), 16)
    names = tuple(unit.modules for unit in units[:-1])
    freed = memory_of(job, ShardPlan(units=names))
    assert freed.gathered == 2 * MIB + 3 * 4 * MIB  # the head, and three blocks that move
    parts = memory_of(job, ShardPlan(units=names, reshard=(True, 4, 4, 4, 4, False)))
    assert parts.gathered == 2 * MIB + 4 * MIB + 3 * 3 * MIB  # a quarter of each block stays


@pytest.mark.parametrize("reshard", [3, 8, 16])
def test_a_number_of_ranks_in_reshard_divides_the_shards(reshard: int) -> None:
    names = tuple(unit.modules for unit in made().units[:-1])
    with pytest.raises(ValueError, match=f"reshard={reshard}: a number of ranks must divide the 8 ranks"):
        simulate(made(), SLOW, 8, plan=ShardPlan(units=names, reshard=(reshard,) * len(names)))


def test_on_the_cpu_backward_stands_still_for_what_fsdp2_itself_reads() -> None:
    assert not Job(made(), SLOW, 8).schedule.blocking
    assert Job(made(), SLOW, 8, shards=4).schedule.blocking, "reduced further"
    assert Job(made(), SLOW, 8, reduce_bytes=2).schedule.blocking, "converted"
    assert not Job(replace(made(), device="cuda"), SLOW, 8, shards=4).schedule.blocking
    names = [one.name for one in play(Job(made(), SLOW, 8, shards=4), ShardPlan(), "shard").phases]
    assert "all_reduce blocks.0" in names


def test_the_expected_largest_of_two_and_three_is_known_exactly() -> None:
    assert slowest(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-8)
    assert slowest(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-8)
    assert slowest(1000) == pytest.approx(3.24144, abs=1e-4)  # H. L. Harter, 1961


def test_copies_take_the_time_that_the_link_has_for_them() -> None:
    without = simulate(made(), FAST, 2)
    copying = simulate(made(), replace(FAST, copy_bytes_per_s=1000 * MIB), 2)
    # Gathered twice but for the head: a half in, the whole out. Reduced once: the whole in.
    copied = (20 + 18) * 1.5 + 20
    assert copying.period_ms - without.period_ms == pytest.approx(copied, rel=0.02)
    assert "no time" in without.assumptions[-1]
    assert not any("no time" in one for one in copying.assumptions)


def test_saves_count_steps_with_their_optimizer() -> None:
    failures = Failures(mtbf_s=1e6, restart_s=60.0, stall_s=0.5)
    plan = choose(made(), FAST, world=4, failures=failures, optimizer_s=4.0)
    step = play(Job(made(), FAST, 4), plan, "shard").end + 1.0
    assert plan.checkpoint_every == round(failures.best_interval(4) / step)


def test_accumulation_under_ddp_computes_every_microbatch_and_reduces_the_last() -> None:
    once = simulate(made(), SLOW, 2, wrapper="replicate")
    thrice = simulate(made(), SLOW, 2, wrapper="replicate", rules=Rules(microbatches=3))
    assert thrice.period_ms - once.period_ms == pytest.approx(2 * 128, abs=0.01)
    assert thrice.parts["communication"].bytes == once.parts["communication"].bytes
    assert thrice.tokens_per_s == pytest.approx(3000 / thrice.period_ms * 1000, rel=1e-6)


def test_blocks_of_two_lists_share_no_unit() -> None:
    units = [
        replace(unit, modules=("decoder.0",)) if unit.name == "blocks.3" else unit for unit in made().units
    ]
    profile = replace(made(), units=tuple(units))
    assert [work.name for work in work_of(Job(profile, SLOW, 2), ShardPlan())][-3:] == [
        "decoder.0",
        "norm+head",
        "(root)",
    ]
    for plan in _shard_plans(Job(profile, SLOW, 2)):
        assert plan.units is not None
        assert ("decoder.0",) in plan.units
