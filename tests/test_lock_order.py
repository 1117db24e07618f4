"""The search for deadlocks finds those that are planted, and says nothing of what is in order."""

import queue
import threading

import pytest

from overlapkit.lane import Lane
from tests.lock_order import LockOrder

HERE = __name__


@pytest.fixture
def order():
    found = LockOrder()
    with found.watching(HERE):
        yield found


def in_a_thread(fn):
    thread = threading.Thread(target=fn, name="other")
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def nested(outer, inner):
    with outer, inner:
        pass


@pytest.mark.parametrize("make", ["Lock", "RLock", "Condition"])
def test_an_inversion_is_found_though_the_threads_never_met(order, make):
    a = getattr(threading, make)()
    b = getattr(threading, make)()
    nested(a, b)
    assert order.news() == []
    in_a_thread(lambda: nested(b, a))
    (found,) = order.news()
    assert "different orders" in found
    assert "thread MainThread" in found
    assert "thread other" in found
    assert found.count("in nested") == 2
    assert order.news() == []  # each is said once


def test_three_locks_in_a_ring_are_found(order):
    a = threading.Lock()
    b = threading.Lock()
    c = threading.Lock()
    for outer, inner in ((a, b), (b, c), (c, a)):
        nested(outer, inner)
    (found,) = order.news()
    assert found.count("waits for") == 3


def test_two_locks_of_one_line_inside_each_other_are_found(order):
    a, b = (threading.Lock() for _ in range(2))
    nested(a, b)
    assert len(order.news()) == 1


def test_one_order_a_second_time_round_and_a_lock_that_is_only_tried_are_well(order):
    a = threading.RLock()
    b = threading.RLock()
    flag = threading.Lock()
    with a, b, a, b:
        assert flag.acquire(blocking=False)
    with a:  # while the flag is up
        assert not flag.acquire(blocking=False)
    threading.Thread(target=flag.release).start()
    assert order.news() == []


def for_a_ticket(timeout):
    lane = Lane("asked")
    lane.submit(lambda: threading.Event().wait(0.05)).wait(timeout)
    lane.close(60.0)


def for_an_event(timeout):
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    event.wait(timeout)


def for_a_thread(timeout):
    thread = threading.Thread(target=threading.Event().wait, args=(0.05,))
    thread.start()
    thread.join(timeout)


def for_a_condition(timeout):
    news = threading.Condition()
    with news:
        threading.Timer(0.05, told, (news,)).start()
        news.wait(timeout)


def for_a_queue(timeout):
    items = queue.SimpleQueue()
    threading.Timer(0.05, items.put, (None,)).start()
    items.get(timeout=timeout)


@pytest.mark.parametrize("wait", [for_a_ticket, for_an_event, for_a_thread, for_a_condition, for_a_queue])
def test_a_wait_without_bound_under_a_lock_is_found(order, wait):
    wait(None)
    lock = threading.Lock()
    with lock:
        wait(60.0)
    assert order.news() == []
    with lock:
        wait(None)
    (found,) = order.news()
    assert "without bound" in found
    assert f"in {wait.__name__}" in found


def told(news):
    with news:
        news.notify_all()


def test_a_condition_gives_its_own_lock_back_while_it_waits(order):
    news = threading.Condition()
    other = threading.Lock()
    with news:
        threading.Timer(0.05, told, (news,)).start()
        assert news.wait()
    nested(other, news)
    assert order.news() == []
    assert order.held == []
