"""verify(): every damaged place is found and named, and a hostile checkpoint is damage, never a traceback."""

import json
import sys

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, Damage, DamagedCheckpoint, describe, diff, export, verify
from tests.checkpoint.faults import value_state
from tests.checkpoint.test_damage import HOSTILE, rewrite
from tests.ranks import run_ranks

BLOCK = 64  # bytes under one checksum here


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """A checkpoint of two tensors of ten blocks each; returns its file and where each tensor begins."""
    for name, module in list(sys.modules.items()):
        if name.startswith("overlapkit.checkpoint.") and hasattr(module, "BLOCK"):
            monkeypatch.setattr(module, "BLOCK", BLOCK)
    state = {"a": torch.arange(160, dtype=torch.float32), "b": torch.arange(160, dtype=torch.float32)}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, state, block=True)
    path = tmp_path / "run" / "step-3" / "rank-00000.safetensors"
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + header])
    return path, {name: 8 + header + table[name]["data_offsets"][0] for name in "ab"}


def flip(path, *places):
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 4
    path.write_bytes(data)


def damage(where):
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(where)
    return caught.value


def test_every_damaged_place_is_named_and_neighbours_are_one(blocks):
    path, start = blocks
    a, b = start["a"], start["b"]
    flip(path, a, a + 2 * BLOCK, a + 3 * BLOCK + 5, b + 9 * BLOCK + 63)
    error = damage(path.parent.parent)
    what = "the checksum differs"
    assert list(error.damage) == [
        Damage(path, what, "a", a, a + BLOCK),
        Damage(path, what, "a", a + 2 * BLOCK, a + 4 * BLOCK),
        Damage(path, what, "b", b + 9 * BLOCK, b + 10 * BLOCK),
    ]
    assert f"{path}: tensor 'b', bytes {b + 9 * BLOCK} to {b + 10 * BLOCK}: {what}" in str(error)


def test_a_long_list_is_cut_in_the_text_only(blocks):
    path, start = blocks
    flip(path, *(start[name] + BLOCK * n for name in "ab" for n in range(0, 10, 2)))
    assert len(damage(path.parent).damage) == 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overlapkit.checkpoint.verification._SHOWN", 3)
        assert str(damage(path.parent)).endswith("; and 7 more places")


def test_the_header_is_looked_at(blocks):
    path, _ = blocks
    flip(path, 9)
    (place,) = damage(path.parent).damage
    assert place == Damage(path, "the checksum of its header differs from the part's")


def save_own(rank, folder):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"t": torch.full((4,), float(rank))}, block=True)


def test_damage_of_one_rank_does_not_hide_that_of_another(tmp_path):
    run_ranks(2, save_own, tmp_path)
    part, file = tmp_path / "step-1/rank-00000.json", tmp_path / "step-1/rank-00001.safetensors"
    flip(part, 20)
    flip(file, -1)
    first, second = damage(tmp_path).damage
    assert first == Damage(part, "its checksum differs from the manifest's")
    assert (second.file, second.tensor, second.stop) == (file, "t", file.stat().st_size)


def test_progress_ends_at_the_bytes_of_all_files(blocks):
    path, _ = blocks
    seen = []
    verify(path.parent, progress=lambda done, total: seen.append((done, total)))
    files = sum(p.stat().st_size for p in path.parent.iterdir() if p.name != "manifest.json")
    assert seen[0] == (0, files)
    assert seen[-1] == (files, files)
    assert seen == sorted(seen)


def test_an_unreadable_file_is_damage(blocks, monkeypatch):
    path, start = blocks

    def broken(fd, views, offset):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("overlapkit.checkpoint.reader.os.preadv", broken)
        places = damage(path.parent).damage
    assert [(p.tensor, p.start, p.stop) for p in places] == [
        (None, None, None),  # its header
        *((name, at, at + 10 * BLOCK) for name, at in start.items()),
    ]
    assert "Input/output error" in places[0].what


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_part_is_damage_to_everything_that_reads_it(tmp_path, case):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, value_state(1), block=True)
        checkpointer.save(2, value_state(2), block=True)
    rewrite(tmp_path, HOSTILE[case])
    readers = (
        verify,
        describe,
        lambda path: diff(tmp_path / "step-1", path),
        lambda path: export(path, tmp_path / "out"),
    )
    for read in readers:
        with pytest.raises(DamagedCheckpoint):
            read(tmp_path / "step-2")
    assert not (tmp_path / "out").exists()


def test_half_an_optimizer_is_damage(tmp_path):
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, {"opt": torch.optim.SGD(model.parameters()), "model": model}, block=True)
    rewrite(tmp_path, lambda part, files: part["state"]["opt"].update(value={"state": {}}))
    with pytest.raises(DamagedCheckpoint, match="not an entry of 'opt'"):
        describe(tmp_path)
