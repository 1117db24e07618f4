"""Steps of several ranks with known lateness, as records and traces, as reports, or from a fake ledger."""

import threading
from collections import deque
from types import SimpleNamespace

from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import Segment, StepRecord
from overlapkit.span import Span

US = 1000


def record(index, **parts):
    """A record of `parts` in microseconds; backward and the rest are 0, what is not measured is None."""
    known = {"forward": 0, "backward": 0, "optimizer": 0, "communication": 0, "other": 0, "outside": 0}
    times = {name: time * US for name, time in {**known, **parts}.items()}
    return StepRecord(
        index=index,
        period=times.pop("period", sum(times.values())),
        **{"transfer": None, "checkpoint": None, "input": None, **times},
        lane_bytes={},
        peak_memory=None,
        tokens=None,
    )


def trace(index, spans, *, zero=0, forward=100, backward=900, waits=()):
    """A trace whose spans are (name, start, end) in microseconds after its start, on a clock of its own."""
    base = zero * US
    turns = [("forward", 0, forward), ("backward", forward, forward + backward)]
    segments = [Segment(kind, *(base + at * US for at in (a, b, a, b))) for kind, a, b in turns]
    named = [
        Span("communication", name, base + start * US, base + end * US, bytes=8, group=group)
        for name, start, end, *rest in spans
        for group in [rest[0] if rest else ""]
    ]
    stood = {"communication": [(base + start * US, base + end * US) for start, end in waits]}
    return Trace(index, segments, stood, tuple(named))


class FakeLedger:
    """Holds what it is given, as Ledger does."""

    def __init__(self):
        self.records, self.traces, self.lock = deque(maxlen=1000), deque(maxlen=100), threading.Lock()

    def add(self, one, seen):
        self.records.append(one)
        self.traces.append(seen)


class FakeQuorum:
    """A rank of a job whose ranks are threads of this process."""

    def __init__(self, rank, world, store, name="job"):
        self.rank, self.world, self.store, self.name = rank, world, store, name
        self.left = False

    def leave(self):
        self.left = True


def fake_phases(kind="forward", turns=2):
    """What a watch reads of a meter."""

    class Phases(SimpleNamespace):
        __hash__ = object.__hash__

    return Phases(timeline=SimpleNamespace(kind=kind, turns=turns), pauses=0)
