import multiprocessing

import pytest

from overlapkit.measure import jobio
from overlapkit.measure.jobio import IOWatch


@pytest.fixture
def system(monkeypatch):
    """A clock, and what /proc says of each process."""
    state = {"now": 0, "totals": {}}
    monkeypatch.setattr(jobio.time, "perf_counter_ns", lambda: state["now"])
    monkeypatch.setattr(jobio, "_totals", state["totals"].get)
    monkeypatch.setattr(jobio.os, "getpid", lambda: 1)
    return state


def test_rates_are_those_of_the_window_and_of_all_processes(system, monkeypatch):
    class Child:
        pid = 2

    monkeypatch.setattr(multiprocessing, "active_children", lambda: [Child])
    watch = IOWatch()
    for step, totals in (
        (0, {1: (0, 0), 2: (0, 0)}),
        (16, {1: (50, 10), 2: (5, 0)}),
        (32, {1: (70, 30), 2: (95, 0)}),
    ):
        system["totals"].clear()
        system["totals"].update(totals)
        system["now"] += 2_000_000_000
        watch.sample(step)
    found = watch.rates(since=0)
    assert (found.read_bytes, found.written_bytes, found.processes) == (165 / 4, 30 / 4, 2)
    assert watch.rates(since=17) == watch.rates(since=16)  # the two newest, where one sample is no rate
    assert watch.rates(since=16).read_bytes == 110 / 2


def test_what_is_not_known_says_why(system):
    watch = IOWatch()
    assert "no /proc/PID/io" in watch.rates(0)
    watch.sample(0)
    assert "no /proc/PID/io" in watch.rates(0)
    system["totals"][1] = (3, 3)
    watch.sample(16)
    assert "two samples" in watch.rates(0)


def test_this_systems_own_numbers(tmp_path):
    import os

    if not os.path.exists("/proc/self/io"):
        pytest.skip("needs Linux with task accounting")
    read, written = jobio._totals(os.getpid())
    assert read >= 0
    assert written >= 0
    assert jobio._totals(2**22 + 1) is None
