"""What one rank hands in about a window of steps: the parts of each step and its collectives, in few bytes.

A late rank shows at one collective only, the first after its delay, so a step is handed in with all of its
collectives or with none: where a window has too many, those of every 2nd, 4th, 8th ... step are taken.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlapkit.measure.across.sequence import Issues
from overlapkit.measure.arrival import Ints
from overlapkit.measure.intervals import Intervals
from overlapkit.measure.ledger import Trace
from overlapkit.measure.record import Segment, StepRecord

LIMIT_BYTES = 16 * 1024
"""The most that a rank hands in for one window."""

PARTS = (
    *("forward", "backward", "optimizer", "input", "transfer", "checkpoint"),
    *("compilation", "garbage", "other"),
)
"""Local time of a rank: what it did itself, waits for collectives left out."""

COLUMNS = (*PARTS, "communication", "period")

PHASES = ("forward", "loss", "backward", "optimizer", "inside", "outside", "paused")

_COLLECTIVES = 1000  # of a window
_UNKNOWN = -1

Key = tuple[str, int, str]
"""A collective of a step: its name, the how many-th of that name, its process group ("" for all ranks)."""


@dataclass(frozen=True, slots=True)
class Detail:
    """The collectives of one step in the order in which this rank began them. Microseconds.

    Attributes:
        step: Its index.
        keys: Which they are.
        starts: When this rank arrived, from the step's own start, (collectives,).
        durations: Until the collective ended here, (collectives,).
        exposed: For how long of it the step stood still, (collectives,). Time in which several were waited
            for is given to the one that ended first.
        phases: Where in PHASES the rank was when it arrived, (collectives,).
    """

    step: int
    keys: tuple[Key, ...]
    starts: Ints
    durations: Ints
    exposed: Ints
    phases: Ints


@dataclass(frozen=True, slots=True)
class Handed:
    """One rank's window.

    Attributes:
        steps: Indices, ascending, (steps,).
        parts: Microseconds of each of COLUMNS, -1 where unknown, (steps, columns).
        details: Of some of the steps.
        issued: What this rank gave to the backend, where it was looked up.
    """

    steps: Ints
    parts: Ints
    details: tuple[Detail, ...]
    issued: Issues | None = None

    def encode(self) -> bytes:
        """At most LIMIT_BYTES: every other of the detailed steps is left out until it is."""
        handed = self
        while len(payload := handed._encode()) > LIMIT_BYTES:
            details, issued = handed.details, handed.issued
            if len(details) > 1:
                details = details[::2]
            elif issued is not None:
                issued = None
            else:
                details = ()
            handed = Handed(self.steps, self.parts, details, issued)
        return payload

    def _encode(self) -> bytes:
        listings = list(dict.fromkeys(detail.keys for detail in self.details))
        head = {
            "steps": self.steps.tolist(),
            "listings": listings,
            "details": [[detail.step, listings.index(detail.keys)] for detail in self.details],
            "issued": None if self.issued is None else self.issued.to_dict(),
        }
        columns = [self.parts.astype("<i4").tobytes()]
        for detail in self.details:
            for column in (detail.starts, detail.durations, detail.exposed, detail.phases):
                columns.append(column.astype("<i4").tobytes())
        text = json.dumps(head, separators=(",", ":")).encode()
        return zlib.compress(len(text).to_bytes(4, "little") + text + b"".join(columns))


def decode(payload: bytes) -> Handed:
    """What `Handed.encode` made."""
    data = zlib.decompress(payload)
    size = int.from_bytes(data[:4], "little")
    head: dict[str, Any] = json.loads(data[4 : 4 + size])
    numbers = np.frombuffer(data[4 + size :], dtype="<i4").astype(np.int64)
    steps = np.array(head["steps"], dtype=np.int64)
    place = len(steps) * len(COLUMNS)
    parts = numbers[:place].reshape(len(steps), len(COLUMNS))
    listings = [tuple((name, turn, group) for name, turn, group in keys) for keys in head["listings"]]
    details = []
    for step, listing in head["details"]:
        count = len(listings[listing])
        columns = numbers[place : place + 4 * count].reshape(4, count)
        details.append(Detail(step, listings[listing], *columns))
        place += 4 * count
    issued = None if head["issued"] is None else Issues.from_dict(head["issued"])
    return Handed(steps, parts, tuple(details), issued)


def hand_in(
    steps: Sequence[tuple[StepRecord, Trace]], *, every: int = 1, issued: Issues | None = None
) -> Handed:
    """Make a rank's window of its records.

    Args:
        steps: Records and their traces, by index.
        every: Distance of their indices.
        issued: What was given to the backend lately, where that was looked up.
    """
    found = [_detail(trace) for _, trace in steps]
    most, stride = max((len(detail.keys) for detail in found), default=0), 1
    while most * len(range(0, len(found), stride)) > _COLLECTIVES and stride < len(found):
        stride *= 2
    return Handed(
        steps=np.array([record.index for record, _ in steps], dtype=np.int64),
        parts=np.array([_parts(record) for record, _ in steps], dtype=np.int64).reshape(-1, len(COLUMNS)),
        details=tuple(one for one in found if one.keys and one.step // every % stride == 0),
        issued=issued,
    )


def _parts(record: StepRecord) -> list[int]:
    times = (getattr(record, column) for column in COLUMNS)
    return [_UNKNOWN if time is None else time // 1000 for time in times]


def _detail(trace: Trace) -> Detail:
    spans = sorted(
        (span for span in trace.collectives if span.bytes is not None), key=lambda span: span.start
    )
    zero = trace.segments[0].start
    turns: dict[tuple[str, str], int] = {}
    keys = []
    for span in spans:
        turn = turns[span.name, span.group] = turns.get((span.name, span.group), -1) + 1
        keys.append((span.name, turn, span.group))
    starts = np.array([span.start for span in spans], dtype=np.int64)
    ends = np.array([span.end for span in spans], dtype=np.int64)
    return Detail(
        step=trace.index,
        keys=tuple(keys),
        starts=(starts - zero) // 1000,
        durations=(ends - starts) // 1000,
        exposed=_exposed(ends, trace.waits.get("communication", [])) // 1000,
        phases=_phases(starts, trace.segments),
    )


def _exposed(ends: Ints, waits: Intervals) -> Ints:
    """Of the time that was waited, what ends with each collective: since another one ended."""
    if not waits or not len(ends):
        return np.zeros(len(ends), dtype=np.int64)
    times = np.array(waits, dtype=np.int64).ravel()
    lengths = np.diff(np.array(waits, dtype=np.int64), axis=1)[:, 0]
    waited = np.repeat(np.concatenate([[0], np.cumsum(lengths)]), 2)[1:-1]
    order = np.argsort(ends, kind="stable")
    until = np.interp(ends[order], times, waited, left=0).astype(np.int64)
    exposed = np.empty(len(ends), dtype=np.int64)
    exposed[order] = np.diff(until, prepend=0)
    return exposed


def _phases(starts: Ints, segments: Sequence[Segment]) -> Ints:
    begins = np.array([segment.start for segment in segments], dtype=np.int64)
    kinds = np.array([PHASES.index(segment.kind) for segment in segments], dtype=np.int64)
    found: Ints = kinds[np.maximum(np.searchsorted(begins, starts, side="right") - 1, 0)]
    return found
