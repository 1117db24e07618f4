"""Tokens to training batches: ours beside DataLoader over a memory map, in GB/s of tokens.

1 GiB of uint16 tokens (the sources of the Python standard library, repeated) becomes shuffled batches of
32 windows of 1,024 tokens and one more, and of 8 windows of 4,096 and one: how far rows at random places fall
behind one long copy depends on their length. Each variant goes on where its last turn ended, so that workers
keep running; a turn of a slow one takes fewer bytes. All read on one core, as beside a training step. The
limit is numpy's copy of the whole file's pages to memory. The DataLoaders' dataset is what most training
scripts have: it slices a memory map, converts to int64 on the host, and gives inputs and targets. How much of
the difference that makes is seen from one that gives the row whole, and one that leaves it in uint16, as ours
does: `inputs_and_targets` makes the rest on the device.
"""

import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import overlapkit as ok
from harness import Figure, Measurement, alternate, returned_seconds, torch_threads

WINDOW, BATCH = 1024, 32
SETTINGS = {"tokens": (WINDOW, BATCH), "tokens in windows of 4,096": (4096, 8)}
TOKEN_BYTES = 2
MEMCPY, OURS, LOADER = "memcpy", "ours", "ours through DeviceLoader"
STATEFUL = "StatefulDataLoader, 1 worker"


class Stream:
    """A source, epoch after epoch; calling it takes `nbytes` of tokens and gives the seconds of a GB."""

    def __init__(self, source: Iterable[Any], nbytes: int, device: torch.device) -> None:
        self._batches = _endless(source)
        self._nbytes, self._device = nbytes, device
        self.batch: Any = None

    def __call__(self) -> float:
        taken = 0
        start = time.perf_counter()
        while taken < self._nbytes:
            self.batch = next(self._batches)
            taken += TOKEN_BYTES * _tokens(self.batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (time.perf_counter() - start) / (taken / 1e9)

    @property
    def bytes_per_token(self) -> float:
        """Of the latest batch."""
        return self.batch.nbytes / _tokens(self.batch)


class Rows(Dataset[Tensor]):
    """Item i is window i of a memory map and the token after it, converted to `dtype`."""

    def __init__(self, tokens: np.ndarray, window: int, dtype: type[np.integer]) -> None:
        self.tokens, self.window, self.dtype = tokens, window, dtype

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.window

    def __getitem__(self, index: int) -> Tensor:
        window = self.tokens[index * self.window : (index + 1) * self.window + 1]
        return torch.from_numpy(window.astype(self.dtype, copy=False))


class Pairs(Rows):
    """The same as inputs and targets."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        row = super().__getitem__(index)
        return row[:-1], row[1:]


def measure(quick: bool, device: torch.device) -> list[Figure]:
    """All figures of this part."""
    with tempfile.TemporaryDirectory(prefix="tokens-") as folder, torch_threads(1):
        size = 2**26 if quick else 2**30
        tokens = write_tokens(Path(folder), size // TOKEN_BYTES)
        found: list[Figure] = []
        for what, (window, batch) in SETTINGS.items():
            streams = {
                name: Stream(source, size if name in (OURS, LOADER) else size // 16, device)
                for name, source in sources(Path(folder), tokens, window, batch, device).items()
            }
            turns: dict[str, Callable[[], object]] = {MEMCPY: memcpy(tokens), **streams}
            took = alternate(turns, rounds=3 if quick else 9, warmup=1, timer=returned_seconds)
            found += figures(took, streams, what)
        return found


def write_tokens(folder: Path, count: int) -> np.ndarray:
    """Write `count` tokens as our shards and as one flat file, and return the latter's memory map."""
    documents = _standard_library()
    flat = np.memmap(folder / "tokens.bin", np.uint16, "w+", shape=(count,))

    def until_full() -> Iterator[np.ndarray]:
        written = 0
        for document in cycle(documents):
            document = document[: count - written]
            flat[written : written + len(document)] = document
            written += len(document)
            yield document
            if written == count:
                return

    ok.write_token_shards(until_full(), folder / "shards")
    flat.flush()
    return np.memmap(folder / "tokens.bin", np.uint16, "c")  # writable in memory: torch warns otherwise


def sources(
    folder: Path, tokens: np.ndarray, window: int, batch: int, device: torch.device
) -> dict[str, Iterable[Any]]:
    """The variants, each a re-iterable of shuffled batches."""
    shards = [ok.TokenShards(folder / "shards", window, batch, seed=0) for _ in range(2)]
    usual = Pairs(tokens, window, np.int64)

    def peer(kind: Any, dataset: Rows, workers: int) -> Any:
        return kind(
            dataset, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
        )

    found = {
        OURS: shards[0],
        LOADER: ok.DeviceLoader(shards[1], device),
        "DataLoader, 0 workers": peer(DataLoader, usual, 0),
        "DataLoader, 1 worker": peer(DataLoader, usual, 1),
        "DataLoader, 2 workers": peer(DataLoader, usual, 2),
        "rows kept whole by DataLoader, 0 workers": peer(DataLoader, Rows(tokens, window, np.int64), 0),
        "uint16 kept by DataLoader, 0 workers": peer(DataLoader, Rows(tokens, window, np.uint16), 0),
    }
    with suppress(ImportError):
        from torchdata.stateful_dataloader import StatefulDataLoader

        found[STATEFUL] = peer(StatefulDataLoader, usual, 1)
    return found


def memcpy(tokens: np.ndarray) -> Callable[[], float]:
    """One thread copies all tokens from the file's pages to memory: the seconds of a GB."""
    target = np.empty_like(tokens)

    def seconds() -> float:
        start = time.perf_counter()
        np.copyto(target, tokens)
        return (time.perf_counter() - start) / (tokens.nbytes / 1e9)

    return seconds


def figures(took: dict[str, Measurement], streams: dict[str, Stream], what: str = "tokens") -> list[Figure]:
    """Rates, ours beside memcpy and beside the fastest DataLoader; names begin with `what`."""

    def rate(taken: Measurement, peer: Measurement, goal: float | None) -> Figure:
        low, high = taken.quartiles
        beside = f" beside {peer.name}" if goal else ""
        return Figure(
            f"{what}, {taken.name}{beside}",
            1 / taken.median,
            "GB/s",
            "higher",
            peer=None if peer is taken else peer.name,
            peer_value=None if peer is taken else 1 / peer.median,
            ratio_limit=goal,
            spread=(1 / high, 1 / low),
        )

    best = min((took[name] for name in took if name.startswith("DataLoader")), key=lambda one: one.median)
    rows = [rate(took[MEMCPY], took[MEMCPY], None)]
    rows += [rate(took[OURS], took[MEMCPY], 1 / 3), rate(took[OURS], best, 20)]
    rows += [rate(one, took[MEMCPY], None) for name, one in took.items() if name not in (MEMCPY, OURS)]
    if STATEFUL not in took:
        rows.append(Figure(f"{what}, {STATEFUL} (pip install torchdata)", None, "GB/s", "higher"))
    width = streams[OURS].bytes_per_token
    rows.append(Figure(f"{what}, bytes a token on the host, ours", width, "B", "lower", limit=TOKEN_BYTES))
    return rows


def _endless(source: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from source


def _tokens(batch: Any) -> int:
    return int((batch if isinstance(batch, Tensor) else batch[0]).numel())


def _standard_library() -> list[np.ndarray]:
    """The .py files of the standard library, a token a byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [file.read_bytes() for file in files if "site-packages" not in file.parts]
    return [np.frombuffer(text, np.uint8).astype(np.uint16) for text in texts if text]
