"""PinnedRing: what it holds, when it hands out, and that it guards by tickets."""

import gc
import mmap
import threading
from typing import Any

import pytest
import torch

from overlapkit import pinned
from overlapkit.lane import Lane
from overlapkit.pinned import PinnedRing
from tests.cuda_fake import CUDA, fake_cuda
from tests.on_gpu import spin


def test_bytes_are_rounded_to_pages_and_buffers_are_reused() -> None:
    with PinnedRing(2, pin=False) as ring:
        assert ring.nbytes == 0
        first = ring.take(mmap.PAGESIZE + 1)
        assert first.nbytes == ring.nbytes == 2 * mmap.PAGESIZE
        address = first.bytes(1).data_ptr()
        first.give_back()
        second = ring.take(1)
        assert second.nbytes == mmap.PAGESIZE
        second.give_back()
        again = ring.take(2 * mmap.PAGESIZE)
        assert again.bytes(1).data_ptr() == address
        assert ring.nbytes == 3 * mmap.PAGESIZE
    assert ring.nbytes == 0


def test_a_buffer_holds_what_was_put_into_it_and_grows_without_holding_both() -> None:
    ring = PinnedRing(1, pin=False)
    buffer = ring.take(10)
    buffer.bytes(10).copy_(torch.arange(10, dtype=torch.uint8))
    assert buffer.bytes(10).tolist() == list(range(10))
    buffer.give_back()
    bigger = ring.take(10 * mmap.PAGESIZE)
    assert ring.nbytes == 10 * mmap.PAGESIZE
    assert int(bigger.bytes(10 * mmap.PAGESIZE).sum()) == 0
    bigger.give_back()
    ring.close()


def test_zero_bytes_and_zero_slots() -> None:
    with PinnedRing(1, pin=False) as ring:
        assert ring.take(0).bytes(0).shape == (0,)
    with pytest.raises(ValueError, match="slots=0"):
        PinnedRing(0, pin=False)


def test_it_waits_for_the_ticket_of_the_last_use() -> None:
    gate = threading.Event()
    with Lane("user") as lane, PinnedRing(1, pin=False) as ring:
        lane.delay_s = 0.01
        buffer = ring.take(4)
        view = buffer.bytes(4).fill_(1)
        seen = lane.submit(lambda: (gate.wait(5), view.clone())[1])
        buffer.give_back(seen)
        threading.Timer(0.02, gate.set).start()
        ring.take(4).bytes(4).fill_(9)  # would be seen by the work, were it handed out early
        assert seen.wait().tolist() == [1, 1, 1, 1]


def test_failed_work_frees_its_buffer_and_keeps_its_error() -> None:
    lane = Lane("user")
    ring = PinnedRing(1, pin=False)
    buffer = ring.take(4)
    buffer.give_back(lane.submit(lambda: 1 / 0))
    ring.take(4).give_back()
    with pytest.raises(ZeroDivisionError):
        lane.close()
    ring.close()


def test_all_on_loan_is_an_error_not_a_hang() -> None:
    with PinnedRing(2, pin=False) as ring:
        kept = [ring.take(1), ring.take(1)]
        with pytest.raises(RuntimeError, match="all 2 buffers are on loan"):
            ring.take(1)
        for buffer in kept:
            buffer.give_back()


def test_page_locked_memory_is_registered_whole_and_released_before_it_is_unmapped() -> None:
    with fake_cuda() as machine:
        ring = PinnedRing(1, pin=True)
        buffer = ring.take(mmap.PAGESIZE + 1)
        assert list(machine.pinned.values()) == [2 * mmap.PAGESIZE]
        assert list(machine.pinned) == [buffer.bytes(1).data_ptr()]
        buffer.give_back()
        ring.close()
        gc.collect()
        assert not machine.pinned


def test_memory_that_cannot_be_locked_is_one_clear_error() -> None:
    with fake_cuda():
        runtime = torch.cuda.cudart()
        runtime.cudaHostRegister = lambda *_: 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "cudart", lambda: runtime)
            with pytest.raises(MemoryError, match=r"cannot page-lock 4096 bytes \(CUDA error 2\).*ulimit -l"):
                PinnedRing(1, pin=True).take(1)


def close_under_a_copy(after: bool) -> list[str]:
    with fake_cuda() as machine:
        lane, ring = Lane("copy", CUDA), PinnedRing(1, pin=True)
        target = torch.empty(4, dtype=torch.uint8, device=CUDA)
        buffer = ring.take(4)
        ticket = lane.submit(lambda: target.copy_(buffer.bytes(4), non_blocking=True))
        buffer.give_back(ticket if after else None)
        ring.close()
        gc.collect()
        assert not machine.pinned
        faults = list(machine.faults)
        lane.close()
        return faults


def test_close_waits_for_the_last_uses_before_it_frees() -> None:
    assert close_under_a_copy(after=True) == []
    assert any("host" in fault for fault in close_under_a_copy(after=False))


def refill(after: bool) -> list[str]:
    with fake_cuda() as machine:
        lane, ring = Lane("copy", CUDA), PinnedRing(1, pin=True)
        target = torch.empty(4, dtype=torch.uint8, device=CUDA)
        for _ in range(2):
            buffer = ring.take(4)
            host = buffer.bytes(4)
            ticket = lane.submit(lambda host=host: target.copy_(host, non_blocking=True))
            buffer.give_back(ticket if after else None)
        ticket.order()
        ring.close()
        lane.close()
        return machine.faults


def test_a_buffer_is_not_refilled_under_a_copy_to_the_device() -> None:
    assert refill(after=True) == []
    assert any("host" in fault for fault in refill(after=False))


def test_two_threads_that_take_at_once_get_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes its memory slowly; the other comes meanwhile."""
    making, go_on = threading.Event(), threading.Event()
    real = pinned._map_pages

    def slow(*args: Any) -> torch.Tensor:
        making.set()
        assert go_on.wait(20)
        return real(*args)

    with PinnedRing(2, pin=False) as ring, Lane("other", kind="thread") as lane:
        with monkeypatch.context() as patch:
            patch.setattr(pinned, "_map_pages", slow)
            ticket = lane.submit(lambda: ring.take(100))
            assert making.wait(20)
        second = ring.take(200)
        go_on.set()
        first = ticket.wait(20)
        assert first is not second
        assert first.bytes(100).data_ptr() != second.bytes(200).data_ptr()
        assert not ring.is_warm(1)
        first.give_back()
        assert ring.is_warm(mmap.PAGESIZE)
        assert not ring.is_warm(mmap.PAGESIZE + 1)
        second.give_back()


def test_memory_that_cannot_be_had_leaves_the_ring_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with PinnedRing(1, pin=False) as ring:
        with monkeypatch.context() as patch:
            patch.setattr(pinned, "_map_pages", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ring.take(100)
        ring.take(100).give_back()


@pytest.mark.gpu
def test_on_a_gpu_a_buffer_is_not_filled_again_before_its_copy_is_done() -> None:
    device, nbytes = torch.device("cuda", torch.cuda.current_device()), 1 << 20
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(8)]
    with Lane("x", device) as lane, PinnedRing(2, pin=True) as ring:
        for k, target in enumerate(there):
            buffer = ring.take(nbytes)
            host = buffer.bytes(nbytes)
            assert host.is_pinned()
            host.fill_(k)

            def copy(target: torch.Tensor = target, host: torch.Tensor = host) -> None:
                spin()
                target.copy_(host, non_blocking=True)

            buffer.give_back(lane.submit(copy))
        lane.submit(lambda: None).wait()
        assert [(one.min().item(), one.max().item()) for one in there] == [(k, k) for k in range(8)]
