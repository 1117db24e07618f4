"""A thousand epochs that the loop leaves early: threads, descriptors and memory end where they began."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overlapkit.input import DeviceLoader, Mixture, TokenShards
from tests.input.sources import RESUMABLE, node
from tests.input.token_sets import write_set
from tests.leftovers import Leftovers

EPOCHS = 1000
KINDS: dict[str, Callable[[int, int], Any]] = {
    "generator": lambda n, size: lambda: iter(range(n)),
    "node": node,
    **{kind: RESUMABLE[kind] for kind in ("list", "shuffled", "stateful loader", "stateful stream")},
}


class Bulky:
    """Batches of 256 KiB, so that a thousand of them that stay behind cannot be missed."""

    def __iter__(self) -> Any:
        return (torch.full((1 << 18,), at, dtype=torch.uint8) for at in range(8))


def resident() -> float:
    """MiB of this process that are in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def leave_early(loader: DeviceLoader, epochs: int) -> None:
    for epoch in range(epochs):
        for taken, _ in enumerate(loader):
            if taken == epoch % 3:
                break


@pytest.mark.parametrize("kind", KINDS)
def test_early_breaks_leave_nothing(kind: str) -> None:
    check(DeviceLoader(KINDS[kind](40, 4), "cpu"), EPOCHS)


@pytest.mark.parametrize("mixed", [False, True], ids=["TokenShards", "Mixture"])
def test_early_breaks_leave_nothing_of_mapped_tokens(tmp_path: Path, mixed: bool) -> None:
    shards = TokenShards(write_set(tmp_path / "x", [40] * 4, 40), 3, 4, rank=0, world_size=1)
    check(DeviceLoader(Mixture({"a": shards}, {"a": 1}) if mixed else shards, "cpu"), EPOCHS)


def test_early_breaks_leave_no_batch() -> None:
    check(DeviceLoader(Bulky(), "cpu", depth=4), EPOCHS)


def test_early_breaks_leave_no_worker() -> None:
    check(DeviceLoader(RESUMABLE["shuffled"](40, 4, num_workers=1), "cpu"), 30)


def check(loader: DeviceLoader, epochs: int) -> None:
    leave_early(loader, epochs // 10)  # allocators and caches fill up
    before, memory = Leftovers(), resident()
    leave_early(loader, epochs)
    before.check()
    assert resident() < memory + 8
