"""The memory of one rank at the highest point of a step, part by part."""

from dataclasses import dataclass

from overlapkit.parallel.shard_plan import ShardPlan
from overlapkit.plan.arguments import check_ranks
from overlapkit.plan.setting import Job, recomputed, rules_under, work_of


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the end of forward, where they are most, or while backward goes through its units.

    Attributes:
        state: Parameters, gradients and the optimizer's state of this rank's share.
        gathered: Whole parameters of the units that are there at once: those that are kept, the one that
            computes, and those that are gathered ahead.
        reduced: Whole gradients of the unit that computes, and of those whose reduction is under way with, on
            the CPU, what is received for it.
        activations: What autograd keeps for backward, and one block's more where blocks are recomputed.
    """

    state: int
    gathered: int
    reduced: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.gathered + self.reduced + self.activations


def memory_of(job: Job, plan: ShardPlan, *, optimizer_bytes: int = 8, replicated: bool = False) -> Memory:
    """What one rank holds.

    Args:
        job: Its profile says what activations take.
        plan: Units, prefetch, reshard and recomputation.
        optimizer_bytes: Bytes an element of the optimizer's state: 8 for AdamW with float32 moments.
        replicated: Under DDP: everything whole, and gradients in buckets that they share.
    """
    check_ranks("optimizer_bytes", optimizer_bytes, least=0)
    units = job.profile.units
    share = 1 if replicated else job.sharing
    trained = sum(unit.trained for unit in units)
    widths = sum(unit.nbytes for unit in units)
    # Gradients are kept in the parameters' dtype.
    gradients = sum(unit.nbytes * unit.trained // max(unit.parameters, 1) for unit in units)
    state = -(-(widths + gradients + trained * optimizer_bytes) // share)
    kept = activations_of(job, plan)
    if replicated or share == 1:
        return Memory(state, 0, 0, kept)
    work, rules = work_of(job, plan), rules_under(job, plan)
    ahead = max(rules.forward_prefetch, rules.backward_prefetch) + 1
    moving = sorted((one.gather_bytes - one.kept_bytes for one in work if one.regathers), reverse=True)[
        : ahead + 1
    ]
    gathered = sum(one.kept_bytes for one in work) + sum(moving)
    flying = rules.buffers or 1
    largest = sorted((one.reduce_bytes for one in work), reverse=True)[: flying + 1]  # one is computed
    reduced = sum(largest)
    if job.profile.device == "cpu":  # what other ranks send is received beside it, then summed
        reduced += sum(largest[:flying]) * (share - 1) // share
    return Memory(state, gathered, reduced, kept)


def activations_of(job: Job, plan: ShardPlan) -> int:
    """Bytes that autograd keeps at the end of forward, and of the largest recomputed block besides."""
    blocks = [unit for unit in job.profile.units if unit.block]
    again = recomputed(len(blocks), plan.recompute)
    repeated = [unit for unit, repeats in zip(blocks, again, strict=True) if repeats]
    names = {unit.name for unit in repeated}
    kept = sum(unit.inputs if unit.name in names else unit.saved for unit in job.profile.units)
    return kept + max((unit.saved for unit in repeated), default=0)
