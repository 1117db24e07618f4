"""One rank's trace, step by step: its lanes, its buckets, its copies, and what the device waited for."""

from dataclasses import dataclass, field

import numpy as np

from overlapkit.measure.record import StepRecord
from overlapkit.measure.traces.buckets import Bucket, find_tail
from overlapkit.measure.traces.columns import COMMUNICATION as COMMUNICATING
from overlapkit.measure.traces.columns import COMPUTE, TO_DEVICE, TO_DEVICE_PAGEABLE, Columns, Ints
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
        record: The period from the end of the step before, shared out. What ran in it counts, whichever
            step launched it: a host that runs ahead launches copies under the compute of the step before.
            That of the first begins with its wait for a batch, or else with its first work.
        copies: From the host to the device; None on a host without one.
        idle: Of the period, when nothing was at work and the host did not wait for a batch.
        host_wait: Of that, the gaps whose next work was launched only when the gap had begun.
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
    idle: int
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
    begin = _first_begin(timeline, number, zero, first) if since is None else since
    end = max(begin, int(ends.max()))
    beside = timeline.during(begin, end)
    sweep = timeline.sweep(beside, begin, end)
    tail = find_tail(timeline, mine, zero)
    return TracedStep(
        number=number,
        rank=rank,
        lanes=account(Sweep(starts, ends, lanes)),
        record=_record(timeline, sweep, number or 0, first),
        copies=None if timeline.device is None else _copies(timeline, mine),
        idle=sweep.idle() - int(timeline.host.input.cover(*sweep.gaps()).sum()),
        host_wait=_host_wait(timeline, beside, sweep),
        buckets=tail.buckets,
        tail=tail.tail,
        tail_rows=tail.rows,
        end=end,
    )


def _first_begin(timeline: Timeline, number: int | None, zero: int, first: int) -> int:
    """Where a period begins that has none before it: with its first work, or the wait for its batch.

    What else the host did before, starting the profiler among it, is not told apart from training.
    """
    fed = timeline.host.input.starts
    waits = fed[(fed < first) & ((fed >= zero) | (number is None))]
    before = timeline.ends[timeline.starts < first]  # of the step before, whose launch was not recorded
    return min(first, max(int(waits[0]), int(before.max(initial=waits[0])))) if len(waits) else first


def _record(timeline: Timeline, sweep: Sweep, number: int, first: int) -> StepRecord:
    """The same record as the meter's: every nanosecond of the period belongs to one part."""
    forward, backward, optimizer, communication, copy = sweep.exposed()
    fed, (begins, ends) = timeline.host.input, sweep.gaps()
    waited = int(fed.cover(begins, ends).sum())
    other = sweep.idle() - waited + (0 if timeline.host.has_forward else forward)
    return StepRecord(
        index=number,
        period=int(sweep.times[-1] - sweep.times[0]),
        forward=forward if timeline.host.has_forward else None,
        backward=backward if timeline.host.has_backward else None,
        optimizer=optimizer if timeline.host.has_optimizer else None,
        transfer=None if timeline.device is None else copy,
        communication=communication if bool((timeline.lanes == COMMUNICATION).any()) else None,
        checkpoint=None,
        input=waited if len(fed.starts) else None,
        other=other,
        outside=int((ends - begins)[ends <= first].sum()),
        lane_bytes={},
        peak_memory=None,
        tokens=None,
    )


def _copies(timeline: Timeline, mine: Ints) -> Copies:
    """Copies from the device, or on it, are no concern of the next batch."""
    kinds = timeline.kinds[mine]
    own, slow = mine[np.isin(kinds, (TO_DEVICE, TO_DEVICE_PAGEABLE))], mine[kinds == TO_DEVICE_PAGEABLE]
    if not len(own):
        return Copies(0, 0, 0)
    beside = timeline.during(int(timeline.starts[own].min()), int(timeline.ends[own].max()))
    rows = np.concatenate([own, beside[np.isin(timeline.kinds[beside], (COMPUTE, COMMUNICATING))]])
    sweep = Sweep(timeline.starts[rows], timeline.ends[rows], timeline.lanes[rows])
    pageable = Sweep(timeline.starts[slow], timeline.ends[slow], timeline.lanes[slow])
    return Copies(sweep.total(COPY), sweep.exposed()[COPY], pageable.total(COPY))


def _host_wait(timeline: Timeline, rows: Ints, sweep: Sweep) -> int:
    """The idle time after which work came that had been launched only when the device was idle already."""
    begins, ends = sweep.gaps()
    starts, launched = timeline.starts[rows], timeline.launched[rows]
    if not len(begins) or not len(starts):
        return 0
    after = np.minimum(np.searchsorted(starts, ends), len(starts) - 1)
    late = (launched[after] != UNKNOWN) & (launched[after] > begins)
    return int((ends - begins - timeline.host.input.cover(begins, ends))[late].sum())


def find_peak(columns: Columns, base: int, timeline: Timeline) -> Peak:
    """The most memory that the profiler saw allocated, on the device if there is one, and in which phase."""
    allocated, kind = columns.memory.column(0), columns.memory.column(1)
    times = columns.memory.starts_ends()[0] + base
    mine = (kind == 0) == (timeline.device is None)
    if isinstance(timeline.device, int):
        mine &= columns.memory.column(2) == timeline.device
    rows = np.flatnonzero(mine)
    if not len(rows) or not len(timeline.starts):
        return None
    row = rows[np.argmax(allocated[rows])]
    order = np.argsort(timeline.launched, kind="stable")
    place = np.searchsorted(timeline.launched[order], times[row])
    lane = int(timeline.lanes[order[min(place, len(order) - 1)]])
    phase = {0: "forward", 1: "backward", 2: "optimizer"}.get(lane, "another phase")
    return int(allocated[row]), phase
