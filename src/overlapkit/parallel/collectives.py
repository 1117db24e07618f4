"""FSDP2's all-gather and reduce-scatter, as torch does them, with spans; on the CPU the former runs beside.

Both are what `set_custom_all_gather` and `set_custom_reduce_scatter` take: `allocate` and a call.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overlapkit.span import Span, SpanLog

LANE = "communication"

# torch 2.13 renamed both and deprecates the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer for one collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocates):
    """All-gathers one unit.

    FSDP2 asks for a synchronous collective. On CUDA that still runs beside the step, on its own stream;
    on the CPU it would block the training thread, prefetched or not. There the work is started and
    handed back, and FSDP2 waits for it where it needs the parameters.

    Args:
        log: Where spans go.
        unit: The unit's name.
    """

    def __init__(self, log: SpanLog, unit: str) -> None:
        self._log = log
        self._name = f"all_gather {unit}"

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` (n,) of each rank into `output_tensor` (n * ranks,)."""
        if output_tensor.device.type == "cpu":
            recording = Recording(self._log, self._name, output_tensor.nbytes)
            return _Gathering(_gather(output_tensor, input_tensor, group=group, async_op=True), recording)
        if output_tensor.is_cuda and not async_op:
            stream = torch.cuda.current_stream(output_tensor.device)
            with self._log.stream(LANE, self._name, stream, bytes=output_tensor.nbytes):
                _gather(output_tensor, input_tensor, group=group)
            return None
        work: dist.Work | None = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class ReduceScatter(_Allocates):
    """Reduce-scatters one unit's gradients; on the CPU the training thread waits for it.

    Args:
        log: Where spans go.
        unit: The unit's name.
    """

    def __init__(self, log: SpanLog, unit: str) -> None:
        self._log = log
        self._unit = unit
        self._name = f"reduce_scatter {unit}"
        self._reduced = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` (n * ranks,) over the ranks, each rank's part into `output_tensor` (n,)."""
        nbytes = input_tensor.nbytes
        work: dist.Work | None
        if input_tensor.device.type == "cpu" and not async_op:
            with self._log.host(LANE, self._name, bytes=nbytes, exposed=True):
                work = _scatter(output_tensor, input_tensor, op=op, group=group)
            self._reduced = time.perf_counter_ns()
        elif input_tensor.is_cuda and not async_op:
            stream = torch.cuda.current_stream(input_tensor.device)
            with self._log.stream(LANE, self._name, stream, bytes=nbytes):
                work = _scatter(output_tensor, input_tensor, op=op, group=group)
        else:
            work = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """Called on the CPU when the all-reduce that followed on a 2-D mesh is done."""
        now = time.perf_counter_ns()
        span = Span(LANE, f"all_reduce {self._unit}", self._reduced, now, reduced.nbytes, exposed=True)
        self._log.add(span)


class Recording:
    """One collective's span, from now until the first call of `end`, from whichever thread."""

    def __init__(self, log: SpanLog, name: str, nbytes: int) -> None:
        self.log = log
        self.name = name
        self.start = time.perf_counter_ns()
        self._nbytes = nbytes
        self._first = threading.Lock()

    def end(self) -> None:
        """Record the span, once."""
        if self._first.acquire(blocking=False):
            now = time.perf_counter_ns()
            self.log.add(Span(LANE, self.name, self.start, now, self._nbytes))


class _Gathering(dist.Work):
    """An all-gather under way. Its span ends when it does; a wait that blocked is a span of its own."""

    def __init__(self, work: dist.Work, recording: Recording) -> None:
        super().__init__()
        self._work = work
        self._recording = recording
        work.get_future().add_done_callback(lambda done: recording.end())

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work.is_completed():
            done = self._work.wait()  # raises what the collective raised
        else:
            recording = self._recording
            with recording.log.host(LANE, f"wait {recording.name}", exposed=True):
                done = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._recording.end()  # the callback may be a moment late
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()
