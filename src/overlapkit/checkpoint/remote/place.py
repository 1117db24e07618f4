"""StorePath: a place on an object store, with as much of pathlib's interface as reading checkpoints uses."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.writer import JSON_LIMIT

if TYPE_CHECKING:
    from overlapkit.checkpoint.remote.store import Store

    _Base = Path  # all that reads takes either; at run time it is none, and no call gets to the local disk
else:
    _Base = object


class StorePath(_Base):
    """An object, or a folder: whatever objects' names begin with its own.

    Args:
        store: Where it is.
        key: Its name there; empty for the store's own folder.
    """

    def __init__(self, store: "Store", key: str = "") -> None:
        self.store = store
        self.key = key

    @property
    def name(self) -> str:
        """The last part of it."""
        return str(self).rpartition("/")[2]

    def __truediv__(self, name: object) -> "StorePath":
        return StorePath(self.store, f"{self.key}/{name}" if self.key else str(name))

    def with_suffix(self, suffix: str) -> "StorePath":
        """The same with another end."""
        return StorePath(self.store, self.key.rpartition(".")[0] + suffix)

    def iterdir(self) -> Iterator["StorePath"]:  # type: ignore[override]
        """The folders in it. Objects are not listed."""
        return (self / name for name in self.store.folders(self.key))

    def is_dir(self) -> bool:
        """Whether anything is in it."""
        return self.store.is_folder(self.key)

    def exists(self) -> bool:
        """Whether it is an object."""
        return self.store.size(self.key) is not None

    def read_bytes(self) -> bytes:
        """A whole small object.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpoint: It is longer than any that was written.
        """
        if (self.store.size(self.key) or 0) > JSON_LIMIT:
            raise DamagedCheckpoint(f"{self}: longer than {JSON_LIMIT} bytes")
        return self.store.read(self.key)

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill these one after the other with the object's bytes from `offset` on.

        Raises:
            DamagedCheckpoint: It is not there, or ends before.
        """
        length = sum(view.nbytes for view in views)
        try:
            data = memoryview(self.store.read(self.key, offset, offset + length))
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{self}: cannot be read ({error})") from error
        if data.nbytes != length:
            raise DamagedCheckpoint(f"{self}: ends at byte {offset + data.nbytes}, before its tensors do")
        at = 0
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))
