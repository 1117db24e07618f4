"""What the doctor times on a device is over when its time is taken: under the recorder."""

import contextlib
import time

import pytest
import torch

from overlapkit.doctor import copying
from overlapkit.doctor.link.measures import Wire
from tests.cuda_fake import fake_cuda


def test_copies_are_timed_from_their_start_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(copying, "_BYTES", 1 << 20)
    plain = torch.Tensor.copy_

    def slow(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        torch.cuda._sleep(1_000_000_000_000)
        return plain(target, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", slow)
    with fake_cuda() as machine:
        rate = copying.host_to_device(0)
        assert machine.copies == [(1 << 20, True)] * 8
        assert machine.faults == []
    assert 900 < (1 << 20) / rate < 1100


def test_a_collective_is_over_when_its_time_is_taken() -> None:
    wire = object.__new__(Wire)
    wire._torch, wire._device, wire._timeout = torch, "cuda", 30.0
    with fake_cuda():
        torch.zeros(4, device="cuda").add_(1)
        stream = torch.cuda.current_stream()
        assert not stream.query()
        wire._finished(time.perf_counter())
        assert stream.query()


def test_a_device_that_is_never_done_is_not_waited_for_for_ever() -> None:
    wire = object.__new__(Wire)
    wire._torch, wire._device, wire._timeout = torch, "cuda", 0.0
    with fake_cuda():
        torch.zeros(4, device="cuda")
        with pytest.raises(RuntimeError, match="the GPU was not done within 0 s"):
            wire._finished(time.perf_counter())
