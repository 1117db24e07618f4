"""The watch of several ranks around one store: who says what, once, and what comes of it.

The ranks are threads of this process; where each is, and whether it moves, is told by the test.
"""

import gc
import itertools
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch.distributed as dist

from overlapkit.measure.across import at_exit
from overlapkit.measure.across import watch as module
from overlapkit.measure.across.hang import HANG_EXIT_CODE
from overlapkit.measure.across.watch import HangWatch
from overlapkit.measure.across.where import Where
from tests.measure.across.steps import FakeQuorum

TIMEOUT = 0.3
SOON = 30.0  # for what comes after TIMEOUT, on however busy a machine


class Training:
    """Stands in for Progress."""

    def __init__(self, **at):
        self.left, self.thread = False, threading.get_ident()
        self._beats = itertools.count()
        self._where = Where(7, True, "backward", 4, 0.0, None, False, "far", 1, 0, 0.0)
        self.be(moves=True, **at)

    def be(self, *, moves=False, **at):
        self._where, self._since = replace(self._where, **at), time.monotonic()
        self.moves = moves

    def look(self):
        if self.moves:
            self._since = time.monotonic()
        still = time.monotonic() - self._since
        return replace(self._where, still_s=still, left=self.left, beat=next(self._beats), at=time.time())


class Job:
    def __init__(self, world, on_hang="wait", store=None):
        self.told = [[] for _ in range(world)]
        self.heard = [threading.Event() for _ in range(world)]
        self.store = store or dist.HashStore()
        self.ranks = [Training() for _ in range(world)]
        self.on_hang = on_hang
        self.watches = []

    def start(self, *ranks):
        for rank in ranks or range(len(self.ranks)):
            quorum = FakeQuorum(rank, len(self.ranks), self.store)
            self.watches.append(HangWatch(self.ranks[rank], quorum, TIMEOUT, self.hear(rank)))
        return self

    def hear(self, rank):
        def told(report):
            self.told[rank].append(report)
            self.heard[rank].set()
            if callable(self.on_hang):
                self.on_hang(report)

        return self.on_hang if self.on_hang == "exit" else told

    def stop(self, **at):
        for one in self.ranks:
            one.be(**at)

    def go_on(self):
        for one in self.ranks:
            one.moves = True

    def wait(self, *ranks):
        for rank in ranks or range(len(self.ranks)):
            assert self.heard[rank].wait(SOON), f"rank {rank} was told of no hang"
            self.heard[rank].clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.watches:
            one.close()


def test_every_rank_says_the_same_once_and_goes_on_waiting(capfd):
    with Job(3).start() as job:
        job.stop()
        job.ranks[1].be(phase="forward", turns=3)
        job.wait()
        time.sleep(3 * TIMEOUT)  # nothing more is said of the same hang
        job.go_on()
    first = [told[0] for told in job.told]
    assert [len(told) for told in job.told] == [1, 1, 1]
    assert first == [first[0]] * 3
    assert (first[0].missing, first[0].step, first[0].phase) == ((1,), 7, "forward")
    assert "(trains)" in first[0].stacks[1]
    said = capfd.readouterr().err
    assert [said.count(f"[rank {rank}] overlapkit: the job hangs") for rank in range(3)] == [1, 1, 1]


def test_a_second_hang_is_told_again():
    with Job(2).start() as job:
        for step in (7, 8):
            job.stop(step=step, phase="backward", turns=4)
            job.ranks[step - 7].be(step=step, phase="forward", turns=3)
            job.wait()
            job.go_on()
            time.sleep(TIMEOUT)
    for told in job.told:
        assert [(one.step, one.missing) for one in told] == [(7, (0,)), (8, (1,))]


@pytest.mark.parametrize(
    "others",
    [
        {"moves": True},  # slow: it computes, or compiles, or writes
        {"moves": True, "phase": "paused"},
        {"moves": True, "inside": False, "phase": "outside"},
    ],
)
def test_a_job_in_which_one_rank_still_moves_gives_no_alarm(others):
    with Job(3).start() as job:
        job.stop()
        job.ranks[2].be(**others)
        time.sleep(3 * TIMEOUT)
        assert job.told == [[], [], []]
        job.ranks[2].be()  # and now it does not: the watch was awake
        job.wait()


def test_after_the_last_step_nobody_is_missed():
    with Job(2).start() as job:
        job.stop(inside=False, phase="outside")
        time.sleep(3 * TIMEOUT)
        assert job.told == [[], []]


def test_a_rank_that_closed_its_meter_is_named_where_others_need_it():
    with Job(3).start() as job:
        job.watches[2].close()
        time.sleep(2 * TIMEOUT)
        assert job.told == [[], [], []]  # the others go on
        job.stop()
        job.wait(0, 1)
    assert job.told[0][0].missing == (2,)
    assert "has closed its meter" in job.told[0][0].why
    assert job.told[2] == []


def test_a_rank_that_falls_silent_is_named():
    with Job(3).start() as job:
        time.sleep(TIMEOUT)
        job.watches[1]._post.stop.set()  # as if it had been killed: it says nothing, not even that it leaves
        job.watches[1]._post._ask = lambda *_: None
        job.ranks[0].be()
        job.ranks[2].be()
        job.wait(0, 2)
    assert job.told[0][0].missing == (1,)
    assert "not heard of for" in job.told[0][0].why
    assert job.told[0] == job.told[2]


def test_a_rank_without_a_watch_is_not_waited_for():
    with Job(3).start(0, 2) as job:
        job.stop()
        job.ranks[0].be(phase="forward", turns=3)
        job.wait(0, 2)
    assert job.told[2][0].missing == (0,)


def test_whoever_was_away_does_not_answer_an_old_alarm():
    with Job(3).start(0, 1) as job:
        job.stop()
        job.wait(0, 1)
        job.go_on()
        time.sleep(TIMEOUT)
        job.start(2)
        job.stop(step=9)
        job.ranks[2].be(step=9, phase="forward", turns=3)
        job.wait()
    assert [one.step for one in job.told[2]] == [9]


def test_exit_ends_every_rank_with_the_code(monkeypatch, capfd):
    codes, ended = [], threading.Event()

    def leave(code):
        codes.append(code)
        if len(codes) == 3:
            ended.set()

    monkeypatch.setattr(module.os, "_exit", leave)
    with Job(3, on_hang="exit").start() as job:
        job.stop()
        job.ranks[1].be(phase="forward", turns=3)
        assert ended.wait(SOON)
        job.go_on()
    assert codes == [HANG_EXIT_CODE] * 3 == [87] * 3
    assert capfd.readouterr().err.count("missing: rank 1: step 7, forward") == 3


def test_what_a_callable_raises_ends_no_watch(capfd):
    def angry(report):
        raise KeyError("mine")

    with Job(2, on_hang=angry).start() as job:
        for step in (7, 8):
            job.stop(step=step)
            job.wait()
            job.go_on()
            time.sleep(TIMEOUT)
    assert [len(told) for told in job.told] == [2, 2]
    assert "KeyError: 'mine'" in capfd.readouterr().err


class Deaf:
    """A store whose host is stopped: calls do not return."""

    def __init__(self):
        self.inner, self.answers = dist.HashStore(), threading.Event()
        self.answers.set()

    def __getattr__(self, name):
        def call(*args):
            self.answers.wait(SOON)
            return getattr(self.inner, name)(*args)

        return call


class Gone:
    def __getattr__(self, name):
        def call(*args):
            raise dist.DistNetworkError("connection reset by peer")

        return call


def test_a_store_that_does_not_answer_is_told_by_each_rank_for_itself():
    store = Deaf()
    with Job(2, store=store).start() as job:
        store.answers.clear()
        job.stop()
        job.wait()
        store.answers.set()
    for rank, told in enumerate(job.told):
        assert told[0].missing == ()
        assert "the job's store has not answered for" in told[0].why
        assert list(told[0].stacks) == [rank]


def test_a_store_that_is_gone_is_told_as_such():
    with Job(2, store=Gone()).start() as job:
        job.stop()
        job.wait()
    assert "the job's store is gone (DistNetworkError: connection reset by peer)" in job.told[0][0].why


def test_a_store_that_is_gone_disturbs_nobody_who_moves():
    with Job(2, store=Gone()).start() as job:
        time.sleep(3 * TIMEOUT)
        assert job.told == [[], []]


def test_one_process_is_watched_too():
    with Job(1).start() as job:
        job.stop()
        job.wait()
    assert "cannot be told: all ranks are at the same place (step 7, backward)" in str(job.told[0][0])
    assert "(trains)" in job.told[0][0].stacks[0]


def test_only_one_thread_talks_to_the_store():
    callers, inner = set(), dist.HashStore()

    class Store:
        def __getattr__(self, name):
            callers.add(threading.current_thread().name)
            return getattr(inner, name)

    with Job(2, store=Store()).start() as job:
        job.stop()
        job.wait()
    assert callers == {"overlapkit-beat"}


def test_a_meter_that_nobody_closed_ends_its_threads_at_the_interpreters_exit():
    with Job(2).start() as job:
        at_exit.end_all()
        assert not any(thread.is_alive() for one in job.watches for thread in one._threads)
        said = job.watches[0]._post._listen()[0]
        assert [where.left for where in said.values()] == [True, True]


def test_exit_waits_for_the_last_words_of_a_watch_that_was_just_forgotten():
    """The interpreter aborts when a thread comes back from the store's code after its end."""
    asked, inner = threading.Event(), dist.HashStore()

    class Slow:
        def __getattr__(self, name):
            asked.set()
            time.sleep(0.3)
            return getattr(inner, name)

    job = Job(1, store=Slow()).start()
    threads = job.watches[0]._threads
    assert asked.wait(10)
    job.watches.clear()
    gc.collect()
    at_exit.end_all()
    assert not any(thread.is_alive() for thread in threads)


def test_a_forgotten_watch_ends_its_threads():
    before = set(threading.enumerate())
    job = Job(1).start()
    (threads,) = [set(threading.enumerate()) - before]
    assert {thread.name for thread in threads} == {"overlapkit-watch", "overlapkit-beat"}
    alive = weakref.ref(job.watches[0])
    job.watches.clear()
    gc.collect()
    assert alive() is None
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
