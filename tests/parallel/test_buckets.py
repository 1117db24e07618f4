"""DDP's reductions on a device, under the recorder: spans of what the backend queues on its own stream."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlapkit.parallel import buckets
from overlapkit.parallel.buckets import BucketTimes, Reduction
from tests.cuda_fake import fake_cuda, on_device

LONG = 100_000_000_000
"""Cycles, and nanoseconds, of 100 s: the host's own pace does not matter beside it."""


class Queued:
    """A collective on the backend's stream, behind those before it; `wait` is the current stream's."""

    def __init__(self, stream: Any, duration: int) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(duration * LONG)
            self.event = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def times_of(monkeypatch: pytest.MonkeyPatch) -> BucketTimes:
    monkeypatch.setattr(buckets, "group_name", lambda group: "")
    monkeypatch.setattr(buckets.exchange, "direct", lambda group: False)
    monkeypatch.setattr(buckets, "roll_of", lambda group: mock.MagicMock())
    return BucketTimes({}, mock.Mock())


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_each_reduction_lies_between_its_turn_and_its_end_and_the_tail_behind_backward(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, device = times_of(monkeypatch), torch.device("cuda", 0)
    with fake_cuda(seed) as machine:
        backend = torch.cuda.Stream()
        for number, last in enumerate((False, True)):
            torch.cuda._sleep(LONG)
            reduction = Reduction((f"w{number}",), (1,), 4, 0)
            times.watch(Queued(backend, 3), device, reduction, last)
        torch.cuda.synchronize()
        spans = {span.name: span for _ in range(12) for span in times.take()}
        assert machine.faults == []
    first, second, tail = spans["all_reduce w0"], spans["all_reduce w1"], spans["all_reduce tail"]
    zero = first.ready
    found = [round((at - zero) / LONG) for span in (first, second, tail) for at in (span.start, span.end)]
    assert found == [0, 3, 3, 6, 1, 6]
    assert round((second.ready - zero) / LONG) == 1, "backward itself waits for nothing"
    assert [span.exposed for span in (first, second, tail)] == [False, False, True]


@pytest.mark.parametrize("queued", [True, False])
def test_only_a_future_that_is_done_once_it_is_queued_is_watched(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others finish on the host: to wait for them there would stop backward."""
    times, watched = times_of(monkeypatch), []
    times.group.size = lambda: 2
    monkeypatch.setattr(times, "watch", lambda *args: watched.append(args))
    future = mock.Mock(done=lambda: queued)
    work = SimpleNamespace(get_future=lambda: future)
    monkeypatch.setattr(buckets.dist, "all_reduce", lambda sent, **options: work)
    with fake_cuda():
        bucket = mock.Mock(buffer=lambda: on_device(torch.ones(2)), is_last=lambda: False, parameters=list)
        monkeypatch.setattr(times, "reduction", lambda bucket, sent: Reduction(("w",), (2,), 8, 0))
        buckets.all_reduce(times, bucket)
    assert bool(watched) is queued


def test_what_is_not_on_the_host_is_the_backends_to_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any device: a group may have gloo for the host beside another backend."""
    times, asked = times_of(monkeypatch), mock.Mock()
    monkeypatch.setattr(times, "_direct", True)
    monkeypatch.setattr(buckets.dist, "all_reduce", asked)
    sent = torch.ones(2, device="meta")
    times.sum(Reduction(("w",), (2,), 8, 0), sent)
    asked.assert_called_once_with(sent, group=times.group, async_op=True)
