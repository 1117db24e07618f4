"""Reading any box out of any chunks, against slices of the tensor; and no more than the blocks it lies in."""

import os
import random

import pytest
import torch

from overlapkit.checkpoint import DamagedCheckpoint
from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.catalog import Chunk, Saved
from overlapkit.checkpoint.hashing import HASHES
from overlapkit.checkpoint.reader import Reader, read_boxes, room
from overlapkit.lane import Lane

BLOCK = 104


def cuts(rng, length):
    """A dimension cut into stretches, some of them one long."""
    places = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(3)))})
    return list(zip(places[:-1], places[1:], strict=True))


def write(folder, value, rng, hash="xxh3_128"):
    """A tensor in a grid of chunks, in two files, with other bytes between them."""
    saved = Saved("x", value.dtype, tuple(value.shape), True, "cpu", [])
    files = [bytearray(rng.randbytes(7)) for _ in range(2)]
    grid = [()]
    for length in value.shape:
        grid = [(*corner, stretch) for corner in grid for stretch in cuts(rng, length)]
    for corner in grid:
        box = Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        data = value[box.inside(Box.whole(tuple(value.shape)))].contiguous().view(-1)
        data = bytes(data.view(torch.uint8).numpy()) if data.numel() else b""
        file = rng.randrange(2)
        sums = [HASHES[hash](data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        path = folder / f"file-{file}"
        saved.chunks.append(Chunk(path, box, len(files[file]), len(data), BLOCK, hash, sums))
        files[file] += data + rng.randbytes(rng.randrange(9))
    for number, content in enumerate(files):
        (folder / f"file-{number}").write_bytes(content)
    return saved


@pytest.fixture
def helper():
    with Lane("test", kind="thread") as lane:
        yield lane


@pytest.mark.parametrize("seed", range(30))
def test_any_box_of_any_chunks(tmp_path, monkeypatch, helper, seed):
    rng = random.Random(seed)
    monkeypatch.setattr("overlapkit.checkpoint.blocks._AT_ONCE", rng.choice([1, 150, 400, 1 << 20]))
    monkeypatch.setattr("overlapkit.checkpoint.blocks._BUFFERS", rng.choice([1, 3, 512]))
    shape = [rng.choice([1, 2, 5, 13, 40]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    dtype = rng.choice([torch.float32, torch.uint8, torch.float64])
    value = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul(200).to(dtype)
    saved = write(tmp_path, value, rng, rng.choice(["xxh3_128", "crc32"]))
    for _ in range(10):
        corner = [sorted(rng.sample(range(length + 1), 2)) for length in shape]
        box = Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        wanted = {"x": (saved, box)}
        memory = torch.full((room(wanted),), 255, dtype=torch.uint8)
        found = read_boxes(wanted, memory, helper, rng.random())["x"]
        assert torch.equal(found, value[box.inside(Box.whole(tuple(shape)))])


def test_only_the_blocks_that_hold_the_box_are_read(tmp_path, monkeypatch):
    value = torch.arange(1000.0).view(100, 10)  # 40 bytes a row
    data = bytes(value.view(-1).view(torch.uint8).numpy())
    (tmp_path / "file").write_bytes(data)
    sums = [HASHES["xxh3_128"](data[at : at + BLOCK]) for at in range(0, 4000, BLOCK)]
    chunk = Chunk(tmp_path / "file", Box.whole((100, 10)), 0, 4000, BLOCK, "xxh3_128", sums)
    saved = Saved("x", torch.float32, (100, 10), True, "cpu", [chunk])
    read = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append((at, n := real(fd, views, at))) or n)
    for box, expected in (
        (Box((6, 0), (3, 10)), range(208, 416)),  # bytes 240 to 360
        (Box((13, 0), (13, 10)), range(520, 1040)),  # exactly five blocks
        (Box((6, 3), (3, 2)), range(208, 416)),  # some columns
    ):
        read.clear()
        target = torch.empty(box.shape)
        with Reader() as reader:
            reader.fill(target, box, saved)
        assert torch.equal(target, value[box.inside(Box.whole((100, 10)))])
        assert sorted(at for first, n in read for at in range(first, first + n)) == list(expected)


@pytest.mark.parametrize("box", [Box((6, 0), (3, 10)), Box((6, 3), (3, 2)), Box.whole((100, 10))])
def test_a_part_is_checked_by_the_blocks_it_lies_in(tmp_path, box, helper):
    value = torch.arange(1000.0).view(100, 10)
    saved = write(tmp_path, value, random.Random(1))
    sound = {path: path.read_bytes() for path in tmp_path.iterdir()}
    found = 0
    for path, data in sound.items():
        for at in range(0, len(data), 50):
            flipped = bytearray(data)
            flipped[at] ^= 1
            path.write_bytes(flipped)
            wanted = {"x": (saved, box)}
            memory = torch.zeros(room(wanted), dtype=torch.uint8)
            try:
                values = read_boxes(wanted, memory, helper)["x"]
            except DamagedCheckpoint as error:
                found += "the checksum differs" in str(error)
            else:
                assert torch.equal(values, value[box.inside(Box.whole((100, 10)))])
        path.write_bytes(data)
    assert found


def test_what_is_in_no_file_is_an_error(tmp_path, helper):
    value = torch.arange(60.0).view(6, 10)
    saved = write(tmp_path, value, random.Random(5))
    saved.chunks.pop()
    wanted = {"x": (saved, Box.whole((6, 10)))}
    with pytest.raises(DamagedCheckpoint, match=r"\d+ of 60 elements"):
        read_boxes(wanted, torch.zeros(room(wanted), dtype=torch.uint8), helper)


def test_few_files_are_open_however_many_ranks_wrote(tmp_path, monkeypatch, helper):
    monkeypatch.setattr("overlapkit.checkpoint.reader._FILES", 5)
    value = torch.arange(400.0).view(100, 4)
    saved = Saved("x", value.dtype, (100, 4), True, "cpu", [])
    for row in range(100):
        data = bytes(value[row].view(torch.uint8).numpy())
        (tmp_path / f"file-{row}").write_bytes(data)
        box = Box((row, 0), (1, 4))
        chunk = Chunk(tmp_path / f"file-{row}", box, 0, 16, BLOCK, "xxh3_128", [HASHES["xxh3_128"](data)])
        saved.chunks.append(chunk)
    before, most = len(os.listdir("/proc/self/fd")), []
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda *args: most.append(len(os.listdir("/proc/self/fd"))) or real(*args)
    )
    for box in (Box.whole((100, 4)), Box((3, 1), (90, 2))):  # rows, and columns
        wanted = {"x": (saved, box)}
        found = read_boxes(wanted, torch.zeros(room(wanted), dtype=torch.uint8), helper)["x"]
        assert torch.equal(found, value[box.inside(Box.whole((100, 4)))])
    assert len(most) > 100
    assert max(most) <= before + 2 * 5 + 2  # two threads, and two that are listing this folder
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_box_twice_in_the_files_is_an_error(tmp_path, helper):
    """Also where as many elements as are wanted are found: some are missing then."""
    value = torch.arange(60.0).view(6, 10)
    saved = write(tmp_path, value, random.Random(5))
    halves = [Box((0, 0), (3, 10)), Box((0, 0), (3, 10))]
    chunk = saved.chunks[0]
    saved.chunks = [Chunk(chunk.path, box, 0, 120, BLOCK, chunk.hash, ["", ""]) for box in halves]
    wanted = {"x": (saved, Box.whole((6, 10)))}
    with pytest.raises(DamagedCheckpoint, match="60 of 60 elements.*or some twice"):
        read_boxes(wanted, torch.zeros(room(wanted), dtype=torch.uint8), helper)
