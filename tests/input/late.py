"""A stand-in for CUDA streams on a CPU machine, on which side streams are as late as they may be.

What is queued on a side stream happens only when something waits for it: the consumer's stream by an
event, or the host. A missing wait is wrong data, every time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

_here = threading.local()


class Stream:
    """A queue of work. The default stream is never late: it does what it is given at once."""

    def __init__(self, device: Any = None, *, late: bool = True) -> None:
        self.device = torch.device("cuda", 0)
        self.late = late
        self.queued: list[Callable[[], Any]] = []
        self.done = 0
        self.waits: list[Stream] = []

    def do(self, work: Callable[[], Any]) -> None:
        if self.late:
            self.queued.append(work)
        else:
            work()

    def run_until(self, point: int) -> None:
        while self.done < point:
            self.queued[self.done]()
            self.done += 1

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)
        if not self.late:
            other.synchronize()

    def wait_event(self, event: "Event") -> None:
        assert not self.late, "side streams wait for streams only"
        event.synchronize()

    def synchronize(self) -> None:
        self.run_until(len(self.queued))


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.device = torch.device("cuda", 0)
        self.stream: Stream | None = None
        self.point = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.point = stream, len(stream.queued)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.point

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.point)

    def elapsed_time(self, end: "Event") -> float:
        return float(end.point - self.point)


class Machine:
    """What the tests look at.

    Attributes:
        default: The stream that is current in every thread until another is entered.
        copies: Bytes of each copy that asked not to block.
        blocks: Bytes of each device allocation.
        streams: Side streams made.
    """

    def __init__(self) -> None:
        self.default = Stream(late=False)
        self.copies: list[int] = []
        self.blocks: list[int] = []
        self.streams: list[Stream] = []

    def new_stream(self, device: Any = None) -> Stream:
        self.streams.append(Stream(device))
        return self.streams[-1]

    def current(self, device: Any = None) -> Stream:
        return getattr(_here, "stream", None) or self.default

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before = getattr(_here, "stream", None)
        _here.stream = stream
        try:
            yield
        finally:
            _here.stream = before

    def late_work(self) -> int:
        """Pieces of work that nobody has waited for yet."""
        return sum(len(stream.queued) - stream.done for stream in self.streams)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        copy, empty = torch.Tensor.copy_, torch.empty

        def late_copy(self_: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return copy(self_, source)
            self.copies.append(source.numel() * source.element_size())
            self.current().do(lambda: copy(self_, source))
            return self_

        def empty_here(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                return empty(*size, device=device, **options)
            made = empty(*size, **options)
            self.blocks.append(made.numel())
            return made.fill_(0xEE)

        patch.setattr(torch.Tensor, "copy_", late_copy)
        patch.setattr(torch, "empty", empty_here)
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.entered)
        patch.setattr(torch.cuda, "current_stream", self.current)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
