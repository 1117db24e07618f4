"""Writing one rank's share: a safetensors file and a JSON part that says what is in it.

The data is never copied again: the header is written, then the staging buffers themselves.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.disk import Disk, write_file
from overlapkit.checkpoint.layout import DTYPES, Inventory
from overlapkit.checkpoint.stage import Row

FORMAT = "overlapkit-checkpoint"
VERSION = 1
BLOCK = 4 << 20
"""Bytes under one checksum: a rank that reads a part of a tensor checks what it reads."""
_PAGE = 4096  # where the data begins, so that direct I/O can read it
_GROUP = 4 * BLOCK  # handed to one write


def write_share(
    disk: Disk, folder: Path, inventory: Inventory, rows: list[Row], about: dict[str, Any]
) -> dict[str, dict[str, int]]:
    """Write this rank's files and wait until they are on disk.

    Args:
        disk: The file system.
        folder: The checkpoint under its temporary name.
        inventory: The state.
        rows: The tensors in host memory, in file order.
        about: step, rank, world and rng, for the part.

    Returns:
        name -> {"bytes": size, "crc32": checksum, for the part only}.
    """
    stem = _stem(about["rank"])
    disk.make_folder(folder)
    files: dict[str, dict[str, int]] = {}
    tensors: dict[str, Any] = {}
    if rows:
        files[f"{stem}.safetensors"] = _write_tensors(disk, folder / f"{stem}.safetensors", rows, tensors)
    for piece in inventory.pieces:
        if piece.alias is not None:
            tensors[piece.name] = {"alias": piece.alias}
    part = {"format": FORMAT, "version": VERSION, "block": BLOCK, **about, "file": None}
    part |= {"state": inventory.entries, "tensors": tensors}
    if rows:
        part["file"] = {"name": f"{stem}.safetensors", **files[f"{stem}.safetensors"]}
        del files[f"{stem}.safetensors"]["crc32"]  # of the header: the part keeps it
    data = json.dumps(part, allow_nan=False).encode()
    write_file(disk, folder / f"{stem}.json", data)
    files[f"{stem}.json"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    disk.sync_folder(folder)
    return files


def remove_share(disk: Disk, folder: Path, rank: int) -> None:
    """Delete what `write_share` wrote on a rank, and the folder where nothing else is in it."""
    disk.remove_files(folder, [f"{_stem(rank)}{suffix}" for suffix in (".safetensors", ".json")])


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def _write_tensors(disk: Disk, path: Path, rows: list[Row], tensors: dict[str, Any]) -> dict[str, int]:
    """Write the safetensors file; fill in the part's table of tensors."""
    header = _header(rows)
    fd = disk.create(path)
    try:
        disk.write(fd, [memoryview(header)])
        at, group, grouped = 0, list[memoryview](), 0
        for piece, data in rows:
            view, sums = memoryview(data.numpy().data), list[int]()
            for start in range(0, view.nbytes, BLOCK):
                block = view[start : start + BLOCK]
                sums.append(zlib.crc32(block))
                group.append(block)
                grouped += block.nbytes
                if grouped >= _GROUP:
                    disk.write(fd, group)
                    group, grouped = [], 0
            tensors[piece.name] = {
                "dtype": DTYPES[piece.data.dtype],
                "shape": list(piece.shape),
                "offset": list(piece.box.offset),
                "local": list(piece.box.shape),
                "own": piece.own,
                "sharded": piece.sharded,
                "device": piece.data.device.type,
                "at": at,
                "crc32": sums,
            }
            at += view.nbytes
        disk.write(fd, group)
        disk.sync(fd)
    finally:
        os.close(fd)
    return {"bytes": len(header) + at, "header": len(header), "crc32": zlib.crc32(header)}


def _header(rows: list[Row]) -> bytes:
    """A safetensors header, filled up with spaces to a whole number of pages."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece, data in rows:
        ends = [at, at + data.numel()]
        table[piece.name] = {
            "dtype": DTYPES[piece.data.dtype],
            "shape": list(piece.box.shape),
            "data_offsets": ends,
        }
        at = ends[1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text
