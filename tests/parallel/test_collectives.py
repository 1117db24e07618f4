"""The timed all-gather's handle: its span ends once, an error comes through, a wait that blocks is seen."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapkit.parallel.collectives import AllGather, Recording, ReduceScatter, _Gathering
from overlapkit.span import SpanLog
from tests.ranks import run_ranks


class _Work(dist.Work):
    """A collective that the test finishes by hand."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.error = error

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self, timeout: Any = None) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


def test_a_gather_that_is_done_exposes_nothing():
    log, work = SpanLog(), _Work()
    handle = _Gathering(work, Recording(log, "all_gather a", 12))
    assert log.take() == []
    work.future.set_result(None)
    done = time.perf_counter_ns()
    time.sleep(0.01)
    assert handle.is_completed()
    assert handle.wait()
    (span,) = log.take()
    assert (span.name, span.bytes, span.exposed) == ("all_gather a", 12, False)
    assert span.end <= done, "the span must end with the gather, not with the wait"


def test_a_gather_that_is_waited_for_is_exposed():
    log, work = SpanLog(), _Work()
    assert _Gathering(work, Recording(log, "all_gather a", 12)).wait()
    work.future.set_result(None)  # the callback comes late: the span was ended by the wait
    gather, wait = log.take()
    assert (gather.name, wait.name) == ("all_gather a", "wait all_gather a")
    assert (gather.exposed, wait.exposed, wait.bytes) == (False, True, None)
    assert gather.start <= wait.start <= wait.end <= gather.end


def test_an_error_of_the_collective_reaches_the_waiting_thread():
    log = SpanLog()
    handle = _Gathering(_Work(RuntimeError("rank 1 is gone")), Recording(log, "all_gather a", 12))
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        handle.wait()
    assert [span.name for span in log.take()] == ["wait all_gather a"]


def test_gathered_values():
    def job(rank: int) -> list[float]:
        gather = AllGather(SpanLog(), "a")
        output = gather.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
        mine = output.narrow(0, 3 * rank, 3)
        mine.copy_(torch.arange(3.0) + 10 * rank)
        handle = gather(output, mine, dist.group.WORLD)
        assert isinstance(handle, dist.Work)
        handle.wait()
        return output.tolist()

    assert run_ranks(2, job) == [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]] * 2


def _on_a_gpu(rank: int) -> tuple[bool, list[tuple[str, Any, bool]]]:
    log, device = SpanLog(), torch.device("cuda")
    gather, scatter = AllGather(log, "a"), ReduceScatter(log, "a")
    mine = torch.arange(3.0, device=device)
    output, reduced = torch.empty_like(mine), torch.empty_like(mine)
    assert gather(output, mine, dist.group.WORLD) is None
    scatter(reduced, mine, dist.group.WORLD, dist.ReduceOp.SUM)
    torch.cuda.synchronize()
    same = torch.equal(output, mine) and torch.equal(reduced, mine)
    return same, [(span.name, span.bytes, span.exposed) for span in log.take()]


@pytest.mark.gpu
def test_spans_on_a_gpu_are_of_its_stream():
    ((same, spans),) = run_ranks(1, _on_a_gpu, backend="nccl", start="spawn")
    assert same
    assert spans == [("all_gather a", 12, False), ("reduce_scatter a", 12, False)]
