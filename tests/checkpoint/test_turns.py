"""Two threads that take turns: both are done when the call returns, and when it raises."""

import threading
import time

import pytest

from overlapkit.checkpoint.turns import many_at_once, take_turns
from overlapkit.lane import Lane


@pytest.mark.parametrize("fails", [False, True])
def test_the_other_thread_is_done_too(fails: bool) -> None:
    both, done, here = threading.Barrier(2), [], threading.get_ident()

    def job() -> None:
        both.wait(30)  # one for each thread
        if threading.get_ident() == here:
            if fails:
                raise OSError("planted")
            return
        time.sleep(0.05)
        done.append("there")

    with Lane("helper") as helper:
        if fails:
            with pytest.raises(OSError, match="planted"):
                take_turns([job, job], helper)
        else:
            take_turns([job, job], helper)
        assert done == ["there"]


def test_the_error_of_one_of_many_is_raised() -> None:
    done: list[int] = []

    def broken() -> None:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        many_at_once([lambda: done.append(1), broken, lambda: done.append(3)], threads=1)
    assert done[:1] == [1]
