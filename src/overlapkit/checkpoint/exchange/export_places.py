"""Where an export's files go, whole or not at all: into a folder, or into a folder of an object store."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from overlapkit.checkpoint.disk import Disk, write_file
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.exchange.export_files import INDEX, SINGLE, Files, Row, contents, in_order, index
from overlapkit.checkpoint.progress import Count
from overlapkit.checkpoint.remote.place import StorePath

_TEMPORARY = ".overlapkit-export"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class _NotWritable(CheckpointError):
    """Around an error of what is to be written: a store does not ask again after it, as after its own."""


def check_folder(folder: Path) -> None:
    """Raise where this is no place for weights, or has some."""
    store = isinstance(folder, StorePath)
    if folder.name.endswith(".safetensors") or (not store and folder.exists() and not folder.is_dir()):
        raise ValueError(f"out={str(folder)!r}: give a folder; {SINGLE} will be in it")
    if isinstance(folder, StorePath):
        names = list(folder.store.sizes(folder.key))
    else:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    if there := sorted(name for name in names if _OURS.fullmatch(name)):
        raise FileExistsError(f"out={str(folder)!r} has weights already: {', '.join(there)}")


def write_files(folder: Path, files: Files, tied: dict[str, str], count: Count) -> list[Path]:
    """Write them; return where they are."""
    if isinstance(folder, StorePath):
        try:
            return _into_store(folder, files, tied, count)
        except _NotWritable as error:
            raise error.args[0] from None
    return _into_folder(folder, files, tied, count)


def _into_store(folder: StorePath, files: Files, tied: dict[str, str], count: Count) -> list[Path]:
    """Write objects; each is there whole or not at all."""
    store, names = folder.store, in_order(files)
    try:
        for name, rows in files.items():
            start = count.done

            def views(rows: list[Row] = rows, start: int = start) -> Iterator[memoryview]:
                count.done = start  # the store is asked again
                try:
                    yield from contents(rows, tied, count)
                except ValueError as error:  # a value that the dtype does not have
                    raise _NotWritable(error) from None

            store.write(name, views)
        if len(files) > 1:
            store.put(INDEX, index(files))
    except BaseException:
        with contextlib.suppress(CheckpointError, OSError):  # what led here matters more
            store.remove([name for name in names if store.size(name) is not None])
        raise
    return [folder / name for name in names]


def _into_folder(folder: Path, files: Files, tied: dict[str, str], count: Count) -> list[Path]:
    """Write files under another name, and give them theirs when all are on the disk."""
    disk = Disk()
    with _staged(disk, folder) as temporary:
        for name, rows in files.items():
            _write(disk, temporary / name, contents(rows, tied, count))
        if len(files) > 1:
            write_file(disk, temporary / INDEX, index(files))
        disk.sync_folder(temporary)
        return _place(disk, temporary, folder, in_order(files))


@contextlib.contextmanager
def _staged(disk: Disk, folder: Path) -> Iterator[Path]:
    """A folder for unfinished files, gone afterwards; so is `folder` where it was made for nothing."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / _TEMPORARY
    try:
        temporary.mkdir()
    except FileExistsError:
        raise FileExistsError(
            f"{temporary} exists: another export is writing there, or was killed; then delete it"
        ) from None
    try:
        check_folder(folder)  # once more: another export may have been faster
        yield temporary
    finally:
        disk.remove(temporary)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _place(disk: Disk, temporary: Path, folder: Path, names: list[str]) -> list[Path]:
    """Give the finished files their names; the last one is what makes readers see the others."""
    placed: list[Path] = []
    try:
        for name in names:
            disk.rename(temporary / name, folder / name)
            placed.append(folder / name)
        disk.sync_folder(folder)
        disk.sync_folder(folder.parent)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise
    return placed


def _write(disk: Disk, path: Path, views: Iterator[memoryview]) -> None:
    fd = disk.create(path)
    try:
        for view in views:
            disk.write(fd, [view])
        disk.sync(fd)
    finally:
        os.close(fd)
