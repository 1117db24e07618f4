"""A training step under DDP, played through: buckets that are reduced when backward has filled them."""

from collections.abc import Iterator, Sequence

from overlapkit.parallel.shard_plan import ShardPlan
from overlapkit.plan.setting import Job, computed
from overlapkit.plan.step import Phase, Played
from overlapkit.plan.wires import Wires

MIB = 2**20
DEFAULT_CAPS = (1.0, 25.0)
"""DDP's own, in MiB: a small first bucket, then all alike."""

Ready = tuple[float, int, str]
"""When a gradient is there, its bytes, and its unit."""


def fill_buckets(ready: Sequence[Ready], caps: Sequence[float]) -> Iterator[list[Ready]]:
    """Put gradients into buckets as DDP does: a bucket is closed by the gradient that reaches its cap.

    Args:
        ready: In the order in which they become ready.
        caps: Of the first buckets in MiB; the last holds for all that follow.
    """
    bucket: list[Ready] = []
    number = 0
    for gradient in ready:
        bucket.append(gradient)
        if sum(nbytes for _, nbytes, _ in bucket) >= caps[min(number, len(caps) - 1)] * MIB:
            yield bucket
            bucket, number = [], number + 1
    if bucket:
        yield bucket


def play_buckets(job: Job, plan: ShardPlan) -> Played:
    """Forward, backward with its buckets in the order of backward, and the tail.

    Within a unit gradients become ready in reverse order of registration, evenly by their elements.
    """
    wires, played, seconds = Wires(), Played(), computed(job, plan)
    now = 0.0
    ready: list[Ready] = []
    *others, root = job.profile.units
    backward = (root, *reversed(others))
    for microbatch in range(job.schedule.microbatches):
        if microbatch:  # those before are not reduced
            for unit in backward:
                now = _phase(played, "backward", unit.name, now, seconds[unit.name][1])
        for unit in job.profile.units:
            now = _phase(played, "forward", unit.name, now, seconds[unit.name][0])
    for unit in backward:
        begin = now
        now = _phase(played, "backward", unit.name, now, seconds[unit.name][1])
        done = 0
        for elements in reversed(unit.gradients):
            done += elements
            share = done / unit.trained if unit.trained else 1.0
            ready.append((begin + (now - begin) * share, elements * job.reduce_bytes, unit.name))
    if job.world > 1:
        for bucket in fill_buckets(ready, plan.bucket_caps_mb or DEFAULT_CAPS):
            nbytes = sum(size for _, size, _ in bucket)
            takes = job.link.seconds("all_reduce", nbytes, job.world)
            names = f"all_reduce {bucket[0][2]}" + (f" .. {bucket[-1][2]}" if len(bucket) > 1 else "")
            wires.launch("reduce", names, nbytes, takes, bucket[-1][0])
    _phase(played, "communication", "all_reduce tail", now, wires.drain(now) - now)
    played.transfers = wires.done
    played.end = max(now, played.phases[-1].end)
    return played


def _phase(played: Played, kind: str, name: str, now: float, seconds: float) -> float:
    if seconds > 0:
        played.phases.append(Phase(kind, name, now, now + seconds))
    return now + max(seconds, 0.0)
