"""Commit by rename, and the sweeping of what crashed saves left behind.

.tmp-<run>-<n>     a save being written; nothing of it counts
.old-<run>-<step>  a checkpoint being replaced by one of the same step; put back if that did not happen
.gone-<run>-<step> a checkpoint being deleted
.run-<run>.lock    locked while the run lives, so that nobody sweeps what is its
"""

import contextlib
import fcntl
import os
import re
import socket
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.disk import Disk, write_file
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.manifest import MANIFEST, is_ours, manifest_bytes, size_of, step_name
from overlapkit.warn import warn

_LEFTOVER = re.compile(r"\.(tmp|old|gone|run)-([0-9a-f]{12})(?:-(\d+)|\.lock)")


def commit(
    disk: Disk, temporary: Path, step: int, files: dict[str, dict[str, Any]], about: dict[str, Any]
) -> Path:
    """Make a checkpoint of a folder that all ranks have written to. Called by rank 0 only.

    A checkpoint of the same step is set aside: see `replaced`.

    Args:
        disk: The file system.
        temporary: The folder, `.tmp-<run>-<n>`.
        step: The step.
        files: Of all ranks.
        about: world and metrics, for the manifest.

    Raises:
        CheckpointError: A file is not there (the ranks do not share this folder), or a folder that is no
            checkpoint has the final name.
    """
    for name, file in files.items():
        if size_of(temporary / name) != file["bytes"]:
            raise CheckpointError(
                f"{temporary / name} is not what its rank wrote: the directory must be on a file system that "
                "they share"
            )
    write_file(disk, temporary / MANIFEST, manifest_bytes(step, files, about["world"], about["metrics"]))
    disk.sync_folder(temporary)
    root, run = temporary.parent, temporary.name.split("-")[1]
    final, old = root / step_name(step), root / f".old-{run}-{step}"
    replaces = final.exists()
    if replaces and not is_ours(final):
        raise CheckpointError(f"{final} exists and is no checkpoint: move it away")
    try:
        if replaces:
            disk.rename(final, old)
        disk.rename(temporary, final)
    except BaseException:
        if replaces and old.exists() and not final.exists():
            old.rename(final)
        raise
    disk.sync_folder(root)
    return final


def replaced(root: Path, run: str) -> list[Path]:
    """What this run's commits have set aside."""
    return list(root.glob(f".old-{run}-*"))


def discard(disk: Disk, root: Path, run: str, folder: Path) -> Path:
    """Take a checkpoint out of sight, so that a crash leaves no half of it; where it is, to be removed."""
    gone = root / f".gone-{run}-{folder.name.split('-')[1]}"
    disk.rename(folder, gone)
    return gone


class RunLock:
    """A lock file that says that a run lives. It goes with its process, however that ends."""

    def __init__(self, root: Path) -> None:
        self._pid = os.getpid()
        self._fd: int | None = None
        self._saves = False
        while self._fd is None:
            self.run = uuid.uuid4().hex[:12]
            self._path = root / f".run-{self.run}.lock"
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                if _locked(fd) and self._path.exists():
                    self._fd = fd
                else:  # another run's sweep came between creating and locking it
                    os.close(fd)
                    self._path.unlink(missing_ok=True)
            except BaseException:  # the handler of a signal has ended the program in between
                with contextlib.suppress(OSError):
                    self._path.unlink()
                raise

    def saves(self) -> None:
        """This run saves, and says so in its file; warns, once, where another one that lives does, too."""
        if self._fd is None or self._saves:
            return
        self._saves = True
        for path in sorted(self._path.parent.glob(".run-*.lock")):
            with contextlib.suppress(OSError), _dead(path) as dead:
                if path != self._path and not dead and (who := path.read_text()):
                    warn(
                        f"directory={str(path.parent)!r}: another job saves here at the same time ({who}): "
                        "each replaces the other's steps, and restores them. End one of them, or give each a "
                        "directory of its own"
                    )
        with contextlib.suppress(OSError):  # a full disk: the save itself will say so
            os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """The run is over. Safe to call twice, and in a forked child, whose copy says nothing."""
        if self._fd is not None:
            if self._pid == os.getpid():
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.release()


def _locked(fd: int) -> bool:
    """Lock a run's own file; False where another run holds it just now, to see whether it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: then nothing is ever swept
        pass
    return True


def sweep(disk: Disk, root: Path) -> None:
    """Remove what dead runs left behind, and put back what one of them was replacing.

    Folders whose run still holds its lock, and everything else that is not ours, stay as they are.
    """
    leftovers = [
        (path, match) for path in sorted(root.iterdir()) if (match := _LEFTOVER.fullmatch(path.name))
    ]
    for run in sorted({match[2] for _, match in leftovers}):
        lock = root / f".run-{run}.lock"
        with _dead(lock) as dead:
            if not dead:
                continue
            try:
                for path, match in leftovers:
                    if match[2] == run and match[1] != "run":
                        _clear(disk, root, path, match[1], match[3])
                lock.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(f"a crashed run's files cannot be removed: {error}", stacklevel=2)


def runs(root: Path) -> tuple[set[str], set[str]]:
    """The names of the runs that have a lock file here: those that live, and those that died."""
    living: set[str] = set()
    dead: set[str] = set()
    for path in root.glob(".run-*.lock"):
        if (match := _LEFTOVER.fullmatch(path.name)) is not None:
            with _dead(path) as is_dead:
                (dead if is_dead else living).add(match[2])
    return living, dead


def _clear(disk: Disk, root: Path, path: Path, kind: str, number: str) -> None:
    if kind == "old" and not (root / step_name(int(number))).exists():
        disk.rename(path, root / step_name(int(number)))
        disk.sync_folder(root)
    else:
        disk.remove(path)


@contextlib.contextmanager
def _dead(lock: Path) -> Iterator[bool]:
    """Whether a run is dead: its lock is free. Holds the lock for the length of the block."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # it ended in order, or was swept up to here
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
