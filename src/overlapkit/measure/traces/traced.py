"""One rank's trace, step by step: its lanes, its buckets, its copies, and what the device waited for."""

from dataclasses import dataclass, field

import numpy as np

from overlapkit.measure.record import StepRecord
from overlapkit.measure.traces.buckets import Bucket, find_tail
from overlapkit.measure.traces.columns import OTHER_COPY, TO_DEVICE_PAGEABLE, Columns, Ints
from overlapkit.measure.traces.lanes import COMMUNICATION, COPY, Lanes, Sweep, account
from overlapkit.measure.traces.timeline import UNKNOWN, Timeline


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies from the host to the device. Nanoseconds.

    Attributes:
        total: In which one was at work.
        exposed: Of it, what neither computation nor communication hid.
        pageable: In which one from pageable memory was at work.
    """

    total: int
    exposed: int
    pageable: int

    def to_dict(self) -> dict[str, float]:
        """In microseconds."""
        return {f"{name}_us": getattr(self, name) / 1e3 for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of one rank. Nanoseconds.

    Attributes:
        number: Of the profiler's step; None for a whole trace without steps.
        rank: Whose.
        lanes: From the first start to the last end of what the step launched.
        record: The period from the end of the step before, shared out.
        copies: From the host to the device; None on a host without one.
        host_wait: Of the idle time, the gaps whose next work was launched only when the gap had begun,
            without what the host waited there for a batch.
        buckets: Of gradients, in the order of their launches.
        tail: See `buckets.Tail`.
        tail_rows: Likewise.
        end: When its last work ended, on the trace's clock.
    """

    number: int | None
    rank: int
    lanes: Lanes
    record: StepRecord
    copies: Copies | None
    host_wait: int
    buckets: tuple[Bucket, ...]
    tail: int | None
    tail_rows: tuple[int, ...] = field(repr=False)
    end: int = field(repr=False)

    def to_dict(self) -> dict[str, object]:
        """Times in microseconds."""
        return {
            "step": self.number,
            "rank": self.rank,
            "lanes_us": self.lanes.to_dict(),
            "overlap_percent": self.lanes.overlap,
            "period_us": self.record.period / 1e3,
            "host_to_device": None if self.copies is None else self.copies.to_dict(),
            "host_wait_us": self.host_wait / 1e3,
            "tail_us": None if self.tail is None else self.tail / 1e3,
            "buckets": [bucket.to_dict() for bucket in self.buckets],
        }


@dataclass(frozen=True, slots=True)
class TracedRank:
    """What one rank did on one device.

    Attributes:
        file: Where it was read.
        rank: Of the job.
        world: Ranks of the job, or None.
        device: Its label; None for a host without one.
        lanes: Of the whole trace.
        copies: From the host to the device.
        steps: The profiler's steps, or one for all where there are none.
        timeline: The work itself.
        memory_peak: (bytes, phase) where memory was profiled.
    """

    file: str
    rank: int
    world: int | None
    device: object
    lanes: Lanes
    copies: Copies | None
    steps: tuple[TracedStep, ...]
    timeline: Timeline = field(repr=False)
    memory_peak: tuple[int, str] | None = None

    def to_dict(self) -> dict[str, object]:
        """Times in microseconds."""
        return {
            "rank": self.rank,
            "device": self.device if isinstance(self.device, int | None) else str(self.device),
            "file": self.file,
            "lanes_us": self.lanes.to_dict(),
            "overlap_percent": self.lanes.overlap,
            "host_to_device": None if self.copies is None else self.copies.to_dict(),
        }


def trace_rank(file: str, rank: int, world: int | None, timeline: Timeline, peak: "Peak") -> TracedRank:
    """Measure one device's timeline."""
    everything = np.arange(len(timeline.starts))
    steps: list[TracedStep] = []
    for place, mine in enumerate(timeline.rows_of_steps()):
        if len(mine):
            number, zero = (
                int(of[place]) for of in (timeline.host.windows.numbers, timeline.host.windows.starts)
            )
            steps.append(_step(timeline, mine, number, zero, rank, steps[-1].end if steps else None))
    whole = _step(timeline, everything, None, int(timeline.starts[0]), rank, None)
    return TracedRank(
        file=file,
        rank=rank,
        world=world,
        device=timeline.device,
        lanes=whole.lanes,
        copies=whole.copies,
        steps=tuple(steps) or (whole,),
        timeline=timeline,
        memory_peak=peak,
    )


Peak = tuple[int, str] | None


def _step(
    timeline: Timeline, mine: Ints, number: int | None, zero: int, rank: int, since: int | None
) -> TracedStep:
    starts, ends, lanes = timeline.starts[mine], timeline.ends[mine], timeline.lanes[mine]
    first = int(starts.min())
    lead = max(0, first - since) if since is not None else 0
    sweep = Sweep(starts, ends, lanes, first - lead if lead else None)
    found = account(sweep, lead)
    tail = find_tail(timeline, mine, zero)
    return TracedStep(
        number=number,
        rank=rank,
        lanes=found,
        record=_record(timeline, sweep, found, number or 0, lead),
        copies=None if timeline.device is None else _copies(timeline, mine),
        host_wait=_host_wait(timeline, mine, sweep),
        buckets=tail.buckets,
        tail=tail.tail,
        tail_rows=tail.rows,
        end=int(ends.max()),
    )


def _record(timeline: Timeline, sweep: Sweep, lanes: Lanes, number: int, lead: int) -> StepRecord:
    """The same record as the meter's: every nanosecond of the period belongs to one part."""
    forward, backward, optimizer, communication, copy = sweep.exposed()
    fed = timeline.host.input
    waited = int(fed.cover(*sweep.gaps()).sum())
    other = sweep.idle() - waited + (0 if timeline.host.has_forward else forward)
    return StepRecord(
        index=number,
        period=lanes.span + lead,
        forward=forward if timeline.host.has_forward else None,
        backward=backward if timeline.host.has_backward else None,
        optimizer=optimizer if timeline.host.has_optimizer else None,
        transfer=None if timeline.device is None else copy,
        communication=communication if bool((timeline.lanes == COMMUNICATION).any()) else None,
        checkpoint=None,
        input=waited if len(fed.starts) else None,
        other=other,
        outside=lead,
        lane_bytes={},
        peak_memory=None,
        tokens=None,
    )


def _copies(timeline: Timeline, mine: Ints) -> Copies:
    """Copies from the device, or on it, are no concern of the next batch."""
    kinds = timeline.kinds[mine]
    rows, slow = mine[kinds != OTHER_COPY], mine[kinds == TO_DEVICE_PAGEABLE]
    sweep = Sweep(timeline.starts[rows], timeline.ends[rows], timeline.lanes[rows])
    pageable = Sweep(timeline.starts[slow], timeline.ends[slow], timeline.lanes[slow])
    return Copies(sweep.total(COPY), sweep.exposed()[COPY], pageable.total(COPY))


def _host_wait(timeline: Timeline, mine: Ints, sweep: Sweep) -> int:
    """The idle time after which work came that had been launched only when the device was idle already."""
    begins, ends = sweep.gaps()
    starts, launched = timeline.starts[mine], timeline.launched[mine]
    if not len(begins) or not len(starts):
        return 0
    after = np.minimum(np.searchsorted(starts, ends), len(starts) - 1)
    late = (launched[after] != UNKNOWN) & (launched[after] > begins)
    return int((ends - begins - timeline.host.input.cover(begins, ends))[late].sum())


def find_peak(columns: Columns, base: int, timeline: Timeline) -> Peak:
    """The most memory that the profiler saw allocated, on the device if there is one, and in which phase."""
    allocated, kind = columns.memory.column(0), columns.memory.column(1)
    times = columns.memory.starts_ends()[0] + base
    rows = np.flatnonzero((kind == 0) == (timeline.device is None))
    if not len(rows) or not len(timeline.starts):
        return None
    row = rows[np.argmax(allocated[rows])]
    order = np.argsort(timeline.launched, kind="stable")
    place = np.searchsorted(timeline.launched[order], times[row])
    lane = int(timeline.lanes[order[min(place, len(order) - 1)]])
    phase = {0: "forward", 1: "backward", 2: "optimizer"}.get(lane, "another phase")
    return int(allocated[row]), phase
