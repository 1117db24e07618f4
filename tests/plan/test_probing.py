"""A probe of the link on a device: what it times is over when it looks at its watch."""

import pytest
import torch

from overlapkit.plan import probing, profiling
from overlapkit.plan.probing import _Probe
from tests.cuda_fake import fake_cuda


def test_a_collective_is_timed_alone_from_its_beginning_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(probing.dist, "barrier", lambda group: torch.ones(1, device="cuda"))
    with fake_cuda():
        stream = torch.cuda.current_stream()
        over: list[bool] = []

        def collective() -> None:
            over.append(stream.query())
            torch.zeros(4, device="cuda")

        _Probe(None, 2, repeats=3)._time(collective)
        assert over == [True] * 4, "the barrier is over before the time is taken"
        assert stream.query()


def test_a_profile_waits_for_marks_that_the_device_has_not_passed() -> None:
    with fake_cuda() as machine:

        class Clock:
            asked = 0

            def time(self, mark: int) -> int | None:
                self.asked += 1
                assert self.asked < 9, "asks again and again, and waits for nothing"
                return mark if machine.syncs else None

        probe = object.__new__(profiling._Probe)
        probe._clock = Clock()
        assert probe._time(5) == 5
