"""A fault or a kill at every single change to the file system leaves the old checkpoints or the new one."""

import fcntl
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, CheckpointError
from overlapkit.checkpoint.commit import RunLock, runs
from overlapkit.checkpoint.disk import Disk
from tests.checkpoint.faults import Faulty, full_disk, in_child, kill, read_value, value_state
from tests.ranks import run_ranks

SCENARIOS = {
    # name: (options, steps there, step saved, what may be found afterwards: (step, value))
    "a new step": ({}, [1], 2, {(1, 1), (2, 99)}),
    "the first step": ({}, [], 2, {(0, -1), (2, 99)}),
    "the same step again": ({}, [1, 2], 2, {(2, 2), (2, 99)}),
    "with retention": ({"keep": 1}, [1, 2], 3, {(2, 2), (3, 99)}),
}


@pytest.fixture
def prepared(tmp_path):
    """Directories with the checkpoints that a scenario starts from."""

    def prepare(steps):
        source = tmp_path / "-".join(map(str, ["from", *steps]))
        if not source.exists():
            with Checkpointer(source, in_flight=3) as checkpointer:
                for step in steps:
                    checkpointer.save(step, value_state(step))
        target = tmp_path / "run"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return target

    return prepare


def save_with(disk, directory, options, step, value=99):
    Checkpointer._disk = disk
    try:
        with Checkpointer(directory, **options) as checkpointer:
            checkpointer.save(step, value_state(value))
    finally:
        Checkpointer._disk = Disk()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def count_calls(directory, options, step):
    disk = Faulty()
    save_with(disk, directory, options, step)
    return disk.calls


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_point(prepared, scenario, after):
    options, there, step, allowed = SCENARIOS[scenario]
    calls = count_calls(prepared(there), options, step)
    assert len(calls) >= 12
    seen = set()
    for at in range(len(calls)):
        directory = prepared(there)
        disk = Faulty(at, kill, after=after)
        assert in_child(lambda: save_with(disk, directory, options, step)) == -signal.SIGKILL  # noqa: B023
        found = read_value(directory)
        assert found in allowed, calls[at]
        seen.add(found)
        assert all(name.startswith("step-") for name in names(directory)), f"{calls[at]}: leftovers"
        save_with(Disk(), directory, options, step + 1, value=100)
        assert read_value(directory) == (step + 1, 100)
    assert seen == allowed  # both outcomes occur: the points lie on either side of the commit


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_any_point(prepared, scenario, after):
    options, there, step, allowed = SCENARIOS[scenario]
    calls = count_calls(prepared(there), options, step)
    for at in range(len(calls)):
        directory = prepared(there)
        with pytest.raises((OSError, CheckpointError)) as caught:
            save_with(Faulty(at, full_disk, after=after), directory, options, step)
        assert "No space left" in str(caught.value)
        found = read_value(directory)
        assert found in allowed, calls[at]
        committed = "is committed" in str(caught.value)
        assert not committed or found == (step, 99)
        save_with(Disk(), directory, options, step + 1, value=100)
        assert read_value(directory) == (step + 1, 100)
        assert all(name.startswith("step-") for name in names(directory)), f"{calls[at]}: leftovers"


def test_everything_is_on_disk_before_it_counts(prepared):
    """The order of calls: each file is synced, then its folder, then the name changes, then the parent."""
    calls = count_calls(prepared([1]), {}, 2)
    for file in ("rank-00000.safetensors", "rank-00000.json", "manifest.json"):
        mine = [call for call, path in calls if path == file]
        assert mine[0] == "create"
        assert mine[-1] == "sync"
        assert set(mine[1:-1]) == {"write"}
    rename = calls.index(("rename", "step-2"))
    written = [path for call, path in calls[:rename] if call == "create"]
    assert written[-1] == "manifest.json"
    assert len(written) == 3
    assert calls[rename - 1][0] == "sync_folder"
    assert calls[rename - 1][1].startswith(".tmp-")
    assert calls[rename - 2] == ("sync", "manifest.json")
    assert calls[rename + 1] == ("sync_folder", "run")


def test_killed_at_random_instants(prepared):
    rng = random.Random(4)
    options, there, step, allowed = SCENARIOS["with retention"]
    for _ in range(25):
        directory = prepared(there)

        delay = rng.uniform(0, 0.02)

        def save_and_die(directory=directory, delay=delay):
            save = Checkpointer(directory, **options).save(step, value_state(99))
            time.sleep(delay)
            kill()
            save.wait()

        assert in_child(save_and_die) == -signal.SIGKILL
        assert read_value(directory) in allowed
        assert all(name.startswith("step-") for name in names(directory))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed_at_any_point(tmp_path, victim):
    def save(rank, directory, at):
        Checkpointer._disk = disk = Faulty(at if rank == victim else None, kill)
        with Checkpointer(directory, keep=1) as checkpointer:
            if at is not None and rank != victim:
                checkpointer._quorum.timeout = 0.3  # the survivor's only: others may be slow, and are alive
            checkpointer.save(2, {"n": 2, "t": torch.full((5,), 2.0)})
            try:
                checkpointer.wait()
            except CheckpointError as error:
                return str(error)
        return len(disk.calls)

    def start(rank, directory):
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(1, {"n": 1, "t": torch.full((5,), 1.0)}, block=True)

    def check(rank, directory):
        state = {"n": 0, "t": torch.zeros(5)}
        with Checkpointer(directory) as checkpointer:
            at = checkpointer.restore(state)
        assert state["n"] == at
        assert state["t"].tolist() == [float(at)] * 5
        return at

    run_ranks(2, start, tmp_path / "start")
    shutil.copytree(tmp_path / "start", tmp_path / "count")
    points = run_ranks(2, save, tmp_path / "count", None)[victim]
    found = set()
    for at in range(points):
        directory = tmp_path / str(at)
        shutil.copytree(tmp_path / "start", directory)
        results = run_ranks(2, save, directory, at, may_die=(victim,))
        assert results[victim] == -signal.SIGKILL
        outcome = run_ranks(2, check, directory)
        assert outcome[0] == outcome[1]
        found.add(outcome[0])
        assert all(name.startswith("step-") for name in names(directory))
    assert found == ({1, 2} if victim == 0 else {1})


def test_a_live_runs_files_are_left_alone(tmp_path):
    live = Checkpointer(tmp_path)
    (tmp_path / f".tmp-{live._run.name}-0").mkdir()
    with Checkpointer(tmp_path) as other:
        other.save(1, {"x": 1})
    assert (tmp_path / f".tmp-{live._run.name}-0").exists()
    live.close()
    with Checkpointer(tmp_path):
        assert names(tmp_path)[-1] == "step-1"
        assert not (tmp_path / f".tmp-{live._run.name}-0").exists()


def test_a_forked_child_does_not_end_the_run(tmp_path):
    checkpointer = Checkpointer(tmp_path)

    def child():
        checkpointer._lock.release()

    assert in_child(child) == 0
    assert (tmp_path / f".run-{checkpointer._run.name}.lock").exists()
    (tmp_path / f".tmp-{checkpointer._run.name}-0").mkdir()
    Checkpointer(tmp_path).close()
    assert (tmp_path / f".tmp-{checkpointer._run.name}-0").exists()
    checkpointer.close()


def test_a_forked_child_cannot_save_into_its_parents_files(tmp_path):
    checkpointer = Checkpointer(tmp_path)

    def child():
        with checkpointer, pytest.raises(RuntimeError, match="before the fork.*make one here"):
            checkpointer.save(1, {"x": 1})

    assert in_child(child) == 0
    checkpointer.save(1, {"x": 1}, block=True)
    assert checkpointer.steps() == [1]
    checkpointer.close()


def test_a_signal_while_the_directory_is_opened_leaves_no_lock(tmp_path, monkeypatch):
    def interrupted(*_):
        sys.exit(128 + signal.SIGTERM)  # what a handler does

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(SystemExit):
        Checkpointer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_another_one_looks_at_while_it_begins_is_not_taken_for_dead(tmp_path, monkeypatch):
    looks, real = [], fcntl.flock

    def looked_at(fd, how):
        if not looks:
            looks.append(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
            real(looks[0], how)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    lock = RunLock(tmp_path)
    os.close(looks[0])
    assert runs(tmp_path) == ({lock.run}, set())
    lock.release()


def test_what_only_looks_like_a_leftover_stays(tmp_path):
    for name in (
        ".tmp-mine",
        ".old-abc-1",
        ".gone-xyz",
        ".hidden",
        "tmp-0123456789ab-0",
        "step-01",
        "step-x",
    ):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    Checkpointer(tmp_path).close()
    assert names(tmp_path) == before


def test_a_directory_that_vanishes_is_an_error_and_then_is_made_again(tmp_path):
    directory = tmp_path / "run"

    class Vanishing(Disk):
        def create(self, path):
            shutil.rmtree(directory)
            Checkpointer._disk.__class__.create = Disk.create
            return super().create(path)

    Checkpointer._disk = Vanishing()
    try:
        with Checkpointer(directory) as checkpointer:
            save = checkpointer.save(1, value_state(1))
            with pytest.raises(FileNotFoundError):
                save.wait()
            checkpointer.save(2, value_state(2), block=True)
            assert checkpointer.steps() == [2]
    finally:
        Checkpointer._disk = Disk()


def test_errors_surface_once_and_whole(tmp_path):
    Checkpointer._disk = Faulty(1, full_disk)
    try:
        checkpointer = Checkpointer(tmp_path)
        first = checkpointer.save(1, value_state(1))
        with pytest.raises(OSError, match="No space left") as caught:
            checkpointer.save(2, value_state(2))
        assert caught.value.errno == 28
        assert "full_disk" in [entry.name for entry in caught.traceback]
        checkpointer.wait()  # once
        with pytest.raises(OSError, match="No space left") as again:
            first.committed.wait()  # and in the future
        assert again.value is caught.value
        checkpointer.close()
        assert checkpointer.steps() == [2]
    finally:
        Checkpointer._disk = Disk()


def test_an_error_that_was_seen_is_not_raised_again(tmp_path):
    Checkpointer._disk = Faulty(1, full_disk)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            with pytest.raises(OSError, match="No space left"):
                checkpointer.save(1, value_state(1), block=True)
            checkpointer.save(2, value_state(2)).wait()
    finally:
        Checkpointer._disk = Disk()


def test_close_raises_what_nobody_has_seen_and_still_closes(tmp_path):
    Checkpointer._disk = Faulty(1, full_disk)
    try:
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(1, value_state(1))
        with pytest.raises(OSError, match="No space left"):
            checkpointer.close()
    finally:
        Checkpointer._disk = Disk()
    assert os.listdir(tmp_path) == []
    checkpointer.close()


def test_an_error_of_the_loop_comes_before_that_of_a_save(tmp_path):
    Checkpointer._disk = Faulty(1, full_disk)
    try:
        with pytest.raises(ZeroDivisionError) as caught, Checkpointer(tmp_path) as checkpointer:  # noqa: PT012
            checkpointer.save(1, value_state(1))
            raise ZeroDivisionError
    finally:
        Checkpointer._disk = Disk()
    assert "No space left" in caught.value.__notes__[0]
