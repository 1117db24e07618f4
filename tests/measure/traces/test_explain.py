"""explain() on traces written by hand, whose answers are known."""

import json

import pytest

from overlapkit.measure import StepReport, TraceError, explain
from tests.measure.traces.hand import HOST, HandTrace

AUTOGRAD = HOST + 1


def lanes_us(report):
    return {name: round(value, 3) for name, value in report.trace.lanes_us.items()}


def answers(report):
    return {one.name: one for one in report.answers}


def test_lanes_of_a_whole_trace(tmp_path):
    made = HandTrace()
    made.work("gemm", 100, 200)
    made.work("gemm again, on another stream", 150, 220, stream=8)
    made.collective(210, 260)
    made.copy(250, 300)
    made.copy(290, 310, name="Memset (Device)")
    made.work("gemm", 400, 410.5)
    report = explain(made.write(tmp_path / "t.json"))
    assert lanes_us(report) == {
        "compute": 130.5,
        "exposed_communication": 40,
        "exposed_copy": 50,
        "idle": 90,
        "span": 310.5,
        "communication": 50,
        "copy": 60,
    }
    assert report.trace.overlap == pytest.approx(20)
    assert (report.first_step, report.last_step, report.trace.steps) == (None, None, ())


def test_work_belongs_to_the_step_that_launched_it_however_late_it_runs(tmp_path):
    """The host is two steps ahead of the device, and work of unknown launch follows its stream."""
    made = HandTrace()
    for number, start in enumerate((0, 10, 20)):
        made.step(number, start, start + 10)
    made.work("before the recording", -50, -40)
    made.work("a", 100, 110, launch=1)
    made.work("b", 110, 140, launch=11)
    made.work("of a graph", 140, 145)
    made.work("c", 145, 185, launch=21)
    made.copy(120, 125, launch=22, stream=9)
    report = explain(made.write(tmp_path / "t.json"))
    steps = {step.number: step for step in report.trace.steps}
    assert [steps[n].lanes.compute for n in (0, 1, 2)] == [10_000, 35_000, 40_000]
    assert [steps[n].lanes.span for n in (0, 1, 2)] == [10_000, 35_000, 65_000]
    assert steps[2].lanes.idle == 20_000
    assert report.trace.lanes_us["compute"] == 95


def test_a_copy_under_the_compute_of_the_step_before_is_hidden(tmp_path):
    """The host runs a step ahead: each batch is copied while the device still computes the step before."""
    made = HandTrace()
    for number in range(4):
        made.step(number, 10 * number, 10 * number + 10)
        made.add("cpu_op", "aten::linear", 10 * number + 2, 5)
        made.copy(1000 * (number - 1) + 100, 1000 * (number - 1) + 600, launch=10 * number + 1, stream=9)
        made.work("gemm", 1000 * number, 1000 * number + 1000, launch=10 * number + 3)
    report = explain(made.write(tmp_path / "t.json"))
    first, *others = report.trace.steps
    assert (first.copies.exposed, first.record.transfer, first.idle) == (500_000, 500_000, 400_000)
    for step in others:
        assert (step.record.period, step.record.forward) == (1_000_000, 1_000_000)
        assert (step.record.transfer, step.copies.total, step.copies.exposed) == (0, 500_000, 0)
        assert (step.idle, step.host_wait, step.record.other) == (0, 0, 0)
    whole = report.trace.ranks[0].lanes
    assert sum(step.record.period for step in report.trace.steps) == whole.span
    assert sum(step.record.transfer for step in report.trace.steps) == whole.exposed_copy


def test_a_step_that_ends_before_the_one_before_it_takes_no_time(tmp_path):
    made = HandTrace()
    for number in range(2):
        made.step(number, 10 * number, 10 * number + 10)
    made.work("long", 0, 1000, launch=1)
    made.work("short, on another stream", 100, 200, launch=11, stream=8)
    report = explain(made.write(tmp_path / "t.json"))
    assert [step.record.period for step in report.trace.steps] == [1_000_000, 0]
    assert [step.lanes.span for step in report.trace.steps] == [1_000_000, 100_000]
    report.to_perfetto(tmp_path / "lanes.json")
    assert str(report)


def test_without_any_launch_a_step_is_when_work_began(tmp_path):
    made = HandTrace()
    made.step(7, 0, 100)
    made.step(8, 100, 200)
    made.work("a", 10, 30)
    made.work("b", 90, 120)
    made.work("c", 130, 140)
    report = explain(made.write(tmp_path / "t.json"))
    assert [(s.number, s.lanes.compute) for s in report.trace.steps] == [(7, 50_000), (8, 10_000)]


def ddp(rank=0, world=1, late=0.0, clock=0.0, base_ns=0):
    """Two steps of a data-parallel run, `late` microseconds later in backward, on a clock that is ahead."""
    made = HandTrace(rank, world, base_ns)

    def at(time):
        return time + clock

    for number in (0, 1):
        zero = 1000 * number
        made.step(number, at(zero), at(zero + 990))
        made.work("forward", at(zero + 50), at(zero + 250), at(zero + 10))
        made.backward(at(zero + 20), at(zero + 60))
        made.work("backward", at(zero + 250 + late), at(zero + 450 + late), at(zero + 30), thread=AUTOGRAD)
        if rank == 0:  # it waits for the other
            first, second = zero + 460, zero + 660
        else:
            first, second = zero + 460 + late, zero + 660
        made.collective(
            at(first),
            at(zero + 560 + 100),
            at(zero + 40),
            thread=AUTOGRAD,
            **{"Collective name": "allreduce"},
            **{"In msg nelems": 1000, "dtype": "Float", "Process Group Ranks": "[0, 1]"},
        )
        made.work("backward", at(zero + 450 + late), at(zero + 640), at(zero + 45), thread=AUTOGRAD)
        made.collective(
            at(second),
            at(zero + 700),
            at(zero + 55),
            thread=AUTOGRAD,
            **{"Collective name": "allreduce", "Process Group Ranks": "[0, 1]"},
        )
        made.add("user_annotation", "Optimizer.step#AdamW.step", at(zero + 70), 20)
        made.work("adamw", at(zero + 720), at(zero + 750), at(zero + 75))
    return made


def test_buckets_and_tail(tmp_path):
    report = explain(ddp().write(tmp_path / "t.json"))
    step = report.trace.steps[1]
    assert [bucket.to_dict() for bucket in step.buckets] == [
        {"kind": "allreduce", "bytes": 4000, "late": False} | times(40, 450, 460, 660) | {"late": True},
        {"kind": "allreduce", "bytes": None, "late": True} | times(55, 640, 660, 700),
    ]
    assert step.tail == 60_000
    record = step.record
    assert (record.forward, record.backward, record.optimizer) == (200_000, 390_000, 30_000)
    assert record.communication == 60_000
    assert record.period == 1_000_000
    assert record.other == record.period - 680_000
    told = answers(report)
    assert told["communication left"].value == pytest.approx(0.06)
    assert told["buckets ready"].value == pytest.approx(0.64)
    assert (
        "2 of them, launched after 0.0, 0.1 ms; 2 too late to end before backward"
        in told["buckets ready"].evidence
    )
    assert told["ranks together"].verdict == "not measured"


def times(launch, ready, start, end):
    return {"launch_us": launch, "ready_us": ready, "start_us": start, "end_us": end}


@pytest.mark.parametrize("clock", [0, -20_000, 5e9])
@pytest.mark.parametrize("base_ns", [0, 1_700_000_000_000_000_000])
def test_a_late_rank_is_named_whatever_its_clock(tmp_path, clock, base_ns):
    ddp(0, 2, base_ns=base_ns).write(tmp_path / "rank0.json")
    ddp(1, 2, late=150, clock=clock, base_ns=base_ns).write(tmp_path / "rank1.json")
    report = explain(tmp_path)
    arrivals = report.trace.arrivals
    assert arrivals.straggler.rank == 1
    assert [one.waited for one in arrivals.ranks] == [2 * 150_000, 0]
    assert [one.last for one in arrivals.ranks] == [2, 2]  # the second of each step finds both there
    assert abs(arrivals.ranks[0].offset - arrivals.ranks[1].offset) == abs(clock) * 1000
    told = answers(report)["ranks together"]
    assert told.evidence.startswith("rank 1 arrives last")
    assert report.trace.to_dict()["arrivals"]["straggler"] == 1


def test_a_clock_is_left_alone_where_ends_differ_as_much_anyway(tmp_path):
    ddp(0, 2).write(tmp_path / "rank0.json")
    ddp(1, 2, late=150, clock=3).write(tmp_path / "rank1.json")
    arrivals = explain(tmp_path).trace.arrivals
    assert [one.offset for one in arrivals.ranks] == [0, 0]
    assert [one.waited for one in arrivals.ranks] == [2 * 153_000 + 2 * 3_000, 0]


def test_the_tail_is_split_into_transfer_and_waiting(tmp_path):
    """Rank 0 is there at 600 and waits for rank 1 until 900; backward ends on both at 500."""
    for rank, start in ((0, 600), (1, 900)):
        made = HandTrace(rank, 2)
        made.backward(0, 100)
        made.work("backward", 100, 500, 10, thread=AUTOGRAD)
        made.collective(start, 950, 20, thread=AUTOGRAD)
        made.write(tmp_path / f"rank{rank}.json")
    report = explain(tmp_path)
    assert [step.tail for one in report.trace.ranks for step in one.steps] == [450_000] * 2
    assert "0.15 ms of the tail waiting for a late rank" in answers(report)["communication left"].evidence
    assert report.trace.arrivals.transfer == 50_000
    (finding,) = [one for one in report.findings if one.lane == "communication"]
    assert finding.component == "rank 1"


def test_ranks_with_different_collectives_are_compared_step_by_step(tmp_path):
    for rank in (0, 1):
        made = HandTrace(rank, 2)
        for number in (0, 1):
            made.step(number, 1000 * number, 1000 * number + 900)
            made.collective(1000 * number + 100 + 10 * rank, 1000 * number + 200, 1000 * number + 50)
        if rank:  # its recording goes on
            made.step(2, 2000, 2900)
            made.collective(2100, 2200, 2050)
        made.write(tmp_path / f"rank{rank}.json")
    arrivals = explain(tmp_path).trace.arrivals
    assert arrivals.collectives == 2
    assert [one.waited for one in arrivals.ranks] == [20_000, 0]


def test_numbers_of_collectives_match_what_was_recorded_in_part(tmp_path):
    for rank, numbers in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        made = HandTrace(rank, 2)
        for number in numbers:
            made.collective(100 * number + 9 * rank, 100 * number + 50, Seq=number)
        made.write(tmp_path / f"rank{rank}.json")
    arrivals = explain(tmp_path).trace.arrivals
    assert (arrivals.collectives, arrivals.ranks[0].waited) == (2, 18_000)


def test_steps_that_not_all_ranks_recorded_are_not_taken_for_each_other(tmp_path):
    """Equally many collectives of the same kind, a step apart: only those of step 6 are the same ones."""
    for rank in (0, 1):
        made = HandTrace(rank, 2)
        for number in (5 + rank, 6 + rank):
            zero = 10_000 * number
            made.step(number, zero, zero + 9000)
            late = 300 if (rank, number) == (1, 6) else 0
            made.collective(zero + 1000 + late, zero + 2000, launch=zero + 500)
        made.write(tmp_path / f"rank{rank}.json")
    arrivals = explain(tmp_path).trace.arrivals
    assert arrivals.collectives == 1
    assert [(one.waited, one.offset) for one in arrivals.ranks] == [(300_000, 0), (0, 0)]


def test_a_rank_that_met_nobody_is_not_late(tmp_path):
    """Rank 0's group is recorded by no other rank; rank 3 comes last, but once."""
    for rank, group in ((0, "[0, 1]"), (2, "[2, 3]"), (3, "[2, 3]")):
        made = HandTrace(rank, 4)
        for number, late in enumerate((0, 0, 7) if rank == 2 else (500, 500, 0)):
            start = 2000 * number + (late if rank else 0)
            made.collective(start, 2000 * number + 600, Seq=number, **{"Process Group Ranks": group})
        made.write(tmp_path / f"rank{rank}.json")
    report = explain(tmp_path)
    assert report.trace.arrivals.straggler.rank == 3
    assert answers(report)["ranks together"].evidence.startswith("rank 3 arrives last at 2 of 3")


def test_of_several_groups_the_rank_that_was_late_first_is_named(tmp_path):
    """Rank 3 keeps rank 2 waiting in rows; then both are late in columns, where 0 waits for 2 and 1 for 3."""
    for rank in range(4):
        made = HandTrace(rank, 4)
        row, column = ("[0, 1]", "[2, 3]")[rank // 2], ("[0, 2]", "[1, 3]")[rank % 2]
        for number in range(3):
            zero, late = 1000 * number, 300 * (rank // 2)
            start = zero + (300 if rank == 3 else 0)
            made.collective(start, zero + 300 + late, Seq=2 * number, **{"Process Group Ranks": row})
            made.collective(zero + 300 + late, zero + 900, Seq=2 * number, **{"Process Group Ranks": column})
        made.write(tmp_path / f"rank{rank}.json")
    report = explain(tmp_path)
    arrivals = report.trace.arrivals
    assert arrivals.collectives == 12
    assert [one.late for one in arrivals.ranks] == [0, 0, 0, 900_000]
    assert [one["late_us"] for one in arrivals.to_dict()["ranks"]] == [0, 0, 0, 900]
    evidence = answers(report)["ranks together"].evidence
    assert evidence.startswith("rank 3 arrives last at 6 of 6 collectives and waits 0.00 ms")


def test_process_groups_of_the_same_ranks_count_by_themselves(tmp_path):
    """As a group of its own for reduce-scatter: both have a collective 1, and one a second."""
    for rank in (0, 1):
        made = HandTrace(rank, 2)
        for turn, (name, number) in enumerate([("1", 1), ("2", 1), ("1", 2)]):
            start = 100 * turn + (10 + turn) * rank
            args = {"Process Group Name": name, "Process Group Ranks": "[0, 1]", "Seq": number}
            made.collective(start, 100 * turn + 50, **args)
        made.write(tmp_path / f"rank{rank}.json")
    arrivals = explain(tmp_path).trace.arrivals
    assert (arrivals.collectives, arrivals.ranks[0].waited) == (3, 33_000)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("Float", 4), ("BFloat16", 2), ("Long", 8), ("Byte", 1), ("Float8_e4m3fn", 1), ("ComplexFloat", 8)],
)
def test_bytes_of_a_collective(tmp_path, dtype, size):
    made = HandTrace()
    made.collective(0, 10, **{"Collective name": "allreduce", "In msg nelems": 1000, "dtype": dtype})
    made.collective(20, 30, **{"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Quaternion"})
    said = explain(made.write(tmp_path / "t.json")).trace.ranks[0].timeline.host.collectives
    assert [one.bytes for one in said] == [1000 * size, None]


def test_what_was_waited_before_the_first_step_is_not_of_a_step(tmp_path):
    for rank in (0, 1):
        made = HandTrace(rank, 2)
        made.collective(9000 * rank, 9500, launch=-10)
        made.step(0, 9600, 10_600)
        made.work("gemm", 9700, 10_700, launch=9650)
        made.collective(10_700 + 20 * rank, 10_800, launch=9660)
        made.write(tmp_path / f"rank{rank}.json")
    report = explain(tmp_path)
    assert report.trace.arrivals.ranks[0].waited == 9_020_000
    assert answers(report)["ranks together"].value == pytest.approx(0.02 / 2)  # the mean of two ranks


def test_ranks_that_share_nothing_say_so(tmp_path):
    for rank in (0, 1):
        made = HandTrace(rank, 2)
        made.collective(1, 2, name=("ncclKernel_AllReduce_x", "ncclKernel_Broadcast_x")[rank])
        made.write(tmp_path / f"rank{rank}.json")
    report = explain(tmp_path)
    assert answers(report)["ranks together"].evidence == "no collective was recorded by several ranks"
    assert report.to_dict()["arrivals"] is None


def test_what_the_optimizer_communicates_is_no_tail(tmp_path):
    made = ddp()
    made.collective(1800, 1900, 1080)
    report = explain(made.write(tmp_path / "t.json"))
    assert [(step.tail, len(step.buckets)) for step in report.trace.steps] == [(60_000, 2)] * 2


def test_of_two_optimizers_that_step_in_turn_the_second_ends_backward(tmp_path):
    """A GAN's step: each backward has a reduction, and the second one's is the tail."""
    made = HandTrace()
    made.step(0, 0, 900)
    for launch, start in ((100, 1000), (500, 3000)):
        made.backward(launch, launch + 100)
        made.work("backward", start, start + 1000, launch + 20, thread=AUTOGRAD)
        made.collective(start + 1000, start + 1500, launch + 40, thread=AUTOGRAD)
        made.add("user_annotation", "Optimizer.step#Adam.step", launch + 150, 100)
        made.work("adam", start + 1500, start + 1600, launch + 160)
    (step,) = explain(made.write(tmp_path / "t.json")).trace.steps
    assert (step.tail, len(step.buckets)) == (500_000, 2)


def test_waiting_in_two_collectives_at_once_counts_once(tmp_path):
    for rank, starts in ((0, (100, 150)), (1, (400, 400))):
        made = HandTrace(rank, 2)
        for stream, start in enumerate(starts):
            made.collective(start, 500, start - 10, stream=20 + stream)
        made.write(tmp_path / f"rank{rank}.json")
    assert [one.waited for one in explain(tmp_path).trace.arrivals.ranks] == [300_000, 0]


def test_copies_pageable_pinned_hidden_and_exposed(tmp_path):
    made = HandTrace()
    made.work("gemm", 0, 100)
    made.copy(50, 150)
    made.copy(200, 230, name="Memcpy HtoD (Pinned -> Device)", stream=11)
    made.copy(300, 400, name="Memcpy DtoH (Device -> Pageable)")
    made.copy(400, 450, name="Memcpy DtoD (Device -> Device)")
    made.work("gemm", 450, 1000)
    report = explain(made.write(tmp_path / "t.json"))
    (one,) = report.trace.ranks
    assert (one.copies.total, one.copies.exposed, one.copies.pageable) == (130_000, 80_000, 100_000)
    told = answers(report)["copy overlapped"]
    assert told.value == pytest.approx(0.08)
    assert told.evidence == "0.13 ms of copies in the trace, 77% from pageable memory, on stream 11, 7"
    (finding,) = [one for one in report.findings if one.lane == "transfer"]
    assert finding.component == "overlapkit.DeviceLoader"
    assert "pageable" in finding.setting


def test_amd(tmp_path):
    made = HandTrace()
    made.step(3, 0, 50)
    made.work("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", 100, 200, launch=5, runtime="hipModuleLaunchKernel")
    made.collective(
        150, 240, launch=6, runtime="hipExtLaunchKernel", name="ncclDevKernel_Generic(ncclDevComm*)"
    )
    made.work("rcclGenericKernel<1, false>", 240, 250, launch=7, runtime="hipLaunchKernel")
    made.copy(250, 260, launch=8, name="CopyHostToDevice", runtime="hipMemcpyWithStream")
    made.work("__amd_rocclr_copyBuffer", 260, 270, launch=9)
    made.work("__amd_rocclr_fillBufferAligned", 270, 280, launch=10)
    report = explain(made.write(tmp_path / "t.json"))
    assert lanes_us(report) == {
        "compute": 100,
        "exposed_communication": 50,
        "exposed_copy": 30,
        "idle": 0,
        "span": 180,
        "communication": 100,
        "copy": 30,
    }
    (step,) = report.trace.steps
    assert (step.number, step.copies.total) == (3, 10_000)


def test_gloo_and_operators_of_a_host(tmp_path):
    """Nested operators count once; DataLoader's are input, gloo's thread's are communication."""
    made = HandTrace()
    made.step(0, 0, 1000)
    made.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100)
    made.add("cpu_op", "aten::stack", 10, 50)
    made.add("cpu_op", "aten::linear", 100, 100)
    made.add("cpu_op", "aten::addmm", 110, 80)
    made.backward(200, 400, HOST)
    made.add("cpu_op", "c10d::allreduce_", 390, 20)
    made.add("user_annotation", "gloo:all_reduce", 380, 320, tid=555, **{"Input Dims": [[10]]})
    made.add("cpu_op", "aten::empty", 390, 10, tid=555)
    made.add("user_annotation", "Optimizer.step#SGD.step", 800, 100)
    made.add("cpu_op", "aten::add_", 810, 40)
    report = explain(made.write(tmp_path / "t.json"))
    assert report.device == "cpu"
    assert lanes_us(report) == {
        "compute": 340,
        "exposed_communication": 300,
        "exposed_copy": 0,
        "idle": 110,
        "span": 750,
        "communication": 320,
        "copy": 0,
    }
    (step,) = report.trace.steps
    assert (step.tail, step.copies) == (300_000, None)
    record = step.record
    assert (record.forward, record.backward, record.optimizer) == (100_000, 200_000, 40_000)
    assert answers(report)["copy overlapped"].value is None


def test_a_thread_that_trains_computes_though_it_begins_sends(tmp_path):
    made = HandTrace()
    made.step(0, 0, 1000)
    made.add("user_annotation", "gloo:recv", 100, 500)
    made.add("cpu_op", "aten::linear", 200, 100)
    lanes = lanes_us(explain(made.write(tmp_path / "t.json")))
    assert (lanes["compute"], lanes["exposed_communication"]) == (100, 400)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_first_wait_for_input_counts_as_those_after_it(tmp_path, steps):
    """Each step waits for its batch from 10 to 910, but for what the one before still runs, until 60."""
    made = HandTrace()
    if steps:
        made.work("of a step that was not recorded", -50, 60)
    for number in range(steps or 1):
        zero = 1000 * number
        if steps:
            made.step(number, zero, zero + 1000)
        made.add("user_annotation", "enumerate(DataLoader)#_Single.__next__", zero + 10, 900)
        made.work("gemm", zero + 960, zero + 1060, launch=zero + 950)
    report = explain(made.write(tmp_path / "t.json"))
    assert [record.input for record in report.records] == ([850_000] * steps or [900_000])
    assert report.findings[0].lane == "input"
    assert [record.period for record in report.records] == ([1_000_000] * steps or [1_050_000])


def test_the_wait_for_input_and_for_the_host(tmp_path):
    """From 100 to 300 nothing runs: 120 of it the host is in the DataLoader, the rest it is late itself."""
    made = HandTrace()
    made.add("cpu_op", "aten::linear", 0, 10)
    made.work("a", 0, 100, launch=-10)
    made.add("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 90, 130)
    made.work("b", 300, 400, launch=290)
    made.work("c, launched long before", 450, 500, launch=295)
    report = explain(made.write(tmp_path / "t.json"))
    told = answers(report)
    assert told["batch ready"].value == pytest.approx(0.12)
    assert told["compute fed"].value == pytest.approx(0.13)
    assert told["compute fed"].evidence.startswith("for 0.08 ms of it")
    assert {one.lane for one in report.findings} == {"input", "other"}


def test_peak_memory(tmp_path):
    made = HandTrace()
    made.backward(100, 200)
    made.work("f", 10, 20, launch=5)
    made.work("b", 110, 150, launch=110, thread=AUTOGRAD)
    for ts, size in ((50, 10 << 20), (108, 30 << 20), (250, 20 << 20)):
        event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "tid": HOST, "ts": ts}
        made.events.append(event | {"args": {"Total Allocated": size, "Device Type": 1, "Device Id": 0}})
    report = explain(made.write(tmp_path / "t.json"))
    told = answers(report)["peak memory"]
    assert (told.value, told.verdict, told.evidence) == (30, "no", "allocated, in backward")
    assert report.peak_memory == 30 << 20


def test_peak_memory_of_each_device(tmp_path):
    made = HandTrace()
    for device, size in ((0, 10 << 20), (1, 30 << 20)):
        made.work("k", 10, 20, launch=5)
        made.events[-1]["args"]["device"] = device
        event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "tid": HOST, "ts": 6}
        made.events.append(event | {"args": {"Total Allocated": size, "Device Type": 1, "Device Id": device}})
    report = explain(made.write(tmp_path / "t.json"))
    assert [one.memory_peak[0] for one in report.trace.ranks] == [10 << 20, 30 << 20]
    assert report.peak_memory == 30 << 20


def test_a_healthy_step_has_no_findings(tmp_path):
    made = HandTrace()
    for number in (0, 1):
        zero = 1000 * number
        made.step(number, zero, zero + 900)
        made.add("cpu_op", "aten::linear", zero, 10)
        made.work("gemm", zero, zero + 995, launch=zero + 1)
        made.collective(zero + 100, zero + 500, launch=zero + 2)
        made.copy(zero + 200, zero + 300, launch=zero + 3, stream=9, name="Memcpy HtoD (Pinned -> Device)")
    report = explain(made.write(tmp_path / "t.json"))
    assert report.findings == ()
    assert report.verdict.startswith("Healthy: a step of 1.0 ms")


def test_two_devices_in_one_process(tmp_path):
    made = HandTrace()
    made.work("a", 0, 10)
    made.work("b", 0, 30)
    made.events[-1]["args"]["device"] = 1
    report = explain(made.write(tmp_path / "t.json"))
    assert [(one.device, one.lanes.compute) for one in report.trace.ranks] == [(0, 10_000), (1, 30_000)]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"dur": -1}, r"event 1 \(traceEvents\[1\]\): 'k' has ts=1.0 and dur=-1.0"),
        ({"ts": 1e18}, "ts=1e\\+18"),
        ({"ts": None}, "ts=None"),
        ({"dur": 1e30}, "dur=1e\\+30"),
    ],
)
def test_times_that_cannot_be(tmp_path, event, words):
    made = HandTrace()
    made.work("first", 0, 1)
    made.work("k", 1, 2)
    made.events[1] |= event
    with pytest.raises(TraceError, match=words):
        explain(made.write(tmp_path / "t.json"))


@pytest.mark.parametrize("value", [None, "7", 7.5, -3, 1 << 70, [1], {"a": 1}])
def test_numbers_of_any_kind_are_taken_as_they_come(tmp_path, value):
    made = HandTrace()
    made.work(
        "k",
        0,
        5,
        launch=0,
        **{"Collective name": value, "Seq": value, "In msg nelems": value, "dtype": value},
    )
    for event in made.events:
        event["tid"] = value
        event["args"] |= {"correlation": value, "stream": value, "device": value}
    report = explain(made.write(tmp_path / "t.json"))
    json.dumps(report.to_dict(), allow_nan=False)
    assert report.trace.lanes_us["span"] == 5


def test_a_trace_without_work_says_what_to_record(tmp_path):
    made = HandTrace()
    made.step(1, 0, 10)
    with pytest.raises(TraceError, match=r"t\.json: 1 events, but no kernel.*activities="):
        explain(made.write(tmp_path / "t.json"))


def test_a_base_that_is_no_time(tmp_path):
    made = HandTrace(base_ns=-5)
    made.work("k", 0, 1)
    with pytest.raises(TraceError, match="baseTimeNanoseconds=-5"):
        explain(made.write(tmp_path / "t.json"))


def test_the_report_as_text_json_and_picture(tmp_path):
    for rank in (0, 1):
        ddp(rank, 2, late=100 * rank).write(tmp_path / f"rank{rank}.json")
    for given in (tmp_path, tmp_path / "rank0.json"):
        report = explain(given)
        assert isinstance(report, StepReport)
        text = str(report)
        assert text.startswith(report.verdict[:40])
        assert max(map(len, text.splitlines())) <= 100
        told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert len(told["answers"]) == 7
        for lanes in (told["lanes_us"], *(step["lanes_us"] for step in told["per_step"])):
            parts = ("compute", "exposed_communication", "exposed_copy", "idle")
            assert sum(lanes[part] for part in parts) == pytest.approx(lanes["span"])
        total = sum(part.mean_ms or 0 for part in report.parts.values())
        assert total == pytest.approx(report.period_ms)
        report.plot(tmp_path / "t.png")
        assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
        report.save(tmp_path / "saved.txt")
    assert [step["rank"] for step in told["per_step"]] == [0, 0]
