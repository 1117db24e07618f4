import time

import numpy as np
import pytest
import torch

from overlapkit.measure.clock import HostClock, StreamClock, clock_of
from overlapkit.span import DeviceClock, SpanLog

DEVICE = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, device=DEVICE):
        self.device = torch.device(device)
        self.lag = 0


class FakeEvent:
    """Times like CUDA: only differences, float32 milliseconds, an error before the event is passed."""

    made = 0
    passed_until = float("inf")

    def __init__(self, enable_timing=False):
        assert enable_timing
        type(self).made += 1

    def record(self, stream):
        self.at = time.perf_counter_ns() + stream.lag

    def query(self):
        return self.at <= self.passed_until

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return float(np.float32((other.at - self.at) / 1e6))


@pytest.fixture
def now(monkeypatch):
    """A host clock that is set by hand, and events that follow it."""
    times = {"ns": 10**12}
    monkeypatch.setattr(time, "perf_counter_ns", lambda: times["ns"])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(FakeEvent, "made", 0)
    monkeypatch.setattr(FakeEvent, "passed_until", float("inf"))
    return times


def test_a_mark_is_timed_on_the_host_clock_to_a_microsecond_after_hours(now):
    clock = DeviceClock(DEVICE)
    stream = FakeStream()
    clock.mark(stream)
    for hours in (0, 1, 100):
        now["ns"] = 10**12 + hours * 3600 * 10**9 + 123_456_789
        stream.lag = 5_000_000
        mark = clock.mark(stream)
        assert abs(clock.time(mark) - (now["ns"] + 5_000_000)) < 1000


def test_a_mark_that_is_not_passed_has_no_time(now):
    clock = DeviceClock(DEVICE)
    stream = FakeStream()
    stream.lag = 1000
    mark = clock.mark(stream)
    FakeEvent.passed_until = now["ns"] + 999
    assert clock.time(mark) is None
    FakeEvent.passed_until = now["ns"] + 1000
    assert clock.time(mark) == now["ns"] + 1000


def test_events_come_from_a_pool(now):
    clock = DeviceClock(DEVICE)
    for _ in range(100):
        clock.release(clock.mark(FakeStream()))
    assert FakeEvent.made == 2  # the anchor and one event


def test_a_span_of_a_stream_is_timed_late_and_says_that_it_is_the_devices(now):
    log, stream = SpanLog(), FakeStream()
    stream.lag = 7000
    with log.stream("transfer", "copy", stream, bytes=5):
        now["ns"] += 2000
    FakeEvent.passed_until = now["ns"]
    assert log.take() == []
    FakeEvent.passed_until = float("inf")
    (span,) = log.take()
    assert (span.end - span.start, span.device, span.bytes) == (2000, True, 5)
    assert abs(span.end - (now["ns"] + 7000)) < 1000
    assert log.take() == []
    with log.host("input", "wait"):
        pass
    assert not log.take()[0].device


def test_stream_clock_marks_the_callers_current_stream(now, monkeypatch):
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    clock = clock_of(DEVICE)
    assert isinstance(clock, StreamClock)
    assert clock.on_device
    stream.lag = 3000
    mark = clock.mark(clock.now())
    assert clock.time(mark) == now["ns"] + 3000
    clock.release(mark)


def test_host_clock_is_the_host():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert not clock.on_device
    before = time.perf_counter_ns()
    assert clock.time(clock.mark(17)) == 17
    assert before <= clock.now() <= time.perf_counter_ns()


@pytest.mark.gpu
def test_a_mark_on_a_real_device_lies_between_submission_and_completion():
    device = torch.device("cuda", torch.cuda.current_device())
    clock = StreamClock(device)
    clock.mark(clock.now())
    torch.cuda.synchronize(device)
    before = clock.now()
    torch.cuda._sleep(20_000_000)
    mark = clock.mark(clock.now())
    torch.cuda.synchronize(device)
    after = clock.now()
    assert before - 100_000 < clock.time(mark) < after + 100_000
