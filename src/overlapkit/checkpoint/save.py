"""Save, the handle of one save, and those that are not finished."""

from collections import deque
from pathlib import Path

from overlapkit.checkpoint.stage import LANE, Staging
from overlapkit.lane import Lane, Ticket
from overlapkit.span import SpanLog


class Save:
    """What `Checkpointer.save` returns.

    Attributes:
        step: The step saved.
        due: False where `every` skipped it: nothing was saved, and both tickets are done.
        staged: Done when the state is in host memory: parameters may be changed by hand from then on.
        committed: Done when the checkpoint is on disk under its final name; its result is that path (None
            where not due). An error raised by it is not raised again by the checkpointer.
        uploaded: With `local=`: done when the store has it, too; its result is that place, or None where it
            was given up for a later one. None without `local`, and where not due.
    """

    def __init__(
        self,
        step: int,
        staged: Ticket[None],
        committed: Ticket[Path | None],
        *,
        due: bool = True,
        staging: Staging | None = None,
        blocked_s: float = 0.0,
        uploaded: Ticket[Path | None] | None = None,
    ) -> None:
        self.step = step
        self.due = due
        self.staged = staged
        self.committed = committed
        self.uploaded = uploaded
        self._staging = staging
        self._blocked_s = blocked_s

    @property
    def stall_s(self) -> float:
        """Seconds that the training thread was blocked: in `save()`, and so far in `optimizer.step()`."""
        return self._blocked_s + self.staging_s

    @property
    def staging_s(self) -> float:
        """The part of `stall_s` that was in `optimizer.step()`."""
        return 0.0 if self._staging is None else self._staging.stall_s

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is committed.

        Raises:
            TimeoutError: It is not within `timeout` seconds.
            Exception: Whatever made the save fail.
        """
        self._help()
        self.committed.wait(timeout)

    def _settle(self) -> None:
        """Wait until it is committed, or has failed."""
        self._help()
        self.committed.settle()

    def _help(self) -> None:
        """Where somebody waits, a core is free to copy and to write."""
        if self._staging is not None:
            self._staging.help(ahead=True)


def not_due(step: int) -> Save:
    """The handle of a save that `every` skipped."""
    done = Lane(LANE, kind="inline")
    return Save(step, done.submit(lambda: None), done.submit(lambda: None), due=False)


class Unfinished:
    """The saves of a checkpointer that are not committed, or have failed and nobody knows.

    Invariant:
        * An error is raised once, here or by the save's own ticket, by whichever is asked first.
    """

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._pending: deque[Save] = deque()
        self._failed: deque[Save] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, save: Save) -> None:
        """A save has begun."""
        self._pending.append(save)

    def make_room(self, limit: int) -> None:
        """Wait until fewer than `limit` are pending."""
        self._collect()
        while len(self._pending) >= limit:
            with self._log.host(LANE, "wait for the previous save", exposed=True):
                self._pending[0]._settle()
            self._collect()

    def settle(self) -> None:
        """Wait until none is pending; raise nothing."""
        for save in self._pending:
            save._settle()
        self._collect()

    def surface(self, before: Save | None = None) -> None:
        """Raise the oldest error that nobody has seen; the next one is for the next call.

        Args:
            before: Only errors of saves before this one: its own belongs to its handle.
        """
        self._collect()
        while self._failed and self._failed[0] is not before:
            save = self._failed.popleft()
            if not save.committed.seen:
                save.committed.wait()

    def unseen(self) -> list[BaseException]:
        """All errors that nobody had seen."""
        self._collect()
        tickets = [save.committed for save in self._failed if not save.committed.seen]
        self._failed.clear()
        for ticket in tickets:
            ticket.seen = True
        return [error for ticket in tickets if (error := ticket.error) is not None]

    def _collect(self) -> None:
        while self._pending and self._pending[0].committed.done():
            save = self._pending.popleft()
            if save.committed.error is not None:
                self._failed.append(save)
