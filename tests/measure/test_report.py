import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from overlapkit.measure import StepMeter
from overlapkit.measure import meter as module
from overlapkit.measure.across.ranks import LateRank, RankPart, Ranks
from overlapkit.measure.across.sequence import Mismatch
from overlapkit.measure.memory import Peak
from overlapkit.span import Span
from tests.fake_clock import FakeClock, FakeComponent

MS = 1_000_000


class Run:
    """A loop of which every part takes the milliseconds that it is told."""

    def __init__(self, monkeypatch, *, ours=(), **parts):
        self.clock = FakeClock()
        monkeypatch.setattr(module, "clock_of", lambda device: self.clock)
        self.loader, self.checkpointer, self.comm = (FakeComponent(self.clock) for _ in range(3))
        self.model = nn.Linear(1, 1)
        self.model.__dict__["timings"] = self.comm.timings
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        given = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
            "checkpointer": self.checkpointer,
        }
        self.meter = StepMeter(**(given | parts))
        self.meter._ledger.coverage.ours = set(ours)

    def step(self, *, input=0.0, checkpoint=0.0, communication=0.0, optimizer=1.0, outside=0.0, inside=0.0):
        clock, meter = self.clock, self.meter
        self.loader.wait("input", int(input * MS))
        clock.host += int(outside * MS)
        with meter.step(tokens=1000):
            meter._turn("forward")
            clock.host += 6 * MS
            meter._turn("backward")
            clock.host += 12 * MS
            self.comm.publish(
                Span("communication", "all_reduce a .. b (2)", clock.host - 9 * MS, clock.host - 3 * MS, 512),
                Span("communication", "all_reduce c", clock.host - 2 * MS, clock.host, 256),
            )
            start = clock.host
            clock.host += int(communication * MS)
            self.comm.publish(Span("communication", "all_reduce tail", start, clock.host, exposed=True))
            meter._turn("optimizer")
            clock.host += int(optimizer * MS)
            meter._turn("inside")
            clock.host += int(inside * MS)
        self.checkpointer.wait("checkpoint", int(checkpoint * MS))


def by_name(report):
    return {answer.name: answer for answer in report.answers}


def test_a_healthy_run_has_no_findings(monkeypatch):
    run = Run(monkeypatch)
    for _ in range(5):
        run.step(input=0.1, inside=0.2)
    report = run.meter.report()
    assert report.findings == ()
    assert report.verdict.startswith("Healthy: a step of 19.3 ms")
    assert "not measured: transfer" in report.verdict
    assert report.period_ms == pytest.approx(19.3)
    assert report.exposed_share == pytest.approx(0.1 / 19.3)
    assert report.tokens_per_s == pytest.approx(1000 / 19.3e-3)
    assert (report.steps, report.first_step, report.last_step) == (4, 1, 4)
    answers = by_name(report)
    assert answers["batch ready"].verdict == "hidden (0.10 ms, 0.5%)"
    assert answers["compute fed"].verdict == "yes (0.20 ms, 1.0% idle)"


def test_the_parts_add_up_to_the_period(monkeypatch):
    run = Run(monkeypatch)
    for number in range(6):
        run.step(input=number, checkpoint=3.0 * (number % 2), communication=2, outside=1, inside=0.5)
    report = run.meter.report()
    assert sum(part.mean_ms or 0 for part in report.parts.values()) == pytest.approx(report.period_ms)
    assert sum(part.share or 0 for part in report.parts.values()) == pytest.approx(1)
    assert report.parts["input"].mean_ms == pytest.approx(3)
    assert report.parts["input"].worst_ms == pytest.approx(5)
    assert report.parts["checkpoint"].mean_ms == pytest.approx(6 / 5)
    assert report.parts["communication"].bytes == 768


@pytest.mark.parametrize(
    ("planted", "lane", "exposed_ms"),
    [
        ({"input": 4}, "input", 4),
        ({"checkpoint": 2}, "checkpoint", 2),
        ({"communication": 3}, "communication", 3),
        ({"optimizer": 5}, "optimizer", 5),
        ({"outside": 3}, "other", 3),
        ({"inside": 3}, "other", 3),
    ],
)
def test_one_planted_fault_is_named_and_nothing_else(monkeypatch, planted, lane, exposed_ms):
    run = Run(monkeypatch)
    for _ in range(4):
        run.step(**planted)
    report = run.meter.report()
    (finding,) = report.findings
    assert finding.lane == lane
    assert finding.exposed_ms == finding.gain_ms == pytest.approx(exposed_ms)
    assert finding.share == pytest.approx(exposed_ms / report.period_ms)
    assert f"costs {exposed_ms:.1f} ms" in report.verdict
    assert finding.component in report.verdict


def test_the_costliest_finding_comes_first(monkeypatch):
    run = Run(monkeypatch)
    for _ in range(3):
        run.step(input=2, checkpoint=5, inside=3)
    assert [finding.lane for finding in run.meter.report().findings] == ["checkpoint", "other", "input"]


def fix_of(run, lane):
    return next(finding.fix for finding in run.meter.report().findings if finding.lane == lane)


def test_the_fix_depends_on_what_is_there(monkeypatch):
    run = Run(monkeypatch)
    for _ in range(3):
        run.step(input=4, optimizer=9, outside=9, communication=3)
    assert "overlapkit.DeviceLoader" in fix_of(run, "input")
    assert "overlapkit.AdamW" in fix_of(run, "optimizer")
    assert "meter.pause()" in fix_of(run, "other")
    assert "bucket_cap_mb" in fix_of(run, "communication")


def test_a_source_that_is_too_slow_is_told_from_one_that_is_irregular(monkeypatch):
    for make_ms, word in ((22, "num_workers="), (10, "depth=")):  # of a step of 23 ms, 4 of them waiting
        run = Run(monkeypatch, ours=("loader",))
        for _ in range(9):
            end = run.clock.host + 1
            run.loader.publish(Span("input", "make", end - make_ms * MS, end))
            run.step(input=4)
        assert word in fix_of(run, "input")


@pytest.mark.parametrize("every", [1, 3])
def test_what_a_lane_does_beside_a_step_counts_once_and_for_every_step(monkeypatch, every):
    run = Run(monkeypatch, ours=("loader",), every=every)
    for _ in range(60):
        end = run.clock.host + 1
        run.loader.publish(*(Span("input", name, end - 7 * MS, end) for name in ("source", "transform")))
        run.step(input=4)
    assert by_name(run.meter.report())["batch ready"].evidence.endswith("7.00 ms a step beside it")
    assert "raise depth=" in fix_of(run, "input")


def test_gathers_and_reductions_have_their_own_fixes(monkeypatch):
    for name, word in (
        ("wait all_gather blocks.1", "forward_prefetch"),
        ("reduce_scatter x", "larger batch"),
        ("all_reduce blocks.1", "larger batch"),  # of shard on a 2-D mesh, which has no buckets
    ):
        run = Run(monkeypatch)
        for _ in range(3):
            run.step()
            start = run.clock.host
            run.clock.host += 4 * MS
            run.comm.publish(Span("communication", name, start, run.clock.host, exposed=True))
        assert word in fix_of(run, "communication")


def test_what_is_waited_for_in_a_pause_is_no_reason_for_a_fix(monkeypatch):
    run = Run(monkeypatch)
    for _ in range(3):
        run.step(communication=4)
        with run.meter.pause():  # an evaluation of a sharded model
            start = run.clock.host
            run.clock.host += 90 * MS
            run.comm.publish(
                Span("communication", "wait all_gather blocks.1", start, run.clock.host, exposed=True)
            )
    assert "bucket_cap_mb" in fix_of(run, "communication")


def test_communication_left_is_the_tail_where_it_is_told(monkeypatch):
    run = Run(monkeypatch)
    for _ in range(3):
        start = run.clock.host
        run.clock.host += 4 * MS
        run.comm.publish(
            Span("communication", "wait all_gather blocks.1", start, run.clock.host, exposed=True)
        )
        run.step(communication=1)
    answer = by_name(run.meter.report())["communication left"]
    assert answer.value == pytest.approx(1)
    assert answer.verdict == "exposed 1.00 ms, 4.2%"
    assert answer.evidence.startswith("5.00 ms exposed in all; ")


def test_no_other_finding_than_a_late_rank_hides_the_communication(monkeypatch):
    ranks = Ranks(8, 1, 4, 4, {}, 8, 0.0, (), False, 2.0, 0.0, 30.0, (), (), None)
    run = Run(monkeypatch)
    for _ in range(4):
        run.step(input=15, communication=2)
    monkeypatch.setattr(run.meter._across, "ranks", lambda patience: ranks)
    assert [one.lane for one in run.meter.report().findings] == ["input", "communication"]


def test_a_run_whose_ranks_do_not_come_together_is_not_called_healthy(monkeypatch):
    late = LateRank(3, 4, 4, 9.0, None, 0.0, None)
    parts = {"communication": RankPart(3.0, 12.0, 1, 9.0)}
    ranks = Ranks(8, 1, 4, 4, parts, 8, 9.0, (late,), False, 0.1, 9.0, 30.0, (), (), None)
    run = Run(monkeypatch)
    for _ in range(4):
        run.step(communication=12)
    monkeypatch.setattr(run.meter._across, "ranks", lambda patience: ranks)
    report = run.meter.report()
    assert report.findings == ()  # of communication: 0.1 ms of transfer
    assert report.verdict.startswith("Ranks wait for each other for 9.0 ms, 30% of a step of 30.0 ms")
    mismatch = Mismatch("", "collective 7", (3,), "all_reduce (4,)", "all_reduce (8,)")
    differing = replace(ranks, late=(), mismatches=(mismatch,))
    monkeypatch.setattr(run.meter._across, "ranks", lambda patience: differing)
    assert "rank 3 issued all_reduce (4,), the others all_reduce (8,)" in run.meter.report().verdict


def test_a_late_rank_and_a_long_tail_have_a_fix_each(monkeypatch):
    late = LateRank(3, 4, 4, 9.0, "backward", 9.0, None)
    ranks = Ranks(8, 1, 4, 4, {}, 8, 9.0, (late,), False, 3.0, 9.0, 33.0, (), (), None)
    run = Run(monkeypatch)
    for _ in range(4):
        run.step(communication=12)
    monkeypatch.setattr(run.meter._across, "ranks", lambda patience: ranks)
    report = run.meter.report()
    assert [one.gain_ms for one in report.findings] == [9, 3]
    answers = by_name(report)
    assert answers["ranks together"].fix == report.findings[0].fix
    assert answers["ranks together"].fix.startswith("rank 3: it computes longer in backward")
    assert answers["communication left"].fix == report.findings[0].fix
    assert "bucket_cap_mb" in answers["buckets ready"].fix


def test_saves_that_come_too_fast_are_told_from_slow_staging(monkeypatch):
    for name, is_previous in (("wait for the previous save", True), ("wait for staging", False)):
        run = Run(monkeypatch)
        for _ in range(3):
            start = run.clock.host
            run.clock.host += 4 * MS
            run.checkpointer.publish(
                Span("checkpoint", "save", start, run.clock.host, exposed=True),
                Span("checkpoint", name, start + MS, run.clock.host, exposed=True),
            )
            run.step()
        assert "every=" in fix_of(run, "checkpoint")
        assert ("in_flight=" in fix_of(run, "checkpoint")) == is_previous


def test_time_between_steps_is_not_blamed_while_the_input_is_unknown(monkeypatch):
    run = Run(monkeypatch, loader=None)
    for _ in range(3):
        run.step(outside=5)
    assert "meter.steps(loader)" in fix_of(run, "other")


def test_without_a_model_the_rest_is_no_finding(monkeypatch):
    monkeypatch.setattr(module, "clock_of", lambda device: clock)
    clock = FakeClock()
    meter = StepMeter()
    for _ in range(3):
        with meter.step():
            clock.host += 20
    report = meter.report()
    assert report.findings == ()
    assert {answer.verdict for answer in report.answers[:6]} == {"not measured"}
    assert report.exposed_share is None
    assert report.parts["forward"].reason == "no model was given to StepMeter"
    assert "no loader was given" in report.answers[0].evidence


def test_a_model_that_the_loop_does_not_call_is_said_so():
    model = nn.Linear(1, 1)
    meter = StepMeter(model)
    with meter.step():
        pass
    report = meter.report()
    assert (
        report.parts["forward"].reason
        == "the model was not called: a meter belongs on what torch.compile(model) returned"
    )
    assert report.parts["backward"].reason == "no gradient reached its output"
    assert by_name(report)["compute fed"].value is None


def test_when_buckets_became_ready(monkeypatch):
    run = Run(monkeypatch)
    run.step()
    answer = by_name(run.meter.report())["buckets ready"]
    assert answer.value == pytest.approx(10)
    assert answer.verdict == "after 10.0 of 12.0 ms"
    assert answer.evidence == "step 0: 2 of them, the first after 3.0 ms; last all_reduce c"


@pytest.mark.parametrize(
    ("peak", "saves", "verdict", "evidence"),
    [
        (None, False, "no", "reached before the first step"),
        (
            Peak(0, 3 << 20, 2, "forward"),
            True,
            "no",
            "+3.0 MiB in the forward of step 2",
        ),
        (Peak(0, 1 << 20, 0, "optimizer"), False, "optimizer", "+1.0 MiB in the optimizer of step 0"),
        (Peak(0, 1 << 20, 3, "outside"), True, "checkpoint, perhaps", "before step 3 began"),
        (Peak(0, 1 << 20, 3, "outside"), False, "no", "before step 3 began"),
        (Peak(0, 1 << 20, 3, "paused"), False, "no", "in a pause of step 3"),
        (Peak(0, 1 << 20, 31, None), True, "unknown", "somewhere in steps 16..31"),
    ],
)
def test_who_made_the_peak(monkeypatch, peak, saves, verdict, evidence):
    run = Run(monkeypatch)
    run.step()
    assert run.meter.last is not None
    if not saves:
        run.meter._ledger.shown.clear()
    else:
        run.meter._ledger.shown.append(Span("checkpoint", "write", 0, 1))
    run.meter._closeup.seen.peaks.top = peak
    answer = by_name(run.meter.report())["peak memory"]
    assert answer.verdict == verdict
    assert answer.evidence.endswith(evidence)
    assert answer.value == run.meter.last.peak_memory / 2**20
    assert (answer.fix is not None) == (verdict in ("optimizer", "checkpoint, perhaps"))


def test_a_meter_that_measured_nothing_says_so(tmp_path):
    report = StepMeter().report()
    assert report.verdict == "No step has been measured yet."
    assert (report.steps, report.period_ms, report.last_step) == (0, None, None)
    assert str(report).startswith("No step has been measured yet.")
    json.dumps(report.to_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="no step has been recorded"):
        report.plot(tmp_path / "x.png")


def test_json_is_complete_and_unmeasured_is_null(monkeypatch, tmp_path):
    run = Run(monkeypatch)
    for _ in range(3):
        run.step(input=4)
    report = run.meter.report()
    report.save(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read == report.to_dict()
    assert read["parts"]["transfer"]["mean_ms"] is None
    assert "CPU" in read["parts"]["transfer"]["reason"]
    assert len(read["answers"]) == 7
    assert read["answers"][4] == {
        "name": "ranks together",
        "question": "Did all ranks arrive together?",
        "value": None,
        "unit": "ms",
        "verdict": "not measured",
        "evidence": "single process",
        "fix": None,
    }
    assert read["findings"][0]["fix"] == report.findings[0].fix == read["answers"][0]["fix"]
    assert read["versions"]["torch"] == str(torch.__version__)


@pytest.mark.parametrize(("columns", "widest"), [(40, 80), (80, 80), (97, 97), (200, 100)])
def test_text_fits_the_terminal_and_says_everything(monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", str(columns))
    run = Run(monkeypatch)
    for _ in range(3):
        run.step(input=4, checkpoint=3, inside=2)
    report = run.meter.report()
    text = str(report)
    assert max(map(len, text.splitlines())) <= widest
    assert text == text.rstrip()
    assert "\x1b" not in text
    words = " ".join(text.split())
    for part in (
        *(part for part in report.parts if part not in ("compilation", "garbage")),
        "35,714 tokens/s",
    ):
        assert part in words
    assert words.startswith(report.verdict)
    for answer in report.answers:
        assert answer.name in words
    for finding in report.findings:
        assert f"{finding.gain_ms:.2f} ms" in words


def test_square_brackets_in_names_are_printed_as_they_are(monkeypatch):
    run = Run(monkeypatch)
    run.comm.publish(
        Span("communication", "all_reduce [red]w[/]", run.clock.host + 17 * MS, run.clock.host + 18 * MS, 8)
    )
    run.step()
    assert "[red]w[/]" in " ".join(str(run.meter.report()).split())


def test_plot_range(monkeypatch, tmp_path):
    run = Run(monkeypatch)
    run.step()
    with pytest.raises(ValueError, match="steps=9"):
        run.meter.report().plot(tmp_path / "x.png", steps=9)
    with pytest.raises(TypeError, match="steps=True"):
        run.meter.report().plot(tmp_path / "x.png", steps=True)


@pytest.mark.parametrize("method", ["plot", "save"])
def test_a_path_is_a_path(monkeypatch, method):
    run = Run(monkeypatch)
    run.step()
    with pytest.raises(TypeError, match="path=5: give the name of a file"):
        getattr(run.meter.report(), method)(5)
