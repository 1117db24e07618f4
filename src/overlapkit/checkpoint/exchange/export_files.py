"""The files of an export as Hugging Face lays them out: which tensors are in which, and their bytes."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from overlapkit.checkpoint.catalog import Saved
from overlapkit.checkpoint.exchange.casting import cast
from overlapkit.checkpoint.pieces import DTYPES
from overlapkit.checkpoint.progress import Count
from overlapkit.checkpoint.reader import Reader
from overlapkit.checkpoint.slices import SliceReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PLACE = {dtype: place for place, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Row:
    """One tensor on its way into a file."""

    name: str
    saved: Saved
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.saved.shape) * self.dtype.itemsize


Files = dict[str, list[Row]]


def divided(rows: list[Row], limit: int) -> Files:
    """The tensors of each file, in the model's order; a file is closed when the next one does not fit."""
    groups: list[list[Row]] = []
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


def in_order(files: Files) -> list[str]:
    """What will be there; the last one makes readers see the others."""
    return [*files, INDEX] if len(files) > 1 else [*files]


def contents(rows: list[Row], tied: dict[str, str], count: Count) -> Iterator[memoryview]:
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


def index(files: Files) -> bytes:
    """What the index file holds: each tensor's file, and how much they are together."""
    rows = [row for inside in files.values() for row in inside]
    total = {
        "total_parameters": sum(math.prod(row.saved.shape) for row in rows),
        "total_size": sum(row.nbytes for row in rows),
    }
    where = {row.name: name for name, inside in files.items() for row in inside}
    return (json.dumps({"metadata": total, "weight_map": where}, indent=2, sort_keys=True) + "\n").encode()


def _header(rows: list[Row], tied: dict[str, str]) -> bytes:
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
