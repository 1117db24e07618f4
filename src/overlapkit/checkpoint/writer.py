"""Writing one rank's share: a safetensors file and a JSON part that says what is in it.

The data is never copied again: the staging buffer is the file's content behind the header. It is written
past the page cache, where the file system can do that: on the machine this was measured on (2 cores, one
virtual disk) 1 GiB took 0.35 s and 0.02 s of CPU time, and through the cache 0.65 s and 0.3 s, which the
training step would miss. Two threads take turns at it: one hashes while the other waits for the disk.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.codec import dump
from overlapkit.checkpoint.disk import Disk, write_file
from overlapkit.checkpoint.fileplan import BLOCK, PAGE, FilePlan
from overlapkit.checkpoint.hashing import ALGORITHM, checksum
from overlapkit.checkpoint.turns import take_turns
from overlapkit.lane import Lane

FORMAT = "overlapkit-checkpoint"
VERSION = 2
"""1 had crc32 checksums, in each tensor's entry."""
JSON_LIMIT = 1 << 30
"""Bytes of a part or a manifest; a longer one is not read."""

Bytes = Callable[[int, int], memoryview]
"""The bytes of a file's data, from and to."""


def held(memory: torch.Tensor) -> Bytes:
    """The bytes of a staging buffer, uint8 (n,)."""
    view = memoryview(memory.numpy().data)
    return lambda start, stop: view[start:stop]


def write_share(
    disk: Disk,
    folder: Path,
    plan: FilePlan,
    entries: dict[str, Any],
    data: Bytes,
    about: dict[str, Any],
    helper: Lane,
) -> dict[str, dict[str, Any]]:
    """Write this rank's files and wait until they are on disk.

    Args:
        disk: The file system.
        folder: The checkpoint under its temporary name.
        plan: Where the tensors go.
        entries: For each key of the state its kind and its typed JSON.
        data: The tensors' bytes as they lie in the file, in memory that begins at a page; called by this
            thread and by the helper's. What it returns is done with at the same thread's next call.
        about: step, rank, world and rng, for the part.
        helper: A thread that takes half of the writing.

    Returns:
        name -> {"bytes": size, ALGORITHM: checksum, for the part only}.
    """
    stem = stem_of(about["rank"])
    disk.make_folder(folder)
    files: dict[str, dict[str, Any]] = {}
    sums: list[Any] = []
    if plan.tensors:
        name = f"{stem}.safetensors"
        sums = _write_tensors(disk, folder / name, plan, data, helper)
        files[name] = {"bytes": len(plan.header) + plan.nbytes}
    text = part_bytes(plan, entries, about, sums)
    write_file(disk, folder / f"{stem}.json", text)
    files[f"{stem}.json"] = {"bytes": len(text), ALGORITHM: checksum(text)}
    disk.sync_folder(folder)
    return files


def part_bytes(plan: FilePlan, entries: dict[str, Any], about: dict[str, Any], sums: list[Any]) -> bytes:
    """The part of a rank whose tensors' blocks have these checksums.

    Raises:
        ValueError: It is longer than any reader takes.
    """
    file: dict[str, Any] | None = None
    if plan.tensors:
        file = {
            "name": f"{stem_of(about['rank'])}.safetensors",
            "bytes": len(plan.header) + plan.nbytes,
            "header": len(plan.header),
            ALGORITHM: checksum(plan.header),
            "sums": "".join(sums),
        }
    part = {"format": FORMAT, "version": VERSION, "hash": ALGORITHM, "block": BLOCK, **about, "file": file}
    text = dump(part | {"state": entries, "tensors": plan.table}).encode()
    if len(text) > JSON_LIMIT:
        raise ValueError(
            f"state holds {len(text)} bytes of plain values, above the limit of {JSON_LIMIT}: "
            "give large ones as tensors"
        )
    return text


def remove_share(disk: Disk, folder: Path, rank: int) -> None:
    """Delete what `write_share` wrote on a rank, and the folder where nothing else is in it."""
    disk.remove_files(folder, [f"{stem_of(rank)}{suffix}" for suffix in (".safetensors", ".json")])


def stem_of(rank: int) -> str:
    """What the names of a rank's files begin with."""
    return f"rank-{rank:05d}"


def _write_tensors(disk: Disk, path: Path, plan: FilePlan, data: Bytes, helper: Lane) -> list[Any]:
    """Write the safetensors file; return the checksums of its blocks."""
    sums: list[Any] = [None] * len(plan.blocks)
    with _File(disk, path) as file:
        file.write_cached(memoryview(plan.header), 0)

        def write(start: int, stop: int, first: int, last: int) -> None:
            blocks = plan.blocks[first:last]
            view = data(start, max([stop, *(end for _, end in blocks)]))
            sums[first:last] = [checksum(view[a - start : b - start]) for a, b in blocks]
            file.write(view[: stop - start], len(plan.header) + start)

        take_turns([partial(write, *group) for group in plan.groups], helper)
        file.sync()
    return sums


class _File:
    """A new file that several threads write to: whole pages directly, the rest through the page cache."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._fd = disk.create(path)
        self._direct = disk.open_direct(path)

    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes; `offset` is a multiple of a page."""
        whole = view.nbytes - view.nbytes % PAGE
        if whole and self._direct is not None:
            try:
                self._disk.write_at(self._direct, view[:whole], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # this file system, or this memory, is not made for it: through the cache then
            else:
                view, offset = view[whole:], offset + whole
        self.write_cached(view, offset)

    def write_cached(self, view: memoryview, offset: int) -> None:
        """Write bytes through the page cache, from and to any place."""
        if view.nbytes:
            self._disk.write_at(self._fd, view, offset)

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            os.close(self._fd)  # which may say, on NFS, what a write before it did not
        finally:
            if self._direct is not None:
                os.close(self._direct)
