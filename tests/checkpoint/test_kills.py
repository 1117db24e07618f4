"""SIGKILL and SIGTERM at hundreds of points of a training that saves again and again, on one rank and two.

Every tensor of save n is filled with n. Whatever is found afterwards is whole, is of one save, and is no
older than the last save that was reported committed.
"""

import atexit
import contextlib
import mmap
import os
import random
import shutil
import signal
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import overlapkit.lane
from overlapkit.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.faults import Faulty, in_child, kill
from tests.ranks import run_ranks

SAVES = 4


@pytest.fixture(autouse=True)
def small_writes(monkeypatch):
    """Several writes a file, by both threads."""
    monkeypatch.setattr("overlapkit.checkpoint.fileplan.BLOCK", 4096)
    monkeypatch.setattr("overlapkit.checkpoint.writer.BLOCK", 4096)
    monkeypatch.setattr("overlapkit.checkpoint.fileplan._GROUP", 4096)


class Progress:
    """Numbers that outlive the process which writes them."""

    def __init__(self):
        self._bytes = mmap.mmap(-1, 4096)

    def __getitem__(self, rank):
        return self._bytes[rank]

    def __setitem__(self, rank, step):
        self._bytes[rank] = step


def training_state(value):
    """A model whose optimizer has a state, a tensor of its own and a number, all filled with `value`."""
    model = torch.nn.Linear(30, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "own": torch.zeros(700), "n": value}
    set_value(state, value)
    return state


def tensors_of(state):
    moments = state["optimizer"].state.values()
    return [
        *state["model"].parameters(),
        *(value for values in moments for value in values.values()),
        state["own"],
    ]


def set_value(state, value):
    with torch.no_grad():
        for tensor in tensors_of(state):
            tensor.fill_(value)
    state["n"] = value


def train_and_save(directory, progress, rank=0, saves=SAVES, **options):
    """Save after save; changes everything as soon as it may."""
    state = training_state(0)
    with Checkpointer(directory, keep=1, **options) as checkpointer:
        for step in range(1, saves + 1):
            set_value(state, step)
            save = checkpointer.save(step, state)
            save.staged.wait()
            if step % 2:
                save.wait()
                progress[rank] = step
        checkpointer.wait()
        progress[rank] = saves


def found_in(directory):
    """The step that is there, 0 for none; fails where anything in it is of another save."""
    state = training_state(0)
    with Checkpointer(directory) as checkpointer:
        at = checkpointer.restore(state)
        for step in checkpointer.steps():
            checkpointer.verify(step)
    assert state["n"] == at
    assert {number for tensor in tensors_of(state) for number in tensor.flatten().tolist()} == {float(at)}
    for file in directory.glob(f"step-{at}/*.safetensors"):  # other ranks', too
        assert {n for tensor in load_file(file).values() for n in tensor.flatten().tolist()} == {float(at)}
    return at


def check(directory, acknowledged, where):
    at = found_in(directory)
    assert acknowledged <= at <= SAVES, where
    names = sorted(path.name for path in directory.iterdir())
    assert all(name.startswith("step-") for name in names), f"{where}: leftovers {names}"
    return at


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_change_to_the_file_system(scratch, monkeypatch, after):
    counting = Faulty()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_disk", counting)
        train_and_save(scratch / "count", Progress())
    assert len(counting.calls) >= 80
    seen = set()
    for at, call in enumerate(counting.calls):
        directory, progress = scratch / "run", Progress()
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "_disk", Faulty(at, kill, after=after))
            assert in_child(lambda: train_and_save(directory, progress)) == -signal.SIGKILL  # noqa: B023
        seen.add(check(directory, progress[0], call))
        shutil.rmtree(directory)
    assert seen == set(range(SAVES + 1))


@pytest.mark.parametrize("stage", ["late", "now"])
def test_killed_at_random_instants(scratch, stage):
    rng = random.Random(7)
    usual = took(scratch / "warm")
    seen = set()
    for _ in range(60):
        directory, progress, delay = scratch / "run", Progress(), rng.uniform(0, 1.2 * usual)

        def die_meanwhile(directory=directory, progress=progress, delay=delay):
            kill_after(delay)
            train_and_save(directory, progress, in_flight=2, stage=stage)

        assert in_child(die_meanwhile) in (-signal.SIGKILL, 0)
        directory.mkdir(exist_ok=True)
        seen.add(check(directory, progress[0], delay))
        shutil.rmtree(directory)
    assert len(seen) >= 3


def took(directory):
    start = time.perf_counter()
    assert in_child(lambda: train_and_save(directory, Progress())) == 0
    return time.perf_counter() - start


def kill_after(delay, number=signal.SIGKILL):
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_ranks_killed_at_random_instants(scratch, victims):
    rng = random.Random(str(victims))
    for _ in range(14):
        directory, progress = scratch / "run", Progress()
        delays = {victim: rng.uniform(0, 0.15) for victim in victims}

        def work(rank, directory=directory, progress=progress, delays=delays):
            with contextlib.suppress(CheckpointError):
                checkpointer = Checkpointer(directory, timeout=20)
                checkpointer.close()  # from here on both are there: only then may one wait for the other
                if rank in delays:
                    kill_after(delays[rank])
                train_and_save(directory, progress, rank, timeout=1.0)

        run_ranks(2, work, may_die=victims)
        check(directory, max(progress[0], progress[1]), delays)
        shutil.rmtree(directory)


def at_exit_too(work):
    """What an interpreter does and a forked child does not: atexit's functions, ours alone."""
    atexit._clear()
    atexit.register(overlapkit.lane._finish_at_exit)
    try:
        work()
    finally:
        atexit._run_exitfuncs()


@pytest.mark.parametrize("handled", [False, True])
def test_sigterm_at_random_instants(scratch, handled):
    """A handler that ends the program lets saves finish, and leaves nothing half; else it is a kill."""
    rng = random.Random(11)
    usual = took(scratch / "warm")
    codes = set()
    for _ in range(40):
        directory, progress, delay = scratch / "run", Progress(), rng.uniform(0, 1.1 * usual)

        def work(directory=directory, progress=progress, delay=delay):
            if handled:
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            kill_after(delay, signal.SIGTERM)
            at_exit_too(lambda: train_and_save(directory, progress, in_flight=2))

        codes.add(in_child(work))
        directory.mkdir(exist_ok=True)
        if handled:
            left = [path.name for path in directory.iterdir() if not path.name.startswith("step-")]
            assert left == [], delay
        check(directory, progress[0], delay)
        shutil.rmtree(directory)
    ended = 128 + signal.SIGTERM if handled else -signal.SIGTERM
    assert ended in codes <= {ended, 0}
