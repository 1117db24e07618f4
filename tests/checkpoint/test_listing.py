"""Which checkpoints there are, which one is meant, and what one holds."""

import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch
from torch import nn

from overlapkit.checkpoint import Checkpointer, describe, list_checkpoints
from overlapkit.checkpoint.finding import find_checkpoint
from overlapkit.checkpoint.manifest import read_manifest
from tests.checkpoint.faults import value_state
from tests.checkpoint.loop import Cursor
from tests.checkpoint.test_distributed import sharded, step
from tests.ranks import run_ranks


@pytest.fixture
def run(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        for number in (2, 9, 10):
            checkpointer.save(number, value_state(number), metrics={"loss": 1 / number}, block=True)
    return tmp_path / "run"


def test_the_list_is_what_is_on_disk(run):
    found = list_checkpoints(run)
    assert [listed.step for listed in found] == [2, 9, 10]
    for listed in found:
        assert listed.folder == run / f"step-{listed.step}"
        assert listed.nbytes == sum(path.stat().st_size for path in listed.folder.iterdir())
        assert timedelta(0) <= datetime.now(UTC) - listed.written < timedelta(minutes=5)
        assert (listed.state, listed.damage, listed.world) == ("committed", None, 1)
        assert set(listed.keys) == value_state(0).keys()
        assert listed.metrics == {"loss": 1 / listed.step}


def test_damage_is_listed_and_more_of_it_when_checked(run):
    (run / "step-2" / "manifest.json").unlink()
    path = run / "step-9" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    states = {listed.step: (listed.state, listed.world) for listed in list_checkpoints(run)}
    assert states == {2: ("damaged", None), 9: ("committed", 1), 10: ("committed", 1)}
    told = []
    found = list_checkpoints(run, check=True, progress=lambda step: lambda *done: told.append((step, *done)))
    assert [listed.state for listed in found] == ["damaged", "damaged", "verified"]
    assert "manifest.json" in found[0].damage
    assert "checksum" in found[1].damage
    assert {step for step, _, _ in told} == {9, 10}


def test_an_empty_directory_has_none_and_a_missing_one_is_an_error(tmp_path):
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_checkpoints(tmp_path / "nowhere")


def test_a_directory_means_its_highest_step_and_a_folder_itself(run, monkeypatch):
    assert find_checkpoint(run) == run / "step-10"
    assert find_checkpoint(run, 9) == find_checkpoint(run / "step-9") == run / "step-9"
    assert find_checkpoint(run / "step-9", 9) == run / "step-9"
    monkeypatch.chdir(run / "step-9")
    assert find_checkpoint(".").resolve() == run / "step-9"
    (run / "step-10" / "manifest.json").write_text("")
    assert find_checkpoint(run) == run / "step-10"  # damaged, and named: no older one is taken in silence
    with pytest.raises(ValueError, match="step 9 alone"):
        find_checkpoint(run / "step-9", 10)
    with pytest.raises(FileNotFoundError, match=r"step=3.*\[2, 9, 10\]"):
        find_checkpoint(run, 3)


def test_where_there_is_none_the_error_says_so(tmp_path):
    (tmp_path / "step-5").mkdir()  # not ours
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        find_checkpoint(tmp_path / "step-5")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_checkpoint(tmp_path / "gone")
    shutil.rmtree(tmp_path / "step-5")


def test_contents_are_the_state(tmp_path):
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    model.tied = model.weight
    schedule = {1: Counter({5: 2}), "list": [1, {"x": None}], "pair": (1, 2), "empty": {}, "t/u": b"\0"}
    state = {"model": model, "loader": Cursor(), "x": schedule, "big": torch.zeros(0, 4), "n": np.float64(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, metrics={"loss": float("nan")}, block=True)
    found = describe(tmp_path)
    assert (found.step, found.world, found.rank, found.folder) == (7, 1, 0, tmp_path / "step-7")
    assert found.kinds == {
        "model": "module",
        "loader": "object",
        "x": "value",
        "big": "tensor",
        "n": "value",
    }
    assert found.generators == ("torch", "numpy", "random")
    assert np.isnan(found.metrics["loss"])
    file = ("rank-00000.safetensors",)
    shown = {name: (t.dtype, t.shape, t.nbytes, t.files, t.shares) for name, t in found.tensors.items()}
    assert shown == {
        "model/weight": (torch.bfloat16, (2, 3), 12, file, None),
        "model/bias": (torch.bfloat16, (2,), 4, file, None),
        "model/tied": (torch.bfloat16, (2, 3), 0, file, "model/weight"),
        "big": (torch.float32, (0, 4), 0, file, None),
    }
    assert found.values == {
        "loader/at": 0,
        "x/1/5": 2,
        "x/list/0": 1,
        "x/list/1/x": None,
        "x/pair": (1, 2),
        "x/empty": {},
        "x/t%2Fu": b"\0",
        "n": 2.0,
    }


def save_sharded(rank, folder):
    state = {**sharded(), "own": rank, "seen": torch.full((rank + 1,), rank)}
    step(state)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, block=True)


def test_shards_are_one_tensor_and_each_rank_has_its_own_values(tmp_path):
    run_ranks(2, save_sharded, tmp_path)
    for rank in (0, 1):
        found = describe(tmp_path, rank=rank)
        assert (found.world, found.values["own"]) == (2, rank)
        weight = found.tensors["model/0.weight"]
        assert (weight.shape, weight.nbytes) == ((5, 7), 140)
        assert weight.files == ("rank-00000.safetensors", "rank-00001.safetensors")
        assert found.tensors["seen"].shape == (rank + 1,)
        assert found.tensors["seen"].files == (f"rank-{rank:05d}.safetensors",)
        assert found.tensors["optimizer/state/model%2F0.weight/exp_avg"].shape == (5, 7)
        assert found.values["optimizer/param_groups/0/lr"] == 0.05
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="ranks 0 to 1"):
            describe(tmp_path, rank=rank)


def test_what_a_living_run_deletes_meanwhile_is_not_damaged(run, monkeypatch):
    def deleted_first(folder):
        if folder.name == "step-2":
            shutil.rmtree(folder)
        return read_manifest(folder)

    monkeypatch.setattr("overlapkit.checkpoint.listing.read_manifest", deleted_first)
    assert [(listed.step, listed.state) for listed in list_checkpoints(run)] == [
        (9, "committed"),
        (10, "committed"),
    ]
