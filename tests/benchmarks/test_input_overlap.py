"""The overlap benchmark takes as many batches as steps, and compares with the slower of the two alone."""

import threading
import time
from functools import partial

import pytest
import torch

import input_overlap
from harness import Measurement

CPU = torch.device("cpu")
STEPS = 3


def test_each_variant_takes_a_batch_a_step() -> None:
    counted = {"produced": 0, "consumed": 0}
    lock = threading.Lock()

    def produce() -> torch.Tensor:
        with lock:
            counted["produced"] += 1
        return torch.zeros(2)

    def consume() -> None:
        counted["consumed"] += 1

    for name, turn in input_overlap.variants(produce, consume, STEPS, CPU).items():
        before = dict(counted)
        assert turn() > 0
        produced, consumed = (counted[key] - before[key] for key in counted)
        assert consumed == (0 if name == "producer alone" else STEPS), name
        in_process = {"consumer alone": 0, "producer alone": STEPS, "two threads": STEPS}
        in_worker = "DataLoader" in name  # counts in a process of its own
        made = in_process.get(name, STEPS + 1 + input_overlap.AHEAD)
        assert produced == (0 if in_worker else made), name


@pytest.mark.parametrize("more", [-1, 1])
def test_a_batch_too_many_or_too_few_is_an_error(more: int) -> None:
    made = STEPS + 1 + input_overlap.AHEAD
    with pytest.raises(RuntimeError, match=f"{input_overlap.AHEAD + more} batches came after 4 of {made}"):
        input_overlap.step_seconds([torch.zeros(1)] * (made + more), lambda: None, STEPS, CPU)


def test_work_grows_with_its_amount() -> None:
    assert input_overlap.product(7)().shape == (7, 512)
    assert input_overlap.sized(_Counted, 1.0).amount == 50  # each unit takes 20 ms on this clock


def test_times_stand_beside_the_slower_of_the_two() -> None:
    took = {
        "consumer alone": (20.0, 30.0, 20.0),
        "producer alone": (15.0, 15.0, 40.0),  # a machine that drifts
        "ours": (20.0, 31.0, 41.0),
        "no loader": (35.0, 45.0, 60.0),
    }
    rows = input_overlap.figures("c", {name: Measurement(name, took[name]) for name in took})
    assert [(row.name, row.value, row.peer_value) for row in rows] == [
        ("c, ours", 31e3, 30e3),
        ("c, no loader", 45e3, 30e3),
    ]


@pytest.mark.parametrize(("middle", "met"), [(1.02, True), (1.04, False)])
def test_the_goal_is_of_a_step(middle: float, met: bool) -> None:
    row = input_overlap.goal("c", [1.0, middle, 1.5])
    assert (row.name, row.value, row.met) == ("c, a step of ours", middle, met)


@pytest.mark.parametrize(("consumed", "produced"), [(0.02, 0.0), (0.0, 0.02)])
def test_a_step_is_measured_by_the_slower_in_the_same_pass(consumed: float, produced: float) -> None:
    def busy(seconds: float) -> torch.Tensor:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return torch.zeros(2)

    found = input_overlap.shares(
        partial(busy, produced), partial(busy, consumed), time.thread_time, STEPS, 2, CPU
    )
    assert len(found) == 2
    assert min(found) > 0.5, "steps without their work"
    twice = input_overlap.Clocked(lambda: 7, iter([1.0, 3.0, 10.0, 14.0]).__next__)
    assert (twice(), twice(), twice.seconds, twice.calls) == (7, 7, 6.0, 2)


class _Counted:
    """Work whose seconds are what it says."""

    now = 0.0

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self) -> None:
        _Counted.now += 0.02 * self.amount


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name == "test_work_grows_with_its_amount":
        monkeypatch.setattr(input_overlap.time, "perf_counter", lambda: _Counted.now)
