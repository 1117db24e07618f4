"""A file that is needed whole, here or in a store."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.remote.place import StorePath

_AT_ONCE = 64 << 20  # bytes of one request


def is_file(path: Path) -> bool:
    """Whether there is a file, or an object."""
    return path.exists() if isinstance(path, StorePath) else path.is_file()


@contextlib.contextmanager
def here(path: Path) -> Iterator[Path]:
    """A path of this machine: the file itself, or a copy of the object, which goes when the block ends.

    Raises:
        StoreError: The store failed.
        DamagedCheckpoint: The object changed while it was copied.
        OSError: There is no room for the copy.
    """
    if not isinstance(path, StorePath):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="overlapkit-") as copy:
        size = path.store.size(path.key) or 0
        try:
            for start in range(0, size, _AT_ONCE):
                copy.write(path.store.read(path.key, start, min(size, start + _AT_ONCE)))
            copy.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                room = f"a copy of {path} takes {size / 2**20:,.1f} MiB in {tempfile.gettempdir()}"
                error.strerror = f"{error.strerror}: {room}: let TMPDIR name a folder with more room"
            raise
        if copy.tell() != size:
            raise DamagedCheckpoint(f"{path}: had {size} bytes, of which {copy.tell()} came")
        yield Path(copy.name)
