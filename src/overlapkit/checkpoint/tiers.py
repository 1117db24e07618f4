"""Where a checkpointer's checkpoints are: a local directory, a store, or a directory before a store."""

import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.commit import runs
from overlapkit.checkpoint.deletion import Deleting, Deletion
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.job import Job
from overlapkit.checkpoint.opening import open_directory
from overlapkit.checkpoint.remote.direct import StoreJob
from overlapkit.checkpoint.remote.earlier import Earlier
from overlapkit.checkpoint.remote.publish import Withdrawal, sweep_store
from overlapkit.checkpoint.remote.store import Store, local_path, open_store
from overlapkit.checkpoint.remote.upload import LocalJob, Uploads
from overlapkit.checkpoint.retention import Policy
from overlapkit.quorum import Quorum, Report
from overlapkit.span import SpanLog

PathLike = str | os.PathLike[str]


class Tiers:
    """The tiers of one checkpointer.

    Args:
        directory: A path, or a URL.
        local: The directory before it, or None.

    Attributes:
        store: The last tier, where that is not the directory itself.
        root: Where saves are committed first.
        places: Where checkpoints are, in the order in which one of the same step is looked for.
        direct: Saves go to the store at once.

    Raises:
        ValueError: Both are the same directory.
    """

    def __init__(self, directory: PathLike, local: PathLike | None) -> None:
        far = local_path(directory)
        if far is not None:
            directory = far = far.absolute()  # a script may change its working directory
        path = far if local is None else Path(local).absolute()
        if local is not None and far is not None and os.path.realpath(far) == os.path.realpath(local):
            raise ValueError(f"local={str(local)!r} is the directory itself: leave local= out")
        self.direct = path is None
        self.store: Store | None = None if local is None and far is not None else open_store(directory)
        self.places: tuple[Path, ...] = (path,) if path is not None else ()
        if self.store is not None:
            self.places += (self.store.root,)
        self.root = self.places[0]

    def open(self, rank: int) -> None:
        """Make sure that all places are there and can be written to.

        Raises:
            ValueError: A directory is a file.
            PermissionError: One cannot be made or written to.
        """
        if not self.direct:
            open_directory(self.root)
        if self.store is not None:
            self.store.probe(rank)

    def sweep(self) -> str:
        """Remove what dead saves left in the store; the name of a new run."""
        if self.store is not None:
            sweep_store(self.store, () if self.direct else runs(self.root)[1])  # before their locks are swept
        return uuid.uuid4().hex[:12]

    def earlier(self, run: str) -> Earlier:
        """What earlier runs have committed locally; nothing where another run lives there, for it may upload.

        Args:
            run: This one.
        """
        if self.store is None or self.direct or runs(self.root)[0] - {run}:
            return Earlier()
        return Earlier.found(self.root)

    def check_shared(self, quorum: Quorum, lock: str) -> None:
        """Make sure that all ranks have the same local directory.

        Args:
            quorum: The ranks.
            lock: The file that rank 0 has there.

        Raises:
            ValueError: They have not. On the others it is RankFailed.
        """

        def look() -> Report:
            if not (self.root / lock).exists():
                raise ValueError(
                    f"local={str(self.root)!r} of rank {quorum.rank} is not that of rank 0: give a directory "
                    "that all ranks share, or leave local= out, and saves go straight to the store"
                )
            return {}

        if self.store is not None and not self.direct:
            quorum.together("local", look, lambda _: {})

    def deletion(self, disk: Disk, run: str, policy: Policy) -> Deleting:
        """What deletes surplus checkpoints where saves are committed first."""
        if self.direct:
            assert self.store is not None
            return Withdrawal(self.store, policy)
        return Deletion(disk, self.root, run, policy)

    def uploads(self, run: str, timeout: float, log: SpanLog, policy: Policy) -> Uploads | None:
        """What brings saves to the next tier, where there is one."""
        if self.store is None or self.direct:
            return None
        return Uploads(self.store, self.root, run, timeout, log, policy)

    def job(self, uploads: Uploads | None, *about: Any) -> Job:
        """A save, of Job's fields."""
        kind: Callable[..., Job] = StoreJob if self.direct else Job
        if uploads is not None:
            kind = partial(LocalJob, uploads=uploads)
        return kind(*about)
