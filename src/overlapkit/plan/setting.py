"""A setting of the wrapper at a number of ranks, applied to a profile: the work of each unit of a step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from statistics import NormalDist

from overlapkit.parallel.merging import MIN_UNIT_MB, filled, least_bytes
from overlapkit.parallel.shard_plan import ShardPlan
from overlapkit.parallel.units import ROOT, first_reached
from overlapkit.plan.arguments import check_amount, check_ranks
from overlapkit.plan.costs import Profile, UnitProfile
from overlapkit.plan.links import Link
from overlapkit.plan.step import Rules, Work, rules_of


@dataclass(frozen=True)
class Job:
    """What is trained where; everything that is not chosen.

    Args:
        profile: Of the model, for one microbatch.
        link: Between the ranks.
        world: Number of ranks.
        shards: Ranks that share each parameter; None for all of them. Fewer make copies (HSDP).
        param_bytes: Bytes an element in an all-gather: 2 with mp_policy="bf16".
        reduce_bytes: Bytes an element in a reduction.
        spread: Standard deviation of the ranks' compute times, of their mean: the slowest sets the pace.
        optimizer_s: Seconds of the optimizer's step for all parameters; each rank steps its share.
        rules: What is fixed in the schedule beside the prefetch depths; None for what `shard` does on the
            profile's device.

    Raises:
        TypeError: `profile` is no Profile, or a figure no number.
        ValueError: It is out of range, or `world` is no multiple of `shards`.
    """

    profile: Profile
    link: Link
    world: int
    shards: int | None = None
    param_bytes: int = 4
    reduce_bytes: int = 4
    spread: float = 0.0
    optimizer_s: float = 0.0
    rules: Rules | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.profile, Profile):
            raise TypeError(f"profile={type(self.profile).__name__}: give a Profile (plan.profile makes one)")
        check_ranks("world", self.world)
        check_ranks("param_bytes", self.param_bytes)
        check_ranks("reduce_bytes", self.reduce_bytes)
        check_amount("spread", self.spread)
        check_amount("optimizer_s", self.optimizer_s)
        if self.shards is not None:
            check_ranks("shards", self.shards)
            if self.world % self.shards:
                raise ValueError(
                    f"world={self.world}, shards={self.shards}: a mesh of copies by shards takes a world "
                    f"that is a multiple of the shards, such as {-(-self.world // self.shards) * self.shards}"
                )

    @property
    def schedule(self) -> Rules:
        """`rules`, or those of the device.

        On the CPU FSDP2 itself reads a reduction that it converts, or reduces further between copies: there
        backward stands still for it.
        """
        if self.rules is not None:
            return self.rules
        units = self.profile.units
        read = self.copies > 1 or any(unit.nbytes != self.reduce_bytes * unit.parameters for unit in units)
        return replace(rules_of(self.profile.device), blocking=self.profile.device == "cpu" and read)

    @property
    def sharing(self) -> int:
        """Ranks that share each parameter."""
        return self.shards or self.world

    @property
    def copies(self) -> int:
        """How many copies of the whole model there are."""
        return self.world // self.sharing

    @property
    def slowness(self) -> float:
        """How much longer than the mean the slowest rank computes."""
        return 1 + self.spread * slowest(self.world)


@lru_cache
def slowest(ranks: int) -> float:
    """The expected largest of n normal values, in standard deviations.

    The integral of x times its density, n p(x) P(x)^(n-1), by the rule of rectangles: exact to 1e-9.
    """
    normal, steps = NormalDist(), 1600
    places = [-8.0 + 16.0 * step / steps for step in range(steps + 1)]
    if ranks == 1:
        return 0.0
    return sum(x * ranks * normal.pdf(x) * normal.cdf(x) ** (ranks - 1) for x in places) * 16.0 / steps


def rules_under(job: Job, plan: ShardPlan) -> Rules:
    """The job's schedule with the prefetch depths that the plan decides."""
    rules, ahead, behind = job.schedule, plan.forward_prefetch, plan.backward_prefetch
    return replace(
        rules,
        forward_prefetch=rules.forward_prefetch if ahead is None else ahead,
        backward_prefetch=rules.backward_prefetch if behind is None else behind,
    )


def grouped(job: Job, plan: ShardPlan) -> list[list[UnitProfile]]:
    """The profile's units, put together as the plan or else `shard` has them; the root's come last.

    Raises:
        ValueError: The plan takes a profiled unit apart.
    """
    left = {name: unit for unit in job.profile.units for name in unit.modules}
    groups = []
    for names in plan.units if plan.units is not None else _default_units(job):
        group: list[UnitProfile] = []
        for name in names:
            if name not in left:
                raise ValueError(
                    f"plan: unit {'+'.join(names)!r} has {name!r}, which was not profiled as a unit: profile "
                    "the model with these units"
                )
            if left[name] not in group:
                group.append(left[name])
        for unit in group:
            if not set(unit.modules) <= set(names):
                raise ValueError(f"plan: {unit.name!r} was profiled as one unit and the plan takes it apart")
            for name in unit.modules:
                del left[name]
        groups.append(group)
    taken = {unit.name for group in groups for unit in group}
    return [*groups, [unit for unit in job.profile.units if unit.name not in taken]]


def _default_units(job: Job) -> list[tuple[str, ...]]:
    """Blocks that follow each other share a unit until it is large enough, as `shard` has it."""
    sizes = [job.param_bytes * unit.parameters for unit in job.profile.units if unit.block]
    least = least_bytes(MIN_UNIT_MB, sizes)
    units: list[tuple[str, ...]] = []
    for (block, *_), run in groupby(job.profile.units[:-1], key=lambda unit: unit.kind):
        if block:
            units += filled([(unit.name, job.param_bytes * unit.parameters) for unit in run], least)
        else:
            units += [unit.modules for unit in run]
    return units


def recomputed(blocks: int, recompute: str | None) -> list[bool]:
    """Which of the blocks are computed again in backward.

    Raises:
        ValueError: It is "selective", whose cost no profile of whole blocks knows.
    """
    if recompute in (None, "none"):
        return [False] * blocks
    if recompute == "full":
        return [True] * blocks
    if recompute is not None and recompute.startswith("every:"):
        every = int(recompute.removeprefix("every:"))
        return [place % every == 0 for place in range(blocks)]
    raise ValueError(
        f"recompute={recompute!r}: simulated are 'none', 'full' and 'every:N'; profile the model with "
        "recompute='selective' applied, and simulate 'none'"
    )


def computed(job: Job, plan: ShardPlan) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward of each profiled unit on the slowest rank, with recomputation."""
    again = iter(recomputed(sum(unit.block for unit in job.profile.units), plan.recompute))
    slow = job.slowness
    return {
        unit.name: (
            slow * unit.forward_s,
            slow * (unit.backward_s + (unit.forward_s if unit.block and next(again) else 0.0)),
        )
        for unit in job.profile.units
    }


def work_of(job: Job, plan: ShardPlan) -> list[Work]:
    """Each unit's work in a step of one microbatch, in forward order, the root last."""
    groups, seconds = grouped(job, plan), computed(job, plan)
    trains = [any(unit.trained for unit in group) for group in groups]
    reached = first_reached(trains)
    return [
        _work(job, group, _reshards(job, plan, groups, place), seconds, reached=place >= reached)
        for place, group in enumerate(groups)
    ]


def _reshards(job: Job, plan: ShardPlan, groups: Sequence[Sequence[UnitProfile]], place: int) -> bool | int:
    """As `shard` does where the plan does not decide: blocks and embedding, but neither head nor root."""
    last = len(groups) - 1
    if place == last:
        return False
    if plan.reshard is not None:
        return _checked(job, plan.reshard[place])
    after_blocks = place == last - 1 and not any(unit.block for unit in groups[place])
    return not after_blocks


def _checked(job: Job, reshard: bool | int) -> bool | int:
    if not isinstance(reshard, bool) and (job.sharing % reshard or not 1 < reshard < job.sharing):
        raise ValueError(
            f"plan: reshard={reshard}: a number of ranks must divide the {job.sharing} ranks that share a "
            "parameter, and be more than 1 and less than they are; or give True or False"
        )
    return reshard


def _work(
    job: Job,
    group: list[UnitProfile],
    reshard: bool | int,
    seconds: Mapping[str, tuple[float, float]],
    *,
    reached: bool,
) -> Work:
    gathered = job.param_bytes * sum(unit.parameters for unit in group)
    reduced = job.reduce_bytes * sum(unit.trained for unit in group)
    sharing, copies = job.sharing, job.copies
    work = Work(
        "+".join(unit.name for unit in group) or ROOT,
        sum(seconds[unit.name][0] for unit in group),
        sum(seconds[unit.name][1] for unit in group),
        regathers=bool(reshard) and reached and any(unit.backward_needs for unit in group),
        reduce_bytes=reduced if job.world > 1 else 0,
    )
    if sharing > 1 and gathered:
        gather = job.link.seconds("all_gather", gathered, sharing)
        kept = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else sharing
        work = replace(
            work,
            gather_bytes=gathered,
            gather_s=gather,
            regather_s=job.link.seconds("all_gather", gathered, kept),
            # On a GPU a stream of its own fills the buffer.
            pack_s=job.link.copy_seconds(gathered / sharing) if job.profile.device == "cpu" else 0.0,
            unpack_s=job.link.copy_seconds(gathered),
            flatten_s=job.link.copy_seconds(reduced),
            kept_bytes=0 if reshard is True else gathered // (1 if reshard is False else reshard),
            reduce_s=job.link.seconds("reduce_scatter", reduced, sharing) if reduced else 0.0,
        )
    if copies > 1 and reduced:
        nbytes = math.ceil(reduced / sharing)
        work = replace(
            work, copies_bytes=nbytes, copies_s=job.link.seconds("all_reduce", nbytes, copies, stride=sharing)
        )
    return work
