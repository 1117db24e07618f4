"""`simulate`: a step at any number of ranks, from a profile and a link, as a StepReport."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from overlapkit.measure.report import StepReport
from overlapkit.parallel.shard_plan import ShardPlan
from overlapkit.plan.buckets import play_buckets
from overlapkit.plan.costs import Profile
from overlapkit.plan.failures import Failures
from overlapkit.plan.memory import Memory, memory_of
from overlapkit.plan.played_report import report_of
from overlapkit.plan.setting import Job, rules_under, work_of
from overlapkit.plan.step import Played, Rules, Step

Wrapper = Literal["shard", "replicate"]

HIDDEN = 0.02
"""The share of a step up to which communication counts as hidden, as in a report's verdict."""


@dataclass(frozen=True)
class SimulatedReport(StepReport):
    """A StepReport of a step that was simulated.

    Attributes:
        memory: Bytes of one rank, part by part.
        break_even_tokens: The fewest tokens a rank in a microbatch that hide communication (2 % of the step
            or less); None where the profile has no tokens.
        save_interval_s: The best training time between two checkpoints, or None without `failures`.
        goodput: The share of time in which the job gets on, saving that often; None without `failures`.
        inputs: Every figure that went in, and where it came from.
        assumptions: What the model takes for granted.
    """

    memory: Memory | None = None
    break_even_tokens: int | None = None
    save_interval_s: float | None = None
    goodput: float | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As StepReport's, and the fields of this class."""
        own = {
            name: getattr(self, name)
            for name in ("break_even_tokens", "save_interval_s", "goodput", "inputs", "assumptions")
        }
        memory = None if self.memory is None else dataclasses.asdict(self.memory)
        return {**super().to_dict(), "simulated": {**own, "memory": memory}}

    def __str__(self) -> str:
        lines = [super().__str__(), "", "Simulated from:"]
        lines += [f"  {name}: {what}" for name, what in self.inputs.items()]
        lines += ["Taken for granted:", *(f"  {one}" for one in self.assumptions)]
        return "\n".join(lines)


def play(job: Job, plan: ShardPlan, wrapper: Wrapper) -> Played:
    """One step of a job under a plan, up to the optimizer.

    Raises:
        ValueError: There is no such wrapper, or `replicate` is to share parameters.
    """
    if wrapper == "replicate":
        if job.shards is not None:
            raise ValueError(
                f"shards={job.shards}, wrapper='replicate': it keeps every parameter whole on each rank; "
                "give shards=None, or wrapper='shard'"
            )
        return play_buckets(job, plan)
    if wrapper != "shard":
        raise ValueError(f"wrapper={wrapper!r}: give 'shard' or 'replicate'")
    return Step(work_of(job, plan), rules_under(job, plan)).play()


def optimizer_step_s(job: Job, wrapper: Wrapper) -> float:
    """The optimizer's step on one rank: of all parameters, or of its share."""
    return job.optimizer_s / (1 if wrapper == "replicate" else job.sharing)


def simulate(
    profile: Profile,
    link: Any,
    world: int,
    *,
    plan: ShardPlan | None = None,
    wrapper: Wrapper = "shard",
    shards: int | None = None,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    spread: float = 0.0,
    optimizer_s: float = 0.0,
    optimizer_bytes: int = 8,
    rules: Rules | None = None,
    failures: Failures | None = None,
) -> SimulatedReport:
    """Play one training step of a model on so many ranks, and report it as a meter would.

    Args:
        profile: Of one microbatch on one rank: see `profile`.
        link: A LinkTable that `probe_link` measured, or a Fabric.
        world: Number of ranks.
        plan: Units, prefetch, reshard, recomputation or bucket caps; what it leaves open is as `shard` and
            `replicate` have it.
        wrapper: "shard" (FSDP2) or "replicate" (DDP).
        shards: Ranks that share each parameter; None for all. Fewer make copies (HSDP).
        param_bytes: Bytes an element in an all-gather.
        reduce_bytes: Bytes an element in a reduction.
        spread: Standard deviation of the ranks' compute times, of their mean.
        optimizer_s: Seconds of the optimizer's step for all parameters on one rank.
        optimizer_bytes: Bytes an element of its state.
        rules: What is fixed in the schedule; None for what `shard` does on the profile's device.
        failures: How often ranks fail; then goodput and the best save interval are said as well.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: A figure is out of range, the world is no multiple of the shards, the fabric has no
            network and the ranks need one, or the plan does not fit the profile.
    """
    plan = plan or ShardPlan()
    job = Job(profile, link, world, shards, param_bytes, reduce_bytes, spread, optimizer_s, rules)
    played = play(job, plan, wrapper)
    memory = memory_of(job, plan, optimizer_bytes=optimizer_bytes, replicated=wrapper == "replicate")
    report = report_of(
        played,
        world=world,
        device=profile.device,
        tokens=None if profile.tokens is None else profile.tokens * job.schedule.microbatches,
        memory=memory.total,
        optimizer_s=optimizer_step_s(job, wrapper),
    )
    interval = None if failures is None else failures.best_interval(world)
    return SimulatedReport(
        **{one.name: getattr(report, one.name) for one in dataclasses.fields(report)},
        memory=memory,
        break_even_tokens=break_even(job, plan, wrapper),
        save_interval_s=interval,
        goodput=None if failures is None or interval is None else failures.goodput(world, interval),
        inputs=_inputs(job, failures),
        assumptions=_assumptions(job, wrapper),
    )


def break_even(job: Job, plan: ShardPlan, wrapper: Wrapper) -> int | None:
    """The fewest tokens a rank in a microbatch for which communication is hidden; compute is proportional."""
    if job.profile.tokens is None:
        return None
    if job.world == 1:
        return 1

    def exposed(factor: float) -> float:
        played = play(dataclasses.replace(job, profile=_scaled(job.profile, factor)), plan, wrapper)
        return played.exposed_s / played.end if played.end else 0.0

    low, high = 0.0, 1.0
    while exposed(high) > HIDDEN:
        low, high = high, high * 2
        if high > 1e9:
            return None
    while high - low > 1e-3 * high and high * job.profile.tokens > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if exposed(middle) > HIDDEN else (low, middle)
    return max(1, round(high * job.profile.tokens))


def _scaled(profile: Profile, factor: float) -> Profile:
    units = tuple(
        dataclasses.replace(unit, forward_s=unit.forward_s * factor, backward_s=unit.backward_s * factor)
        for unit in profile.units
    )
    return dataclasses.replace(profile, units=units)


def _inputs(job: Job, failures: Failures | None) -> dict[str, str]:
    profile = job.profile
    found = {
        "compute": f"forward {profile.forward_s * 1e3:.2f} ms, backward {profile.backward_s * 1e3:.2f} ms of "
        f"{len(profile.units)} units, {profile.source} on {profile.device}",
        "model": f"{profile.parameters:,} parameters; {job.param_bytes} bytes an element gathered, "
        f"{job.reduce_bytes} reduced (given)",
        "link": job.link.source,
        "copies": f"{job.link.copy_seconds(2**24) * 1e3:.2f} ms for 16 MiB (from the link)",
        "spread of ranks": f"{job.spread:.2%} of their compute time (given)",
        "optimizer": f"{job.optimizer_s * 1e3:.2f} ms for all parameters (given)",
    }
    if failures is not None:
        found["failures"] = (
            f"one rank fails every {failures.mtbf_s / 86400:.1f} days, restart {failures.restart_s:.0f} s, "
            f"stall {failures.stall_s:.2f} s, writing {failures.write_s:.0f} s (given)"
        )
    return found


def _assumptions(job: Job, wrapper: Wrapper) -> tuple[str, ...]:
    same = "every rank computes what the profiled one did, and the slowest of them sets the pace"
    ring = "collectives take what a ring takes; nothing else uses the link"
    beside = "a collective does not slow the computation beside it"
    if wrapper == "replicate":
        return same, ring, beside, "within a unit gradients become ready evenly, last parameter first"
    said = [same, ring, beside]
    if job.schedule.separate or job.copies > 1:
        said.append("collectives of different communicators share the link evenly")
    if job.sharing > 1 and not job.link.copy_seconds(1):
        said.append("copies into and out of the collectives' buffers take no time")
    if again := [unit.name for unit in job.profile.units if unit.calls > 1 and job.sharing > 1]:
        said.append(f"units that are called several times a step are gathered once: {', '.join(again)}")
    return tuple(said)
