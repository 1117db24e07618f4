"""What a report knows beside the parts of a step: buckets, units, saves, compilations, memory, arithmetic.

Times are milliseconds, means over the window's steps that were looked at. What was not measured is None,
and `StepDetail.missing` says why.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Bucket:
    """One reduction of gradients. Its times count from the beginning of the backward that it belongs to.

    Attributes:
        name: Of its span, e.g. "all_reduce a.weight .. b.bias (4)".
        parameters: Names of the parameters whose gradients it reduces; empty where they were not published.
        bytes: That it moves, or None.
        ready_ms: When this rank had all that it gives, or None where that was not published.
        start_ms: When the reduction began.
        end_ms: When it ended.
        steps: How often it was seen.
    """

    name: str
    parameters: tuple[str, ...]
    bytes: int | None
    ready_ms: float | None
    start_ms: float
    end_ms: float
    steps: int


@dataclass(frozen=True, slots=True)
class Gather:
    """The all-gathers of one unit.

    Attributes:
        unit: Its name.
        exposed_ms: Milliseconds a step that the step stood still for them.
        bytes: That they bring a step, or None.
    """

    unit: str
    exposed_ms: float
    bytes: float | None


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch's local time: what this rank computed, without what it waited for.

    Attributes:
        forward_ms: Of its forward, the loss included.
        backward_ms: Of its backward.
    """

    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True)
class Compilation:
    """A function that torch.compile compiled.

    Attributes:
        name: Of the function.
        where: Its file and line.
        steps: In which steps.
        ms: All of its compilations together.
        reason: Why it was compiled again, as torch says, or None the first time.
    """

    name: str
    where: str
    steps: tuple[int, ...]
    ms: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class Sync:
    """A place where the host waited for the device.

    Attributes:
        operator: That does it, e.g. "aten._local_scalar_dense" (`.item()`, `float()`, `if tensor:`).
        where: File and line of the innermost frame outside of torch.
        a_step: How often, a step that was looked at.
    """

    operator: str
    where: str
    a_step: float


@dataclass(frozen=True, slots=True)
class JobIO:
    """What this process and its children read from storage and wrote to it (/proc/PID/io).

    Attributes:
        read_bytes: A second.
        written_bytes: A second.
        processes: How many were counted.
    """

    read_bytes: float
    written_bytes: float
    processes: int


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """(stall + wait for the previous save + slowdown of the following steps) / interval.

    Attributes:
        saves: How many began in the window.
        interval: Steps between two of them.
        stall_ms: That a save holds the step up, the wait for the previous one included.
        slowdown_ms: By how much the steps beside a save are longer, all of them together; None where no
            step was free of saves, or none beside one.
        amortised_ms: All of it, a step.
    """

    saves: int
    interval: float
    stall_ms: float
    slowdown_ms: float | None
    amortised_ms: float


@dataclass(frozen=True, slots=True)
class StepDetail:
    """Beside the parts.

    Attributes:
        recompute_ms: Of backward, forward that was run again (activation checkpointing).
        passes: Local time of each microbatch of a step, in order.
        buckets: In the order in which they begin.
        gathers: Exposed all-gather of each unit, the costliest first.
        compilations: By torch.compile in the window.
        syncs: Of the host with the device, the most frequent first.
        io: Of the job, with storage.
        checkpoint: What saving costs a step.
        peaks: Bytes at the highest point within each phase.
        flops: Floating-point operations of a step on this rank, recomputation left out.
        mfu: Model FLOPs utilisation: the time that `flops` take at the device's peak, of the period.
        missing: For each of the above that is None, the reason.
    """

    recompute_ms: float | None = None
    passes: tuple[Pass, ...] | None = None
    buckets: tuple[Bucket, ...] | None = None
    gathers: tuple[Gather, ...] | None = None
    compilations: tuple[Compilation, ...] | None = None
    syncs: tuple[Sync, ...] | None = None
    io: JobIO | None = None
    checkpoint: CheckpointCost | None = None
    peaks: Mapping[str, int] | None = None
    flops: float | None = None
    mfu: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: _listed(value) for name, value in asdict(self).items()}


def _listed(value: Any) -> Any:
    """JSON has lists, no tuples."""
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    return [_listed(part) for part in value] if isinstance(value, (list, tuple)) else value
