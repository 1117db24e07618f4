"""The work of one device, or of a host without one, by its starts: lane, step and phase of each piece.

Work belongs to the step whose host launched it, not to the one during which it ran: a host runs ahead.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overlapkit.measure.traces import columns as kinds
from overlapkit.measure.traces.columns import Collective, Columns, Ints, Table
from overlapkit.measure.traces.lanes import BACKWARD, COMMUNICATION, COPY, FORWARD, OPTIMIZER, Sweep

UNKNOWN = -(1 << 62)
"""A launch that the trace does not hold."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Windows:
    """Stretches of the host's time, by their starts, in nanoseconds."""

    starts: Ints
    ends: Ints
    numbers: Ints

    def place(self, at: Ints) -> Ints:
        """Which window each time lies in; -1 for none. Where windows overlap it is the latest that began."""
        place = np.searchsorted(self.starts, at, side="right") - 1
        if not len(self.starts):
            return np.full(len(at), -1)
        return np.where((place >= 0) & (at < self.ends[np.maximum(place, 0)]), place, -1)

    def union(self) -> "Windows":
        """Without overlaps, so that each moment counts once."""
        if not len(self.starts):
            return self
        until = np.maximum.accumulate(self.ends)
        first = np.concatenate([[True], self.starts[1:] > until[:-1]])
        last = np.concatenate([first[1:], [True]])
        return Windows(self.starts[first], until[last], self.numbers[first])

    def cover(self, starts: Ints, ends: Ints) -> Ints:
        """How much of each stretch lies within windows that do not overlap."""
        if not len(self.starts):
            return np.zeros(len(starts), dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(self.ends - self.starts)])

        def until(at: Ints) -> Ints:
            place = np.searchsorted(self.starts, at, side="right") - 1
            window = np.maximum(place, 0)
            part = np.minimum(at, self.ends[window]) - self.starts[window]
            covered: Ints = np.where(place >= 0, before[window] + part, 0)
            return covered

        return until(ends) - until(starts)


@dataclass(frozen=True)
class Host:
    """What the work of all devices of a trace shares.

    Attributes:
        windows: The host's steps.
        input: When it waited for a batch.
        collectives: What communication says about itself.
        labels: How the trace numbers or names threads, streams and devices.
        has_forward: Whether operators were recorded, so that the rest of them is forward.
        has_backward: Whether autograd's were among them.
        has_optimizer: Whether the optimizer's step can be told.
    """

    windows: Windows
    input: Windows
    collectives: list[Collective]
    labels: list[object]
    has_forward: bool
    has_backward: bool
    has_optimizer: bool


@dataclass(frozen=True)
class Timeline:
    """Work in the order of its starts; times are nanoseconds.

    Attributes:
        device: Its label in the trace; None for a host without one.
        starts: Of each piece of work.
        ends: Likewise.
        launched: When the host launched it, or UNKNOWN.
        lanes: See `lanes`.
        kinds: See `columns`.
        steps: Which of the host's windows it belongs to, or -1.
        streams: Of each, as a place in the host's labels.
        places: Of communication in the host's `collectives`, else -1.
        host: The host's side.
    """

    device: object
    starts: Ints
    ends: Ints
    launched: Ints
    lanes: Ints
    kinds: Ints
    steps: Ints
    streams: Ints
    places: Ints
    host: Host

    @cached_property
    def _until(self) -> Ints:
        """When all work that began up to each piece of it has ended."""
        return np.maximum.accumulate(self.ends)

    def during(self, begin: int, end: int) -> Ints:
        """The rows of all work that ran between two moments, whichever step launched it."""
        rows = np.arange(np.searchsorted(self._until, begin, side="right"), np.searchsorted(self.starts, end))
        return rows[self.ends[rows] > begin]

    def sweep(self, rows: Ints, begin: int, end: int) -> Sweep:
        """The sweep over some work, from one moment to another."""
        starts, ends = np.maximum(self.starts[rows], begin), np.minimum(self.ends[rows], end)
        return Sweep(starts, ends, self.lanes[rows], begin)

    def rows_of_steps(self) -> list[Ints]:
        """For each window the rows of its work, in their order."""
        order = np.argsort(self.steps, kind="stable")
        bounds = np.searchsorted(self.steps[order], np.arange(len(self.host.windows.starts) + 1))
        return [order[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


def timelines(columns: Columns, base: int) -> list[Timeline]:
    """One for each device that computes; one of the host where there is none. Empty where nothing was done.

    Args:
        columns: What was kept of the trace.
        base: Nanoseconds that the trace's times are counted from.
    """
    host = Host(
        windows=windows_of(columns.steps, base),
        input=windows_of(columns.input, base).union(),
        collectives=columns.collectives,
        labels=columns.labels,
        has_forward=bool(len(columns.ops.times)),
        has_backward=bool(len(columns.backward.times)),
        has_optimizer=bool(len(columns.optimizer.times)),
    )
    if len(columns.work.times):
        return _of_devices(columns, base, host)
    return _of_host(columns, base, host) if len(columns.ops.times) or len(columns.gloo.times) else []


def windows_of(table: Table, base: int) -> Windows:
    """A table's rows as windows, numbered by its first column."""
    starts, ends = table.starts_ends()
    order = np.argsort(starts, kind="stable")
    return Windows(starts[order] + base, ends[order] + base, table.column(0)[order])


def _of_devices(columns: Columns, base: int, host: Host) -> list[Timeline]:
    work = columns.work
    starts, ends = (times + base for times in work.starts_ends())
    launched, threads = _launches(columns, work.column(1), base)
    steps = host.windows
    phases = _phases(columns, base, launched, threads)
    mine = np.where(launched == UNKNOWN, -1, steps.place(launched))
    kind, device = work.column(0), work.column(3)
    lanes = np.select([kind == kinds.COMPUTE, kind == kinds.COMMUNICATION], [phases, COMMUNICATION], COPY)
    computing = np.unique(device[(kind == kinds.COMPUTE) | (kind == kinds.COMMUNICATION)])
    found = []
    for number in computing if len(computing) else np.unique(device):
        rows = np.flatnonzero(device == number)
        rows = rows[np.argsort(starts[rows], kind="stable")]
        streams = work.column(2)[rows]
        timeline = Timeline(
            device=columns.labels[number],
            starts=starts[rows],
            ends=ends[rows],
            launched=launched[rows],
            lanes=lanes[rows],
            kinds=kind[rows],
            steps=_follow(mine[rows], launched[rows] == UNKNOWN, streams, starts[rows], steps),
            streams=streams,
            places=work.column(4)[rows],
            host=host,
        )
        found.append(timeline)
    return found


def _of_host(columns: Columns, base: int, host: Host) -> list[Timeline]:
    """Operators compute, gloo's spans communicate; what makes batches, or is on gloo's threads, does not.

    A send is noted in the thread that began it, which may be the one that trains: that one is not gloo's.
    """
    starts, ends = (times + base for times in columns.ops.starts_ends())
    threads = columns.ops.column(0)
    gloos = np.setdiff1d(columns.gloo.column(1), list(columns.training))
    drop = _within(columns.input, base, threads, starts) | np.isin(threads, gloos)
    starts, ends, threads = starts[~drop], ends[~drop], threads[~drop]
    phases = _phases(columns, base, starts, threads)
    sent, arrived = (times + base for times in columns.gloo.starts_ends())
    starts, ends = np.concatenate([starts, sent]), np.concatenate([ends, arrived])
    order = np.argsort(starts, kind="stable")
    kind = np.repeat([kinds.COMPUTE, kinds.COMMUNICATION], [len(threads), len(sent)])[order]
    timeline = Timeline(
        device=None,
        starts=starts[order],
        ends=ends[order],
        launched=starts[order],
        lanes=np.concatenate([phases, np.full(len(sent), COMMUNICATION)])[order],
        kinds=kind,
        steps=host.windows.place(starts[order]),
        streams=np.concatenate([threads, columns.gloo.column(1)])[order],
        places=np.concatenate([np.full(len(threads), -1), columns.gloo.column(0)])[order],
        host=host,
    )
    return [timeline] if len(order) else []


def _launches(columns: Columns, correlations: Ints, base: int) -> tuple[Ints, Ints]:
    """When and by which thread each piece of work was launched."""
    known = columns.launches.column(0)
    if not len(known):
        return np.full(len(correlations), UNKNOWN), np.full(len(correlations), -1)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], correlations), len(known) - 1)
    row = order[place]
    found = known[row] == correlations
    launched = columns.launches.starts_ends()[0][row] + base
    return np.where(found, launched, UNKNOWN), np.where(found, columns.launches.column(1)[row], -1)


def _phases(columns: Columns, base: int, at: Ints, threads: Ints) -> Ints:
    backward = _within(columns.backward, base, threads, at)
    optimizer = _within(columns.optimizer, base, threads, at)
    return np.select([backward, optimizer], [BACKWARD, OPTIMIZER], FORWARD)


def _within(table: Table, base: int, threads: Ints, at: Ints) -> Mask:
    """Whether each moment of each thread lies within one of that thread's rows."""
    inside = np.zeros(len(at), dtype=bool)
    begin, end = table.starts_ends()
    of = table.column(0)
    for thread in np.unique(of):
        rows = np.flatnonzero(of == thread)
        rows = rows[np.argsort(begin[rows], kind="stable")]
        until = np.maximum.accumulate(end[rows]) + base
        mine = np.flatnonzero(threads == thread)
        place = np.searchsorted(begin[rows] + base, at[mine], side="right") - 1
        inside[mine] = (place >= 0) & (at[mine] < until[np.maximum(place, 0)])
    return inside


def _follow(steps: Ints, unknown: Mask, streams: Ints, starts: Ints, windows: Windows) -> Ints:
    """Give work of unknown launch the step of what ran before it on its stream: streams keep their order.

    Where no launch is known at all, a piece of work belongs to the step during which it began.
    """
    if not unknown.any():
        return steps
    if unknown.all():
        return windows.place(starts)
    steps = steps.copy()
    for stream in np.unique(streams[unknown]):
        rows = np.flatnonzero(streams == stream)
        known = np.where(unknown[rows], 0, np.arange(1, len(rows) + 1))
        last = np.maximum(np.maximum.accumulate(known) - 1, 0)
        steps[rows] = steps[rows][last]  # -1 of the first, where it was launched before the recording began
    return steps
