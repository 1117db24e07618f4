"""The log of spans under threads, finalisers and a device that answers late: each span once, and no wait."""

import sys
import threading

import pytest
import torch

from overlapkit import span
from overlapkit.span import Span, SpanLog
from tests.cuda_fake import fake_cuda


def test_a_finaliser_that_waits_for_another_thread_may_run_within_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector may run there; a forgotten iterator waits for its reader, which records spans."""
    with fake_cuda():
        log, ended = SpanLog(), []
        stream = torch.cuda.current_stream()

        def record() -> None:
            with log.stream("transfer", "copy", stream):
                pass

        def collect(pending: span._Pending) -> Span | None:
            if len(ended) < 3:
                thread = threading.Thread(target=record)
                thread.start()
                thread.join(5)
                ended.append(not thread.is_alive())
            return resolve(pending)

        resolve = span._Pending.resolve
        monkeypatch.setattr(span._Pending, "resolve", collect)
        record()
        spans = [span for _ in range(9) for span in log.take()]
        assert ended == [True] * 3
        assert len(spans) == 4


def test_each_span_goes_to_one_of_those_who_take() -> None:
    log, taken, done = SpanLog(1 << 20), [], threading.Event()

    def take() -> None:
        while not done.is_set():
            taken.extend(log.take())

    takers = [threading.Thread(target=take) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for taker in takers:
            taker.start()
        for k in range(20_000):
            log.add(Span("input", "x", k, k))
    finally:
        sys.setswitchinterval(interval)
        done.set()
        for taker in takers:
            taker.join()
    assert sorted(one.start for one in [*taken, *log.take()]) == list(range(20_000))


def test_the_oldest_are_dropped_first() -> None:
    with fake_cuda():
        log = SpanLog(3)
        stream = torch.cuda.current_stream()
        for k in range(5):
            log.add(Span("input", str(k), k, k))
            with log.stream("transfer", str(k), stream):
                pass
        spans = [one for _ in range(9) for one in log.take()]
        for lane in ("input", "transfer"):
            assert sorted(one.name for one in spans if one.lane == lane) == ["2", "3", "4"]


def test_a_device_span_says_when_its_data_was_ready_and_of_which_parameters() -> None:
    with fake_cuda():
        log = SpanLog()
        stream = torch.cuda.current_stream()
        ready = log.mark(stream)
        with log.stream("communication", "all_reduce", stream, ready=ready, parameters=("a", "b")):
            pass
        (one,) = [one for _ in range(9) for one in log.take()]
        assert one.parameters == ("a", "b")
        assert one.ready is not None
        assert one.ready <= one.start <= one.end


def test_a_wait_lies_between_two_streams_and_is_none_where_what_is_waited_for_came_first() -> None:
    with fake_cuda():
        log = SpanLog()
        waiting, awaited = torch.cuda.current_stream(), torch.cuda.Stream()
        for name, first, second in (("waited", waiting, awaited), ("came late", awaited, waiting)):
            earlier, later = log.mark(first), log.mark(second)
            ends = (earlier, later) if first is waiting else (later, earlier)
            log.between("communication", name, waiting, ends, exposed=True, parameters=("a",))
        (one,) = [one for _ in range(9) for one in log.take()]
        assert (one.name, one.exposed, one.device, one.parameters) == ("waited", True, True, ("a",))
        assert one.end > one.start
