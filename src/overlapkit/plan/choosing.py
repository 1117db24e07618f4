"""`choose`: the plan whose simulated step is shortest among those that fit into memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from overlapkit.parallel.shard_plan import ShardPlan
from overlapkit.plan.arguments import check_ranks
from overlapkit.plan.costs import Profile, UnitProfile
from overlapkit.plan.failures import Failures
from overlapkit.plan.links import Link, LinkTable
from overlapkit.plan.memory import memory_of
from overlapkit.plan.setting import Job, grouped
from overlapkit.plan.simulation import Wrapper, optimizer_step_s, play
from overlapkit.plan.step import Rules

WORTH = 0.01
"""A plan that is no more than this much faster than the default one is not worth leaving it for."""

_DEPTHS = (1, 0, 2, 3)
_RECOMPUTE = ("none", "every:4", "every:2", "full")
_CAPS = (25.0, 1.0, 2.0, 4.0, 8.0, 16.0, 50.0, 100.0)


@dataclass(frozen=True)
class _Candidate:
    plan: ShardPlan
    seconds: float
    nbytes: int


def choose(
    profile: Profile,
    link: Link,
    memory: int | None = None,
    *,
    world: int | None = None,
    wrapper: Wrapper = "shard",
    shards: int | None = None,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    spread: float = 0.0,
    optimizer_s: float = 0.0,
    optimizer_bytes: int = 8,
    rules: Rules | None = None,
    failures: Failures | None = None,
) -> ShardPlan:
    """Play a step under every plan of a grid, and take the fastest that fits.

    Tried are, for `shard`: consecutive blocks merged by 1, 2, 4 ...; 0 to 3 units gathered ahead, in forward
    and in backward; blocks freed after forward or kept; recomputation of none, every fourth, every second or
    all blocks. For `replicate`: sizes of the buckets after the first, and recomputation. The default is left
    only for a plan that is 1 % faster, or where it does not fit.

    Args:
        profile: Of one microbatch on one rank: see `profile`.
        link: A LinkTable that `probe_link` measured, or a Fabric.
        memory: Bytes that one rank has for the model, its state and its activations; None for no limit.
        world: Number of ranks; None for those of a LinkTable.
        wrapper: As for `simulate`; so are the following.
        shards: Ranks that share each parameter.
        param_bytes: Bytes an element in an all-gather.
        reduce_bytes: Bytes an element in a reduction.
        spread: Standard deviation of the ranks' compute times, of their mean.
        optimizer_s: Seconds of the optimizer's step for all parameters on one rank; `checkpoint_every` counts
            it in.
        optimizer_bytes: Bytes an element of the optimizer's state.
        rules: What is fixed in the schedule; None for what `shard` does on the profile's device.
        failures: Then the plan has `checkpoint_every`, too.

    Returns:
        A plan that decides everything that the wrapper takes.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: A figure is out of range, or no plan fits into memory; the message says what the smallest
            takes, and which choice frees most.
    """
    if world is None:
        if not isinstance(link, LinkTable):
            raise ValueError("world=None: a Fabric has any number of ranks; give world=")
        world = link.ranks
    if memory is not None:
        check_ranks("memory", memory)
    job = Job(profile, link, world, shards, param_bytes, reduce_bytes, spread, optimizer_s, rules)
    tried = [
        _Candidate(
            plan,
            play(job, plan, wrapper).end,
            memory_of(job, plan, optimizer_bytes=optimizer_bytes, replicated=wrapper == "replicate").total,
        )
        for plan in (_shard_plans(job) if wrapper == "shard" else _replicate_plans())
    ]
    fitting = [one for one in tried if memory is None or one.nbytes <= memory]
    if not fitting:
        raise ValueError(_too_large(tried, memory or 0))
    best = min(fitting, key=lambda one: one.seconds)
    if tried[0] in fitting and best.seconds > tried[0].seconds * (1 - WORTH):
        best = tried[0]
    if failures is None:
        return best.plan
    step_s = best.seconds + optimizer_step_s(job, wrapper)
    every = max(1, round(failures.best_interval(world) / step_s)) if step_s else 1
    return replace(best.plan, checkpoint_every=every)


def _shard_plans(job: Job) -> Iterator[ShardPlan]:
    """All plans of the grid, the default one first."""
    blocks = sum(unit.block for unit in job.profile.units)
    merges = [2**power for power in range(16) if 2**power <= max(1, blocks // 2)]
    groupings = [grouped(job, ShardPlan())[:-1], *(_merged(job.profile, merge) for merge in merges)]
    for groups, ahead, behind, kept, recompute in itertools.product(
        groupings, _DEPTHS, _DEPTHS, (False, True), _RECOMPUTE
    ):
        yield ShardPlan(
            units=tuple(tuple(name for unit in group for name in unit.modules) for group in groups),
            reshard=tuple(
                not (kept and group[0].block) and not _is_head(groups, place)
                for place, group in enumerate(groups)
            ),
            forward_prefetch=ahead,
            backward_prefetch=behind,
            recompute=recompute,
        )


def _replicate_plans() -> Iterator[ShardPlan]:
    for cap, recompute in itertools.product(_CAPS, _RECOMPUTE):
        yield ShardPlan(bucket_caps_mb=(1.0, cap), recompute=recompute)


def _merged(profile: Profile, size: int) -> list[list[UnitProfile]]:
    """The units but for the root, `size` consecutive blocks in one."""
    groups: list[list[UnitProfile]] = []
    for unit in profile.units[:-1]:
        last = groups[-1] if groups else []
        if unit.block and last and last[0].kind == unit.kind and len(last) < size:
            last.append(unit)
        else:
            groups.append([unit])
    return groups


def _is_head(groups: list[list[UnitProfile]], place: int) -> bool:
    """Backward begins with it: to free it gains nothing."""
    return place == len(groups) - 1 and place > 0 and not groups[place][0].block


def _too_large(tried: list[_Candidate], memory: int) -> str:
    default, least = tried[0], min(tried, key=lambda one: one.nbytes)
    knobs = ("units", "reshard", "forward_prefetch", "backward_prefetch", "recompute", "bucket_caps_mb")
    freed = {}
    for knob in knobs:
        others = [other for other in knobs if other != knob and (knob, other) != ("units", "reshard")]
        alone = [
            one.nbytes
            for one in tried
            if all(getattr(one.plan, other) == getattr(default.plan, other) for other in others)
        ]
        freed[knob] = default.nbytes - min(alone)
    most = max(freed, key=lambda knob: freed[knob])
    return (
        f"memory={memory}: no plan fits; the smallest takes {least.nbytes} bytes "
        f"(recompute={least.plan.recompute!r}, forward_prefetch={least.plan.forward_prefetch}, "
        f"backward_prefetch={least.plan.backward_prefetch}), and of the choices alone {most} frees most: "
        f"{freed[most]} bytes. Give more ranks, fewer tokens a microbatch, or more memory"
    )
