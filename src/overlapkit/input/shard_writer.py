"""Writing token shards: one pass over the documents, one shard in memory, and the whole set or nothing."""

import fcntl
import json
import os
import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from overlapkit.input.checks import is_integer
from overlapkit.input.shards import FORMAT, FORMAT_KEY, shard_name

_OWN = re.compile(r"\d+|tokens-\d{5,}-of-\d{5,}\.safetensors")
"""Names of files while they are written, and when all are."""


def write_token_shards(
    token_arrays: Iterable[Any],
    directory: str | os.PathLike[str],
    *,
    dtype: Literal["uint16", "uint32"] = "uint16",
    shard_tokens: int = 100_000_000,
    progress: bool | None = None,
) -> None:
    """Write documents of tokens as safetensors shards, for TokenShards or any reader of safetensors.

    Each file holds `tokens`, uint16 or uint32 of shape (n,), and `offsets`, int64 of shape (documents + 1,):
    document i is tokens[offsets[i]:offsets[i + 1]]. Nothing is put between documents: an end-of-text token
    belongs into the array.

    The directory appears when all shards are on disk, or not at all. They are written beside it, into
    `.NAME.writing`; what an interrupted call leaves there is removed by the next, and anything else in it is
    refused.

    Args:
        token_arrays: Documents, each a list, numpy array or CPU tensor of integers, of shape (n,). They are
            asked for once, and at most one shard of them is held. An empty one keeps its number.
        directory: Where to. It must not exist, or be empty.
        dtype: "uint16" for vocabularies of up to 65,536 tokens, else "uint32".
        shard_tokens: A shard is full before the document that would take it beyond this. Only a longer
            document makes a larger one.
        progress: Show a bar; None does so on a terminal.

    Raises:
        TypeError: `token_arrays` is no iterable of documents.
        ValueError: An argument is out of range; a document is no integers of one dimension, or a token does
            not fit into `dtype` (the message says which); there are no tokens; the directory is not empty, is
            the current one or cannot be made; its file system has no locks; another process is writing it; or
            it was taken while it was written (the finished shards are kept, and the message says where).
    """
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype={dtype!r}: use 'uint16', or 'uint32' for more than 65,536 different tokens")
    if not is_integer(shard_tokens) or shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens!r}: it is an integer of at least 1")
    if progress not in (None, True, False):
        raise ValueError(f"progress={progress!r}: use True, False, or None to show a bar on a terminal")
    if isinstance(token_arrays, str | bytes) or not isinstance(token_arrays, Iterable):
        raise TypeError(f"token_arrays={token_arrays!r}: give an iterable of token arrays, one a document")
    target = Path(directory).resolve()
    with _unfinished(target) as folder:
        documents = _checked(_tracked(token_arrays, target, progress), np.dtype(dtype))
        paths = _write_shards(documents, folder, dtype, shard_tokens)
        if not paths:
            raise ValueError("token_arrays has no tokens: there is nothing to write")
        for number, path in enumerate(paths):
            path.rename(folder / shard_name(number, len(paths)))


def _tracked(documents: Iterable[Any], target: Path, progress: bool | None) -> Iterator[Any]:
    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield from documents
        return
    total = len(documents) if isinstance(documents, Sized) else None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        yield from bar.track(documents, total=total, description=f"documents to {target.name}")


def _checked(documents: Iterable[Any], dtype: np.dtype) -> Iterator[np.ndarray]:
    """The documents as arrays of `dtype`."""
    limit = int(np.iinfo(dtype).max)
    for number, document in enumerate(documents):
        tokens = _as_array(document, number)
        if tokens.size and (tokens.dtype.kind not in "iu" or tokens.ndim != 1):
            raise ValueError(
                f"document {number} is {tokens.dtype} of shape {tokens.shape}: give integers of one dimension"
            )
        if tokens.size and tokens.dtype != dtype and (tokens.min() < 0 or tokens.max() > limit):
            at = int(((tokens < 0) | (tokens > limit)).argmax())
            remedy = (
                "use dtype='uint32'" if 0 <= tokens[at] < 2**32 else "tokens are not negative, below 2**32"
            )
            raise ValueError(
                f"document {number} has the token {tokens[at]} at {at}, which {dtype} does not hold: {remedy}"
            )
        yield np.ascontiguousarray(tokens, dtype)


def _as_array(document: Any, number: int) -> np.ndarray:
    if isinstance(document, torch.Tensor) and document.device.type != "cpu":
        raise ValueError(f"document {number} is on {document.device}: give it as document.cpu()")
    try:
        return np.asarray(document)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, sparse tensors
        raise ValueError(f"document {number} is no array of tokens ({error})") from error


def _write_shards(documents: Iterable[np.ndarray], folder: Path, dtype: str, limit: int) -> list[Path]:
    paths: list[Path] = []
    tokens, offsets = bytearray(), array("q", [0])
    for document in documents:
        if tokens and document.size and offsets[-1] + document.size > limit:
            paths.append(_write(folder / str(len(paths)), tokens, offsets, dtype))
            tokens, offsets = bytearray(), array("q", [0])
        tokens += document.tobytes()
        offsets.append(offsets[-1] + document.size)
    if tokens:
        paths.append(_write(folder / str(len(paths)), tokens, offsets, dtype))
    return paths


def _write(path: Path, tokens: bytearray, offsets: "array[int]", dtype: str) -> Path:
    """Write a safetensors file; it is on disk when this returns.

    safetensors' own save_file makes files that only their owner may read.
    """
    split = len(offsets) * offsets.itemsize
    header = {
        "__metadata__": {FORMAT_KEY: FORMAT},
        "offsets": {"dtype": "I64", "shape": [len(offsets)], "data_offsets": [0, split]},
        "tokens": {
            "dtype": {"uint16": "U16", "uint32": "U32"}[dtype],
            "shape": [offsets[-1]],
            "data_offsets": [split, split + len(tokens)],
        },
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % offsets.itemsize)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(offsets)
        file.write(tokens)
        file.flush()
        os.fsync(file.fileno())
    return path


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A folder that takes the target's name when the body is done, or vanishes with parents made for it."""
    _refuse_target(target)
    folder = target.with_name(f".{target.name}.writing")
    new = [parent for parent in folder.parents if not os.path.exists(parent)]
    try:
        with _held(folder) as fd:
            _remove_own(folder)
            try:
                yield folder
                os.fsync(fd)
            except BaseException:
                with suppress(OSError, ValueError):
                    _remove_own(folder)
                    folder.rmdir()
                raise
            _publish(folder, target)
        for path in (target, *new):
            _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # one that is not empty stays
            for parent in new:
                parent.rmdir()
        raise


def _refuse_target(target: Path) -> None:
    if not os.path.exists(target):
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ValueError(
            f"directory={str(target)!r} is there and not empty: token shards need a directory of their own. "
            "Give another name, or remove it"
        )
    if target.samefile("."):
        raise ValueError(
            f"directory={str(target)!r} is the current directory, which a finished one would take the place "
            "of: give a name within it"
        )


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """The folder, made where it is not there, open and locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        what = "is no folder" if os.path.lexists(folder) else "cannot be made"
        raise ValueError(
            f"{folder}, where shards are written until all are there, {what} ({error.strerror}: "
            f"{error.filename}): give another directory, or mend that"
        ) from error
    try:
        _lock(fd, folder)
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    """Hold the folder for as long as the file descriptor is open; a process that dies lets go of it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.lstat(folder)):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:  # some network file systems
        with suppress(OSError):
            folder.rmdir()
        raise ValueError(
            f"{folder.parent} is on a file system without locks ({error.strerror}): two writers would "
            "not see each other: write to a local disk, and move the directory there"
        ) from error
    raise ValueError(
        f"another process is writing {folder}: wait for it, and let one rank write what all ranks read"
    )


def _remove_own(folder: Path) -> None:
    """Empty the folder of what an interrupted call left there, unless it holds anything else."""
    found = list(os.scandir(folder))
    for entry in found:
        if not (_OWN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
            raise ValueError(
                f"{entry.path} is no file that write_token_shards() writes, and everything in {folder} would "
                "be removed: move it elsewhere"
            )
    for entry in found:
        os.unlink(entry.path)


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as error:
        raise ValueError(
            f"directory={str(target)!r} was free when writing began, and cannot be taken now "
            f"({error.strerror}). All shards are finished, in {folder}: rename that yourself; the next call "
            "for the same directory removes it"
        ) from error


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
