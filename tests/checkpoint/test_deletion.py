"""Retention on disk: what earlier runs left counts only once it is verified, and the best survives."""

import shutil
import threading
import warnings

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, CheckpointError
from overlapkit.checkpoint import deletion as deletion_module
from overlapkit.checkpoint.disk import Disk
from tests.ranks import run_ranks


def state(value=0.0):
    return {"x": torch.full((3,), float(value))}


def life(directory, steps, *, restore=True, keep=3, **options):
    """A run from its beginning to its end; the steps that it leaves."""
    with Checkpointer(directory, keep=keep, **options) as checkpointer:
        if restore:
            checkpointer.restore(state())
        for step in steps:
            checkpointer.save(step, state(step), block=True)
    return checkpointer.steps()


def restore_and_read(checkpointer):
    """Restore the latest, and wait until what is read in the background for it is read."""
    checkpointer.restore(state())
    if checkpointer._deletion._reading is not None:
        checkpointer._deletion._reading.settle()


def damage(folder):
    """Turn one bit of a tensor: the manifest and all lengths stay as they are."""
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_old_ones_stay_until_enough_new_ones_are_there(tmp_path):
    assert life(tmp_path, [1, 2, 3, 4]) == [2, 3, 4]
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        there = []
        for step in (5, 6, 7):
            checkpointer.save(step, state(), block=True)
            there.append(checkpointer.steps())
    assert there == [[2, 3, 4, 5], [2, 3, 4, 5, 6], [5, 6, 7]]


class Slow(Disk):
    """Removes a folder only when it is told to, and keeps the order of what it does."""

    def __init__(self):
        self.go, self.calls = threading.Event(), []

    def make_folder(self, path):
        self.calls.append(("make", path.name.split("-")[-1]))
        super().make_folder(path)

    def remove(self, path):
        self.go.wait(30)
        self.calls.append(("remove", path.name.split("-")[-1]))
        super().remove(path)


def test_a_save_is_committed_before_the_old_bytes_are_gone_and_the_next_is_written_after(
    tmp_path, monkeypatch
):
    disk = Slow()
    monkeypatch.setattr(Checkpointer, "_disk", disk)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(), block=True)
        assert checkpointer.steps() == [2]
        assert disk.calls == [("make", "1"), ("make", "2")]
        third = checkpointer.save(3, state())
        disk.go.set()
        third.wait()
    assert disk.calls == [("make", "1"), ("make", "2"), ("remove", "1"), ("make", "3"), ("remove", "2")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3"]


def test_wait_waits_until_what_is_surplus_is_gone(tmp_path, monkeypatch):
    disk = Slow()
    monkeypatch.setattr(Checkpointer, "_disk", disk)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(), block=True)
        threading.Timer(0.2, disk.go.set).start()
        checkpointer.wait()
        assert disk.calls[-1] == ("remove", "1")


def test_what_cannot_be_removed_is_told_once_and_holds_nothing_up(tmp_path, monkeypatch):
    class Stuck(Disk):
        def remove(self, path):
            if path.name.split("-")[-1] in stuck:
                raise OSError(f"planted {path.name[-1]}")
            super().remove(path)

    stuck = {"1"}
    monkeypatch.setattr(Checkpointer, "_disk", Stuck())
    checkpointer = Checkpointer(tmp_path, keep=1)
    for step in (1, 2):
        checkpointer.save(step, state(), block=True)
    with pytest.raises(
        CheckpointError, match="step-3 is committed, but older ones cannot be deleted: planted 1"
    ):
        checkpointer.save(3, state(), block=True)
    checkpointer.save(4, state(), block=True)
    checkpointer.wait()
    assert checkpointer.steps() == [4]
    assert sorted(path.name[-1] for path in tmp_path.glob(".gone-*")) == ["1"]
    stuck |= {"4"}
    checkpointer.save(5, state(), block=True)
    with pytest.raises(CheckpointError, match="what is surplus cannot be deleted: planted 4"):
        checkpointer.wait()
    checkpointer.wait()
    stuck |= {"5"}
    checkpointer.save(6, state(), block=True)
    with pytest.raises(CheckpointError, match="what is surplus cannot be deleted: planted 5"):
        checkpointer.close()
    stuck.clear()
    Checkpointer(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6"]


def test_what_was_restored_whole_or_verified_counts_at_once(tmp_path):
    life(tmp_path, [1, 2, 3])
    shutil.copytree(tmp_path, tmp_path.with_name("other"))
    assert life(tmp_path, [4, 5]) == [3, 4, 5]
    with Checkpointer(tmp_path.with_name("other"), keep=3) as checkpointer:
        checkpointer.restore(state(), only=("x",))  # not the whole of it
        checkpointer.save(4, state(), block=True)
        checkpointer.save(5, state(), block=True)
        assert checkpointer.steps() == [1, 2, 3, 4, 5]
        checkpointer.verify(3)
        checkpointer.save(5, state(), block=True)
        assert checkpointer.steps() == [3, 4, 5]


def test_at_another_world_size_a_restore_has_not_read_everything(tmp_path):
    """Each rank's own tensors: rank 1's are in nobody's way, and nobody looks at them."""

    def save(rank):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state(), block=True)

    def restore(rank):
        with Checkpointer(tmp_path, keep=3) as checkpointer:
            checkpointer.restore(state())
            return sorted(checkpointer._deletion._verified)

    run_ranks(2, save)
    assert run_ranks(2, restore) == [[1], [1]]
    assert run_ranks(1, restore) == [[]]


def test_the_last_sound_one_is_not_deleted_for_damaged_ones(tmp_path):
    life(tmp_path, [1, 2, 3])
    damage(tmp_path / "step-2")
    damage(tmp_path / "step-3")
    with Checkpointer(tmp_path, keep=3) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two are skipped
        assert checkpointer.restore(state()) == 1
        checkpointer.save(4, state(), block=True)
        assert checkpointer.steps() == [1, 2, 3, 4]
        checkpointer.verify(1)


def test_runs_that_all_end_early_do_not_fill_the_disk(tmp_path):
    """Each life makes one save: what only waits to be verified is read in the background."""
    there = []
    for step in range(1, 21):
        with Checkpointer(tmp_path, keep=3) as checkpointer:
            restore_and_read(checkpointer)
            checkpointer.save(step, state(step), block=True)
            there.append(len(checkpointer.steps()))
    assert there[:3] == [1, 2, 3]
    assert max(there) <= 7
    assert min(there[10:]) < 6  # some were deleted, more than once
    checkpointer = Checkpointer(tmp_path)
    for step in checkpointer.steps():
        checkpointer.verify(step)
    checkpointer.close()


def test_a_damaged_one_found_in_the_background_counts_for_nothing(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state(step), block=True)
    damage(tmp_path / "step-6")
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        with pytest.warns(UserWarning, match="step-6 is damaged: it stays"):
            restore_and_read(checkpointer)
        checkpointer.save(8, state(), block=True)
        checkpointer._deletion._reading.settle()  # step 5
        checkpointer.save(9, state(), block=True)
        assert checkpointer.steps() == [6, 7, 8, 9]


def test_closing_does_not_wait_for_the_reading(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state(step), block=True)
    told = []

    def endless(folder, progress):
        while True:
            told.append(folder.name)
            progress(0, 1)

    monkeypatch.setattr(deletion_module, "verify", endless)
    assert life(tmp_path, []) == [1, 2, 3, 4, 5, 6, 7]
    assert set(told) == {"step-6"}


def test_the_best_survives_the_newest_and_a_restart(tmp_path):
    values = {1: 0.5, 2: 0.2, 3: float("nan"), 4: 0.4, 5: None, 6: 0.3}
    for life_of in ([1, 2, 3], [4, 5, 6]):
        with Checkpointer(tmp_path, keep=1, best="val_loss") as checkpointer:
            checkpointer.restore(state())
            for step in life_of:
                metrics = None if values[step] is None else {"val_loss": values[step], "acc": -step}
                checkpointer.save(step, state(step), metrics=metrics, block=True)
    assert checkpointer.steps() == [2, 6]
    with Checkpointer(tmp_path, keep=1, best="val_loss") as checkpointer:
        assert (checkpointer.best(), checkpointer.latest()) == (2, 6)
        found = state()
        assert checkpointer.restore(found, "best") == 2
        assert found["x"].tolist() == [2.0] * 3
    with Checkpointer(tmp_path, best=("acc", "max")) as checkpointer:
        assert checkpointer.best() == 2
    with Checkpointer(tmp_path, best=("acc", "min")) as checkpointer:
        assert checkpointer.best() == 6


def test_a_damaged_best_is_skipped_with_a_warning(tmp_path):
    with Checkpointer(tmp_path, best=("acc", "max"), in_flight=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), metrics={"acc": -step})
        checkpointer.wait()
        damage(tmp_path / "step-1")
        with pytest.warns(UserWarning, match="step-1 is damaged and is skipped"):
            assert checkpointer.restore(state(), "best") == 2


def test_without_any_result_there_is_no_best(tmp_path):
    with Checkpointer(tmp_path, best="loss") as checkpointer:
        assert checkpointer.best() is None
        checkpointer.save(1, state(), block=True)
        assert checkpointer.best() is None
        with pytest.raises(FileNotFoundError, match="has 'loss' among its metrics"):
            checkpointer.restore(state(), "best")
    with Checkpointer(tmp_path) as checkpointer:
        for ask in (checkpointer.best, lambda: checkpointer.restore(state(), "best")):
            with pytest.raises(ValueError, match="which one is best"):
                ask()


def test_metrics_without_the_one_that_decides_are_refused_at_the_first_call(tmp_path):
    with Checkpointer(tmp_path, every=10, best="val_loss") as checkpointer:
        with pytest.raises(ValueError, match=r"has \['val_los'\], and not 'val_loss'"):
            checkpointer.save(1, state(), metrics={"val_los": 1.0})
        for metrics in (None, {}, {"val_loss": float("nan")}):
            checkpointer.save(1, state(), metrics=metrics)


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
def test_the_best_is_the_same_at_another_world_size(tmp_path, worlds):
    def save(rank):
        with Checkpointer(tmp_path, keep=1, best=("acc", "max")) as checkpointer:
            for step in (1, 2, 3):
                metrics = {"acc": [0.0, 0.3, 0.9, 0.5][step]} if rank == 0 else None  # only rank 0 knows them
                checkpointer.save(step, {"model": torch.nn.Linear(2, 2)}, metrics=metrics, block=True)
            return checkpointer.steps()

    def read(rank):
        with Checkpointer(tmp_path, keep=1, best=("acc", "max")) as checkpointer:
            at = checkpointer.restore({"model": torch.nn.Linear(2, 2)}, "best")
            return at, checkpointer.best()

    assert run_ranks(worlds[0], save) == [[2, 3]] * worlds[0]
    assert run_ranks(worlds[1], read) == [(2, 2)] * worlds[1]


def test_a_link_is_deleted_and_what_it_leads_to_stays(tmp_path):
    """A run that begins with another run's checkpoint may have a link to it."""
    life(tmp_path / "other", [1], restore=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "other" / "step-1")
    assert life(tmp_path / "run", [2, 3], keep=1) == [3]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-3"]
    assert Checkpointer(tmp_path / "other").steps() == [1]


def test_going_back_costs_the_new_branch_nothing(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (60, 70, 80):
            checkpointer.save(step, state(step), block=True)
        checkpointer.restore(state(), step=70)
        with pytest.warns(UserWarning, match="step-80 is above it"):
            checkpointer.save(72, state(72), block=True)
        for step in (74, 76):
            checkpointer.save(step, state(step), block=True)
        assert checkpointer.steps() == [74, 76, 80]
        for step in (80, 90):
            checkpointer.save(step, state(step + 0.5), block=True)
        assert checkpointer.steps() == [80, 90]
        checkpointer.restore(found := state(), step=80)
    assert found["x"][0] == 80.5
