"""The overlap benchmark takes as many batches as steps, and compares with the slower of the two alone."""

import threading

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
        assert produced == (0 if in_worker else in_process.get(name, STEPS + 1)), name


def test_batches_left_over_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 batches more than the 4"):
        input_overlap.step_seconds([torch.zeros(1)] * 6, lambda: None, STEPS, CPU)


def test_work_grows_with_its_amount() -> None:
    assert input_overlap.product(7)().shape == (7, 512)
    assert input_overlap.sized(_Counted, 1.0).amount == 50  # each unit takes 20 ms on this clock


@pytest.mark.parametrize(("ours", "met"), [(20.5, True), (20.7, False)])
def test_the_goal_is_that_of_the_slower(ours: float, met: bool) -> None:
    took = {"consumer alone": 20.0, "producer alone": 15.0, "ours": ours, "no loader": 35.0}
    rows = input_overlap.figures("c", {name: Measurement(name, (ms / 1e3,)) for name, ms in took.items()})
    assert [(row.name, row.met) for row in rows] == [("c, ours", met), ("c, no loader", None)]
    assert rows[1].ratio == pytest.approx(1.75)


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
