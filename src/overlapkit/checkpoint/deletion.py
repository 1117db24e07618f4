"""Deleting what is surplus, and finding out on which checkpoints one can rely for that."""

import warnings
from pathlib import Path
from typing import Protocol

from overlapkit.checkpoint.commit import discard, replaced
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint
from overlapkit.checkpoint.finding import sound_checkpoints
from overlapkit.checkpoint.manifest import step_name
from overlapkit.checkpoint.retention import Policy
from overlapkit.checkpoint.stage import LANE
from overlapkit.checkpoint.verification import verify
from overlapkit.lane import Lane, Ticket


class Deleting(Protocol):
    """What Deletion does, to whatever place."""

    def committed(self, step: int) -> None:
        """This run has committed a step: delete what is surplus now, or put it out of sight."""

    def finish(self) -> None:
        """Delete what is out of sight. What cannot be deleted stays for the next run to sweep."""

    def unseen(self) -> list[CheckpointError]:
        """Of what could not be deleted: each is told once, here or by the next `committed`."""

    def read_whole(self, step: int) -> None:
        """Every byte of a checkpoint was read and checked."""

    def close(self) -> None:
        """Nothing is asked any more."""


def delete_surplus(deletion: Deleting, step: int, where: Path) -> None:
    """Delete what is surplus now that a step is committed.

    Raises:
        CheckpointError: Something cannot be deleted; `where` is committed all the same.
    """
    try:
        deletion.committed(step)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{where} is committed, but older ones cannot be deleted: {error}") from error


class Deletion:
    """What rank 0 deletes; the others keep all.

    A save is committed before the bytes of an earlier one are gone (1 GiB took 0.25 s on the disk that this
    was measured on), and these are gone before the next one is written.

    A checkpoint is verified when this run wrote it, restored it whole, or read it through. Those of earlier
    runs are not read for it as a rule: after a restart the old ones stay until `keep` newer verified ones
    are there. Only where `keep` or more wait for that (runs that end early, one after another) they are read
    in the background, one by one: so there are never many more than 2 x keep.

    Invariant:
        * Deleting is the saves' thread's work alone; reading runs in a thread of its own.
    """

    def __init__(self, disk: Disk, root: Path, run: str, policy: Policy) -> None:
        self._disk, self._root, self._run, self._policy = disk, root, run, policy
        self._verified: set[int] = set()
        self._damaged: set[int] = set()
        self._gone: list[Path] = []
        self._failed: list[OSError] = []
        self._reader = Lane(f"{LANE}-verify", kind="thread")
        self._reading: Ticket[None] | None = None
        self._closed = False

    def committed(self, step: int) -> None:
        """This run has committed a step: put out of sight what is surplus now.

        Raises:
            OSError: Something cannot be deleted: put out of sight now, or removed after an earlier save.
        """
        self._verified.add(step)
        self._damaged.discard(step)
        self._gone += replaced(self._root, self._run)
        if self._policy.keep is not None:
            found = self._found()
            for old in self._policy.surplus(found, self._verified, step):
                self._gone.append(discard(self._disk, self._root, self._run, self._root / step_name(old)))
                self._verified.discard(old)
            self._look_ahead(step)
        if self._failed:
            raise self._failed.pop(0)

    def finish(self) -> None:
        """Delete what is out of sight. What cannot be deleted stays for the next run to sweep."""
        gone, self._gone = self._gone, []
        for path in gone:
            try:
                self._disk.remove(path)
            except OSError as error:
                self._failed.append(error)

    def unseen(self) -> list[CheckpointError]:
        """Of what could not be deleted: each is told once, here or by the next `committed`."""
        failed, self._failed = self._failed, []
        return [CheckpointError(f"what is surplus cannot be deleted: {error}") for error in failed]

    def read_whole(self, step: int) -> None:
        """Every byte of a checkpoint was read and checked."""
        self._verified.add(step)
        self._look_ahead(step)

    def close(self) -> None:
        """Stop reading, and delete what is left."""
        self._closed = True
        self._reader.close()
        self.finish()

    def _look_ahead(self, newest: int) -> None:
        """Begin to read a checkpoint, where too many stay for want of a verified one."""
        keep = self._policy.keep
        if keep is None or self._closed or not (self._reading is None or self._reading.done()):
            return
        found = self._found()
        waiting = self._policy.surplus(found, found, newest)
        unread = [step for step in found.keys() - self._verified if step <= newest]
        if len(waiting) >= keep and unread:
            step = max(unread)
            self._reading = self._reader.submit(lambda: self._read(step))
            self._reading.seen = True  # what cannot be read does not count, and that is all

    def _found(self) -> dict[int, dict[str, float]]:
        sound = sound_checkpoints(self._root)
        return {step: metrics for step, metrics in sound.items() if step not in self._damaged}

    def _read(self, step: int) -> None:
        folder = self._root / step_name(step)
        try:
            verify(folder, progress=self._go_on)
        except DamagedCheckpoint as damage:
            self._damaged.add(step)
            if folder.exists():  # else it was deleted meanwhile
                warnings.warn(
                    f"{folder} is damaged: it stays, and counts for nothing: {damage}", stacklevel=1
                )
        else:
            self._verified.add(step)

    def _go_on(self, done: int, total: int) -> None:
        if self._closed:
            raise InterruptedError("the checkpointer is being closed")
