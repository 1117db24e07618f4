"""Logged values: what they held when they were logged, in order, once each, with no wait for the device."""

import gc
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from overlapkit.measure import StepMeter
from overlapkit.measure.logged import Logged
from overlapkit.measure.operators import Operators
from tests.cuda_fake import fake_cuda, on_device
from tests.on_gpu import no_waits, spin
from tests.ranks import one_rank_group


class Told:
    def __init__(self):
        self.calls = []
        self.logged = Logged(lambda step, values: self.calls.append((step, dict(values))))

    def __getattr__(self, name):
        return getattr(self.logged, name)


def test_values_of_a_cpu_are_what_they_were_when_logged():
    told, loss = Told(), torch.tensor([2.5], requires_grad=True)
    told.log(3, {"loss": loss * 2, "rate": 3, "count": torch.tensor(7), "flag": torch.tensor(True)})
    told.log(3, {})
    with torch.no_grad():
        loss += 1  # what is written later is another value
    told.log(
        4, {"loss": loss, "bad": torch.tensor(math.inf), "half": torch.tensor(0.1, dtype=torch.bfloat16)}
    )
    assert told.calls == []  # not in the middle of a step
    told.deliver()
    assert told.calls == [
        (3, {"loss": 5.0, "rate": 3.0, "count": 7.0, "flag": 1.0}),
        (3, {}),
        (4, {"loss": 3.5, "bad": math.inf, "half": 0.10009765625}),
    ]
    assert [list(values) for _, values in told.calls] == [
        ["loss", "rate", "count", "flag"],
        [],
        ["loss", "bad", "half"],
    ]
    assert told.latest == {
        "loss": 3.5,
        "rate": 3.0,
        "count": 7.0,
        "flag": 1.0,
        "bad": math.inf,
        "half": 0.10009765625,
    }
    told.deliver()
    assert len(told.calls) == 3


def test_values_of_a_device_arrive_later_in_order_without_a_wait():
    with fake_cuda() as machine:
        told = Told()
        for step in range(4):
            loss = on_device(torch.tensor(float(step)))
            count = on_device(torch.tensor(step))
            told.log(step, {"before": step, "loss": loss, "after": -step, "int": count})
            loss.add_(100)  # at once, on the step's own stream
            del loss  # and its memory goes back
        told.log(4, {"only": 4})
        told.deliver()
        assert told.calls == []  # the device has not come so far; what is there already keeps its place
        told.deliver()
        first = list(told.calls)
        assert machine.syncs == 0
        for _ in range(12):
            told.deliver()
        assert machine.syncs == 0
    expected = [(s, {"before": s, "loss": s, "after": -s, "int": s}) for s in range(4)] + [(4, {"only": 4})]
    assert first == expected[:1]
    assert told.calls == expected
    assert [list(values) for _, values in told.calls[:4]] == [["before", "loss", "after", "int"]] * 4
    assert machine.faults == []
    assert all(non_blocking for _, non_blocking in machine.copies)
    assert len(machine.copies) == 4  # one for the values of a call


def test_a_logged_value_is_no_synchronisation_of_the_report():
    with fake_cuda():
        told, loss = Told(), on_device(torch.tensor(2.0))
        with (operators := Operators(lambda: "inside")):
            told.log(0, {"loss": loss})
        assert operators.syncs == {}
        with operators:
            loss.item()
        assert sum(operators.syncs.values()) == 1
        told.close()


def test_nothing_is_logged_into_a_graph(monkeypatch):
    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(
            RuntimeError, match="while a CUDA graph is captured: log the graph's output after"
        ):
            Told().log(0, {"loss": on_device(torch.tensor(1.0))})


def test_a_forked_child_leaves_the_values_to_its_parent():
    calls = []
    meter = StepMeter(on_log=[lambda step, values: calls.append(step)])
    meter.log(loss=1)
    child = os.fork()
    if child == 0:
        meter._live.close()
        os._exit(len(calls))
    assert os.waitpid(child, 0)[1] == 0
    meter.close()
    assert calls == [0]


def test_what_is_left_is_waited_for_at_the_end_and_only_then(monkeypatch):
    monkeypatch.setattr("tests.cuda_fake.FakeEvent.query", lambda event: False)
    with fake_cuda() as machine:
        told = Told()
        for step in range(3):
            told.log(step, {"loss": on_device(torch.tensor(float(step)))})
        told.deliver()
        assert (machine.syncs, told.calls) == (0, [])
        told.close()
        assert machine.syncs == 3
        told.close()
    assert told.calls == [(s, {"loss": float(s)}) for s in range(3)]
    assert machine.faults == []


def test_a_device_that_is_far_behind_does_not_fill_memory(monkeypatch):
    monkeypatch.setattr("overlapkit.measure.logged._HELD", 3)
    with fake_cuda():
        told = Told()
        for step in range(8):
            told.log(step, {"loss": on_device(torch.tensor(float(step)))})
        assert [step for step, _ in told.calls] == [0, 1, 2, 3, 4]
        told.close()
    assert [step for step, _ in told.calls] == list(range(8))


def test_who_is_told_may_log_and_deliver_and_close():
    calls = []

    def tell(step, values):
        calls.append((step, dict(values)))
        if step == 0:
            logged.log(1, {"again": 1})
        logged.deliver()
        logged.close()

    logged = Logged(tell)
    logged.log(0, {"a": 1})
    logged.close()
    assert calls == [(0, {"a": 1.0}), (1, {"again": 1.0})]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("high", TypeError, "loss='high': log a number, or a tensor of one element"),
        (None, TypeError, "loss=None"),
        (1j, TypeError, "loss=1j"),
        ([1.0], TypeError, r"loss=\[1.0\]"),
        (torch.ones(2, 3), ValueError, r"loss has shape \(2, 3\): log one number, such as loss.mean\(\)"),
        (torch.ones(0), ValueError, r"loss has shape \(0,\)"),
        (torch.tensor(1j), TypeError, "complex64"),
        (torch.empty((), device="meta"), TypeError, "on meta"),
    ],
)
def test_what_cannot_be_logged(value, error, words):
    told = Told()
    told.log(0, {"loss": 1})
    with pytest.raises(error, match=words):
        told.log(1, {"fine": 2, "loss": value})  # a name may have another shape at a later step
    told.close()
    assert told.calls == [(0, {"loss": 1.0})]


def test_dtensors():
    with one_rank_group():
        mesh = init_device_mesh("cpu", (1,))
        told, local = Told(), torch.tensor(2.0, requires_grad=True)
        told.log(0, {"loss": DTensor.from_local(local, mesh, [Replicate()])})
        partial = DTensor.from_local(local, mesh, [Partial()])
        with pytest.raises(TypeError, match=r"loss is a DTensor .*Partial.*: log loss.full_tensor\(\)"):
            told.log(1, {"loss": partial})
        told.log(1, {"loss": partial.full_tensor()})
        told.close()
        assert told.calls == [(0, {"loss": 2.0}), (1, {"loss": 2.0})]


def test_a_meter_numbers_them_by_its_steps_and_loses_none():
    calls = []
    meter = StepMeter(on_log=[lambda step, values: calls.append((step, values))])
    meter.log(before=0)
    for number in range(3):
        with meter.step():
            meter.log(loss=number)
        assert meter.logged["loss"] == number
        with meter.pause():
            meter.log(validation=number)  # of the step that was
    with pytest.raises(TypeError, match="does not support item assignment"):
        meter.logged["loss"] = 3
    meter.close()
    assert calls == [
        (0, {"before": 0.0}),
        *(one for n in range(3) for one in ((n, {"loss": float(n)}), (n, {"validation": float(n)}))),
    ]
    with pytest.raises(RuntimeError, match=r"meter.log\(\) after meter.close\(\)"):
        meter.log(loss=1)


def test_a_step_that_raises_keeps_what_it_logged():
    calls = []
    meter = StepMeter(nn.Linear(1, 1), on_log=[lambda step, values: calls.append((step, values))])
    with pytest.raises(TypeError, match="bad="), meter.step():
        meter.log(loss=1) or meter.log(bad="")
    assert calls == [(0, {"loss": 1.0})]


def test_a_meter_that_is_dropped_delivers_the_last_ones():
    calls = []
    meter = StepMeter(on_log=[lambda step, values: calls.append((step, values))])
    meter.log(loss=1)
    del meter
    gc.collect()
    assert calls == [(0, {"loss": 1.0})]


def test_the_interpreters_exit_delivers_the_last_ones():
    code = (
        "from overlapkit.measure import StepMeter\n"
        "meter = StepMeter(on_log=[lambda step, values: print(step, values)])\n"
        "with meter.step(): pass\nmeter.log(loss=2)\n1 / 0\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "0 {'loss': 2.0}\n", ran.stderr


@pytest.mark.gpu
def test_on_a_gpu_nothing_synchronises():
    calls = []
    meter = StepMeter(on_log=[lambda step, values: calls.append((step, values))])
    with no_waits():
        for number in range(20):
            with meter.step():
                loss = torch.full((), float(number), device="cuda")
                spin()
                meter.log(loss=loss, twice=loss.bfloat16() * 2, number=number)
                loss.zero_()
    assert len(calls) < 20
    meter.close()
    assert calls == [(n, {"loss": n, "twice": 2.0 * n, "number": n}) for n in range(20)]
