import pytest
import torch
from torch import nn

from overlapkit.measure import StepMeter
from overlapkit.measure import meter as module
from overlapkit.span import Span
from tests.fake_clock import FakeClock, FakeComponent

MS = 1_000_000


class Loop:
    """Steps of forward 6 ms and backward 12 ms, with what the components publish."""

    def __init__(self, monkeypatch):
        self.clock = clock = FakeClock()
        monkeypatch.setattr(module, "clock_of", lambda device: clock)
        self.comm, self.checkpointer = FakeComponent(clock), FakeComponent(clock)
        self.model = nn.Linear(1, 1)
        self.model.__dict__["timings"] = self.comm.timings
        self.meter = StepMeter(self.model, None, None, self.checkpointer)

    def step(self, spans=lambda begun: (), longer=0, microbatches=1, tokens=1000, inside=0):
        with self.meter.step(tokens):
            for _ in range(microbatches):
                self.meter._turn("forward")
                self.clock.host += 6 * MS
                self.meter._turn("backward")
                begun = self.clock.host
                self.clock.host += 12 * MS
                self.comm.publish(*spans(begun))
            self.clock.host += longer * MS
            self.meter._turn("inside")
            self.clock.host += inside * MS

    @property
    def detail(self):
        return self.meter.report().detail


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def reduced(name, ready, start, end, parameters=(), bytes=8):
    def at(begun):
        times = (begun + int(time * MS) for time in (start, end))
        ready_at = None if ready is None else begun + int(ready * MS)
        return Span("communication", name, *times, bytes, ready=ready_at, parameters=parameters)

    return at


def test_buckets_have_the_times_within_their_own_backward_and_their_parameters(loop):
    late = reduced("all_reduce b", 8, 9, 14, ("b",))
    early = [reduced("all_reduce a", 2, ready, 6, ("a.weight", "a.bias"), 64) for ready in (3, 3, 4)]
    for one in early:
        loop.step(lambda begun, one=one: (one(begun), late(begun)), microbatches=2, longer=20)
    first, last = loop.detail.buckets
    assert (first.name, first.parameters, first.bytes) == ("all_reduce a", ("a.weight", "a.bias"), 64)
    assert (first.ready_ms, first.start_ms, first.end_ms, first.steps) == (2, 3.5, 6, 4)
    assert (last.name, last.ready_ms, last.start_ms, last.end_ms) == ("all_reduce b", 8, 9, 14)
    answer = next(one for one in loop.meter.report().answers if one.name == "buckets ready")
    assert (answer.value, answer.verdict) == (8, "after 8.0 of 32.0 ms")


def test_a_bucket_that_tells_no_readiness_has_its_begin_only(loop):
    for _ in range(2):
        loop.step(lambda begun: [reduced("reduce_scatter x", None, 5, 7)(begun)])
    (bucket,) = loop.detail.buckets
    assert (bucket.ready_ms, bucket.start_ms) == (None, 5)


def test_a_bucket_that_is_reduced_after_its_backward_still_belongs_to_it(loop):
    for _ in range(2):
        loop.step(lambda begun: [reduced("all_reduce last", 11, 13, 15)(begun)], inside=20)
    (bucket,) = loop.detail.buckets
    assert (bucket.ready_ms, bucket.start_ms, bucket.end_ms) == (11, 13, 15)


def test_gathers_show_what_the_step_stood_still_for(loop):
    def spans(begun):
        wait = Span("communication", "wait all_gather blocks.1", begun, begun + 3 * MS, exposed=True)
        gathers = [
            Span("communication", f"all_gather blocks.{unit}", begun, begun + MS, 100) for unit in range(2)
        ]
        return (*gathers, wait)

    for _ in range(3):
        loop.step(spans)
    worst, other = loop.detail.gathers
    assert (worst.unit, worst.exposed_ms, worst.bytes) == ("blocks.1", 3, 100)
    assert (other.unit, other.exposed_ms) == ("blocks.0", 0)


def test_gathers_of_an_evaluation_are_none_of_the_step(loop):
    def gathered():
        start = loop.clock.host
        loop.clock.host += 3 * MS
        loop.comm.publish(
            Span("communication", "all_gather a", start, loop.clock.host, 100),
            Span("communication", "wait all_gather a", start, loop.clock.host, exposed=True),
        )

    for _ in range(3):
        gathered()
        loop.step()
        with loop.meter.pause():
            for _ in range(5):
                gathered()
    (one,) = loop.detail.gathers
    assert (one.exposed_ms, one.bytes) == (3, 100)


def test_microbatches_are_told_apart_and_odd_steps_left_out(loop):
    for count in (1, 3, 3, 2, 3):
        loop.step(microbatches=count)
    passes = loop.detail.passes
    assert [(one.forward_ms, one.backward_ms) for one in passes] == [(6, 12)] * 3


def save(loop, stall, work):
    start = loop.clock.host
    loop.clock.host += stall * MS
    loop.checkpointer.publish(Span("checkpoint", "save", start, loop.clock.host, exposed=True))
    loop.checkpointer.publish(Span("checkpoint", "write", loop.clock.host, loop.clock.host + work * MS, 9))


def test_a_save_costs_its_stall_and_what_it_slows_down_over_its_interval(loop):
    for step in range(9):
        if step in (3, 6):
            save(loop, stall=5, work=30)
        loop.step(longer=2 if step in (3, 4, 6, 7) else 0)
    cost = loop.detail.checkpoint
    assert (cost.saves, cost.interval) == (2, 4)
    assert (cost.stall_ms, cost.slowdown_ms) == (5, 4)
    assert cost.amortised_ms == pytest.approx((2 * 5 + 2 * 4) / 8)
    (finding,) = loop.meter.report().findings
    assert (finding.lane, finding.gain_ms) == ("checkpoint", 1.25)  # of it what the step stood still for


def test_steps_that_differ_anyway_are_no_slowdown(loop):
    for step in range(12):
        if step == 5:
            save(loop, stall=1, work=10)
        loop.step(longer=step % 3)
    assert loop.detail.checkpoint.slowdown_ms == 0


def test_a_slowdown_is_unknown_where_every_step_saves(loop):
    for _ in range(4):
        save(loop, stall=1, work=10)
        loop.step()
    assert loop.detail.checkpoint.slowdown_ms is None
    assert loop.detail.checkpoint.amortised_ms == 1


def test_a_window_longer_than_the_steps_whose_times_are_kept_counts_all_its_saves(loop):
    for step in range(401):
        if step % 200 == 150:
            save(loop, stall=40, work=10)
        loop.step()
    cost = loop.meter.report(window=400).detail.checkpoint
    assert (cost.saves, cost.stall_ms, cost.slowdown_ms) == (2, 40, 0)
    assert cost.interval == pytest.approx(200, rel=0.01)
    assert cost.amortised_ms == pytest.approx(0.2, rel=0.01)


def test_slow_steps_beside_a_save_are_named(loop):
    for step in range(12):
        if step == 5:
            save(loop, stall=0, work=60)
        loop.step(longer=9 if step in (5, 6, 7) else 0)
    (finding,) = loop.meter.report().findings
    assert finding.lane == "checkpoint"
    assert "27.0 ms longer" in finding.setting
    assert finding.gain_ms == pytest.approx(27 / 10)  # a step: step 0 and the counted one are left out


def test_a_batch_too_small_is_named_with_where_it_breaks_even(loop):
    def spans(begun):
        work = Span("communication", "all_reduce w", begun, begun + 30 * MS, 8)
        return work, Span("communication", "all_reduce tail", begun + 12 * MS, begun + 30 * MS, exposed=True)

    for _ in range(4):
        loop.step(spans, longer=18)
    (finding,) = loop.meter.report().findings
    assert finding.component == "the batch"
    assert "30.0 ms of communication behind 18.0 ms of compute" in finding.setting
    assert "even at 2,000 tokens" in finding.setting  # (18 + 18) / 18 times 1,000
    assert finding.gain_ms == 18


def test_every_unknown_has_its_reason():
    report = StepMeter().report()
    assert set(report.detail.missing.values()) == {"no step has been measured yet"}
    meter = StepMeter()
    with meter.step():
        pass
    detail = meter.report().detail
    fields = [name for name in detail.__dataclass_fields__ if name != "missing"]
    assert {name for name in fields if getattr(detail, name) is None} == set(detail.missing)
    assert all(detail.missing.values())
    assert detail.missing["buckets"] == "single process"
    assert "no checkpointer" in detail.missing["checkpoint"]
    assert "CPU" in detail.missing["syncs"]


def test_host_waits_on_a_device_are_named_in_the_fix(loop):
    for _ in range(12):
        loop.step(inside=9)
    loop.meter._ledger.coverage.device = torch.device("cuda", 0)
    loop.meter._closeup.seen.syncs = {("aten._local_scalar_dense", "train.py:33"): 4}
    loop.meter._closeup.seen.flops = {}
    report = loop.meter.report()
    (sync,) = report.detail.syncs
    assert (sync.where, sync.a_step) == ("train.py:33", 4)
    (finding,) = report.findings
    assert (finding.component, finding.gain_ms) == ("meter.log", 9)
    assert "train.py:33" in finding.setting
    assert "train.py:33 4 times a step" in " ".join(str(report).split())
