"""trace_every: which step is traced, that it counts nowhere, and that no other profiler is disturbed."""

import gzip
import json
import os
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from overlapkit.measure import StepMeter
from overlapkit.measure.tracing import _fold, other_profiler
from tests.measure.traces.hand import HandTrace
from tests.ranks import run_ranks

CPU = [ProfilerActivity.CPU]
# a bare checkout on a GPU machine may have no msgspec
explain = pytest.importorskip("overlapkit.measure.traces.explain").explain


class Loop:
    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.meter = StepMeter(self.model, self.optimizer, **options)

    def step(self, times=1, error=None):
        for _ in range(times):
            with self.meter.step():
                self.model(torch.randn(4, 16)).sum().backward()
                if error is not None:
                    raise error
                self.optimizer.step()
                self.optimizer.zero_grad()

    def read(self):
        """Wait for the trace that is being read."""
        if self.meter._tracer._reading is not None:
            self.meter._tracer._reading.settle()
        return self.meter.report()


@pytest.fixture
def loop(request):
    made = Loop(**getattr(request, "param", {"trace_every": 3}))
    yield made
    made.meter.close()


def test_the_last_of_each_so_many_steps_is_traced_and_not_measured(loop):
    loop.step(2)
    assert (loop.meter.report().traced_step, loop.meter.report().trace) == (None, None)
    loop.step()
    report = loop.read()
    assert (report.traced_step, report.trace_note) == (2, None)
    assert [step.number for step in report.trace.steps] == [2]
    record = report.trace.steps[0].record
    assert None not in (record.forward, record.backward, record.optimizer)
    loop.step(4)
    report = loop.read()
    assert report.traced_step == 5
    assert [record.index for record in report.records] == [1, 3, 4, 6]
    # the period after a traced step begins where the profiler had been stopped: nobody's time is its
    before, after = list(loop.meter._ledger.traces)[-2:]
    assert (before.index, after.index) == (4, 6)
    assert after.segments[0].start > before.segments[-1].end


def test_what_torch_says_of_its_first_profiler_is_not_said_of_ours(loop, monkeypatch):
    """Torch 2.11 and 2.12 warn that cycles are forgotten; ours has one."""
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.step(3)
    assert (loop.read().traced_step, loop.read().trace_note) == (2, None)


def test_the_report_with_a_trace_as_text_and_json(loop, tmp_path):
    loop.step(3)
    report = loop.read()
    assert "· traced step 2" in str(report)
    report.save(tmp_path / "a.json")
    read = json.loads((tmp_path / "a.json").read_text())
    assert read["traced_step"] == 2
    assert read["lanes_us"] == report.trace.lanes_us
    assert len(read["per_step"]) == 1


def test_traces_are_read_elsewhere_and_leave_no_file(loop, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []
    monkeypatch.setattr(
        "overlapkit.measure.traces.explain.explain",
        lambda path: seen.append((threading.current_thread().name, os.listdir(path.parent))) or explain(path),
    )
    loop.step(3)
    assert loop.read().traced_step == 2
    assert seen == [("overlapkit-trace", ["rank.json"])]
    assert os.listdir(tmp_path) == []


def test_traces_are_kept_where_they_are_wanted(tmp_path):
    loop = Loop(trace_every=2, trace_folder=tmp_path / "traces")
    for _ in range(2):
        loop.step(2)
        loop.read()
    loop.meter.close()
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert kept == ["traces/step-1/rank-0.json.gz", "traces/step-3/rank-0.json.gz"]
    again = explain(tmp_path / "traces" / "step-3")
    assert again.trace.lanes_us == loop.meter.report().trace.lanes_us
    json.loads(gzip.decompress((tmp_path / "traces/step-1/rank-0.json.gz").read_bytes()))


def test_ranks_trace_the_same_step_and_are_compared_from_the_folder(tmp_path):
    def train(rank):
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = StepMeter(model, optimizer, trace_every=3, trace_folder=tmp_path)
        for _ in range(3):
            with meter.step():
                if rank == 1:
                    time.sleep(0.02)
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        meter.close()
        report = meter.report()
        left = next(answer for answer in report.answers if answer.name == "communication left")
        return report.traced_step, report.parts["communication"].mean_ms, left.value, left.evidence

    for step, measured, left, evidence in run_ranks(2, train):
        assert (step, measured) == (2, None)  # DDP of its own publishes nothing
        assert left >= 0
        assert evidence.startswith("traced step 2: ")
    together = explain(tmp_path / "step-2")
    assert [one.rank for one in together.trace.ranks] == [0, 1]
    assert together.trace.arrivals.straggler.rank == 1


def test_close_finishes_the_last_trace():
    loop = Loop(trace_every=2)
    loop.step(2)
    loop.meter.close()
    assert loop.meter.report().traced_step == 1


def test_close_does_not_wait_for_ever(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr("overlapkit.measure.tracing._PATIENCE_S", 0.01)
    monkeypatch.setattr("overlapkit.measure.traces.explain.explain", lambda path: gate.wait(30))
    loop, told = Loop(trace_every=2, on_log=[lambda step, values: told.append(step)]), []
    loop.step(2)
    loop.meter.log(loss=1)
    loop.meter.close()
    assert loop.meter.report().trace_note == "the trace of step 1 was still being read at close()"
    assert told == [1]
    gate.set()


def test_a_step_that_raises_leaves_no_trace_and_no_profiler(loop):
    loop.step(2)
    with pytest.raises(KeyError):
        loop.step(error=KeyError("x"))
    assert not torch.autograd.profiler._is_profiler_enabled
    assert loop.read().traced_step is None
    loop.step()  # the same number again
    assert loop.read().traced_step == 2


def test_closing_within_the_traced_step_stops_the_profiler(loop):
    loop.step(2)
    with loop.meter.step():
        assert torch.autograd.profiler._is_profiler_enabled
        loop.meter.close()
        assert not torch.autograd.profiler._is_profiler_enabled
    assert loop.meter.report().traced_step is None


def test_a_profiler_of_the_users_own_comes_first(loop):
    loop.step(2)
    with profile(activities=CPU) as own:
        loop.step()
        report = loop.meter.report()
    assert len(own.events()) > 10
    assert report.trace_note == "step 2 was not traced: another profiler was running"
    assert report.trace_note in " ".join(str(report).split())
    assert [record.index for record in report.records] == [1, 2]  # so it was measured
    loop.step(3)
    assert (loop.read().traced_step, loop.read().trace_note) == (5, None)


@pytest.mark.parametrize(
    ("stepped", "words"),
    [(0, "about to begin"), (1, "about to record"), (2, "running"), (3, None)],
)
def test_a_profiler_with_a_schedule_is_left_alone_from_before_its_warmup_on(loop, stepped, words):
    loop.step(2)
    with profile(activities=CPU, schedule=schedule(wait=1, warmup=1, active=1, repeat=1)) as own:
        for _ in range(stepped):
            own.step()
        loop.step()
        for _ in range(3 - stepped):
            own.step()
    report = loop.read()
    assert own.events()
    assert report.trace_note == (words and f"step 2 was not traced: another profiler was {words}")
    assert report.traced_step == (None if words else 2)


def test_a_profiler_that_is_done_or_not_begun_is_no_reason():
    done = profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    with done:
        done.step()
        done.step()
    unused = torch.autograd.profiler.profile(enabled=True)
    assert other_profiler() is None
    del unused


def test_a_trace_that_cannot_be_made_or_read_does_not_end_the_run(loop, monkeypatch):
    loop.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(profile, "start", lambda self: 1 / 0)
        loop.step()
    assert loop.meter.report().trace_note == "step 2 was not traced: division by zero"
    loop.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(profile, "stop", lambda self: (self.__class__.stop_trace(self), 1 / 0))
        loop.step()
    assert loop.meter.report().trace_note == "the trace of step 5 failed: division by zero"
    loop.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(profile, "export_chrome_trace", lambda self, path: open(path, "w").close())
        loop.step()
        note = loop.read().trace_note
    assert note.startswith("the trace of step 8 could not be read:")
    assert note.endswith("is empty")
    assert loop.meter.report().steps == 6  # 1, 3, 4, 6, 7 and 2, which was measured


def test_the_next_one_waits_for_the_last_to_be_read(loop, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(
        "overlapkit.measure.traces.explain.explain", lambda path: gate.wait(30) and explain(path)
    )
    loop.step(6)
    assert loop.meter.report().trace_note == "step 5 was not traced: the trace before it is still being read"
    gate.set()
    assert loop.read().traced_step == 2


def test_on_a_device_the_gaps_between_kernels_come_from_the_trace(tmp_path):
    made = HandTrace(0, 1)
    made.step(99, 0, 1000)
    made.work("gemm", 100, 300, launch=10)
    made.work("gemm", 500, 900, launch=450)
    made.copy(950, 1000, launch=940)
    traced = explain(made.write(tmp_path / "a.json"))
    loop = Loop()
    loop.step(3)
    report = _fold(loop.meter.report(), 99, traced, None)
    answers = {answer.name: answer for answer in report.answers}
    before = {answer.name: answer for answer in loop.meter.report().answers}
    fed = answers["compute fed"]
    assert fed.value == before["compute fed"].value  # the meter's own stays
    assert "traced step 99: idle for 0.25 ms, for 0.25 ms of it the host had not launched" in fed.evidence
    assert answers["copy overlapped"].value == pytest.approx(0.05)  # the meter had none
    assert answers["copy overlapped"].evidence.startswith("traced step 99: ")
    assert answers["peak memory"] == before["peak memory"]
    assert {finding.lane for finding in report.findings} == {"transfer", "other"} | {
        finding.lane for finding in loop.meter.report().findings
    }
    costs = [finding.exposed_ms for finding in report.findings]
    assert costs == sorted(costs, reverse=True)
    assert report.parts == loop.meter.report().parts


def test_what_the_meter_measured_is_not_found_again_in_a_trace(tmp_path):
    made = HandTrace(0, 1)
    made.step(99, 0, 1000)
    made.work("gemm", 100, 300, launch=10)
    made.copy(300, 1000, launch=20)
    traced = explain(made.write(tmp_path / "a.json"))
    loop = Loop()
    loop.step(3)
    report = loop.meter.report()
    known = replace(report.parts["transfer"], mean_ms=0.1, share=0.001, worst_ms=0.1)
    report = replace(report, parts={**report.parts, "transfer": known}, findings=())
    assert [finding.lane for finding in _fold(report, 99, traced, None).findings] == []


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_traced():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    meter = StepMeter(model, optimizer, trace_every=4)
    for _ in range(6):
        with meter.step():
            model(torch.randn(64, 512, device="cuda")).square().mean().backward()
            optimizer.step()
    meter.close()
    report = meter.report()
    assert report.traced_step == 3
    (step,) = report.trace.steps
    assert step.lanes.compute > 0
    assert report.trace.ranks[0].device is not None
    assert [record.index for record in report.records] == [1, 2, 4, 5]
    fed = next(answer for answer in report.answers if answer.name == "compute fed")
    assert "traced step 3: idle for" in fed.evidence
