"""Real traces of others, and the numbers that other tools and people got from them."""

import csv
from pathlib import Path

import pytest

from overlapkit.measure import explain

TRACES = Path(__file__).parents[4] / "shared" / "traces"

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="needs the traces in shared/traces beside the repository"
)


@pytest.fixture(scope="module")
def ddp():
    return explain(TRACES / "ddp_resnet50_a100_rank0of2.json.gz")


@pytest.fixture(scope="module")
def dlrm():
    return explain(TRACES / "dlrm_8ranks.tar.gz")


def test_ddp_communication(ddp):
    lanes = ddp.trace.lanes_us
    assert lanes["communication"] == pytest.approx(46_876.5, abs=1)
    assert lanes["exposed_communication"] == pytest.approx(39_559.5, abs=1)
    assert ddp.trace.overlap == pytest.approx(15.61, abs=0.01)
    assert (ddp.first_step, ddp.last_step, ddp.rank, ddp.world) == (4, 6, 0, 2)


def test_ddp_buckets_of_step_4(ddp):
    step = ddp.trace.steps[0]
    assert step.number == 4
    launches = [round(bucket.launch / 1e6, 1) for bucket in step.buckets]
    assert launches == [107.9, 117.7, 123.9, 149.6, 189.5]
    assert [bucket.late for bucket in step.buckets] == [False, False, False, False, True]
    assert step.tail / 1e3 == pytest.approx(1_691, abs=1)


def test_ddp_findings(ddp):
    """The host is too slow; what was exposed of communication lay where it left the device idle."""
    idle, communication = ddp.findings
    assert (idle.lane, communication.lane) == ("other", "communication")
    assert "launches too late" in idle.setting
    assert "feed the device first" in communication.setting


def test_dlrm_ranks(dlrm):
    ranks = dlrm.trace.ranks
    assert [one.rank for one in ranks] == list(range(8))
    assert ranks[0].lanes.overlap == pytest.approx(4.50, abs=0.01)
    assert ranks[0].lanes.idle / 1e3 == pytest.approx(6_419, abs=1)


def test_dlrm_arrivals(dlrm):
    arrivals = dlrm.trace.arrivals
    assert arrivals.collectives == 8
    assert arrivals.straggler.rank == 7
    assert (arrivals.ranks[7].last, arrivals.ranks[7].shared) == (5, 8)
    assert arrivals.ranks[7].waited / 1e3 == pytest.approx(1_534, abs=1)
    assert arrivals.patient.rank == 1
    assert arrivals.ranks[1].waited / 1e3 == pytest.approx(11_125, abs=1)


def test_pageable_copies():
    report = explain(TRACES / "resnet_pageable_1gpu.json.gz")
    (one,) = report.trace.ranks
    assert [time / 1e3 for time in (one.copies.total, one.copies.exposed, one.copies.pageable)] == [
        629_760
    ] * 3
    (told,) = [answer for answer in report.answers if answer.name == "copy overlapped"]
    assert "100% from pageable memory, on stream 7" in told.evidence
    # HolisticTraceAnalysis 0.5, get_temporal_breakdown: idle, compute, the rest of what is busy
    lanes = report.trace.lanes_us
    assert lanes["idle"] == pytest.approx(9_789_089, abs=1)
    assert lanes["compute"] == pytest.approx(4_103_141, abs=1)
    assert lanes["exposed_communication"] + lanes["exposed_copy"] == pytest.approx(630_681, abs=1)


def test_overlap_of_two_ranks_of_128():
    report = explain([TRACES / f"sampled_rank{rank}of128.json.gz" for rank in (0, 1)])
    assert [one.lanes.overlap for one in report.trace.ranks] == pytest.approx([14.95, 19.93], abs=0.01)
    assert [one.world for one in report.trace.ranks] == [128, 128]


def test_what_tracelens_computed():
    with (TRACES / "bert_h100_1gpu.expected.csv").open() as file:
        expected = {
            row["type"]: (float(row["time ms"]), float(row["percent"])) for row in csv.DictReader(file)
        }
    lanes = explain(TRACES / "bert_h100_1gpu.json.gz").trace.lanes_us
    ours = {
        "computation_time": lanes["compute"],
        "exposed_comm_time": lanes["exposed_communication"],
        "exposed_memcpy_time": lanes["exposed_copy"],
        "busy_time": lanes["span"] - lanes["idle"],
        "idle_time": lanes["idle"],
        "total_time": lanes["span"],
        "total_comm_time": lanes["communication"],
        "total_memcpy_time": lanes["copy"],
    }
    assert ours.keys() == expected.keys()
    for name, time in ours.items():
        assert time == pytest.approx(1e3 * expected[name][0], abs=1), name
        assert 100 * time / lanes["span"] == pytest.approx(expected[name][1], abs=0.01), name


def test_gloo_without_a_device():
    report = explain(TRACES / "gloo_cpu_rank34of300.json.gz")
    assert (report.rank, report.world, report.device) == (34, 300, "cpu")
    (step,) = report.trace.steps
    # two all-reduces on threads of their own: from the first's start to the second's end
    assert step.number == 551
    assert step.lanes.communication == 1_212_075_727_130_731 - 1_212_075_548_353_304
    assert len(report.trace.ranks[0].timeline.host.collectives) == 10


@pytest.mark.parametrize("name", [path.name for path in sorted(TRACES.glob("*.gz"))])
def test_lanes_of_every_trace_and_step_add_up(name):
    trace = explain(TRACES / name).trace
    for lanes in [one.lanes for one in (*trace.ranks, *trace.steps)]:
        parts = lanes.compute + lanes.exposed_communication + lanes.exposed_copy + lanes.idle
        assert parts == lanes.span
        assert (
            min(parts, lanes.communication - lanes.exposed_communication, lanes.copy - lanes.exposed_copy)
            >= 0
        )
