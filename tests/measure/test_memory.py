import sys

import pytest
import torch

from overlapkit.measure import memory
from overlapkit.measure.memory import Peak, PeakWatch, looks_closely, peak_memory

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_on_linux_it_is_the_largest_resident_set():
    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    before, value, after = status("VmHWM:"), peak_memory(CPU), status("VmHWM:")
    assert before <= value <= after
    assert value > 1 << 20


def test_a_cuda_peak_is_the_allocators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77 if device.index == 1 else 0)
    assert peak_memory(torch.device("cuda", 1)) == 77


@pytest.fixture
def peaks(monkeypatch):
    """What the system will say, one reading after the other."""
    values = [1000]
    monkeypatch.setattr(memory, "peak_memory", lambda device: values.pop(0))
    return values


def test_the_phase_that_raised_the_peak_last_made_it(peaks):
    watch = PeakWatch(CPU)
    assert watch.top is None
    peaks += [1000, 1500, 1500, 1505, 1800, 1800]
    for phase in ("inside", "forward", "backward", "inside", "optimizer"):
        watch.look(0, phase)
    assert watch.after(0, "inside") == 1800
    assert watch.top == Peak(1800, 300, 0, "optimizer")


def test_growth_below_one_percent_adds_up(peaks):
    watch = PeakWatch(CPU)
    peaks += [1006, 1012]
    watch.look(0, "forward")
    assert watch.top is None
    watch.look(0, "backward")
    assert watch.top == Peak(1012, 12, 0, "backward")


def test_growth_in_steps_that_are_not_looked_at_is_nobodys(peaks):
    watch = PeakWatch(CPU)
    peaks += [2000]
    for step in range(8, 15):
        assert watch.after(step, "inside") == 1000  # not read
    assert watch.after(15, "inside") == 2000
    assert watch.top == Peak(2000, 1000, 15, None)
    assert not peaks


def test_no_record_of_peaks(peaks):
    peaks[:] = [None, None]
    watch = PeakWatch(CPU)
    assert watch.after(0, "inside") is None
    assert watch.top is None


def test_early_steps_are_looked_at_closely():
    assert [step for step in range(50) if looks_closely(step)] == [*range(8), 16, 32, 48]
