"""The collectives of one sharded model that are under way: who ends them, who waits for them, their spans."""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from overlapkit.lane import Lane, Ticket
from overlapkit.parallel.failure import roll_of
from overlapkit.span import Span, SpanLog

LANE = "communication"


class Label(NamedTuple):
    """What a span says of a unit's collective, e.g. "all_gather blocks.3", and of what it carries."""

    name: str
    parameters: tuple[str, ...] = ()


class Traffic:
    """Shared by the collectives of all units.

    Invariants:
        * Host collectives are begun in the training thread, in FSDP2's order, which is that of all ranks, and
          ended in a lane's thread: its sum, and the span's end, need nobody who waits.
        * At most `reductions` reduce-scatters that nobody has waited for hold their buffers.

    Args:
        reductions: How many reduce-scatters may be under way beside backward, at least 1. On the host.
    """

    def __init__(self, reductions: int = 2) -> None:
        self.log = SpanLog()
        self.last: object = None  # the reduce-scatter begun last, on a device
        self._begun = 0
        self._reductions = reductions
        self._lanes = {kind: Lane(kind, lasting=False) for kind in ("all_gather", "reduce_scatter")}
        self._late: deque[Pending] = deque()
        self._watches: dict[tuple[str, torch.device], torch.cuda.Stream] = {}

    def begin(
        self,
        kind: str,
        label: Label,
        group: dist.ProcessGroup,
        nbytes: int,
        begin: Callable[[], Callable[[], None]],
    ) -> "Pending":
        """Begin a host collective; what `begin` returns ends it, in the lane of its kind."""
        start, log, roll = time.perf_counter_ns(), self.log, roll_of(group)
        self._begun += 1
        what = f"{label.name} (collective {self._begun} of the model)"
        with roll.naming(what):
            finish = begin()

        def end() -> None:
            with roll.naming(what):
                finish()
            now = time.perf_counter_ns()
            span = Span(LANE, label.name, start, now, nbytes, ready=start, parameters=label.parameters)
            log.add(span._replace(group=group_name(group)))

        return Pending(self._lanes[kind].submit(end), log, label)

    def make_room(self) -> None:
        """Wait until another reduce-scatter may be begun."""
        while len(self._late) >= self._reductions:
            self._late.popleft().wait()

    def wait_late(self, pending: "Pending") -> None:
        """Wait for a reduce-scatter when backward has nothing else left."""
        self._late.append(pending)

        def wait() -> None:
            pending.wait()
            if pending in self._late:
                self._late.remove(pending)

        if not at_end_of_backward(wait):
            wait()

    def watch(self, kind: str, device: torch.device) -> torch.cuda.Stream:
        """A stream that only waits for the collectives of one kind: its marks tell when they ended."""
        stream = self._watches.get((kind, device))
        if stream is None:
            stream = self._watches[kind, device] = torch.cuda.Stream(device)
        return stream


class Pending(dist.Work):
    """A host collective under way. A wait that blocked is a span of its own, exposed."""

    def __init__(self, ticket: Ticket[None], log: SpanLog, label: Label) -> None:
        super().__init__()
        self._ticket, self._log, self._label = ticket, log, label

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; raises what the collective raised. The group's timeout bounds it."""
        limit = timeout.total_seconds() if timeout else None
        if self._ticket.done():
            self._ticket.wait()
            return True
        start = time.perf_counter_ns()
        try:
            self._ticket.wait(limit)
        finally:
            name, parameters = self._label
            now = time.perf_counter_ns()
            self._log.add(Span(LANE, f"wait {name}", start, now, exposed=True, parameters=parameters))
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ticket.done()


def group_name(group: dist.ProcessGroup) -> str:
    """What a span says of the ranks that take part: nothing where all of the job do."""
    return "" if group.size() == dist.get_world_size() else str(group.group_name)


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call it when the backward that runs now is done; False where none runs."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # what DDP and FSDP2 use
    except RuntimeError:
        return False
    return True


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return at_end_of_backward(lambda: None)
