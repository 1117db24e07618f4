"""Export of a model as Hugging Face lays it out: one safetensors file, or several with an index."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.catalog import Catalog, Saved
from overlapkit.checkpoint.disk import Disk, write_file
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.exchange.casting import cast, castable, check_cast
from overlapkit.checkpoint.exchange.weights import find_weights
from overlapkit.checkpoint.finding import Step, Where, find_checkpoint
from overlapkit.checkpoint.manifest import read_manifest
from overlapkit.checkpoint.opening import check_place
from overlapkit.checkpoint.pieces import DTYPES
from overlapkit.checkpoint.progress import Count, Progress
from overlapkit.checkpoint.reader import Reader
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.remote.store import place_of
from overlapkit.checkpoint.slices import SliceReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TEMPORARY = ".overlapkit-export"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_PLACE = {dtype: place for place, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Exported:
    """What an export has written.

    Attributes:
        files: The files, the index last where there is one.
        tensors: How many tensors they hold.
        nbytes: The tensors' bytes.
        tied: For each name that shares another's data, and so is not in the files, the name that is.
        left_out: What the model's state has beside weights: extra state that is no tensor.
    """

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    """One tensor on its way into a file."""

    name: str
    saved: Saved
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.saved.shape) * self.dtype.itemsize


Files = dict[str, list[_Row]]


def export(
    where: Where,
    out: str | os.PathLike[str],
    *,
    step: Step = "latest",
    only: str | None = None,
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Exported:
    """Write a checkpoint's model to safetensors files that Hugging Face's libraries read.

    The folder gets `model.safetensors`, or, where the tensors take more than `shard_size`, files
    `model-00001-of-0000N.safetensors` and then `model.safetensors.index.json`. They appear under these names
    when all of them are on the disk. Names are the model's own, without `module.` and `_orig_mod.`; tensors
    that share their data are written once, under the first of their names, and the file's metadata has the
    others. Memory holds a slice of 64 MiB (or one row, where that is longer) of one tensor.

    Args:
        where: A directory of checkpoints, or the folder of one.
        out: A folder, made if it does not exist, or the URL of one on an object store, where the files appear
            one after the other, the index last. It may hold other files (a config.json).
        step: Which checkpoint; "latest" is the one of the highest step.
        only: The key of the state to export: a module, or a dict of tensors (rank 0's). None: the one module.
        dtype: Cast tensors of 16, 32 and 64 bit floating point to this; None leaves them as they are.
        shard_size: The most tensor bytes in one file: a number, or such as "5GB" (10**9) or "4GiB" (2**30).
            A longer tensor has a file of its own.
        progress: Told how many of the bytes to write are written.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        FileExistsError: The folder has weights already, or another export's unfinished files.
        DamagedCheckpoint: The checkpoint is damaged; nothing is left in the folder.
        ValueError: An argument is wrong, or a value is too large for `dtype`.
        StoreError: A store failed; what was written there is removed, as far as that is possible.
    """
    if dtype is not None:
        check_cast(dtype)
    check_place("out", out)
    limit, folder = parse_size(shard_size), place_of(out)
    _check_folder(folder)
    manifest = read_manifest(find_checkpoint(where, step))
    weights = find_weights(Catalog(manifest, 0, manifest.world), only)
    rows = [
        _Row(name, saved, dtype if dtype is not None and castable(saved.dtype) else saved.dtype)
        for name, saved in weights.tensors.items()
    ]
    files = _shards(rows, limit)
    count = Count(sum(row.nbytes for row in rows), progress)
    if isinstance(folder, StorePath):
        placed = _into_store(folder, files, weights.tied, count)
    else:
        placed = _into_folder(folder, files, weights.tied, count)
    return Exported(
        files=tuple(placed),
        tensors=len(rows),
        nbytes=sum(row.nbytes for row in rows),
        tied=weights.tied,
        left_out=tuple(weights.left_out),
    )


def parse_size(size: int | str) -> int:
    """Bytes, from a number or such as "5GB", "512 MiB".

    Raises:
        ValueError: It is none, or 0.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        unit = (match[2] or "").upper()
        scale = (1024 if unit.endswith("I") else 1000) ** (" KMGT".index(unit[0]) if unit else 0)
        if (nbytes := int(float(match[1]) * scale)) > 0:
            return nbytes
    raise ValueError(f"shard_size={size!r}: give bytes above 0, or such as '5GB' (10**9) or '4GiB' (2**30)")


def _shards(rows: list[_Row], limit: int) -> Files:
    """The tensors of each file, in the model's order; a file is closed when the next one does not fit."""
    groups: list[list[_Row]] = []
    room = 0
    for row in rows:
        if not groups or row.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(row)
        room -= row.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _check_folder(folder: Path) -> None:
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


def _names(files: Files) -> list[str]:
    """What will be there; the last one makes readers see the others."""
    return [*files, INDEX] if len(files) > 1 else [*files]


def _into_store(folder: StorePath, files: Files, tied: dict[str, str], count: Count) -> list[Path]:
    """Write objects; each is there whole or not at all."""
    store, names = folder.store, _names(files)
    try:
        for name, rows in files.items():
            start = count.done

            def views(rows: list[_Row] = rows, start: int = start) -> Iterator[memoryview]:
                count.done = start  # the store is asked again
                return _views(rows, tied, count)

            store.write(name, views)
        if len(files) > 1:
            store.put(INDEX, _index(files))
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
            _write(disk, temporary / name, _views(rows, tied, count))
        if len(files) > 1:
            write_file(disk, temporary / INDEX, _index(files))
        disk.sync_folder(temporary)
        return _place(disk, temporary, folder, _names(files))


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
        _check_folder(folder)  # once more: another export may have been faster
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


def _views(rows: list[_Row], tied: dict[str, str], count: Count) -> Iterator[memoryview]:
    """The bytes of one safetensors file, a slice of a tensor at a time."""
    rows = sorted(rows, key=lambda row: _PLACE[row.dtype])  # wide dtypes first keeps every tensor aligned
    with Reader() as reader:
        slices = SliceReader(reader)
        yield memoryview(_header(rows, tied))
        for row in rows:
            for values in slices.read(row.saved):
                made = cast(values, row.dtype, row.name) if row.dtype != values.dtype else values
                data = memoryview(made.reshape(-1).view(torch.uint8).numpy().data)
                yield data
                count.add(data.nbytes)


def _header(rows: list[_Row], tied: dict[str, str]) -> bytes:
    inside = {row.name for row in rows}
    metadata = {name: kept for name, kept in tied.items() if kept in inside}  # as safetensors' save_model
    table: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    at = 0
    for row in rows:
        table[row.name] = {
            "dtype": DTYPES[row.dtype],
            "shape": list(row.saved.shape),
            "data_offsets": [at, at + row.nbytes],
        }
        at += row.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(files: Files) -> bytes:
    rows = [row for inside in files.values() for row in inside]
    total = {
        "total_parameters": sum(math.prod(row.saved.shape) for row in rows),
        "total_size": sum(row.nbytes for row in rows),
    }
    where = {row.name: name for name, inside in files.items() for row in inside}
    return (json.dumps({"metadata": total, "weight_map": where}, indent=2, sort_keys=True) + "\n").encode()
