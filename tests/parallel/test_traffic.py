"""A collective under way on the host: whether it is over, and how long somebody waits for it."""

import threading
from datetime import timedelta

import pytest

from overlapkit.lane import Lane
from overlapkit.parallel.traffic import Label, Pending
from overlapkit.span import SpanLog


def test_it_is_completed_when_it_is_and_a_wait_has_a_bound() -> None:
    go, log = threading.Event(), SpanLog()
    with Lane("all_gather") as lane:
        pending = Pending(lane.submit(lambda: go.wait(5)), log, Label("all_gather a"))  # type: ignore[arg-type]
        assert not pending.is_completed()
        with pytest.raises(TimeoutError):
            pending.wait(timedelta(milliseconds=1))
        go.set()
        assert pending.wait()
        assert pending.is_completed()
        assert pending.wait()
    names = [(span.name, span.exposed) for span in log.take()]
    assert set(names) == {("wait all_gather a", True)}
    assert len(names) in (1, 2)  # the second wait may have come too late to wait, and the third one has
