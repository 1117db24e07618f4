"""The tensor file: written past the page cache and through it, by two threads, whole in every case."""

import errno
import json
import os
import threading
import time

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from overlapkit.checkpoint import Checkpointer, fileplan
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.turns import take_turns
from overlapkit.lane import Lane


class NoDirect(Disk):
    """A file system without direct I/O: none can be opened."""

    def open_direct(self, path):
        return None


class RefusesDirect(Disk):
    """One that opens such files, and then refuses to write to them."""

    def __init__(self):
        self.refused = 0

    def open_direct(self, path):
        self.direct = os.open(path, os.O_WRONLY)
        return self.direct

    def write_at(self, fd, view, offset):
        if fd == self.direct:
            self.refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        super().write_at(fd, view, offset)


class Short(Disk):
    """One that writes less than it is asked to."""

    def write_at(self, fd, view, offset):
        real, os.pwrite = (
            os.pwrite,
            lambda fd, view, offset: real(fd, view[: max(4096, len(view) // 3)], offset),
        )
        try:
            super().write_at(fd, view, offset)
        finally:
            os.pwrite = real


def state(sizes=(1, 1023, 1024, 50_000, 4096, 70_001)):
    generator = torch.Generator().manual_seed(3)
    return {f"t{i}": torch.rand(size, generator=generator) for i, size in enumerate(sizes)} | {
        "bytes": torch.arange(77, dtype=torch.uint8),
        "scalar": torch.tensor(5, dtype=torch.int64),
    }


def check(tmp_path, expected):
    found = load_file(tmp_path / "step-1" / "rank-00000.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("disk", [Disk, NoDirect, RefusesDirect, Short])
@pytest.mark.parametrize("group", [4096, 3 * 4096, 1 << 24])
def test_the_file_is_whole_whatever_the_file_system_does(tmp_path, monkeypatch, disk, group):
    monkeypatch.setattr(fileplan, "_GROUP", group)
    monkeypatch.setattr(fileplan, "BLOCK", 1000)
    monkeypatch.setattr("overlapkit.checkpoint.writer.BLOCK", 1000)
    monkeypatch.setattr(Checkpointer, "_disk", made := disk())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(), block=True)
        check(tmp_path, state())
        checkpointer.verify(1)
        restored = {name: torch.zeros_like(value) for name, value in state().items()}
        checkpointer.restore(restored)
    assert all(torch.equal(restored[name], value) for name, value in state().items())
    assert getattr(made, "refused", 1)


def test_every_block_has_its_own_checksum(tmp_path, monkeypatch):
    """Against xxhash over the file, at the places that the part gives."""
    monkeypatch.setattr(fileplan, "BLOCK", 1000)
    monkeypatch.setattr("overlapkit.checkpoint.writer.BLOCK", 1000)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(), block=True)
    part = json.loads((tmp_path / "step-1" / "rank-00000.json").read_text())
    data = (tmp_path / "step-1" / "rank-00000.safetensors").read_bytes()
    header, sums = part["file"]["header"], part["file"]["sums"]
    assert header % 4096 == 0
    seen = set()
    for entry in part["tensors"].values():
        nbytes = (
            entry["local"][0]
            if entry["dtype"] == "U8"
            else 8
            if not entry["local"]
            else 4 * entry["local"][0]
        )
        for block, at in enumerate(range(0, nbytes, 1000)):
            place = entry["sum"] + block
            begin = header + entry["at"] + at
            expected = xxhash.xxh3_128_hexdigest(data[begin : begin + min(1000, nbytes - at)])
            assert sums[32 * place : 32 * place + 32] == expected
            seen.add(place)
    assert len(sums) == 32 * len(seen)


def test_direct_writes_are_whole_pages_from_page_boundaries(tmp_path, monkeypatch):
    """As far as this file system takes them: else nothing was direct."""
    monkeypatch.setattr(fileplan, "_GROUP", 8192)
    direct, lengths = set(), []

    class Watched(Disk):
        def open_direct(self, path):
            fd = super().open_direct(path)
            direct.add(fd)
            return fd

        def write_at(self, fd, view, offset):
            if fd in direct:
                lengths.append(view.nbytes)
                address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
                assert view.nbytes % 4096 == offset % 4096 == address % 4096 == 0
            super().write_at(fd, view, offset)

    monkeypatch.setattr(Checkpointer, "_disk", Watched())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(), block=True)
    check(tmp_path, state())
    total = sum(value.nbytes for value in state().values())
    assert direct == {None} or sum(lengths) == total // 4096 * 4096


def test_no_byte_is_copied_on_its_way(tmp_path, monkeypatch):
    """What is written is the staging buffer itself."""
    addresses = []

    class Watched(Disk):
        def write_at(self, fd, view, offset):
            addresses.append(torch.frombuffer(view, dtype=torch.uint8).data_ptr())
            super().write_at(fd, view, offset)

    monkeypatch.setattr(Checkpointer, "_disk", Watched())
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match="not writable"):  # of the look at the header's bytes
            checkpointer.save(1, state(), block=True)
        memory = checkpointer._stager._ring._slots[0]._memory
        inside = range(memory.data_ptr(), memory.data_ptr() + memory.numel())
        assert all(address in inside for address in addresses[1:])  # the first is the header


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_in_either_thread_ends_the_save(tmp_path, monkeypatch, failing):
    monkeypatch.setattr(fileplan, "_GROUP", 4096)
    calls = []

    class Fails(Disk):
        def write_at(self, fd, view, offset):
            calls.append(threading.current_thread())
            if len(calls) - 1 == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write_at(fd, view, offset)

    monkeypatch.setattr(Checkpointer, "_disk", Fails())
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(1, state(), block=True)
        calls[:] = [None] * 1000
        checkpointer.save(2, state(), block=True)
        assert checkpointer.steps() == [2]


def test_two_threads_take_turns():
    """Each job runs once, both threads run some, and an error stops what has not begun."""
    both, ran = threading.Barrier(2, timeout=20), []

    def job(number):
        if number < 2:
            both.wait()  # one thread alone would never pass
        ran.append(number)

    with Lane("test", kind="thread") as helper:
        take_turns([lambda number=number: job(number) for number in range(50)], helper)
        assert sorted(ran) == list(range(50))
        take_turns([], helper)
        ran.clear()

        def fails():
            both.wait()
            raise ValueError("broken")

        def goes_on():
            both.wait()
            time.sleep(0.3)  # until the other has failed, and left nothing to do

        with pytest.raises(ValueError, match="broken"):
            take_turns([fails, goes_on] + [lambda: ran.append(1)] * 50, helper)
        assert ran == []
