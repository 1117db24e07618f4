"""Tokens that are on disk and not in memory: how long a batch takes, and how much is read for it.

Nothing of 4 GiB of tokens is left in the page cache when a variant begins, as with a set that is larger than
memory at any time. Each takes shuffled batches of 32 windows of 1,024 tokens and one more, some thousandth of
the set; the first batch, with which workers start, is not counted. What is read is what the system counts
for the process, where the variant has no workers. The tokens are random, for nobody looks at them.
"""

import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import overlapkit as ok
from harness import Figure, alternate, returned_seconds, time_figure, torch_threads
from input_tokens import BATCH, TOKEN_BYTES, WINDOW, Pairs

OURS, PEER = "ours", "DataLoader, 0 workers"
ROW, PAGE = TOKEN_BYTES * (WINDOW + 1), mmap.PAGESIZE  # a row lies in one page, or in two


def measure(quick: bool, device: torch.device) -> list[Figure]:
    """All figures of this part; `device` is of no account, for batches stay on the host."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder, torch_threads(1):
        write(Path(folder), (2**27 if quick else 2**32) // TOKEN_BYTES)
        if not evict(Path(folder)):
            note = "this file system keeps files in memory"
            return [Figure(f"tokens from disk, {OURS} ({note})", None, "ms", "lower")]
        batches = 4 if quick else 32
        read: dict[str, float] = {}
        turns: dict[str, Callable[[], object]] = {
            name: partial(seconds, name, source, Path(folder), batches, read)
            for name, source in sources(Path(folder)).items()
        }
        took = alternate(turns, rounds=2 if quick else 7, warmup=0, timer=returned_seconds)
    peer = took[PEER]
    goals = {OURS: 0.1}
    rows = [
        time_figure(f"tokens from disk, {name}", one, peer, ratio_limit=goals.get(name))
        for name, one in took.items()
    ]
    what = "tokens from disk, bytes read for one"
    rows.append(Figure(f"{what}, {OURS}", read[OURS], "B", "lower", limit=2 * PAGE / ROW))
    return [*rows, Figure(f"{what}, {PEER}", read[PEER], "B", "lower")]


def write(folder: Path, count: int) -> None:
    """Write the same tokens as our shards and as one flat file."""
    tokens = np.random.default_rng(0).integers(0, 2**16, min(count, 2**24), dtype=np.uint16)
    parts = [tokens] * (count // len(tokens))
    ok.write_token_shards(parts, folder / "shards", progress=False)
    with open(folder / "tokens.bin", "wb") as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())


def evict(folder: Path) -> bool:
    """Drop all files' pages from memory, and say whether that could be done. None may be mapped."""
    for path in folder.rglob("*.*"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:
                pass
            return False
    return True


def sources(folder: Path) -> dict[str, Callable[[], Iterable[Any]]]:
    """What opens each variant's batches anew."""

    def peer(workers: int) -> Iterable[Any]:
        tokens = np.memmap(folder / "tokens.bin", np.uint16, "c")
        rows = Pairs(tokens, WINDOW, np.int64)
        return DataLoader(rows, BATCH, shuffle=True, num_workers=workers, drop_last=True)

    return {
        OURS: partial(ok.TokenShards, folder / "shards", WINDOW, BATCH),
        PEER: partial(peer, 0),
        "DataLoader, 2 workers": partial(peer, 2),
    }


def seconds(
    name: str, source: Callable[[], Iterable[Any]], folder: Path, batches: int, read: dict[str, float]
) -> float:
    """Seconds of a batch behind the first; how many bytes were read for each of its own goes to `read`."""
    gc.collect()  # what is mapped stays
    if not evict(folder):
        raise RuntimeError(f"{folder} is still in memory: somebody has mapped it, or reads it")
    iterator = iter(source())
    next(iterator)
    before, start = _read(), time.perf_counter()
    taken = sum(1 for _ in islice(iterator, batches))
    took = time.perf_counter() - start
    read[name] = (_read() - before) / (taken * BATCH * ROW)
    return took / taken


def _read() -> int:
    """Bytes that this process has had read from disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
