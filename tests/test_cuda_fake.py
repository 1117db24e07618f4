"""The recorder itself: it must see each kind of missing wait, and nothing where the order is right."""

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from overlapkit.lane import Lane, Ticket
from overlapkit.pinned import PinnedRing
from tests.cuda_fake import FakeCuda, fake_cuda, module_on_device


def side_write(order_before: bool = True, order_after: bool = True) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    if order_before:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        x.add_(1)
    if order_after:
        event = torch.cuda.Event()
        event.record(side)
        main.wait_event(event)
    assert x.sum().raw.item() == 4  # values are right in any case: only the order is at stake


def pinned_refill(wait: bool) -> None:
    with PinnedRing(1, pin=True) as ring:
        buffer = ring.take(16)
        target = torch.empty(16, dtype=torch.uint8, device="cuda")
        target.copy_(buffer.bytes(16), non_blocking=True)
        if wait:
            torch.cuda.current_stream().synchronize()
        buffer.give_back()
        ring.take(16).give_back()
        torch.cuda.synchronize()


def freed_elsewhere(record: bool) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.clone()
    if record:
        x.record_stream(side)


def read_unwritten_side(order: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(4, device="cuda")
    if order:
        torch.cuda.current_stream().wait_stream(side)
    x + 1
    side.wait_stream(torch.cuda.current_stream())


def waited_for_elsewhere(told: bool) -> None:
    """A thread waits for the copy; this one overwrites what was copied, told of it or only late enough."""
    x, side, over = torch.zeros(4, device="cuda"), torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.clone()
    thread = threading.Thread(target=lambda: over.append(side.synchronize()))
    thread.start()
    while not over:
        time.sleep(1e-3)
    if told:
        thread.join()
    x.zero_()
    side.synchronize()


CASES: dict[str, tuple[Callable[[], None], Callable[[], None], str]] = {
    "write before its input is there": (
        lambda: side_write(),
        lambda: side_write(order_before=False),
        "written",
    ),
    "use before the write is done": (lambda: side_write(), lambda: side_write(order_after=False), "read"),
    "host refills a buffer in use": (lambda: pinned_refill(True), lambda: pinned_refill(False), "host"),
    "freed while in use": (lambda: freed_elsewhere(True), lambda: freed_elsewhere(False), "freed"),
    "waited for in another thread": (
        lambda: waited_for_elsewhere(True),
        lambda: waited_for_elsewhere(False),
        "written",
    ),
    "read on another stream": (lambda: read_unwritten_side(True), lambda: read_unwritten_side(False), "read"),
}


def faults_of(run: Callable[[], None]) -> list[str]:
    with fake_cuda() as machine:
        run()
        gc.collect()
        return machine.faults


@pytest.mark.parametrize("case", CASES)
def test_each_planted_fault_is_seen_and_its_cure_is_clean(case: str) -> None:
    right, wrong, word = CASES[case]
    assert faults_of(right) == []
    faults = faults_of(wrong)
    assert faults
    assert any(word in fault for fault in faults), faults


def test_a_training_step_on_one_stream_is_clean_and_has_the_values_of_the_cpu() -> None:
    torch.manual_seed(0)
    here = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    here(x).square().sum().backward()
    torch.manual_seed(0)
    with fake_cuda() as machine:
        there = module_on_device(nn.Linear(3, 2))
        there(x.to("cuda")).square().sum().backward()
        assert there.weight.device.type == "cuda"
        assert torch.equal(there.weight.grad.raw, here.weight.grad)
        assert machine.faults == []


def test_copies_are_counted_with_their_kind() -> None:
    with fake_cuda() as machine, PinnedRing(1, pin=True) as ring:
        target = torch.empty(8, dtype=torch.uint8, device="cuda")
        target.copy_(torch.arange(8, dtype=torch.uint8), non_blocking=True)
        assert machine.copies == [(8, True)]
        assert machine.syncs == 1  # pageable memory: the host waits although it asked not to
        buffer = ring.take(8)
        target.copy_(buffer.bytes(8), non_blocking=True)
        assert machine.syncs == 1
        torch.cuda.synchronize()
        buffer.give_back()


def patience(machine: FakeCuda) -> int:
    event = torch.cuda.Event()
    event.record()
    return next(tries for tries in range(1, 9) if event.query())


def test_a_seed_draws_the_same_again_and_another_one_other_things() -> None:
    drawn = []
    for seed in (1, 1, 2, None):
        with fake_cuda(seed) as machine:
            drawn.append([patience(machine) for _ in range(20)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[2]) == {1, 2, 3, 4}
    assert set(drawn[3]) == {2}


def test_an_event_that_nobody_has_asked_for_cannot_be_timed() -> None:
    with fake_cuda():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        with pytest.raises(RuntimeError, match="not ready"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.elapsed_time(end) >= 0


def test_time_passes_on_each_stream_by_itself_and_across_a_wait() -> None:
    with fake_cuda():
        streams = torch.cuda.current_stream(), torch.cuda.Stream()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for event, stream, seconds in zip(marks, 2 * streams, (0, 500, 3000, 1000), strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(seconds * 1_000_000_000)
                event.record()
        streams[1].wait_stream(streams[0])
        marks.append(streams[1].record_event(torch.cuda.Event(enable_timing=True)))
        torch.cuda.synchronize()
        assert [round(marks[0].elapsed_time(mark), -5) / 1e3 for mark in marks] == [0, 500, 3000, 1500, 3000]


def test_nothing_is_left_patched() -> None:
    def patched() -> tuple[object, ...]:
        told = Ticket.done, Ticket._settle, Lane.submit, threading.Thread.start, threading.Event.set
        return torch.cuda.Stream, torch.empty, torch.Tensor.to, PinnedRing.take, *told

    before = patched()
    with fake_cuda():
        assert torch.cuda.is_available()
        assert not set(before) & set(patched())
    assert before == patched()
    assert FakeCuda.current is None
