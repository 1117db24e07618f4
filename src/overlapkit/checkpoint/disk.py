"""Every change that a save makes to the file system goes through here, one call a change.

A crash between any two of these calls must leave the old checkpoints or the new one; tests put a fault
into each of them.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

_AT_ONCE = 1024  # buffers that one writev takes (IOV_MAX)


class Disk:
    """The file system. Stateless."""

    def make_folder(self, path: Path) -> None:
        """Make a folder; another rank may have made it."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Open a new file for writing; an existing one is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_direct(self, path: Path) -> int | None:
        """Open a file for writing past the page cache; None where its file system cannot."""
        flag: int | None = getattr(os, "O_DIRECT", None)  # not everywhere
        if flag is None:
            return None
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
        except OSError:
            return None

    def write_at(self, fd: int, view: memoryview, offset: int) -> None:
        """Write all of these bytes at this place. Other threads may write at other places."""
        done = 0
        while done < view.nbytes:
            done += _some(os.pwrite(fd, view[done:], offset + done))

    def write(self, fd: int, views: Sequence[memoryview]) -> None:
        """Write all of these bytes, in this order."""
        queue = [view for view in views if view.nbytes]
        while queue:
            written = _some(os.writev(fd, queue[:_AT_ONCE]))
            while queue and written >= queue[0].nbytes:
                written -= queue.pop(0).nbytes
            if written:
                queue[0] = queue[0][written:]

    def sync(self, fd: int) -> None:
        """Wait until a file's bytes are on the disk."""
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's entries are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder its new name, at once or not at all."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Delete a folder and all that is in it, or a link. It is no error if another process was faster."""
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path, onerror=_unless_gone)

    def remove_files(self, folder: Path, names: Sequence[str]) -> None:
        """Delete files, and the folder where nothing else is in it (OSError where there is)."""
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _unless_gone(
    function: object, path: str, info: tuple[type[BaseException], BaseException, object]
) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _some(written: int) -> int:
    """A write of nothing would be tried for ever."""
    if written == 0:
        raise OSError(errno.EIO, "the file system writes nothing, and does not say why")
    return written


@contextlib.contextmanager
def saying_what_has_no_room(what: str, root: Path, nbytes: int) -> Iterator[None]:
    """Let the system's bare "No space left on device" say what was to be written, where, and what to do.

    Args:
        what: What is written.
        root: The folder on whose file system it goes.
        nbytes: Its size.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(root).free
        limit = " `ulimit -f` limits the size of a file." if error.errno == errno.EFBIG else ""
        error.strerror = (
            f"{error.strerror}: {what} in {os.fspath(root)!r} takes {nbytes / 2**20:,.1f} MiB of this rank, "
            f"and {free / 2**20:,.1f} MiB are free.{limit} Earlier checkpoints are as they were. Make room, "
            "lower keep=, or save to another directory"
        )
        raise


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    fd = disk.create(path)
    try:
        disk.write(fd, [memoryview(data)])
        disk.sync(fd)
    finally:
        os.close(fd)
