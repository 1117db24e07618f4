"""A thousand epochs that the loop leaves early: threads, descriptors and memory end where they began.

Where an epoch is dear there are fewer, and the test says why.
"""

import gc
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapkit.input import DeviceLoader, Mixture, TokenShards
from overlapkit.input.images import train_loader
from tests.input.images.photos import write_photos
from tests.input.sources import RESUMABLE, node
from tests.input.token_sets import write_set
from tests.leftovers import Leftovers
from tests.ranks import run_ranks

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


def take_all(loader: DeviceLoader) -> None:
    """What persistent workers have made and nobody took lies in descriptors. (A mixture has no end.)"""
    for _ in islice(loader, 40):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_early_breaks_leave_nothing(kind: str) -> None:
    check(DeviceLoader(KINDS[kind](40, 4), "cpu"), EPOCHS)


@pytest.mark.parametrize("mixed", [False, True], ids=["TokenShards", "Mixture"])
def test_early_breaks_leave_nothing_of_mapped_tokens(tmp_path: Path, mixed: bool) -> None:
    shards = TokenShards(write_set(tmp_path / "x", [40] * 4, 40), 3, 4, rank=0, world_size=1)
    check(DeviceLoader(Mixture({"a": shards}, {"a": 1}) if mixed else shards, "cpu"), EPOCHS)


def test_early_breaks_leave_no_batch() -> None:
    check(DeviceLoader(Bulky(), "cpu", depth=4), EPOCHS)


@pytest.mark.parametrize(("persistent", "epochs"), [(False, 60), (True, 200)])
def test_early_breaks_leave_no_worker(persistent: bool, epochs: int) -> None:
    """Fewer epochs: a process is forked and joined in each, some 0.1 s; or told to begin anew."""
    options = {"num_workers": 1, "persistent_workers": persistent}
    check(DeviceLoader(RESUMABLE["shuffled"](40, 4, **options), "cpu"), epochs)


def test_early_breaks_leave_nothing_of_images(tmp_path: Path) -> None:
    """Fewer epochs: in each DALI decodes four batches anew, and throws most of them away."""
    pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")
    write_photos(tmp_path, 12)
    images = train_loader(tmp_path, None, 2, size=8, threads=1, prefetch=1, device="cpu")
    check(DeviceLoader(images, "cpu"), 200)
    images.close()


@pytest.mark.parametrize("mode", ["error", "drop", "join"])
def test_early_breaks_leave_nothing_of_ranks_that_agree(mode: Any) -> None:
    """Fewer epochs: the two ranks agree on each batch, and wait for each other."""

    def run(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        loader = DeviceLoader(lambda: iter(range(40)), "cpu", uneven=mode)
        check(loader, 400)
        dist.barrier()
        assert store.num_keys() < 200  # and not some for each pass

    run_ranks(2, run)


def check(loader: DeviceLoader, epochs: int) -> None:
    leave_early(loader, max(3, epochs // 10))  # allocators and caches fill up
    take_all(loader)
    before, memory = Leftovers(), resident()
    leave_early(loader, epochs)
    take_all(loader)
    before.check()
    assert resident() < memory + 8
