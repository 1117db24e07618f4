"""Tokens that are on disk and not in memory: how long a batch takes, and how much is read for it.

Nothing of 4 GiB of tokens is left in the page cache when a variant begins, as with a set that is larger than
memory at any time. Each takes shuffled batches of 32 windows of 1,024 tokens and one more, some thousandth of
the set; the first four, with which workers start, are not counted. In each round they are other ones, or the
same again: a virtual disk has those in its host's memory, and answers many requests at once, where it may
read what is new to it one by one. What is read is what the system counts for the process, where the variant
has no workers. A map is read row by row; "told that it is read at random" it is by madvise, without which the
kernel reads ahead: by the disk's read_ahead_kb, 128 as a rule. The tokens are random: nobody looks at them.
"""

import ctypes
import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import overlapkit as ok
from harness import Figure, alternate, returned_seconds, time_figure, torch_threads
from input_tokens import BATCH, TOKEN_BYTES, WINDOW, Pairs

OURS, PEER, TOLD = "ours", "DataLoader, 0 workers", "DataLoader, told that it is read at random"
AGAIN = "tokens from disk, the same again"
PATIENCE_S = 10.0
FIRST = 4  # so many batches ours gathers at once
_LIBC = ctypes.CDLL(None, use_errno=True)
ROW, PAGE = TOKEN_BYTES * (WINDOW + 1), mmap.PAGESIZE  # a row lies in one page, or in two


def measure(quick: bool, device: torch.device) -> list[Figure]:
    """All figures of this part; `device` is of no account, for batches stay on the host."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder, torch_threads(1):
        write(Path(folder), (2**27 if quick else 2**32) // TOKEN_BYTES)
        if not evict(Path(folder)):
            note = "this file system keeps files in memory"
            return [Figure(f"tokens from disk, {OURS} ({note})", None, "ms", "lower")]
        found: list[Figure] = []
        for what, seeds, peer, goal in (
            ("tokens from disk", count(), PEER, 0.2),
            (AGAIN, repeat(0), TOLD, 0.5),
        ):
            found += _part(what, seeds, peer, goal, Path(folder), quick)
        return found


def _part(what: str, seeds: Iterator[int], peer: str, goal: float, folder: Path, quick: bool) -> list[Figure]:
    read: dict[str, float] = {}
    turns: dict[str, Callable[[], object]] = {
        name: partial(seconds, name, lambda open=open_: open(next(seeds)), folder, 4 if quick else 32, read)
        for name, open_ in sources(folder).items()
    }
    took = alternate(turns, rounds=2 if quick else 7, warmup=1, timer=returned_seconds)
    rows = [
        time_figure(f"{what}, {name}", one, took[peer], ratio_limit=goal if name == OURS else None)
        for name, one in took.items()
    ]
    for name in (OURS, TOLD, PEER):
        limit = 2 * PAGE / ROW if name == OURS else None
        rows.append(Figure(f"{what}, bytes read for one, {name}", read[name], "B", "lower", limit=limit))
    return rows


def write(folder: Path, number: int) -> None:
    """Write the same tokens as our shards and as one flat file."""
    tokens = np.random.default_rng(0).integers(0, 2**16, min(number, 2**24), dtype=np.uint16)
    parts = [tokens] * (number // len(tokens))
    ok.write_token_shards(parts, folder / "shards", progress=False)
    with open(folder / "tokens.bin", "wb") as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())


def evict(folder: Path) -> bool:
    """Drop all files' pages from memory, and say whether that could be done. None may be mapped."""
    files = list(folder.rglob("*.*"))
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not any(map(_in_memory, files))


def _in_memory(path: Path) -> bool:
    """By mincore: a read that must not wait (RWF_NOWAIT) tells it, too, and brings the page in."""
    with open(path, "rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    pages = np.empty(-(-len(mapped) // PAGE), np.uint8)
    if _LIBC.mincore(*map(ctypes.c_size_t, (mapped.ctypes.data, len(mapped), pages.ctypes.data))) != 0:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return bool((pages & 1).any())


def sources(folder: Path) -> dict[str, Callable[[int], Iterable[Any]]]:
    """What opens each variant's batches anew, by a seed."""

    def ours(seed: int) -> Iterable[Any]:
        return ok.TokenShards(folder / "shards", WINDOW, BATCH, seed=seed)

    def peer(seed: int, workers: int = 0, told: bool = False) -> Iterable[Any]:
        with open(folder / "tokens.bin", "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable: torch warns otherwise
        if told:
            mapped.madvise(mmap.MADV_RANDOM)
        tokens = np.frombuffer(mapped, np.uint16)
        rows, order = Pairs(tokens, WINDOW, np.int64), torch.Generator().manual_seed(seed)
        return DataLoader(rows, BATCH, shuffle=True, num_workers=workers, drop_last=True, generator=order)

    return {
        OURS: ours,
        TOLD: partial(peer, told=True),
        PEER: peer,
        "DataLoader, 2 workers": partial(peer, workers=2),
        f"{TOLD}, 2 workers": partial(peer, workers=2, told=True),
    }


def seconds(
    name: str, source: Callable[[], Iterable[Any]], folder: Path, batches: int, read: dict[str, float]
) -> float:
    """Seconds of a batch, behind the first ones; what was read for each byte of it goes to `read`."""
    gc.collect()  # what is mapped stays
    deadline = time.monotonic() + PATIENCE_S
    while not evict(folder):  # the last one's workers may be on their way out
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder} is still in memory: somebody has mapped it, or reads it")
        time.sleep(0.1)
    iterator = iter(source())
    for _ in islice(iterator, FIRST):
        pass
    before, start = _read(), time.perf_counter()
    taken = sum(1 for _ in islice(iterator, batches))
    took = time.perf_counter() - start
    read[name] = (_read() - before) / (taken * BATCH * ROW)
    return took / taken


def _read() -> int:
    """Bytes that this process has had read from disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
