"""Windows go in, one verdict comes back: nothing lost at close, nobody waited for without a bound.

The ranks are threads of this process around one store, so who talks to it, and when, can be told.
"""

import gc
import threading
import weakref

import pytest
import torch.distributed as dist

from overlapkit.measure.across import at_exit
from overlapkit.measure.across import liaison as module
from overlapkit.measure.across.handed import LIMIT_BYTES
from overlapkit.measure.across.judge import sum_up
from overlapkit.measure.across.liaison import WINDOW, Liaison, window_end
from overlapkit.measure.across.ranks import Ranks
from tests.measure.across.steps import FakeLedger, FakeQuorum, record, trace


class Store:
    """Counts who calls, and may stop answering."""

    def __init__(self):
        self.inner = dist.HashStore()
        self.callers = set()
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name):
        def call(*args):
            self.callers.add(threading.current_thread().name)
            self.answers.wait(30)
            return getattr(self.inner, name)(*args)

        return call


class Rank:
    """A meter's side of it: records steps, late or not."""

    def __init__(self, rank, world, store, every=1):
        self.rank, self.every, self.steps = rank, every, 0
        self.ledger, self.quorum = FakeLedger(), FakeQuorum(rank, world, store)
        self.liaison = Liaison(self.ledger, every, self.quorum)

    def train(self, count, late=lambda step: {}):
        for _ in range(count):
            if self.steps % self.every == 0:
                delays = late(self.steps)
                own, last = delays.get(self.rank, 0), max(delays.values(), default=0)
                seen = [("all_reduce a", 600 + own, 650 + last)]
                times = {"forward": 100, "backward": 800 + own, "communication": last - own}
                one = trace(self.steps, seen, zero=10**6 * self.rank, waits=[(600 + own, 650 + last)])
                self.ledger.add(record(self.steps, **times), one)
            self.liaison.step_ended(self.steps)
            self.steps += 1


@pytest.fixture
def store():
    return Store()


def close_all(ranks):
    """As ranks do: each for itself, all at about the same time."""
    threads = [threading.Thread(target=one.liaison.close) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_ranks_get_the_same_verdict_and_nothing_is_lost_at_close(store):
    ranks = [Rank(rank, 3, store) for rank in range(3)]
    for one in ranks:
        one.train(47, lambda step: {1: 500} if step > 3 else {})
    verdicts = [one.liaison.latest(patience=20.0) for one in ranks]
    assert verdicts[0].last_step == 39
    close_all(ranks)
    verdicts = [one.liaison.latest() for one in ranks]
    assert isinstance(verdicts[0], Ranks)
    assert verdicts == [verdicts[0]] * 3
    assert (verdicts[0].first_step, verdicts[0].last_step, verdicts[0].steps) == (1, 46, 46)
    assert [(late.rank, late.steps, late.phase) for late in verdicts[0].late] == [(1, 43, "backward")]
    assert all(one.quorum.left for one in ranks)


def test_a_verdict_that_is_being_made_is_waited_for(store, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        go.wait(20)
        return sum_up(*args)

    monkeypatch.setattr(module, "sum_up", slow)
    ranks = [Rank(rank, 2, store) for rank in range(2)]
    for one in ranks:
        one.train(5)
    begun.wait(20)
    release = threading.Timer(0.2, go.set)
    release.start()
    assert [one.liaison.latest(patience=20.0).steps for one in ranks] == [4, 4]
    release.join()
    close_all(ranks)


def test_windows_are_small_and_their_keys_do_not_pile_up(store):
    ranks = [Rank(rank, 2, store) for rank in range(2)]
    for _ in range(12):
        for one in ranks:
            one.train(WINDOW)
        for one in ranks:
            one.liaison.latest(patience=20.0)
    close_all(ranks)
    assert len(ranks[1].liaison.handed_bytes) == 14  # two short ones at first
    assert sum(ranks[1].liaison.handed_bytes) < 14 * 1024
    assert max(ranks[1].liaison.handed_bytes) < LIMIT_BYTES
    assert store.inner.num_keys() == 1  # the verdict
    assert ranks[1].liaison.latest().steps == 6 * WINDOW  # the latest six windows


def test_the_training_thread_never_talks_to_the_store(store):
    ranks = [Rank(rank, 2, store) for rank in range(2)]
    for one in ranks:
        one.train(30)
    for one in ranks:
        one.liaison.latest(patience=20.0)
    close_all(ranks)
    assert store.callers == {"overlapkit-ranks"}


def test_a_short_run_is_compared_too(store):
    ranks = [Rank(rank, 2, store) for rank in range(2)]
    assert "after 5 measured steps" in ranks[0].liaison.latest()
    for one in ranks:
        one.train(5)
    assert [one.liaison.latest(patience=20.0).steps for one in ranks] == [4, 4]
    close_all(ranks)


def test_only_measured_steps_count(store):
    ranks = [Rank(rank, 2, store, every=3) for rank in range(2)]
    for one in ranks:
        one.train(31)  # 0, 3 ... 30 are measured: eleven
    close_all(ranks)
    last = ranks[1].liaison.latest()
    assert (last.first_step, last.last_step, last.steps) == (3, 30, 10)


def test_a_rank_that_stops_earlier_is_waited_for_with_a_bound(store, monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.3)
    ranks = [Rank(rank, 3, store) for rank in range(3)]
    for one, steps in zip(ranks, (28, 28, 12), strict=True):
        one.train(steps)
    close_all(ranks)
    last = ranks[0].liaison.latest()
    assert last.missing == (2,)
    assert last.last_step == 27


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_without_a_meter_holds_nobody_up(store, monkeypatch, silent):
    monkeypatch.setattr(module, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    ranks = [Rank(rank, 3, store) for rank in range(3) if rank != silent]
    for one in ranks:
        one.train(12)
    said = [one.liaison.latest(patience=20.0 if silent else 0.3) for one in ranks]
    close_all(ranks)
    if silent:
        assert [one.missing for one in said] == [(1,), (1,)]
        assert all(one.steps == 9 for one in said)
    else:
        assert said == ["the ranks' first window of steps has not been judged yet"] * 2


def test_a_store_that_is_gone_is_a_reason_and_no_error(store):
    ranks = [Rank(rank, 2, store) for rank in range(2)]
    store.inner = Broken()
    for one in ranks:
        one.train(6)
    said = [one.liaison.latest(patience=20.0) for one in ranks]
    close_all(ranks)
    for text in said:
        assert text == "ranks could not be compared: DistNetworkError: connection reset by peer"


class Broken:
    def __getattr__(self, name):
        def call(*args):
            raise dist.DistNetworkError("connection reset by peer")

        return call


def test_a_store_that_does_not_answer_holds_up_neither_report_nor_close(store, monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.1)
    store.answers.clear()
    one = Rank(1, 2, store)
    one.train(25)
    try:
        assert isinstance(one.liaison.latest(patience=0.05), str)
        one.liaison.close()
    finally:
        store.answers.set()


def test_a_forgotten_liaison_ends_its_thread(store):
    one = Rank(0, 2, store)
    one.train(3)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "overlapkit-ranks"]
    alive = weakref.ref(one.liaison)
    del one
    gc.collect()
    assert alive() is None
    thread.join(10)
    assert not thread.is_alive()


def test_a_meter_that_nobody_closed_ends_its_thread_at_the_interpreters_exit(store):
    one = Rank(0, 2, store)
    one.train(3)
    at_exit.end_all()
    assert not one.liaison._thread.is_alive()
    assert not one.quorum.left


def test_windows_end_where_every_rank_thinks_they_do():
    assert [window_end(number) for number in range(6)] == [5, 10, 20, 40, 60, 80]


def test_the_latest_complete_window_is_known_without_counting_them(store, monkeypatch):
    """Asked for many times a second; a run of weeks has a million windows."""
    one = Rank(0, 2, store, every=3)
    ends = [window_end(number) for number in range(10)]
    monkeypatch.setattr(module, "window_end", None)
    assert one.liaison._desk.complete() == -1
    for measured in (*range(1, 170), 10**7):
        one.ledger.add(record(3 * (measured - 1)), trace(3 * (measured - 1), []))
        expected = sum(end <= measured for end in ends) - 1 if measured < 170 else 10**7 // 20 + 1
        assert one.liaison._desk.complete() == expected
