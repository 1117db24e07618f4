"""How each kind of fault is made to happen, and how one that lasts is ended."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import netlab
from chaos_job import Job, send
from chaos_place import Place
from chaos_plan import Fault

HELD = frozenset({"stop", "slow", "stall", "full", "read-only", "throttle"})
"""Kinds that last; the job goes on with them, or when they are over."""
BETWEEN = frozenset({"flip", "resize", "shard"})
"""Kinds for which the job is stopped; what they are is done before the next start."""
FREE_MBIT = 2000.0
_THROTTLED_MBIT = 8.0
_SLOWEST_S, _LEFT_BYTES = 0.2, 600_000

Undo = Callable[[], object]


@dataclass
class Event:
    """A fault that was injected.

    Attributes:
        fault: As planned; its kind is what came of it.
        t: When, of `time.time`.
        start: Which life and restart it hit.
        rank: Which rank.
        step: After which step.
        note: What exactly.
        over: When it was ended, where it lasts.
        recovered: When the job had gone on.
    """

    fault: Fault
    t: float
    start: tuple[int, int]
    rank: int
    step: int
    note: str = ""
    over: float | None = None
    recovered: float | None = None
    undo: Undo | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        return self.fault.kind

    @property
    def took(self) -> float | None:
        """Seconds to recover, since the fault, or since the end of one that lasts."""
        lasts = self.kind in HELD or self.kind == "freeze"
        began = self.over if lasts and self.over is not None else self.t
        return None if self.recovered is None else self.recovered - began

    def line(self) -> str:
        """All about it, for whoever looks for what went wrong."""
        took = "not recovered" if self.took is None else f"recovered in {self.took:.2f} s"
        life = f"life {self.start[0]}.{self.start[1]}, rank {self.rank}, after step {self.step}"
        return f"{life}: {self.fault}: {self.note + ', ' if self.note else ''}{took}"


def inject(fault: Fault, job: Job, pid: int, rank: int, place: Place, lab: netlab.Lab | None) -> Undo | None:
    """Make it happen.

    Args:
        fault: Which.
        job: That it happens to.
        pid: Of the rank that it hits.
        rank: That rank.
        place: The job's folders.
        lab: Its hosts.

    Returns:
        What ends it, where it lasts.
    """
    kind, share, seconds = fault.kind, fault.share, fault.seconds
    if kind in ("kill", "kill early"):
        send(pid, signal.SIGKILL)
    elif kind in ("stop", "freeze"):
        send(pid, signal.SIGSTOP)
        return lambda: send(pid, signal.SIGCONT)
    elif kind == "term one":
        send(pid, signal.SIGTERM)
    elif kind == "term" or (kind in BETWEEN and share < 0.5):
        job.signal(signal.SIGTERM)
    elif kind == "kill all" or kind in BETWEEN:
        job.kill()
    elif kind == "full":
        place.fill(int(share * _LEFT_BYTES))
        return place.free
    elif kind == "read-only":
        place.make_read_only()
        return place.make_writable
    elif kind == "slow":
        place.make_slow(share * _SLOWEST_S)
        return lambda: place.make_slow(0)
    elif kind in ("raise", "stall"):
        place.tell_source(rank, "raise" if kind == "raise" else f"{seconds}")
        return lambda: place.tell_source(rank, "")
    elif kind == "throttle":
        assert lab is not None
        lab.set_rate(_THROTTLED_MBIT)
        return lambda: lab.set_rate(FREE_MBIT)
    else:
        raise ValueError(f"kind={kind!r}: there is no such fault")
    return None
