"""When each gradient bucket was launched, ready and reduced, and what was left of it after backward."""

import re
from dataclasses import dataclass

import numpy as np

from overlapkit.measure.traces.columns import Ints
from overlapkit.measure.traces.lanes import BACKWARD, COMMUNICATION, COPY, FORWARD, OPTIMIZER
from overlapkit.measure.traces.timeline import Timeline

_REDUCES = re.compile(r"all_?reduce|reduce_?scatter", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One reduction of gradients. Nanoseconds since the host began the step.

    Attributes:
        kind: As "allreduce".
        bytes: Of its input, or None.
        launch: When the host launched it.
        ready: When, besides, all computation launched before it was done: its gradients were there.
        start: When its kernel (or gloo's span) began.
        end: When it ended.
        late: It was ready so late that it could not end before backward, however fast it began.
    """

    kind: str
    bytes: int | None
    launch: int
    ready: int
    start: int
    end: int
    late: bool

    def to_dict(self) -> dict[str, object]:
        """Times in microseconds."""
        times = {f"{name}_us": getattr(self, name) / 1e3 for name in ("launch", "ready", "start", "end")}
        return {"kind": self.kind, "bytes": self.bytes, **times, "late": self.late}


@dataclass(frozen=True, slots=True)
class Tail:
    """What of a step's communication was left after backward.

    Attributes:
        buckets: Reductions launched in backward, in the order of their launches.
        tail: From the end of backward's last computation to the end of the last collective that was launched
            in backward; 0 where that ended before, None where there was no backward or no collective in it.
        rows: Which of the timeline's work these collectives are.
    """

    buckets: tuple[Bucket, ...]
    tail: int | None
    rows: tuple[int, ...]


def find_tail(timeline: Timeline, mine: Ints, zero: int) -> Tail:
    """The buckets of a step, and its tail.

    Args:
        timeline: All work.
        mine: Which rows of it are the step's.
        zero: When the host began the step.
    """
    lanes, launched, ends = (of[mine] for of in (timeline.lanes, timeline.launched, timeline.ends))
    backward = lanes == BACKWARD
    if not backward.any():
        return Tail((), None, ())
    first, last_end = launched[backward].min(), int(ends[backward].max())
    # Of several optimizers that step in turn (a GAN's), those before the last backward end nothing.
    optimizer = launched[(lanes == OPTIMIZER) & (launched > launched[backward].max())]
    until = optimizer.min() if len(optimizer) else np.iinfo(np.int64).max
    rows = mine[(lanes == COMMUNICATION) & (launched >= first) & (launched < until)]
    if not len(rows):
        return Tail((), None, ())
    rows = rows[np.argsort(timeline.launched[rows], kind="stable")]
    done = _done(timeline, mine)
    buckets = tuple(
        _bucket(timeline, int(row), done, last_end, zero) for row in rows if _reduces(timeline, int(row))
    )
    return Tail(buckets, max(0, int(timeline.ends[rows].max()) - last_end), tuple(map(int, rows)))


def _reduces(timeline: Timeline, row: int) -> bool:
    return bool(_REDUCES.search(timeline.host.collectives[timeline.places[row]].kind))


def _done(timeline: Timeline, mine: Ints) -> tuple[Ints, Ints]:
    """Launches of computation, in order, and when all that was launched up to each of them was done."""
    work = mine[np.isin(timeline.lanes[mine], (FORWARD, BACKWARD, COPY))]
    work = work[np.argsort(timeline.launched[work], kind="stable")]
    return timeline.launched[work], np.maximum.accumulate(timeline.ends[work])


def _bucket(timeline: Timeline, row: int, done: tuple[Ints, Ints], last_end: int, zero: int) -> Bucket:
    launch, start, end = (int(times[row]) for times in (timeline.launched, timeline.starts, timeline.ends))
    before = np.searchsorted(done[0], launch) - 1 if timeline.device is not None else -1
    # Work of another stream may end after this began: then it did not wait for that.
    ready = min(start, max(launch, int(done[1][before]))) if before >= 0 else launch
    says = timeline.host.collectives[timeline.places[row]]
    return Bucket(
        kind=says.kind,
        bytes=says.bytes,
        launch=launch - zero,
        ready=ready - zero,
        start=start - zero,
        end=end - zero,
        late=ready + end - start > last_end,
    )
