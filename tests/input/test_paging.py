"""Rows that are not in memory: asked for together, exactly they, and only while there are such."""

import mmap
import resource
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from input_cold import evict
from overlapkit.input import paging
from overlapkit.input.paging import Paging
from overlapkit.input.shard_writer import write_token_shards
from overlapkit.input.tokens import TokenShards

PAGE = mmap.PAGESIZE


class Kernel:
    """Stands in for the system: notes what it is asked for, and says what the thread has read from disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        self.blocks = self.faults = 0
        monkeypatch.setattr(paging, "_madvise", self._advise)
        monkeypatch.setattr(paging.resource, "getrusage", self._usage)

    def _advise(self, address: int, nbytes: int, advice: int) -> None:
        assert address % PAGE == 0
        if advice == mmap.MADV_WILLNEED:
            self.asked.append((address, address + nbytes))

    def _usage(self, who: int) -> SimpleNamespace:
        assert who == resource.RUSAGE_THREAD
        return SimpleNamespace(ru_inblock=self.blocks, ru_majflt=self.faults)


def test_the_pages_of_each_row_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    memory = np.frombuffer(mmap.mmap(-1, 8 * PAGE), np.uint8)
    places = np.array([0, 3, PAGE // 2 - 1, 3 * PAGE // 2], dtype=np.int64)
    Paging(memory, 2, 10).ask(places)
    base = memory.ctypes.data
    ends = [(base + 2 * place) for place in places.tolist()]
    assert kernel.asked == [(end - end % PAGE, end + 10) for end in ends]


@pytest.mark.parametrize("counter", ["blocks", "faults"])
def test_asking_ends_where_all_is_in_memory_and_begins_again(
    counter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch)
    memory = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    rows, place = Paging(memory, 1, 4), np.array([8], dtype=np.int64)

    def asked(times: int) -> int:
        before = len(kernel.asked)
        for _ in range(times):
            rows.ask(place)
        return len(kernel.asked) - before

    assert asked(100) == paging._ASKED, "nobody knows at first"
    assert asked(100) == 0
    setattr(kernel, counter, 1)
    assert asked(10) == 10
    setattr(kernel, counter, 2)
    assert asked(100) == paging._ASKED, "counted from the last that was read"


@pytest.mark.parametrize("into", [False, True])
def test_from_disk_come_the_rows_and_their_pages_alone(tmp_path: Path, into: bool) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 2**25, dtype=np.uint16)
    write_token_shards([tokens], tmp_path / "set", progress=False)
    if not evict(tmp_path / "set"):
        pytest.skip("this file system keeps files in memory")
    shards = TokenShards(tmp_path / "set", 1024, 32, seed=3)
    batches = shards.iter_into(lambda *what: torch.empty(what[0], dtype=what[1])) if into else iter(shards)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    taken = list(islice(batches, 8))
    after = resource.getrusage(resource.RUSAGE_THREAD)
    rows = [row for batch in taken for row in batch.tolist()]
    order = shards.order.at(0, np.arange(len(rows)))
    assert rows == [tokens[sample * 1024 :][:1025].tolist() for sample in order.tolist()]
    pages = 2 * len(rows)  # a row of 2,050 bytes lies in one or two
    assert 0 < (after.ru_inblock - before.ru_inblock) * 512 <= 1.1 * pages * PAGE
    assert after.ru_majflt - before.ru_majflt <= len(rows) // 10, "each would be one wait for the disk"


def test_in_their_own_order_rows_are_left_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch)
    write_token_shards([np.arange(1000)], tmp_path / "set", progress=False)
    for _ in TokenShards(tmp_path / "set", 9, 4, shuffle=False):
        pass
    assert kernel.asked == []
    for _ in TokenShards(tmp_path / "set", 9, 4):
        pass
    assert len(kernel.asked) == 111 // 4 * 4
