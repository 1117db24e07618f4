"""What a run committed locally and had not uploaded when it died: the next one uploads it."""

import os
import shutil
import signal
import threading
import time

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, RankFailed, StoreError, verify
from overlapkit.checkpoint.commit import RunLock
from overlapkit.checkpoint.remote import upload
from overlapkit.checkpoint.remote.folder import FolderStore
from overlapkit.checkpoint.remote.store import Store
from tests.checkpoint.faults import in_child, kill, read_value, value_state
from tests.checkpoint.remote.injected import URL, Fault, Injected, faulty, names, objects
from tests.checkpoint.test_damage import VERSION_1
from tests.ranks import run_ranks


def fill(directory, steps, *, metrics=None, world_value=None):
    """Checkpoints of an earlier run; step n says n."""
    with Checkpointer(directory) as checkpointer:
        for step in steps:
            value = step if world_value is None else world_value
            loss = metrics and {"val_loss": metrics[step]}
            checkpointer.save(step, value_state(value), metrics=loss, block=True)


def bring(url, local, **options):
    """A run that does nothing but upload what is there."""
    with Checkpointer(url, local=local, **options) as checkpointer:
        checkpointer.wait()


def committed(fault):
    """The steps whose manifests were put, in order."""
    puts = [path for call, path in fault.calls if call == "put" and path.endswith("manifest.json")]
    return [int(path.split("step-")[1].split("/")[0]) for path in puts]


def writes(call, path):
    """Whether a request is of an upload."""
    return call == "put_file" or (call == "put" and path.endswith("manifest.json"))


def saves_in(far):
    """The folders of saves in a store on disk, by step."""
    return {step: [one for one in os.listdir(far / step) if "-" in one] for step in sorted(os.listdir(far))}


@pytest.mark.parametrize(("at", "sent"), [(0, 0), (1, 1), (2, 2), (4, 4)])
def test_what_a_killed_run_had_not_uploaded_the_next_one_uploads(tmp_path, at, sent):
    far, local = tmp_path / "far", tmp_path / "local"

    def attempt():
        """Saves 1 and 2; both are committed locally, and then the process dies in its request `at`."""
        calls = []

        def dying(real):
            def call(self, *args, **options):
                while not (local / "step-2").exists():
                    time.sleep(0.001)
                if len(calls) == at:
                    kill()
                calls.append(args)
                return real(self, *args, **options)

            return call

        FolderStore.put_file = dying(FolderStore.put_file)
        FolderStore.put = dying(FolderStore.put)
        with Checkpointer(far, local=local) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, value_state(step), block=True)

    assert in_child(attempt) == -signal.SIGKILL
    assert sum(len(files) for _, _, files in os.walk(far)) == sent
    with Checkpointer(far, local=local) as checkpointer:
        assert checkpointer.latest() == 2
        checkpointer.wait()
    assert {step: len(saves) for step, saves in saves_in(far).items()} == {"step-1": 1, "step-2": 1}
    assert read_value(far) == (2, 2)  # and both are sound


def test_the_newest_goes_up_first_and_what_retention_would_delete_does_not(tmp_path):
    losses = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.9, 5: 0.9, 6: 0.9}
    fill(tmp_path, losses, metrics=losses)
    fill(URL, [6], metrics=losses)
    with faulty(Fault()) as fault:
        options = {"keep": 2, "keep_every": 3, "best": "val_loss"}
        with Checkpointer(URL, local=tmp_path, **options) as checkpointer:
            checkpointer.wait()
            assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]
    assert committed(fault) == [5, 3, 1]  # 6 is there; the newest, a third one, the best
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == [1, 3, 5, 6]
    for step in (1, 3, 5):
        assert read_value(URL, step) == (step, step)


def test_training_does_not_wait_and_a_save_takes_the_place_of_what_waits(tmp_path):
    fill(tmp_path, [1, 2, 3, 4])
    fault = Fault(only=writes)
    with faulty(fault):
        fault.gate = threading.Semaphore(0)
        checkpointer = Checkpointer(URL, local=tmp_path, keep=3, keep_every=3)
        while not fault.calls:  # until the first one's upload has begun
            time.sleep(0.001)
        state = value_state(-1)
        assert checkpointer.restore(state) == 4
        save = checkpointer.save(9, value_state(9), block=True)
        assert not save.uploaded.done()
        fault.gate.release(1000)
        checkpointer.close()
    assert committed(fault) == [4, 3, 9]  # 2 has waited; so has 3, which stays for ever


def test_an_older_format_goes_up_as_it_is(tmp_path):
    shutil.copytree(VERSION_1, tmp_path / "step-1")
    bring(URL, tmp_path)
    verify(f"{URL}/step-1")
    assert read_value(URL) == (1, 3)


def test_close_finishes_the_upload_that_runs_and_what_stays(tmp_path):
    fill(tmp_path, [1, 2, 3])
    with faulty(Fault(only=writes)) as fault:
        fault.gate = threading.Semaphore(0)
        checkpointer = Checkpointer(URL, local=tmp_path, keep=3, keep_every=2)
        while not fault.calls:
            time.sleep(0.001)
        uploads, real = checkpointer._uploads, checkpointer._uploads.give_up_earlier
        uploads.give_up_earlier = lambda: (real(), fault.gate.release(1000))
        checkpointer.close()
    assert committed(fault) == [3, 2]
    bring(URL, tmp_path)
    assert read_value(URL, 1) == (1, 1)


def test_a_run_that_lives_uploads_its_own(tmp_path):
    fill(tmp_path, [1])
    lock = RunLock(tmp_path)
    with Checkpointer(URL, local=tmp_path) as checkpointer:
        checkpointer.save(2, value_state(2))
    assert names() == ["step-2/manifest.json", "step-2/rank-00000.json", "step-2/rank-00000.safetensors"]
    lock.release()
    bring(URL, tmp_path)
    assert read_value(URL, 1) == (1, 1)


def test_what_is_damaged_is_not_uploaded_and_the_others_are(tmp_path):
    fill(tmp_path, [1, 2, 3])
    file = tmp_path / "step-2" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="step-2 is damaged and is not uploaded: .*rank-00000.safetensors"):
        bring(URL, tmp_path)
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == [1, 3]


def test_what_is_deleted_while_it_waits_is_not_missed(tmp_path):
    fill(tmp_path, [1, 2])
    with faulty(Fault(only=lambda call, path: call == "put_file")) as fault:
        fault.gate = threading.Semaphore(0)
        checkpointer = Checkpointer(URL, local=tmp_path)
        while not fault.calls:
            time.sleep(0.001)
        shutil.rmtree(tmp_path / "step-1")
        fault.gate.release(1000)
        checkpointer.wait()
        checkpointer.close()
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == [2]


def test_what_is_saved_anew_while_it_waits_goes_up_once(tmp_path):
    fill(tmp_path, [3, 4])
    with faulty(Fault(only=writes)) as fault:
        fault.gate = threading.Semaphore(0)
        checkpointer = Checkpointer(URL, local=tmp_path, keep=5, keep_every=3)
        while not fault.calls:
            time.sleep(0.001)
        with pytest.warns(UserWarning, match="step-4 is above it"):
            checkpointer.save(3, value_state(33), block=True)
        fault.gate.release(1000)
        checkpointer.close()
    assert committed(fault) == [4, 3]
    assert read_value(URL, 3) == (3, 33)


@pytest.mark.parametrize("later", ["local", "far"])
def test_of_one_step_the_save_that_came_later_counts(tmp_path, later):
    fill(tmp_path, [1])
    fill(URL, [1], world_value=50)
    hour = 3600 if later == "local" else -3600
    manifest = tmp_path / "step-1" / "manifest.json"
    os.utime(manifest, (time.time() + hour,) * 2)
    before = objects()
    bring(URL, tmp_path)
    assert read_value(URL) == (1, 1 if later == "local" else 50)
    assert (objects() == before) == (later == "far")
    assert len(names()) == 3


def test_a_store_that_is_away_then_is_told_once_and_by_the_next_call(tmp_path):
    fill(tmp_path, [1, 2])
    with faulty(Fault(0, only=lambda call, path: call == "put_file")) as fault:
        checkpointer = Checkpointer(URL, local=tmp_path)
        checkpointer._unsent.settle()
    assert len(fault.calls) == 4  # for the one that was tried, all that it takes; for the other none
    with pytest.raises(StoreError, match="step-2/.* the store is away"):
        checkpointer.save(3, value_state(3))
    checkpointer.close()
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == [3]
    bring(URL, tmp_path)
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3]


def test_only_what_a_dead_run_left_is_swept_at_once(tmp_path):
    dead, other = "0123456789ab", "ba9876543210"
    (tmp_path / f".run-{dead}.lock").write_bytes(b"")
    store = Store(URL)
    for run in (dead, other):
        store.put(f"step-1/{run}-3/rank-00000.json", b"half")
    Checkpointer(URL, local=tmp_path).close()
    assert list(Injected.store) == [f"/bucket/run/step-1/{other}-3/rank-00000.json"]


def own(rank):
    return {"n": rank, "t": torch.full((5,), float(rank))}


@pytest.mark.parametrize("victim", [None, 0, 1])
def test_two_ranks_upload_what_three_have_saved(tmp_path, victim):
    far, local = tmp_path / "far", tmp_path / "local"

    def save(rank):
        with Checkpointer(local) as checkpointer:
            checkpointer.save(1, own(rank))

    def upload(rank):
        sent, real = [], FolderStore.put_file
        FolderStore.put_file = lambda self, source, name: (sent.append(name), real(self, source, name))
        bring(far, local)
        return sorted({name[-25:].partition("rank-")[2][:5] for name in sent})

    def fail(rank):
        if rank == victim:
            FolderStore.put_file = lambda *args: 1 / 0
        checkpointer = Checkpointer(far, local=local)
        with pytest.raises(ZeroDivisionError if rank == victim else RankFailed, match="division by zero"):
            checkpointer.wait()
        checkpointer.close()

    run_ranks(3, save)
    if victim is not None:
        run_ranks(2, fail)
        with Checkpointer(far) as checkpointer:
            assert checkpointer.steps() == []
    assert run_ranks(2, upload) == [["00000", "00002"], ["00001"]]
    shutil.rmtree(local)

    def restore(rank):
        state = own(-1)
        with Checkpointer(far, local=local) as checkpointer:
            assert checkpointer.restore(state) == 1
        return state["n"], state["t"].tolist()

    assert run_ranks(3, restore) == [(rank, [float(rank)] * 5) for rank in range(3)]


@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_on_one_rank_alone_ends_it_on_the_other_at_once(tmp_path, victim):
    far, local = tmp_path / "far", tmp_path / "local"
    fill(local, [1, 2, 3])

    def run(rank):
        if rank == victim:  # after the verdict on step 3, which has gone well
            upload.Cargo.let_go = lambda self: 1 / 0
            upload.Cargo.__del__ = lambda self: None
        checkpointer = Checkpointer(far, local=local)  # a wait of an hour, were nothing told
        with pytest.raises(ZeroDivisionError if rank == victim else RankFailed, match="division by zero"):
            checkpointer.wait()
        checkpointer.close()

    run_ranks(2, run)
    with Checkpointer(far) as checkpointer:
        assert checkpointer.steps() == [3]
