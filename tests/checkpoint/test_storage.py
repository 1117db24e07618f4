"""Storage that is full, read-only, slow or broken: a save fails whole, training goes on."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch

import overlapkit.checkpoint.manifest as manifest_module
import overlapkit.checkpoint.reader as reader_module
from overlapkit.checkpoint import Checkpointer, DamagedCheckpoint
from overlapkit.checkpoint.disk import Disk
from tests.checkpoint.faults import read_value, value_state

CALLS = ("open", "pwrite", "writev", "fsync")
"""What a Disk asks the system for; `Faulty` has the rest."""


class System:
    """`os`, as one module sees it; at its n-th call of these names it does something else.

    `fault(real, *args)` stands in for that call and, with `for_good`, for all that follow.
    """

    def __init__(self, names, at, fault, for_good=False):
        self._names, self._at, self._fault, self._for_good = names, at, fault, for_good
        self.calls = 0

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in self._names:
            return real

        def call(*args, **options):
            here, self.calls = self.calls, self.calls + 1
            if here == self._at or (self._for_good and here > self._at):
                return self._fault(real, *args, **options)
            return real(*args, **options)

        return call


def raising(code):
    def fault(real, *args, **options):
        raise OSError(code, os.strerror(code))

    return fault


def one_byte(real, fd, data, *rest):
    return real(fd, [data[0][:1]] if isinstance(data, list) else data[:1], *rest)


def nothing(real, *args):
    return 0


def train(state):
    """A step by hand: the state can still be used."""
    state["model"](torch.ones(1, 40)).sum().backward()
    state["optimizer"].step()
    assert all(p.isfinite().all() for p in state["model"].parameters())


def save_through(directory):
    """Save 2 while the fault is there; returns its error, or None. The next save has none."""
    with Checkpointer(directory) as checkpointer:
        save = checkpointer.save(2, value_state(2))
        with contextlib.suppress(OSError):
            save.wait()
        error = save.committed.error
        assert error is None or isinstance(error, OSError)
        return error


@pytest.fixture
def run(scratch):
    with Checkpointer(scratch / "run") as checkpointer:
        checkpointer.save(1, value_state(1), block=True)
    return scratch / "run"


def clean_after(directory, allowed):
    assert read_value(directory) in allowed
    state = value_state(3)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(3, state)
        train(state)
    assert read_value(directory) == (3, 3)
    assert all(path.name.startswith("step-") for path in directory.iterdir())


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_an_error_at_any_system_call(run, monkeypatch, code, for_good):
    def attempt(at):
        system = System(CALLS, at, raising(code), for_good)
        with monkeypatch.context() as patch:
            patch.setattr("overlapkit.checkpoint.disk.os", system)
            return system.calls, save_through(run), system

    calls = attempt(None)[2].calls if not for_good else 20
    shutil.rmtree(run / "step-2", ignore_errors=True)
    assert calls >= 12
    failed = 0
    for at in range(calls):
        error = attempt(at)[1]
        failed += error is not None
        assert error is None or error.errno == code
        clean_after(run, {(1, 1)} if error is not None and not (run / "step-2").exists() else {(2, 2)})
        for step in (2, 3):
            shutil.rmtree(run / f"step-{step}", ignore_errors=True)
    assert failed >= 8


@pytest.mark.parametrize("fault", [one_byte, nothing])
def test_short_writes(run, monkeypatch, fault):
    """A write of less is gone on with; one of nothing is an error, and no endless loop."""
    for at in range(3):
        system = System(("pwrite", "writev"), at, fault)
        with monkeypatch.context() as patch:
            patch.setattr("overlapkit.checkpoint.disk.os", system)
            error = save_through(run)
        assert (error is None) == (fault is one_byte)
        assert error is None or error.errno == errno.EIO
        clean_after(run, {(2, 2)} if error is None else {(1, 1)})
        for step in (2, 3):
            shutil.rmtree(run / f"step-{step}", ignore_errors=True)


def test_a_storm_of_signals(run):
    """EINTR at any call: each is made again."""
    previous = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 2e-4)
    try:
        with Checkpointer(run) as checkpointer:
            for step in range(2, 12):
                checkpointer.save(step, value_state(step), block=True)
                checkpointer.restore(value_state(-1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert read_value(run) == (11, 11)


class Slow(Disk):
    def __getattribute__(self, name):
        if not name.startswith("_"):
            time.sleep(0.01)
        return super().__getattribute__(name)


def test_slow_storage_holds_up_no_step(run, monkeypatch):
    monkeypatch.setattr(Checkpointer, "_disk", Slow())
    state = value_state(2)
    with Checkpointer(run) as checkpointer:
        save = checkpointer.save(2, state)
        train(state)  # changes the parameters
        assert not save.committed.done()
    assert read_value(run) == (2, 2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_that_fails_is_damage_and_the_older_one_is_taken(run, monkeypatch, code):
    with Checkpointer(run) as checkpointer:
        checkpointer.save(2, value_state(2), block=True)
    reads = ("open", "preadv")
    monkeypatch.setattr("overlapkit.checkpoint.restorer.read_ahead", lambda path: None)  # a hint, no reading
    for module, least in ((manifest_module, 2), (reader_module, 2)):
        counting = System(reads, None, None)
        with monkeypatch.context() as patch, Checkpointer(run) as checkpointer:
            patch.setattr(module, "os", counting)
            assert checkpointer.restore(value_state(-1)) == 2
        assert counting.calls >= least
        for at in range(counting.calls):
            state = value_state(-1)
            with Checkpointer(run) as checkpointer, monkeypatch.context() as patch:
                patch.setattr(module, "os", System(reads, at, raising(code)))
                with pytest.warns(UserWarning, match=f"step-2 is damaged.*{os.strerror(code)}"):
                    assert checkpointer.restore(state) == 1
            assert state["n"] == 1
            assert (state["model"].weight == 1).all()
    assert read_value(run) == (2, 2)


def test_reads_that_all_fail_load_nothing(run, monkeypatch):
    state = value_state(5)
    monkeypatch.setattr(reader_module, "os", System(("preadv",), 0, raising(errno.EIO), for_good=True))
    with (
        Checkpointer(run) as checkpointer,
        pytest.warns(UserWarning, match="step-1 is damaged"),
        pytest.raises(DamagedCheckpoint, match="Input/output error"),
    ):
        checkpointer.restore(state)
    assert state["n"] == 5
    assert (state["model"].weight == 5).all()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB; what mounts it again with other options."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root that may mount a tmpfs")

    def remount(options):
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    yield folder, remount
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_at_any_level(small_disk):
    folder, _ = small_disk
    directory = folder / "run"
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, value_state(1), block=True)
        needed = sum(path.stat().st_blocks * 512 for path in (directory / "step-1").iterdir())
        outcomes = set()
        for left in range(0, needed + 20 * 4096, 4096):
            space = os.statvfs(folder).f_bavail * 4096
            (folder / "ballast").write_bytes(bytes(space - left))
            state = value_state(2)
            save = checkpointer.save(2, state)
            with contextlib.suppress(OSError):
                save.wait()
            error = save.committed.error
            assert error is None or error.errno == errno.ENOSPC, left
            outcomes.add(error is None)
            assert checkpointer.steps() == ([1, 2] if error is None else [1])
            assert [path.name for path in directory.iterdir() if path.name.startswith(".tmp")] == []
            train(state)
            (folder / "ballast").unlink()
            shutil.rmtree(directory / "step-2", ignore_errors=True)
        assert outcomes == {False, True}
    clean_after(directory, {(1, 1)})


def test_a_disk_that_turns_read_only(small_disk):
    folder, remount = small_disk
    directory = folder / "run"
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, value_state(1), block=True)
        checkpointer._lock.release()  # a file that is open for writing would keep it from turning
        remount("ro")
        state = value_state(2)
        with pytest.raises(OSError, match="Read-only file system"):
            checkpointer.save(2, state, block=True)
        train(state)
        assert checkpointer.steps() == [1]
        assert checkpointer.restore(value_state(-1)) == 1
        remount("rw")
        checkpointer.save(3, value_state(3), block=True)
        remount("ro")
        with pytest.raises(PermissionError, match="cannot be read and written to"):
            Checkpointer(directory)
        remount("rw")
    clean_after(directory, {(3, 3)})


@pytest.mark.parametrize("when", ["before a save", "before close"])
def test_a_directory_that_vanishes(run, when):
    checkpointer = Checkpointer(run)
    shutil.rmtree(run)
    if when == "before a save":
        checkpointer.save(2, value_state(2), block=True)
        assert checkpointer.steps() == [2]
    checkpointer.close()
    assert run.exists() == (when == "before a save")
