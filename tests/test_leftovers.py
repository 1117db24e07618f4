"""The comparison itself: it waits for what ends by itself, and names what does not."""

import os
import threading
import time

import pytest

from tests.leftovers import Leftovers


def test_what_ends_by_itself_is_waited_for() -> None:
    before = Leftovers()
    pipe = os.pipe()

    def end() -> None:
        time.sleep(0.2)
        for end in pipe:
            os.close(end)
        time.sleep(0.2)

    threading.Thread(target=end, daemon=True).start()
    before.check()


def test_what_stays_is_named() -> None:
    before = Leftovers()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="who stays", daemon=True)
    thread.start()
    reading, writing = os.pipe()
    try:
        with pytest.raises(AssertionError, match=rf"thread 'who stays', descriptor {reading} of pipe:"):
            before.check(0.1)
    finally:
        os.close(reading)
        os.close(writing)
        stop.set()
        thread.join()


def test_a_thread_that_takes_the_place_of_another_is_found() -> None:
    stop = threading.Event()
    first, second = (threading.Thread(target=stop.wait, daemon=True) for _ in range(2))
    first.start()
    before = Leftovers()
    stop.set()
    first.join()
    stop.clear()
    second.start()
    try:
        with pytest.raises(AssertionError, match="left behind: thread"):
            before.check(0.1)
    finally:
        stop.set()
        second.join()
