"""Sets of token shards for tests, and what a reader of plain safetensors finds in them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from overlapkit.input.shard_writer import write_token_shards


def documents(lengths: list[int], first: int = 0) -> list[np.ndarray]:
    """Documents of given lengths whose tokens are all different: first, first + 1, ..."""
    ends = first + np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def write_set(
    folder: Path, lengths: list[int], shard_tokens: int = 10**6, first: int = 0, **options: Any
) -> Path:
    """Write such documents."""
    write_token_shards(documents(lengths, first), folder, shard_tokens=shard_tokens, **options)
    return folder


def load_set(folder: Path) -> list[dict[str, np.ndarray]]:
    """Each shard's arrays, by safetensors itself."""
    return [load_file(path) for path in sorted(folder.iterdir())]


def all_windows(folder: Path, window: int) -> list[list[int]]:
    """Every window of a set in its own order, one by one."""
    found = []
    for shard in load_set(folder):
        tokens, start = shard["tokens"].tolist(), 0
        while start + window + 1 <= len(tokens):
            found.append(tokens[start : start + window + 1])
            start += window
    return found


def raw_shard(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    """A file in the manner of safetensors with whatever header, and whatever it says of its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if isinstance(header, dict):
        text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    """One array in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
