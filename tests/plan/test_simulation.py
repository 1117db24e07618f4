"""Simulated steps against sums worked out by hand, and plans against every other of the grid."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from overlapkit.parallel import ShardPlan, describe
from overlapkit.plan.buckets import fill_buckets
from overlapkit.plan.choosing import WORTH, _shard_plans, choose
from overlapkit.plan.failures import Failures
from overlapkit.plan.links import OPS, Fabric, LinkTable, Wire
from overlapkit.plan.memory import memory_of
from overlapkit.plan.setting import Job, slowest, work_of
from overlapkit.plan.simulation import break_even, play, simulate
from overlapkit.plan.step import Rules
from tests.plan.models import MIB, made

SLOW = Fabric(Wire(100 * MIB))
FAST = Fabric(Wire(1e15), node_size=1 << 14)


def test_on_a_fast_link_a_step_is_its_compute_and_its_share_of_the_optimizer() -> None:
    report = simulate(made(), FAST, 4, optimizer_s=0.040)
    assert report.period_ms == pytest.approx(40 + 80 + 3 + 5 + 10, abs=0.01)
    assert report.parts["forward"].mean_ms == pytest.approx(43, abs=0.01)
    assert report.parts["backward"].mean_ms == pytest.approx(85, abs=0.01)
    assert report.parts["optimizer"].mean_ms == pytest.approx(10, abs=0.01)
    assert report.parts["input"].mean_ms is None
    assert report.parts["input"].reason == "not simulated"
    assert report.findings == ()
    assert (report.world, report.tokens_per_s) == (4, pytest.approx(1000 / 0.138, rel=1e-3))


def test_on_a_slow_link_the_parts_still_add_up_and_communication_is_the_finding() -> None:
    report = simulate(made(), SLOW, 2)
    measured = [part.mean_ms for part in report.parts.values() if part.mean_ms is not None]
    assert sum(measured) == pytest.approx(report.period_ms)
    assert report.exposed_share == pytest.approx(report.parts["communication"].mean_ms / report.period_ms)
    assert [finding.lane for finding in report.findings] == ["communication"]
    # Gathered are all units and again the embedding and the blocks, reduced all: half of it over the link.
    moved = 4 * ((4 << 20) + (1 << 20)) + 4 * ((4 << 20) + (1 << 19)) + 4 * ((4 << 20) + (1 << 20))
    assert report.parts["communication"].bytes == moved
    link_s = moved / 2 / (100 * MIB)
    assert report.period_ms / 1e3 >= link_s
    assert report.period_ms / 1e3 <= link_s + 0.128


def test_one_rank_communicates_nothing() -> None:
    report = simulate(made(), SLOW, 1)
    assert report.period_ms == pytest.approx(128)
    assert report.parts["communication"].mean_ms == 0.0
    assert report.break_even_tokens == 1


def test_replicated_buckets_start_when_backward_has_filled_them() -> None:
    # Of 4 MiB blocks in buckets of 4 MiB: the head's 2 MiB and half a block reach the cap.
    plan = ShardPlan(bucket_caps_mb=(4.0,))
    job = Job(made(), Fabric(Wire(1000 * MIB)), 2)
    played = play(job, plan, "replicate")
    assert [transfer.nbytes // MIB for transfer in played.transfers] == [4, 4, 4, 4, 4]
    begin = 0.043 + 0.004  # forward, and the head's backward
    assert [transfer.launched for transfer in played.transfers] == pytest.approx(
        [begin + 0.010, begin + 0.030, begin + 0.050, begin + 0.070, begin + 0.081]
    )
    assert played.end == pytest.approx(0.128 + 0.004)  # 4 MiB at 1000 MiB/s, twice half of them
    assert sum(t.nbytes for t in played.transfers) == 4 * made().parameters


def test_buckets_close_when_they_reach_their_cap_and_the_last_cap_holds_on() -> None:
    ready = [(float(i), MIB, "u") for i in range(6)]
    assert [len(bucket) for bucket in fill_buckets(ready, (1.0, 2.0))] == [1, 2, 2, 1]
    assert [len(bucket) for bucket in fill_buckets(ready, (0.5,))] == [1] * 6
    assert [len(bucket) for bucket in fill_buckets(ready, (100.0,))] == [6]


def test_copies_reduce_among_themselves_and_gather_among_their_shards() -> None:
    fabric = Fabric(Wire(1000 * MIB), Wire(10 * MIB), node_size=4)
    copies = work_of(Job(made(), fabric, 8, shards=4), ShardPlan())
    whole = work_of(Job(made(), fabric, 8), ShardPlan())
    block = copies[1]
    assert block.gather_s == pytest.approx(4 * MIB * 3 / 4 / (1000 * MIB))
    assert block.copies_s == pytest.approx(2 * MIB * 1 / 2 / (10 * MIB))  # 1 MiB a rank, two copies
    assert whole[1].gather_s == pytest.approx(4 * MIB * 7 / 8 / (40 * MIB))
    assert whole[1].copies_s == 0.0


def test_numbers_of_ranks_in_reshard_gather_again_among_fewer() -> None:
    fabric = Fabric(Wire(1000 * MIB), Wire(10 * MIB), node_size=4)
    names = tuple(unit.modules for unit in made().units[:-1])
    plan = ShardPlan(units=names, reshard=(True, 4, 4, 4, 4, False))
    block = work_of(Job(made(), fabric, 8), plan)[1]
    assert block.regather_s == pytest.approx(3 * MIB / (1000 * MIB))
    assert block.gather_s > block.regather_s


def test_accumulation_reduces_once_and_gathers_every_time() -> None:
    once = simulate(made(), FAST, 2)
    thrice = simulate(made(), FAST, 2, rules=Rules(microbatches=3))
    assert thrice.period_ms == pytest.approx(3 * once.period_ms, abs=0.01)
    reduced = 4 * ((4 << 20) + (1 << 20))
    gathered = once.parts["communication"].bytes - reduced
    assert thrice.parts["communication"].bytes == 3 * gathered + reduced
    assert thrice.tokens_per_s == pytest.approx(once.tokens_per_s, rel=1e-3)


def test_the_slowest_of_many_sets_the_pace() -> None:
    rng = random.Random(0)
    for ranks in (2, 8, 128):
        drawn = [max(rng.gauss(0, 1) for _ in range(ranks)) for _ in range(4000)]
        assert slowest(ranks) == pytest.approx(sum(drawn) / len(drawn), abs=0.05)
    assert slowest(1) == 0.0
    assert simulate(made(), FAST, 128, spread=0.05).period_ms == pytest.approx(
        128 * (1 + 0.05 * slowest(128)), abs=0.02
    )


def test_the_break_even_hides_communication_and_one_token_in_fifty_less_does_not() -> None:
    report = simulate(made(), SLOW, 2)
    assert report.break_even_tokens is not None

    def exposed(tokens: float) -> float:
        factor = tokens / 1000
        units = tuple(
            replace(u, forward_s=u.forward_s * factor, backward_s=u.backward_s * factor) for u in made().units
        )
        played = play(Job(replace(made(), units=units), SLOW, 2), ShardPlan(), "shard")
        return played.exposed_s / played.end

    assert exposed(report.break_even_tokens * 1.01) <= 0.02 < exposed(report.break_even_tokens * 0.98)
    assert break_even(Job(made(tokens=None), SLOW, 2), ShardPlan(), "shard") is None


def test_memory_is_counted_part_by_part() -> None:
    job = Job(made(), SLOW, 4)
    elements = (4 << 20) + (1 << 20)
    default = memory_of(job, ShardPlan(forward_prefetch=1, backward_prefetch=1))
    assert default.state == elements * (4 + 4 + 8) // 4
    assert default.activations == 4 * 6 * MIB + MIB
    assert default.gathered == 2 * MIB + 3 * 4 * MIB  # the head is kept; one computes, one comes, one goes
    full = memory_of(job, ShardPlan(recompute="full"))
    assert full.activations == 4 * MIB + MIB + 6 * MIB
    half = memory_of(job, ShardPlan(recompute="every:2"))
    assert half.activations == 2 * MIB + 2 * 6 * MIB + MIB + 6 * MIB
    whole = memory_of(job, ShardPlan(), replicated=True)
    assert (whole.state, whole.gathered) == (elements * 16, 0)
    assert default.total == default.state + default.gathered + default.reduced + default.activations


def test_recomputation_is_paid_in_backward() -> None:
    report = simulate(made(), FAST, 2, plan=ShardPlan(recompute="every:2"))
    assert report.parts["backward"].mean_ms == pytest.approx(85 + 20, abs=0.01)
    with pytest.raises(ValueError, match="selective.*profile the model with recompute='selective'"):
        simulate(made(), FAST, 2, plan=ShardPlan(recompute="selective"))


@pytest.mark.parametrize("link", [SLOW, Fabric(Wire(600 * MIB, 2e-3)), FAST], ids=["slow", "latency", "fast"])
def test_the_chosen_plan_is_the_best_of_the_grid_or_the_default(link: Fabric) -> None:
    profile = made(blocks=4)
    job = Job(profile, link, 4)
    chosen = choose(profile, link, world=4)
    ends = {plan: play(job, plan, "shard").end for plan in _shard_plans(job)}
    default = next(iter(_shard_plans(job)))
    assert ends[chosen] <= ends[default]
    assert ends[chosen] <= min(ends.values()) * (1 + 2 * WORTH)
    if link is FAST:
        assert chosen == default, "nothing is gained by leaving it"


def test_the_default_of_the_grid_is_what_an_empty_plan_plays() -> None:
    job = Job(made(), SLOW, 4)
    default = next(iter(_shard_plans(job)))
    assert play(job, default, "shard").end == play(job, ShardPlan(), "shard").end


def test_latency_merges_units_and_too_little_memory_recomputes() -> None:
    latency = choose(made(blocks=8), Fabric(Wire(1e12, 3e-3)), world=8)
    assert latency.units is not None
    assert max(len(unit) for unit in latency.units[1:-1]) > 1
    tight = choose(made(blocks=8), FAST, 72 * MIB, world=8)
    assert tight.recompute != "none"
    assert memory_of(Job(made(blocks=8), FAST, 8), tight).total <= 72 * MIB


def test_a_plan_for_ddp_has_buckets_and_beats_every_other_cap() -> None:
    job = Job(made(), SLOW, 2)
    chosen = choose(made(), SLOW, world=2, wrapper="replicate")
    assert chosen.units is None
    assert chosen.bucket_caps_mb is not None
    best = play(job, chosen, "replicate").end
    for cap in (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0):
        assert best <= play(job, ShardPlan(bucket_caps_mb=(1.0, cap)), "replicate").end * (1 + WORTH)


def test_saves_are_as_far_apart_as_failures_allow() -> None:
    failures = Failures(mtbf_s=1e6, restart_s=60.0, stall_s=0.5)
    plan = choose(made(), FAST, world=100, failures=failures)
    step = play(Job(made(), FAST, 100), plan, "shard").end
    assert plan.checkpoint_every == round(failures.best_interval(100) / step)
    report = simulate(made(), FAST, 100, failures=failures)
    assert report.save_interval_s == failures.best_interval(100)
    assert report.goodput == failures.goodput(100, report.save_interval_s)


def test_what_no_plan_fits_says_the_smallest_and_the_knob() -> None:
    with pytest.raises(
        ValueError, match=r"memory=1000: no plan fits; the smallest takes (\d+) bytes"
    ) as caught:
        choose(made(), FAST, 1000, world=4)
    smallest = int(str(caught.value).split("takes ")[1].split()[0])
    assert "recompute frees most" in str(caught.value)
    assert choose(made(), FAST, smallest, world=4).recompute is not None
    with pytest.raises(ValueError, match="no plan fits"):
        choose(made(), FAST, smallest - 1, world=4)


def test_the_report_says_what_went_in_and_is_json() -> None:
    report = simulate(made(), SLOW, 2, failures=Failures(1e6, 60.0, 0.5))
    text = str(report)
    for words in ("Simulated from:", "link: given", "Taken for granted:", "one rank fails every 11.6 days"):
        assert words in text
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["simulated"]["memory"]["state"] == report.memory.state
    assert data["simulated"]["break_even_tokens"] == report.break_even_tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world": 6, "shards": 4}, "world=6, shards=4.*such as 8"),
        ({"world": 0}, "world=0"),
        ({"world": 9}, "do not fit a node of 8"),
        ({"wrapper": "ddp"}, "wrapper='ddp'"),
        ({"spread": -0.1}, "spread=-0.1"),
        ({"optimizer_s": math.nan}, "optimizer_s=nan"),
        ({"plan": ShardPlan(units=(("other",),))}, "has 'other', which was not profiled"),
        ({"plan": ShardPlan(units=(("norm",),))}, "takes it apart"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(**{"profile": made(), "link": SLOW, "world": 2, **arguments})


def test_a_fabric_has_no_world_of_its_own_and_a_table_has() -> None:
    with pytest.raises(ValueError, match="world=None: a Fabric"):
        choose(made(), SLOW)
    rows = dict.fromkeys(OPS, ((1000, 0.001), (10**8, 1.0)))
    assert choose(made(), LinkTable(2, rows)).units is not None


def test_choose_refuses_what_simulate_refuses() -> None:
    with pytest.raises(ValueError, match="wrapper='ddp'"):
        choose(made(), SLOW, world=2, wrapper="ddp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer_bytes=-1"):
        choose(made(), SLOW, world=2, optimizer_bytes=-1)
    with pytest.raises(TypeError, match="profile=str"):
        choose("profile.json", SLOW, world=2)  # type: ignore[arg-type]


def test_a_merged_unit_gathers_what_its_parts_did() -> None:
    job = Job(made(), SLOW, 2)
    merged = ShardPlan(
        units=(("embed",), ("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), ("norm", "head"))
    )
    pairs = itertools.pairwise(work_of(job, merged)[1:3])
    assert all(a.gather_bytes == b.gather_bytes == 8 * MIB for a, b in pairs)
    assert play(job, merged, "shard").exposed_s > 0


def test_small_blocks_share_a_unit_as_shard_has_them() -> None:
    units = [replace(unit, parameters=1 << 16) if unit.block else unit for unit in made(blocks=16).units]
    profile = replace(made(), units=tuple(units))
    names = [work.name for work in work_of(Job(profile, SLOW, 2), ShardPlan())]
    blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16))
    shards = describe(_Called(blocks), ranks=2).units
    assert names == ["embed", *(row.name for row in shards if row.name != "(root)"), "norm+head", "(root)"]


class _Called(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_an_embedding_is_not_gathered_again() -> None:
    units = [replace(u, backward_needs=False) if u.name == "embed" else u for u in made().units]
    job = Job(replace(made(), units=tuple(units)), SLOW, 2)
    assert [work.regathers for work in work_of(job, ShardPlan())] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
