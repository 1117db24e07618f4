"""Real signals to real processes: all ranks save at the end of one step and exit, or nothing is saved."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from overlapkit.checkpoint import Checkpointer, RankFailed
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.preemption import ABANDONED
from overlapkit.quorum import Quorum
from tests.checkpoint.faults import Faulty, in_child, kill
from tests.ranks import run_ranks

STEP_S = 0.02


def state(step=0):
    return {"x": torch.full((3,), float(step))}


def saved(directory):
    """(steps, what the newest says); every checkpoint is whole."""
    with Checkpointer(directory) as checkpointer:
        for step in checkpointer.steps():
            checkpointer.verify(step)
        found = state(-1)
        at = checkpointer.restore(found)
        assert found["x"].tolist() == [float(at if checkpointer.steps() else -1)] * 3
        return checkpointer.steps()


def train(directory, at_step=lambda step: None, *, deadline=20.0, steps=200, collective=True, **options):
    """A loop; the exit code of its end and the step that it came to."""
    step = 0
    code = 0
    try:
        with Checkpointer(directory, **options) as checkpointer:
            checkpointer.on_signal(signal.SIGTERM, deadline=deadline)
            while step < steps:
                at_step(step)
                time.sleep(STEP_S)
                if collective and dist.is_initialized():
                    dist.all_reduce(torch.ones(1))
                step += 1
                checkpointer.save(step, state(step))
    except SystemExit as end:
        code = end.code
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return code, step


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_one_process_saves_at_the_end_of_its_step_and_exits(tmp_path):
    code, step = train(tmp_path, lambda step: step == 5 and terminate(), every=1000)
    assert code == 128 + signal.SIGTERM
    assert 6 <= step < 100
    assert saved(tmp_path) == [step]


def test_the_exit_status_is_the_processs_own(tmp_path):
    def run():
        checkpointer = Checkpointer(tmp_path)
        checkpointer.on_signal(signal.SIGUSR1, exit_code=0)
        checkpointer.on_signal(signal.SIGTERM, exit_code=42)
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(1000):
            time.sleep(STEP_S)
            checkpointer.save(step, state(step))

    assert in_child(run) == 42


def test_a_signal_before_the_first_step(tmp_path):
    code, step = train(tmp_path, lambda step: step or (terminate(), time.sleep(0.3)), every=1000)
    assert (code, step) == (143, 1)
    assert saved(tmp_path) == [1]


def test_a_second_signal_changes_nothing(tmp_path):
    code, step = train(tmp_path, lambda step: step >= 5 and (terminate(), terminate()))
    assert code == 143
    assert saved(tmp_path)[-1] == step


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("collective", [True, False])
def test_a_signal_to_some_ranks_ends_all_at_the_same_step(tmp_path, who, collective):
    def run(rank):
        def at_step(step):
            if not collective:
                time.sleep(0.013 * rank)  # they drift apart
            if rank in who and step == 5 + 9 * rank:
                terminate()

        return train(tmp_path, at_step, every=1000, collective=collective)

    (code, step), other = run_ranks(2, run)
    assert code == 143
    assert other == (code, step)
    assert saved(tmp_path) == [step]


def test_a_signal_while_one_rank_evaluates(tmp_path):
    """The other is held at the end of its step, not in the next one's collective."""

    def run(rank):
        def at_step(step):
            if step == 5:
                if rank == 0:
                    terminate()
                else:
                    time.sleep(1.5)  # an evaluation

        return train(tmp_path, at_step, every=1000)

    ends = run_ranks(2, run)
    assert ends[0] == ends[1]
    assert ends[0] == (143, 6)
    assert saved(tmp_path) == [6]


def test_a_signal_to_a_rank_that_waits_in_a_collective_is_heard_at_once(tmp_path):
    def run(rank):
        with Checkpointer(tmp_path, every=1000) as checkpointer:
            checkpointer.on_signal()
            pids = [None, None]
            dist.all_gather_object(pids, os.getpid())
            if rank == 0:
                time.sleep(0.3)
                os.kill(pids[1], signal.SIGTERM)
                until = time.monotonic() + 10
                while not checkpointer.signalled and time.monotonic() < until:  # an evaluation
                    time.sleep(0.01)
                assert checkpointer.signalled
            dist.all_reduce(torch.ones(1))  # where rank 1 is, all that time: no handler runs there
            with pytest.raises(SystemExit):
                checkpointer.save(1, state(1))

    run_ranks(2, run)
    assert saved(tmp_path) == [1]


def test_ranks_are_held_while_the_agreement_takes_its_time(tmp_path, monkeypatch):
    settle = Quorum.settle

    def slow(self, key, report, judge):
        if key == "call":
            time.sleep(0.5)  # after this rank's call was read
        return settle(self, key, report, judge)

    monkeypatch.setattr(Quorum, "settle", slow)

    def run(rank):
        return train(
            tmp_path, lambda step: step == 5 and rank == 0 and terminate(), every=1000, collective=False
        )

    ends = run_ranks(2, run)
    assert ends[0] == ends[1]
    assert ends[0][1] < 20  # not half a second's worth of steps
    assert saved(tmp_path) == [ends[0][1]]


def test_one_process_that_does_not_come_back(tmp_path):
    def run():
        train(tmp_path, lambda step: step == 5 and (terminate(), time.sleep(20)), deadline=0.5, every=3)

    assert in_child(run) == ABANDONED
    assert saved(tmp_path) == [3]


def test_one_that_is_closed_early_on_one_rank_does_not_part_the_next_ones(tmp_path):
    def run(rank):
        with Checkpointer(tmp_path) as first:
            first.on_signal()
            time.sleep(0.4 * rank)  # rank 0's thread has not yet asked the store for anything
        return train(tmp_path, lambda step: rank == 0 and step == 5 and terminate(), deadline=5, every=1000)

    (code, step), other = run_ranks(2, run)
    assert (code, step) == other
    assert code == 143
    assert saved(tmp_path) == [step]


def test_an_event_loops_pipe_for_signals_stays_its_own(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        code, step = train(tmp_path, lambda step: step == 3 and terminate(), every=1000)
        assert (code, saved(tmp_path)) == (143, [step])
        assert os.read(reader, 9) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(reader)
        os.close(writer)


def test_an_evaluation_can_end_early(tmp_path):
    def run(rank):
        with Checkpointer(tmp_path, every=1000) as checkpointer:
            assert not checkpointer.signalled
            checkpointer.on_signal()
            assert not checkpointer.signalled
            if rank == 0:
                terminate()
            while not checkpointer.signalled:  # on both
                time.sleep(0.01)
            with pytest.raises(SystemExit):
                checkpointer.save(1, state(1))

    run_ranks(2, run)
    assert saved(tmp_path) == [1]


class Slow(Disk):
    def sync(self, fd):
        time.sleep(0.15)
        super().sync(fd)


def test_a_signal_during_a_save_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpointer, "_disk", Slow())

    def run(rank):
        return train(tmp_path, lambda step: rank == 1 and step == 10 and terminate(), every=10)

    (code, step), other = run_ranks(2, run)
    assert (code, step) == other
    assert code == 143
    assert saved(tmp_path)[0] == 10  # the one in flight is finished
    assert saved(tmp_path)[-1] == step


def abandons(directory, stuck, deadline=1.0, disk=None, every=3, how=lambda: time.sleep(30)):
    """What the other ranks' processes end with, and what they say, where one is stuck."""

    def run(rank):
        if disk is not None:
            Checkpointer._disk = disk
        sys.stderr.flush()
        file = os.open(directory / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)

        def at_step(step):
            if step == 5 and rank == 0:
                time.sleep(0.1)
                terminate()
            if step == 5 and rank == stuck:
                how()

        train(directory / "run", at_step, deadline=deadline, every=every, collective=False)

    ends = []
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        def one(rank):
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
            run(rank)

        processes = [context.Process(target=one, args=(rank,)) for rank in range(2)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(10)
        process.kill()  # the one that is stopped
        process.join()
        ends.append(process.exitcode)
    return ends, [(directory / f"stderr-{rank}").read_text() for rank in range(2)]


def test_a_stuck_rank_is_named_and_nothing_is_half(tmp_path):
    ends, said = abandons(tmp_path, stuck=1)
    assert ends == [ABANDONED, ABANDONED]
    assert (
        "rank 0: a signal came, with 1 s for it: rank(s) 1 had begun 5 calls of save(), where call" in said[0]
    )
    assert "rank 1: a signal came, with 1 s for it: rank(s) 1 had begun 5 calls" in said[1]
    assert all(text.endswith(f"Exit status {ABANDONED}.\n") for text in said)
    assert saved(tmp_path / "run") == [3]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-3"]


def test_a_rank_whose_process_is_stopped_is_named(tmp_path):
    ends, said = abandons(tmp_path, stuck=1, how=lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert ends == [ABANDONED, -signal.SIGKILL]
    assert "rank(s) 1 did not report" in said[0]
    assert saved(tmp_path / "run") == [3]


def test_a_disk_that_is_too_slow(tmp_path):
    class Stuck(Disk):
        def rename(self, old, new):
            time.sleep(60)

    ends, said = abandons(tmp_path, stuck=None, disk=Stuck(), every=1000)
    assert ends == [ABANDONED, ABANDONED]
    assert "the save is not finished" in said[0]
    assert saved(tmp_path / "run") == []


def test_an_error_of_the_agreed_save_is_raised(tmp_path):
    def run(rank):
        Checkpointer._disk = disk = Faulty()

        def full():
            raise OSError(28, "No space left on device")

        def at_step(step):
            if rank == 1 and step == 5:
                disk.at, disk.fault = len(disk.calls) + 1, full
                terminate()

        with pytest.raises(OSError if rank else RankFailed, match="No space left"):
            train(tmp_path, at_step, every=1000)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    run_ranks(2, run)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_saves_error_does_not_cost_the_exit_status(tmp_path, capsys, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpointer, "_disk", Faulty(1, fail))
    with pytest.raises(SystemExit) as end, Checkpointer(tmp_path, in_flight=2) as checkpointer:  # noqa: PT012
        checkpointer.on_signal()
        checkpointer.save(1, state(1))
        terminate()
        while not checkpointer.signalled:
            time.sleep(0.01)
        checkpointer.save(2, state(2))
    assert end.value.code == 143
    assert "No space left on device" in capsys.readouterr().err
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_any_point_of_the_agreed_save(tmp_path, victim):
    """The checkpoint before stays, or the new one is whole."""

    def run(rank, directory, at):
        Checkpointer._disk = disk = Faulty()
        checkpointer = Checkpointer(directory, keep=1, every=4)
        checkpointer._quorum.timeout = 20.0 if at is None or rank == victim else 0.5
        checkpointer.on_signal(deadline=20.0)
        for step in range(1, 5):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        calls = len(disk.calls)
        dist.barrier()
        if rank == victim:
            disk.at, disk.fault = (None if at is None else calls + at), kill
            terminate()
        while not checkpointer.signalled:
            time.sleep(0.005)
        with checkpointer, contextlib.suppress(RankFailed), pytest.raises(SystemExit):
            checkpointer.save(5, state(5))
        return len(disk.calls) - calls

    points = run_ranks(2, run, tmp_path / "count", None)[victim]
    assert points >= 5
    found = set()
    for at in range(points):
        directory = tmp_path / str(at)
        assert run_ranks(2, run, directory, at, may_die=(victim,))[victim] == -signal.SIGKILL
        found.add(tuple(saved(directory)))
    assert found <= {(4,), (4, 5), (5,)}
    assert (4,) in found
    assert victim or found > {(4,)}


def test_the_handler_before_is_called_and_comes_back(tmp_path):
    seen = []

    def before(signum, frame):
        seen.append(signum)

    old = signal.signal(signal.SIGUSR1, before)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.on_signal(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            while not checkpointer.signalled:
                time.sleep(0.01)
            with pytest.raises(SystemExit) as end:
                checkpointer.save(1, state(1))
        assert seen == [signal.SIGUSR1]
        assert end.value.code == 128 + signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_ctrl_c_can_be_such_a_signal(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.on_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # no KeyboardInterrupt
        while not checkpointer.signalled:
            time.sleep(0.01)
        with pytest.raises(SystemExit):
            checkpointer.save(1, state(1))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_no_save_follows_is_told_of(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.on_signal()
    terminate()
    with pytest.warns(RuntimeWarning, match="SIGTERM came, and no call of save"):
        checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_forked_child_still_ends_by_the_signal(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.on_signal()
        assert in_child(lambda: (terminate(), time.sleep(20))) == -signal.SIGTERM
        assert not checkpointer.signalled


def test_a_forgotten_checkpointer_gives_the_signal_back(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.on_signal()
    del checkpointer
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"signum": 0}, "signum=0"),
        ({"signum": "TERM"}, "signum='TERM'"),
        ({"signum": signal.SIGKILL}, "SIGKILL: no process can handle it"),
        ({"deadline": 0}, "deadline=0"),
        ({"exit_code": 256}, "exit_code=256"),
        ({"exit_code": ABANDONED}, f"exit_code={ABANDONED}.*means not saved"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, match):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=match):
        checkpointer.on_signal(**options)


def test_only_in_the_main_thread_and_only_once(tmp_path):
    caught = []

    def elsewhere():
        with pytest.raises(RuntimeError, match="main thread") as error:
            checkpointer.on_signal()
        caught.append(error)

    with Checkpointer(tmp_path) as checkpointer:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert caught
        checkpointer.on_signal()
        with pytest.raises(ValueError, match="SIGTERM: it is listened to already"):
            checkpointer.on_signal()


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from overlapkit.checkpoint import Checkpointer

dist.init_process_group("gloo")
rank = dist.get_rank()
with Checkpointer(sys.argv[1], every=1000) as checkpointer:
    checkpointer.on_signal(signal.SIGTERM, deadline=20, exit_code=int(sys.argv[2]))
    open(f"{sys.argv[1]}/began-{rank}", "a").write(f"{os.getpid()} ")
    for step in range(1, 2000):
        time.sleep(0.02)
        dist.all_reduce(torch.ones(1))
        checkpointer.save(step, {"x": torch.full((3,), float(step))})
"""


@pytest.mark.parametrize(("to", "exit_code"), [("torchrun", 143), ("one worker", 143), ("one worker", 0)])
def test_torchrun(tmp_path, to, exit_code):
    """torchrun's own signal is passed on to all, and it restarts nobody; a worker's own ends all workers.

    With any status but 0 it would start them again, where it may.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    restarts = 0 if to == "one worker" and exit_code else 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", str(tmp_path / "train.py"), str(tmp_path), str(exit_code)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    began = [tmp_path / f"began-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in began) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(run.pid if to == "torchrun" else int(began[1].read_text()), signal.SIGTERM)
    error = run.communicate(timeout=60)[1]
    assert (run.returncode == 0) == (exit_code == 0), error
    assert [len(path.read_text().split()) for path in began] == [1, 1]  # nobody was started again
    steps = saved(tmp_path)
    assert len(steps) == 1, error
    if to == "one worker" and exit_code:
        assert "exitcode  : 143" in error


def test_a_rank_that_ends_while_ranks_agree_leaves_no_thread_in_the_store(tmp_path):
    """torchrun sends SIGTERM where a worker has died; a thread in the store's code at exit is an abort."""

    def run(rank):
        checkpointer = Checkpointer(tmp_path)
        checkpointer.on_signal(signal.SIGTERM, deadline=50.0)
        if rank == 1:
            kill()
        checkpointer._quorum.timeout = 0.3  # for its last words to the other rank
        terminate()
        deadline = time.monotonic() + 30
        while not checkpointer.signalled and time.monotonic() < deadline:
            time.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nothing was saved for the signal
            checkpointer.close()
        return [one.name for one in threading.enumerate() if "preemption" in one.name]

    assert run_ranks(2, run, may_die=(1,)) == [[], -signal.SIGKILL]


def test_no_descriptor_or_thread_is_left(tmp_path):
    def open_now():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    counts = []
    for _ in range(4):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.on_signal()
            checkpointer.save(1, state())
        counts.append(open_now())
    assert counts[1] == counts[-1]
