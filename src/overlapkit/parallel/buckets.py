"""DDP's all-reduce of one bucket, as DDP does it by default, with a span each and one for the tail."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from overlapkit.span import Span, SpanLog

LANE = "communication"
TAIL = "all_reduce tail"


class BucketTimes:
    """State of the communication hook: names, spans, and what is still under way in this backward.

    A copy or a pickle of it is empty: a copied DDP module makes new buckets, without the hook.

    Args:
        names: Name of each parameter.
        wire: Dtype in which gradients travel, or None for their own.
    """

    def __init__(
        self, names: dict[torch.nn.Parameter, str] | None = None, wire: torch.dtype | None = None
    ) -> None:
        self.wire = wire
        self._names = names or {}
        self._log = SpanLog()
        self._lock = threading.Lock()
        self._running = 0
        self._tail: int | None = None
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def __reduce__(self) -> tuple[type["BucketTimes"], tuple[()]]:
        return BucketTimes, ()

    def take(self) -> list[Span]:
        """The spans finished since the last call."""
        return self._log.take()

    def name(self, bucket: Any) -> str:
        """First and last parameter of a bucket, and how many there are."""
        parameters = bucket.parameters()
        first, last = (self._names.get(parameters[place], "?") for place in (0, -1))
        return f"all_reduce {first}" + (f" .. {last} ({len(parameters)})" if len(parameters) > 1 else "")

    def begin(self, last: bool) -> int:
        """A bucket is ready on the host; `last` if backward has no other left. Returns when."""
        with self._lock:
            self._running += 1
            now = time.perf_counter_ns()
            if last:
                self._tail = now
            return now

    def end(self, name: str, start: int, nbytes: int) -> None:
        """That bucket is done. Called from the backend's threads."""
        with self._lock:
            self._running -= 1
            now = time.perf_counter_ns()
            self._log.add(Span(LANE, name, start, now, nbytes))
            if self._running == 0 and self._tail is not None:
                self._log.add(Span(LANE, TAIL, self._tail, now, exposed=True))
                self._tail = None

    def watch(
        self, future: torch.futures.Future[Any], device: torch.device, name: str, nbytes: int, last: bool
    ) -> None:
        """Time a reduction that is queued on the device, on streams that only wait for it.

        The stream of all buckets waits for each in turn, so that a span begins where the reduction
        before it ended; the stream of the tail begins where the gradients are ready.
        """
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        buckets, tail = self._streams
        self._watch(buckets, future, name, nbytes, exposed=False)
        if last:
            self._watch(tail, future, TAIL, None, exposed=True)

    def _watch(
        self,
        stream: torch.cuda.Stream,
        future: torch.futures.Future[Any],
        name: str,
        nbytes: int | None,
        exposed: bool,
    ) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with (
            torch.cuda.stream(stream),
            self._log.stream(LANE, name, stream, bytes=nbytes, exposed=exposed),
        ):
            future.wait()  # of a queued collective: makes this stream wait, not the host


def all_reduce(
    times: BucketTimes,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP demands this very annotation; torch has no stub
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages a bucket over the ranks.

    Without compression the arithmetic is that of DDP without a hook: scaled by 1 / ranks, then summed.
    """
    buffer = bucket.buffer()
    name, last, start = times.name(bucket), bucket.is_last(), 0
    sent = buffer.mul_(1.0 / dist.get_world_size())
    if times.wire is not None:
        sent = sent.to(times.wire)
    on_host = not sent.is_cuda
    if on_host:
        start = times.begin(last)
    future = dist.all_reduce(sent, async_op=True).get_future()
    if not on_host and future.done():  # NCCL's are done once queued; others finish on the host
        times.watch(future, sent.device, name, sent.nbytes, last)

    def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if on_host:
            times.end(name, start, sent.nbytes)
        (reduced,) = done.value()  # raises what the collective raised
        if reduced.dtype == buffer.dtype:
            return reduced
        averaged: torch.Tensor = buffer.copy_(reduced)
        return averaged

    averages: torch.futures.Future[torch.Tensor] = future.then(finish)
    return averages
