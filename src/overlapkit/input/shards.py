"""Token shards on disk: what a directory of them holds, refused unless all of it is sound.

A shard is a safetensors file with `tokens`, uint16 or uint32 of shape (n,), and, unless somebody else
wrote it, `offsets`, int64 of shape (documents + 1,): document i is tokens[offsets[i]:offsets[i + 1]].
"""

import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

FORMAT_KEY = "overlapkit.tokens"
FORMAT = "1"
OFFSETS = np.dtype("<i8")

_TOKENS: dict[str, np.dtype] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
_OFFSETS: dict[str, np.dtype] = {"I64": OFFSETS, "U64": OFFSETS}

_HEADER_LIMIT = 100_000_000  # safetensors' own
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Shard:
    """Where in a file its arrays are.

    Attributes:
        path: The file.
        nbytes: Its size.
        modified: When it was last changed, in ns.
        dtype: Of its tokens.
        tokens: How many.
        tokens_at: Byte of the file at which they start.
        documents: How many, or None where there are no offsets or nobody asked for them.
        offsets_at: Byte of the file at which the offsets start.
    """

    path: Path
    nbytes: int
    modified: int
    dtype: np.dtype
    tokens: int
    tokens_at: int
    documents: int | None
    offsets_at: int


def shard_name(number: int, total: int) -> str:
    """A shard's file name: a set says how many belong to it, so that a lost one is noticed."""
    return f"tokens-{number:05d}-of-{total:05d}.safetensors"


def find_shards(directory: str | os.PathLike[str], documents: bool = False) -> list[Shard]:
    """The shards of a directory in their order, after a look at each one's header; no token is read.

    Args:
        directory: Where they are.
        documents: Whether offsets are needed; else they are not looked at.

    Raises:
        ValueError: It is no directory of token shards, one is missing, or one is damaged; the message
            names the file.
    """
    folder = Path(directory).absolute()  # looked at again after a chdir
    if not folder.is_dir():
        raise ValueError(
            f"directory={str(folder)!r} is no directory: give one that write_token_shards() wrote, or one of "
            "safetensors files with a tensor named 'tokens'"
        )
    shards = [read_header(path, documents) for path in _in_order(folder)]
    for shard in shards:
        if shard.dtype != shards[0].dtype:
            _refuse(
                shard.path,
                f"its tokens are {shard.dtype}, those of {shards[0].path.name} are {shards[0].dtype}",
                "write all with one dtype",
            )
    return shards


def read_header(path: Path, with_documents: bool) -> Shard:
    """Look at one shard's header.

    Raises:
        ValueError: It is no sound token shard.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            _refuse(path, "it is no regular file", "remove it from the directory")
        with open(path, "rb") as file:
            seen = os.fstat(file.fileno())
            header, data_at = _parse(path, file)
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        _refuse(path, f"it is no sound safetensors file ({error})", "write it, or copy it, again")
    except OSError as error:
        _refuse(
            path, f"it cannot be read ({error.strerror or error})", "put it back, or mend its permissions"
        )
    if metadata.get(FORMAT_KEY, FORMAT) != FORMAT:
        _refuse(path, f"its format is {metadata[FORMAT_KEY]!r}, read here is {FORMAT!r}", "update overlapkit")
    dtype, tokens, tokens_at = _array(path, header, "tokens", _TOKENS, data_at)
    documents, offsets_at = None, 0
    if with_documents and "offsets" in header:
        _, entries, offsets_at = _array(path, header, "offsets", _OFFSETS, data_at)
        documents = entries - 1
        if documents < 0:
            _refuse(path, "its offsets are empty", "they hold one more entry than there are documents")
    return Shard(path, seen.st_size, seen.st_mtime_ns, dtype, tokens, tokens_at, documents, offsets_at)


def check_unchanged(shard: Shard) -> None:
    """Refuse a file that is not as it was when its header was read: what is mapped may end too early.

    Raises:
        ValueError: It has another size or time of change, or is gone.
    """
    remedy = "leave shards as they are while they are read; open the directory again"
    try:
        now = os.stat(shard.path)
    except OSError as error:
        _refuse(shard.path, f"it was there when it was opened ({error.strerror})", remedy)
    if now.st_size != shard.nbytes:
        _refuse(shard.path, f"it has {now.st_size} bytes, and had {shard.nbytes} when it was opened", remedy)
    if now.st_mtime_ns != shard.modified:
        _refuse(shard.path, "it was written to since it was opened", remedy)


def check_offsets(shard: Shard, offsets: np.ndarray) -> None:
    """Refuse document offsets, int64 (documents + 1,), that do not lead from the first token to the last.

    Raises:
        ValueError: They do not.
    """
    remedy = "offsets rise from 0 to the number of tokens; write the shard again"
    if offsets[0] != 0 or offsets[-1] != shard.tokens:
        _refuse(
            shard.path,
            f"its offsets go from {offsets[0]} to {offsets[-1]} over {shard.tokens} tokens",
            remedy,
        )
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        at = int(falls.argmax())
        _refuse(shard.path, f"offset {at + 1} is {offsets[at + 1]}, after {offsets[at]}", remedy)


def _in_order(folder: Path) -> list[Path]:
    """The folder's safetensors files: a whole numbered set, or files without numbers by name."""
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not paths:
        raise ValueError(
            f"directory={str(folder)!r} holds no *.safetensors file: write token shards there with "
            "write_token_shards()"
        )
    matches = {path: _NUMBERED.fullmatch(path.name) for path in paths}
    numbered = {path: match for path, match in matches.items() if match}
    if not numbered:
        return paths
    sets = {(match["stem"], int(match["total"])) for match in numbered.values()}
    if len(sets) > 1 or len(numbered) < len(paths):
        strays = sorted(f"{stem}-*-of-{total}" for stem, total in sets)
        strays += [path.name for path in paths if path not in numbered]
        raise ValueError(
            f"directory={str(folder)!r} holds more than one set of shards ({', '.join(strays[:4])}): each "
            "needs a directory of its own"
        )
    return _whole_set(folder, {int(match["number"]): path for path, match in numbered.items()}, sets.pop())


def _whole_set(folder: Path, by_number: dict[int, Path], named: tuple[str, int]) -> list[Path]:
    stem, total = named
    first = 1 if total in by_number else 0  # others count from 1
    if missing := [number for number in range(first, first + total) if number not in by_number]:
        raise ValueError(
            f"directory={str(folder)!r} lacks {len(missing)} of the {total} shards {stem}-*-of-{total}, the "
            f"first of them number {missing[0]}: copy the set again"
        )
    if len(by_number) > total:
        raise ValueError(
            f"directory={str(folder)!r} holds {len(by_number)} shards {stem}-*-of-{total}: remove those that "
            "do not belong to it"
        )
    return [by_number[number] for number in sorted(by_number)]


def _parse(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header as it is written, which safe_open does not tell, and the byte at which data starts.

    What it says is checked by safe_open: types, ranges, and that the arrays cover the file without a gap.
    """
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 8
    if length > _HEADER_LIMIT:
        _refuse(path, f"it says that its header has {length} bytes", f"the limit is {_HEADER_LIMIT}")
    text = file.read(length)
    if len(text) < length:
        _refuse(path, f"it ends after {len(start + text)} bytes, within its header", "copy it again")
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"it is no safetensors file (its header: {error})", "write it, or copy it, again")
    if not isinstance(header, dict):
        _refuse(path, "it is no safetensors file (its header is no table)", "write it, or copy it, again")
    return header, 8 + length


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _array(
    path: Path, header: dict[str, Any], name: str, dtypes: Mapping[str, np.dtype], data_at: int
) -> tuple[np.dtype, int, int]:
    """The dtype, length and first byte of a one-dimensional array that safe_open has found sound."""
    if name not in header:
        held = ", ".join(sorted(header.keys() - {"__metadata__"})) or "nothing"
        _refuse(
            path, f"it has no tensor named {name!r} (it holds {held})", "write it with write_token_shards()"
        )
    entry = header[name]
    if entry["dtype"] not in dtypes or len(entry["shape"]) != 1:
        _refuse(
            path,
            f"{name} is {entry['dtype']} of shape {entry['shape']}",
            f"it must be {' or '.join(dtypes)} with one dimension",
        )
    dtype, at = dtypes[entry["dtype"]], data_at + entry["data_offsets"][0]
    if at % dtype.itemsize:
        _refuse(
            path,
            f"{name} starts at byte {at}, no multiple of its {dtype.itemsize} bytes an item",
            "write it with write_token_shards(), which aligns it",
        )
    return dtype, entry["shape"][0], at


def _refuse(path: Path, what: str, remedy: str) -> NoReturn:
    raise ValueError(f"{path} cannot be used: {what}; {remedy}")
