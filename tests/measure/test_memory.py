import sys

import pytest
import torch

from overlapkit.measure import memory
from overlapkit.measure.memory import Peak, PeakWatch, looks_closely, peak_memory, reset_peak

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
    monkeypatch.setattr(memory, "reset_peak", lambda device: True)
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


def test_each_phase_has_a_peak_of_its_own(peaks):
    watch = PeakWatch(CPU)
    peaks += [1000, 1200, 1900, 1100, 900]
    for phase in ("outside", "forward", "recompute", "backward", "optimizer"):
        watch.look(0, phase)
    peaks += [1300]
    assert watch.after(0, "inside") == 1900  # although the record was set back since
    assert watch.phases == {"forward": 1200, "backward": 1900, "optimizer": 900, "between the phases": 1300}
    peaks += [700, 1250, 5000]
    watch.look(1, "outside")
    watch.look(1, "forward")
    watch.look(1, "paused")
    assert (watch.phases["between steps"], watch.phases["forward"]) == (700, 1250)
    assert 5000 not in watch.phases.values()


def test_a_step_that_comes_after_others_unseen_has_no_peak_between_steps(peaks):
    watch = PeakWatch(CPU)
    peaks += [1000, 9000, 1100]
    watch.after(16, "inside")  # the next one is not looked at closely
    watch.begin(251)
    watch.look(251, "forward")
    assert watch.phases == {"forward": 1100}


def test_where_the_record_cannot_be_set_back_no_phase_has_a_peak(peaks, monkeypatch):
    monkeypatch.setattr(memory, "reset_peak", lambda device: False)
    watch = PeakWatch(CPU)
    peaks += [1500, 1600]
    watch.look(0, "forward")
    assert watch.after(0, "backward") == 1600
    assert watch.phases == {}
    assert watch.top == Peak(1600, 100, 0, "backward")


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_the_kernels_record_begins_again_at_what_is_in_use():
    block = bytearray(64 << 20)
    block[::4096] = bytes(len(block[::4096]))
    high = peak_memory(CPU)
    del block
    if not reset_peak(CPU):
        pytest.skip("this system does not let it be set back")
    assert peak_memory(CPU) < high - (32 << 20)


def test_on_a_gpu_the_allocators_record_is_set_back(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert reset_peak(torch.device("cuda", 1))
    assert reset == [torch.device("cuda", 1)]


def test_no_record_of_peaks(peaks):
    peaks[:] = [None, None]
    watch = PeakWatch(CPU)
    assert watch.after(0, "inside") is None
    assert watch.top is None


def test_early_steps_are_looked_at_closely():
    assert [step for step in range(50) if looks_closely(step)] == [*range(8), 16, 32, 48]


def test_growth_before_a_step_that_is_looked_at_out_of_turn_is_not_that_of_the_time_between_steps(peaks):
    watch = PeakWatch(CPU)
    peaks += [1000, 5000]
    watch.after(7, "inside")
    for step in (8, 9):
        watch.after(step, "inside")  # not read: the peak was made in here
    watch.begin(10)
    assert watch.top == Peak(5000, 4000, 9, None)
    assert "between steps" not in watch.phases


def test_two_watches_do_not_take_the_peaks_from_each_other(monkeypatch):
    now, record = [100], [100]

    def use(most, left):
        record[0], now[0] = max(record[0], most), left

    def back(device):
        record[0] = now[0]
        return True

    monkeypatch.setattr(memory, "peak_memory", lambda device: record[0])
    monkeypatch.setattr(memory, "reset_peak", back)
    watches = PeakWatch(CPU), PeakWatch(CPU)
    for phase, most in (("outside", 100), ("forward", 700), ("backward", 900), ("optimizer", 300)):
        use(most, 100)
        for watch in watches:
            watch.look(0, phase)
    for watch in watches:
        assert watch.phases == {"forward": 700, "backward": 900, "optimizer": 300}
        assert watch.after(0, "inside") == 900
        assert watch.top == Peak(900, 200, 0, "backward")
