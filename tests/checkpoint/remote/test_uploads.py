"""A local directory before a store: what is uploaded, what is given up, and who hears of a failure."""

import os
import shutil
import signal
import threading
import time

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, CheckpointError, DamagedCheckpoint, RankFailed, StoreError
from tests.checkpoint.faults import read_value, value_state
from tests.checkpoint.remote.injected import URL, Fault, Injected, faulty, names, objects, put_back
from tests.ranks import RanksFailed, run_ranks


def steps_in_store():
    with Checkpointer(URL) as checkpointer:
        return checkpointer.steps()


def open_files():
    """What this process holds open of checkpoints."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [link for link in links if "rank-" in link]


def test_a_save_is_in_both_and_either_alone_restores_it(tmp_path):
    with Checkpointer(URL, local=tmp_path / "local") as checkpointer:
        save = checkpointer.save(1, value_state(1))
        assert str(save.committed.wait()) == str(tmp_path / "local" / "step-1")
        assert str(save.uploaded.wait()) == f"{URL}/step-1"
        checkpointer.verify(1)
    assert read_value(tmp_path / "local") == (1, 1)
    assert read_value(URL) == (1, 1)
    assert not open_files()
    shutil.rmtree(tmp_path / "local")
    state = value_state(-1)
    with Checkpointer(URL, local=tmp_path / "local") as checkpointer:
        assert checkpointer.latest() == 1
        assert checkpointer.restore(state, 1) == 1
    assert state["n"] == 1


def test_training_does_not_wait_and_what_waits_is_given_up_for_what_comes_later(tmp_path):
    gate = threading.Semaphore(0)
    fault = Fault(only=lambda call, path: call == "put_file" and path.endswith("safetensors"))
    with faulty(fault), Checkpointer(URL, local=tmp_path, keep=1, keep_every=4) as checkpointer:
        fault.gate = gate
        saves = [checkpointer.save(step, value_state(step), block=True) for step in range(1, 8)]
        assert [save.uploaded.done() for save in saves] == [False] * 7
        # one that runs, the last one, and what keep_every keeps: all others' files are let go
        assert len(open_files()) == 2 * 3
        gate.release(100)
        checkpointer.wait()
        uploaded = [save.step for save in saves if save.uploaded.wait() is not None]
        assert uploaded == [1, 4, 7]
        assert checkpointer.steps() == [4, 7]
    assert steps_in_store() == [4, 7]
    assert read_value(URL) == (7, 7)
    assert read_value(URL, 4) == (4, 4)
    assert not open_files()


def test_the_best_so_far_is_not_given_up(tmp_path):
    gate = threading.Semaphore(0)
    fault = Fault(only=lambda call, path: call == "put_file" and path.endswith("safetensors"))
    with faulty(fault), Checkpointer(URL, local=tmp_path, keep=1, best="val_loss") as checkpointer:
        fault.gate = gate
        losses = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.1, 5: float("nan"), 6: 0.2}
        saves = []
        for step, loss in losses.items():
            metrics = {"val_loss": loss}
            saves.append(checkpointer.save(step, value_state(step), metrics=metrics, block=True))
            while not fault.calls:  # until the first one's upload has begun
                time.sleep(0.001)
        assert len(open_files()) == 2 * 3  # the one that runs, the best, the last
        gate.release(100)
        checkpointer.wait()
        assert [save.step for save in saves if save.uploaded.wait() is not None] == [1, 4, 6]
    assert steps_in_store() == [4, 6]


def test_neither_retention_nor_the_same_step_again_takes_an_upload_its_files(tmp_path):
    gate = threading.Semaphore(0)
    with faulty(Fault(only=lambda call, path: call == "put_file")) as fault:
        checkpointer = Checkpointer(URL, local=tmp_path, keep=1)
        fault.gate = gate
        first = checkpointer.save(1, value_state(1), block=True)
        checkpointer.save(1, value_state(10), block=True)
        checkpointer.save(2, value_state(2), block=True)
        checkpointer._saver.settle()  # what is surplus is gone, whatever is still uploaded
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-2"]
        gate.release(2)  # its two files
        first.uploaded.wait()
        assert read_value(URL) == (1, 1)
        gate.release(100)
        checkpointer.close()
    assert read_value(URL) == (2, 2)
    assert steps_in_store() == [2]


def test_a_failed_upload_is_told_once_and_whole_and_the_next_one_is_clean(tmp_path):
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        with faulty(Fault(0, only=lambda call, path: call == "put_file")) as fault:
            save = checkpointer.save(1, value_state(1), block=True)
            save.uploaded.settle()
            assert len(fault.calls) == 4  # as often as stated
        with pytest.raises(StoreError, match="rank-00000.* the store is away") as caught:
            checkpointer.save(2, value_state(2))
        assert isinstance(caught.value.__cause__, OSError)
        checkpointer.wait()
        with pytest.raises(StoreError) as again:
            save.uploaded.wait()
        assert again.value is caught.value
        assert checkpointer.steps() == [1, 2]
    assert steps_in_store() == [2]
    assert not [name for name in Injected.store if "step-1" in name], "what was uploaded of it stays behind"
    assert not open_files()


def test_a_failed_upload_is_told_by_close(tmp_path):
    checkpointer = Checkpointer(URL, local=tmp_path)
    with faulty(Fault(0, only=lambda call, path: call == "put_file")):
        checkpointer.save(1, value_state(1))
        with pytest.raises(StoreError, match="the store is away"):
            checkpointer.close()
    checkpointer.close()


def test_a_save_that_fails_locally_is_not_uploaded(tmp_path, monkeypatch):
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("overlapkit.checkpoint.job.commit", lambda *args: 1 / 0)
            save = checkpointer.save(1, value_state(1))
            assert save.uploaded.wait() is None
        with pytest.raises(ZeroDivisionError):
            checkpointer.wait()
    assert names() == []
    assert not open_files()


@pytest.mark.filterwarnings("ignore:.*step-2 is damaged and is not uploaded")
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_what_is_damaged_locally_comes_from_the_store(tmp_path, damage):
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        checkpointer.save(1, value_state(1))
        checkpointer.save(2, value_state(2))
    file = tmp_path / "step-2" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data) if damage == "flipped" else file.unlink()
    for step in ("latest", 2):
        state = value_state(-1)
        with Checkpointer(URL, local=tmp_path) as checkpointer:
            with pytest.warns(
                UserWarning, match="step-2 is damaged and is skipped: .*rank-00000.safetensors"
            ):
                assert checkpointer.restore(state, step) == 2
            assert checkpointer.latest() == 2
        assert state["n"] == 2
    there = objects()
    put_back({name: data for name, data in there.items() if "step-2" not in name})
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match="step-2 is damaged and is skipped"):
            assert checkpointer.restore(value_state(-1)) == 1
        with pytest.raises(DamagedCheckpoint):
            checkpointer.restore(value_state(-1), 2)


def test_a_newer_one_in_the_store_is_the_latest(tmp_path):
    with Checkpointer(URL, local=tmp_path / "one") as checkpointer:
        checkpointer.save(5, value_state(5))
    with Checkpointer(URL, local=tmp_path / "other") as checkpointer:
        with pytest.warns(UserWarning, match="step-5 is above it"):
            checkpointer.save(3, value_state(3))
        checkpointer.wait()
        assert checkpointer.steps() == [3, 5]
        state = value_state(-1)
        assert checkpointer.restore(state) == 5
        assert state["n"] == 5
        with pytest.raises(FileNotFoundError, match=r"no such checkpoint, but \[3, 5\]"):
            checkpointer.restore(state, 4)


def test_timings_have_the_uploads(tmp_path):
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        checkpointer.save(1, value_state(1))
        checkpointer.wait()
        spans = [span for span in checkpointer.timings() if span.name == "upload"]
    assert [span.bytes for span in spans] == [
        sum(len(data) for name, data in objects().items() if "rank" in name)
    ]


def two(rank):
    return {"n": rank, "t": torch.full((5,), float(rank))}


def test_every_rank_uploads_its_own_files(tmp_path):
    far = f"file://{tmp_path}/far"

    def save(rank):
        with Checkpointer(far, local=tmp_path / "local") as checkpointer:
            checkpointer.save(1, two(rank))
            saved = checkpointer.save(2, two(rank + 10))
            checkpointer.wait()
            return saved.uploaded.wait() is not None

    assert run_ranks(2, save) == [True, True]
    shutil.rmtree(tmp_path / "local")

    def restore(rank):
        state = two(0)
        with Checkpointer(far, local=tmp_path / "local") as checkpointer:
            at = checkpointer.restore(state)
        return at, state["n"], state["t"].tolist()

    assert run_ranks(2, restore) == [(2, 10, [10.0] * 5), (2, 11, [11.0] * 5)]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_that_cannot_upload_fails_the_upload_on_all(tmp_path, victim, monkeypatch):
    far = tmp_path / "far"

    def save(rank):
        with Checkpointer(far, local=tmp_path / "local") as checkpointer:
            if rank == victim:
                checkpointer._tiers.store.put_file = lambda *args: 1 / 0
            checkpointer.save(1, two(rank), block=True)
            error = ZeroDivisionError if rank == victim else RankFailed
            with pytest.raises(error, match="division by zero"):
                checkpointer.wait()
            if rank == victim:
                del checkpointer._tiers.store.put_file
            checkpointer.save(2, two(rank))
            checkpointer.wait()
        return sorted(os.listdir(far))

    assert all(found[-1] == "step-2" for found in run_ranks(2, save))
    with Checkpointer(far) as checkpointer:
        assert checkpointer.steps() == [2]


def test_ranks_with_a_directory_each_are_told_so_at_once(tmp_path):
    def build(rank):
        Checkpointer(tmp_path / "far", local=tmp_path / str(rank))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, build)
    assert "of rank 1 is not that of rank 0" in str(caught.value)


def test_a_directory_before_itself_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for directory in (tmp_path, f"file://{tmp_path}", tmp_path / "link"):
        with pytest.raises(ValueError, match="is the directory itself"):
            Checkpointer(directory, local=tmp_path)
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("behind", [0, 1])
def test_all_ranks_give_up_the_same_saves(tmp_path, behind):
    far = tmp_path / "far"

    def save(rank):
        gate = threading.Event()
        with Checkpointer(far, local=tmp_path / "local") as checkpointer:
            real = checkpointer._tiers.store.put_file

            def slow(source, name):
                assert gate.wait(30)
                real(source, name)

            if rank == behind:  # it has not yet heard that later saves are committed
                checkpointer._uploads.give_up_before = lambda number, metrics: None
            if rank == 1:  # it is still uploading the first one when the last one is committed
                checkpointer._tiers.store.put_file = slow
            saves = [checkpointer.save(step, two(rank), block=True) for step in (1, 2, 3, 4)]
            gate.set()
            checkpointer.wait()
            return [save.step for save in saves if save.uploaded.wait() is not None]

    first, second = run_ranks(2, save)
    assert first == second
    assert first[-1] == 4
    assert 3 not in first
    assert 2 not in first


def test_what_is_committed_is_uploaded_though_older_ones_cannot_be_deleted(tmp_path):
    def save(rank):
        with Checkpointer(tmp_path / "far", local=tmp_path / "local", timeout=5) as checkpointer:
            if rank == 0:
                checkpointer._deletion.committed = lambda step: os.rmdir("/proc/1")
            save = checkpointer.save(1, two(rank))
            assert save.uploaded.wait(4) == tmp_path / "far" / "step-1"
            if rank == 0:
                with pytest.raises(CheckpointError, match="is committed, but older ones cannot be deleted"):
                    save.wait()

    run_ranks(2, save)


def test_the_rank_that_has_the_metrics_decides_for_all_which_is_the_best(tmp_path):
    def save(rank):
        gate = threading.Event()
        with Checkpointer(tmp_path / "far", local=tmp_path / "local", best="val_loss") as checkpointer:
            real = checkpointer._tiers.store.put_file

            def slow(source, name):
                assert gate.wait(30)
                real(source, name)

            checkpointer._tiers.store.put_file = slow
            losses = (4.0, 1.0, 3.0, 2.0) if rank == 0 else (None,) * 4
            saves = [
                checkpointer.save(step, two(rank), metrics=loss and {"val_loss": loss}, block=True)
                for step, loss in enumerate(losses)
            ]
            gate.set()
            checkpointer.wait()
            return [save.step for save in saves if save.uploaded.wait() is not None]

    first, second = run_ranks(2, save)
    assert first == second
    assert first[-2:] == [1, 3]


def test_a_signal_saves_to_both(tmp_path):
    checkpointer = Checkpointer(URL, local=tmp_path, every=100)
    checkpointer.on_signal(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not checkpointer.signalled:
        time.sleep(0.001)
    with pytest.raises(SystemExit) as end:
        checkpointer.save(7, value_state(7))
    assert end.value.code == 128 + signal.SIGUSR1
    assert steps_in_store() == [7]
    assert read_value(tmp_path) == (7, 7)
