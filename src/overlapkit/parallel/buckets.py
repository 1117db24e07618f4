"""DDP's all-reduce of one bucket, with a span each and one for the tail.

DDP lays its buckets out anew after a process's first backward: with sums that depend on the place in the
bucket, as gloo's do from three ranks on, a restarted job would get other bits. Ours do not.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from overlapkit.lane import Lane
from overlapkit.parallel import exchange, ring
from overlapkit.parallel.failure import roll_of
from overlapkit.parallel.traffic import group_name
from overlapkit.span import Span, SpanLog

LANE = "communication"
TAIL = "all_reduce tail"


@dataclass(slots=True)
class Reduction:
    """One bucket under way.

    Attributes:
        parameters: Names of the bucket's parameters.
        lengths: Of these, in numbers: a complex one is two.
        bytes: What this rank sends.
        ready: When this rank had all its gradients, on the host.
        start: When it was begun with, on the host, where it had to wait for those before it.
        error: What went wrong with it in the lane. A future of torch would keep it, and all in its traceback.
    """

    parameters: tuple[str, ...]
    lengths: tuple[int, ...]
    bytes: int
    ready: int
    start: int | None = None
    error: BaseException | None = None

    @property
    def name(self) -> str:
        """First and last parameter of the bucket, and how many there are."""
        first, last, count = self.parameters[0], self.parameters[-1], len(self.parameters)
        return f"all_reduce {first}" + (f" .. {last} ({count})" if count > 1 else "")


class BucketTimes:
    """State of the communication hook: names, spans, and what is still under way in this backward.

    Args:
        names: Name of each parameter.
        group: Over which ranks gradients are averaged.
        wire: Dtype in which gradients travel, or None for their own.
    """

    def __init__(
        self, names: dict[torch.nn.Parameter, str], group: dist.ProcessGroup, wire: torch.dtype | None = None
    ) -> None:
        self.wire = wire
        self.group = group
        self._group_name = group_name(group)
        self.roll = roll_of(group)
        self.backwards = 0
        self._names = names
        self._log = SpanLog()
        self._lock = threading.Lock()
        self._running = 0
        self._direct = exchange.direct(group)
        self._tags: tuple[int, int] | None = None  # from the first sum on: copies of one rank alone need none
        self._lane = Lane("all_reduce", lasting=False)
        # What Python does when gloo is done it does here: in gloo's own thread it might let go of the last of
        # a process group, which aborts the process.
        self._waiting = Lane("all_reduce-wait", lasting=False)
        self._tail: int | None = None
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def take(self) -> list[Span]:
        """The spans finished since the last call."""
        return self._log.take()

    def reduction(self, bucket: Any, sent: torch.Tensor) -> Reduction:
        """What is to be known of a bucket that is ready now; `sent` is what travels."""
        parameters = bucket.parameters()
        names = tuple(self._names.get(parameter, "?") for parameter in parameters)
        lengths = tuple(parameter.numel() * (1 + parameter.is_complex()) for parameter in parameters)
        return Reduction(names, lengths, _nbytes(sent), time.perf_counter_ns())

    def begin(self, reduction: Reduction, last: bool) -> None:
        """The sum of a bucket on the host was begun; `last` if backward has no other left."""
        with self._lock:
            self._running += 1
            if last:
                self._tail = reduction.ready

    def end(self, reduction: Reduction) -> None:
        """That bucket is done, or has failed. Called in the thread that summed it."""
        with self._lock:
            now = time.perf_counter_ns()
            self._running -= 1
            start = reduction.ready if reduction.start is None else reduction.start
            span = Span(LANE, reduction.name, start, now, reduction.bytes)
            span = span._replace(ready=reduction.ready, parameters=reduction.parameters)
            self._log.add(span._replace(group=self._group_name))
            if self._running == 0 and self._tail is not None:
                self._log.add(Span(LANE, TAIL, self._tail, now, exposed=True))
                self._tail = None

    def sum(self, reduction: Reduction, sent: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Begin to sum a bucket over the ranks, in place. Errors: in the future, or `reduction.error`."""
        if sent.device.type != "cpu":
            work: dist.Work = dist.all_reduce(sent, group=self.group, async_op=True)
            return work.get_future()
        if not self._direct or sent.layout != torch.strided:
            work = dist.all_reduce(sent, group=self.group, async_op=True)
            return self._in(self._waiting, reduction, lambda: work.get_future().wait())
        if self._tags is None:
            self._tags = exchange.new_tags(self.group)
        group, tags = self.group, self._tags

        def add_up() -> list[torch.Tensor]:
            reduction.start = time.perf_counter_ns()
            if sent.dtype in (torch.float32, torch.float64):
                ring.all_reduce(sent, reduction.lengths, group, tags[0])
            else:  # a ring would round at each rank
                exchange.all_reduce(sent, group, tags)
            return [sent]

        future = self._in(self._lane, reduction, add_up)
        with record_function("gloo:all_reduce") as noted:  # torch's profiler does not look into the lane
            return noted._call_end_callbacks_on_future(future)  # type: ignore[no-any-return]

    @staticmethod
    def _in(
        lane: Lane, reduction: Reduction, work: Callable[[], list[torch.Tensor]]
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """Begin work in a lane; what it raises goes to the reduction."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def run() -> None:
            found: list[torch.Tensor] = []
            try:
                found = work()
            except BaseException as error:  # whatever it is, backward waits for the future
                reduction.error = error
            future.set_result(found)

        lane.submit(run)
        return future

    def watch(
        self, future: torch.futures.Future[Any], device: torch.device, reduction: Reduction, last: bool
    ) -> None:
        """Time a reduction that is queued on the device, on streams that only wait for it.

        The stream of all buckets waits for each in turn, so that a span begins where the reduction
        before it ended; the stream of the tail begins where the gradients are ready.
        """
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        buckets, tail = self._streams
        computing = torch.cuda.current_stream(device)
        ready = self._log.mark(computing)
        buckets.wait_stream(computing)
        with (
            torch.cuda.stream(buckets),
            self._log.stream(
                LANE,
                reduction.name,
                buckets,
                bytes=reduction.bytes,
                ready=ready,
                parameters=reduction.parameters,
                group=self._group_name,
            ),
        ):
            future.wait()  # of a queued collective: makes this stream wait, not the host
        if last:
            tail.wait_stream(computing)
            with torch.cuda.stream(tail), self._log.stream(LANE, TAIL, tail, exposed=True):
                future.wait()


def all_reduce(
    times: BucketTimes,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP demands this very annotation; torch has no stub
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages a bucket over the ranks.

    Scaled by 1 / ranks, then summed, as by DDP without a hook.
    """
    buffer, last = bucket.buffer(), bucket.is_last()
    sent = buffer.mul_(1.0 / times.group.size())
    if times.wire is not None:
        sent = sent.to(times.wire)
    reduction = times.reduction(bucket, sent)
    what = f"{reduction.name} in backward {times.backwards}"
    on_host = not sent.is_cuda
    times.backwards += last
    with times.roll.naming(what):
        future = times.sum(reduction, sent)
    if on_host:
        times.begin(reduction, last)
    elif future.done():  # NCCL's are done once queued; others finish on the host
        times.watch(future, sent.device, reduction, last)

    def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if on_host:
            times.end(reduction)
        with times.roll.naming(what):
            if reduction.error is not None:
                raise reduction.error
            (reduced,) = done.value()  # raises what the collective raised
        if reduced.dtype == buffer.dtype:
            return reduced
        averaged: torch.Tensor = buffer.copy_(reduced)
        return averaged

    averages: torch.futures.Future[torch.Tensor] = future.then(finish)
    return averages


def _nbytes(sent: torch.Tensor) -> int:
    if sent.layout == torch.strided:
        return sent.nbytes
    return sent._indices().nbytes + sent._values().nbytes
