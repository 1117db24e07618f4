"""The trace for Perfetto: valid as Chrome's trace events, and as long as the report says."""

import gzip
import json
import os
from collections import defaultdict

import pytest
import torch
from torch import nn

from overlapkit.measure import StepMeter, TraceError, explain
from overlapkit.measure import meter as module
from overlapkit.span import Span
from tests.fake_clock import FakeClock, FakeComponent
from tests.measure.traces.hand import HandTrace

MS = 1_000_000


class Shown:
    """A file as a viewer reads it; what no viewer takes is an error.

    The rules are those of the format's document ("Trace Event Format", Google): complete, instant, counter
    and metadata events, and slices of one thread that nest.
    """

    def __init__(self, path):
        raw = path.read_bytes()
        whole = json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)
        self.about, self.events = whole["otherData"], whole["traceEvents"]
        assert whole["displayTimeUnit"] == "ms"
        self.processes, self.tracks = {}, {}
        self.slices, self.instants, self.counters = defaultdict(list), defaultdict(list), defaultdict(list)
        for event in self.events:
            assert type(event["pid"]) is int
            assert event["pid"] > 0
            assert type(event["tid"]) is int
            assert isinstance(event["name"], str)
            getattr(self, {"M": "_meta", "X": "_slice", "i": "_instant", "C": "_counter"}[event["ph"]])(event)
        for slices in self.slices.values():
            self._nest(slices)

    def _meta(self, event):
        kind, value = event["name"], event["args"]
        if kind == "process_name":
            self.processes[event["pid"]] = value["name"]
        elif kind == "thread_name":
            self.tracks[event["pid"], event["tid"]] = value["name"]
        else:
            assert kind in ("process_sort_index", "thread_sort_index")
            assert type(value["sort_index"]) is int

    def _slice(self, event):
        assert event["ts"] >= 0 or event["cat"] == "overlapkit"
        assert event["dur"] >= 0
        self.slices[event["pid"], event["tid"]].append(event)

    def _instant(self, event):
        assert event["s"] == "t"
        self.instants[self.tracks[event["pid"], event["tid"]]].append((event["name"], event["ts"]))

    def _counter(self, event):
        assert all(type(value) in (int, float) for value in event["args"].values())
        self.counters[event["name"]].append((event["ts"], event["args"]["value"]))

    def _nest(self, slices):
        open_until = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-6, event
            open_until.append(end)

    def on(self, track, pid=1):
        """(name, start, end) in ms of a lane's slices, over all its tracks."""
        found = [
            e
            for key, slices in self.slices.items()
            if self.tracks[key] == track and key[0] == pid
            for e in slices
        ]
        return sorted(
            (e["name"], round(e["ts"] / 1e3, 6), round((e["ts"] + e["dur"]) / 1e3, 6)) for e in found
        )


@pytest.fixture
def report(monkeypatch):
    """Two steps of 22 ms: 2 input, 6 forward, 10 backward, 3 of an all-reduce's tail, 1 optimizer."""
    clock = FakeClock()
    monkeypatch.setattr(module, "clock_of", lambda device: clock)
    loader, comm = FakeComponent(clock), FakeComponent(clock)
    model = nn.Linear(1, 1)
    model.__dict__["timings"] = comm.timings
    meter = StepMeter(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in range(3):
        loader.wait("input", 2 * MS)
        with meter.step(tokens=11):
            meter._turn("forward")
            clock.host += 6 * MS
            meter._turn("backward")
            start = clock.host
            clock.host += 10 * MS
            for name, begin, ready in (("all_reduce a", 4, 3), ("all_reduce b", 6, 5)):
                comm.publish(
                    Span(
                        "communication",
                        name,
                        start + begin * MS,
                        clock.host + 2 * MS,
                        512,
                        ready=start + ready * MS,
                        parameters=("w", "b"),
                    )
                )
            comm.publish(
                Span("communication", "all_reduce tail", clock.host, clock.host + 3 * MS, exposed=True)
            )
            clock.host += 3 * MS
            meter._turn("optimizer")
            clock.host += 1 * MS
    return meter.report()


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_meters_steps(report, tmp_path, name):
    report.to_perfetto(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    shown = Shown(tmp_path / name)
    assert shown.processes == {1: "rank 0 of 1 on cpu"}
    assert shown.about["verdict"] == report.verdict
    assert shown.on("steps") == [
        ("step 1", 0, 22),
        ("step 2", 22, 44),  # the report is without step 0
    ]
    assert shown.on("compute") == [
        ("backward", 8, 18),
        ("backward", 30, 40),
        ("forward", 2, 8),
        ("forward", 24, 30),
    ]
    assert shown.on("optimizer") == [("optimizer", 21, 22), ("optimizer", 43, 44)]
    assert shown.on("input: exposed") == [("wait", 0, 2), ("wait", 22, 24)]
    assert shown.on("communication: exposed") == [("all_reduce tail", 18, 21), ("all_reduce tail", 40, 43)]
    assert shown.on("communication")[:2] == [("all_reduce a", 12, 20), ("all_reduce a", 34, 42)]
    assert list(shown.tracks.values()).count("communication") == 2  # two at a time
    assert shown.instants["communication"][:2] == [
        ("ready: all_reduce a", 11e3),
        ("ready: all_reduce a", 33e3),
    ]
    assert shown.counters["tokens/s"] == [(0, 500), (22e3, 500)]
    assert shown.counters["exposed %"] == [
        (0, pytest.approx(100 * 5 / 22)),
        (22e3, pytest.approx(100 * 5 / 22)),
    ]
    told = next(event["args"] for event in shown.events if event["name"] == "step 1")
    assert told["backward_ms"] == 10
    assert told["communication_ms"] == 3
    assert "transfer_ms" not in told  # not measured
    told = next(event["args"] for event in shown.events if event["name"] == "all_reduce a")
    assert told == {"bytes": 512, "parameters": "w, b"}
    names = list(shown.tracks.values())
    assert (
        names.index("input") < names.index("compute") < names.index("optimizer") if "input" in names else True
    )


def test_exposed_time_is_what_the_report_says(report, tmp_path):
    report.to_perfetto(tmp_path / "a.json")
    shown = Shown(tmp_path / "a.json")
    for lane in ("input", "communication"):
        total = sum(end - start for _, start, end in shown.on(f"{lane}: exposed"))
        assert total == pytest.approx(report.steps * report.parts[lane].mean_ms)


def hand(tmp_path, rank, ahead=0):
    made = HandTrace(rank, 2)
    made.step(5, 0 + ahead, 1000 + ahead)
    made.backward(0 + ahead, 500 + ahead)
    for launch, start, end in ((10, 100, 400), (20, 420, 700)):
        made.work("gemm", start + ahead, end + ahead, launch + ahead, thread=101)
    # collectives end at the same time on both; rank 1 comes 200 late
    late = 200 * rank
    for end in (600, 650, 900):
        made.collective(end - 250 + late + ahead, end + ahead, 30 + ahead, thread=101, stream=20 + end)
    made.copy(700 + ahead, 720 + ahead, 40 + ahead)
    return made.write(tmp_path / f"rank{rank}.json")


def test_ranks_of_a_trace_are_on_one_clock(tmp_path):
    report = explain([hand(tmp_path, 0), hand(tmp_path, 1, ahead=50_000)])
    report.to_perfetto(tmp_path / "out.json")
    shown = Shown(tmp_path / "out.json")
    assert shown.processes == {1: "rank 0 on device 0", 2: "rank 1 on device 0"}
    ends = [[end for _, _, end in shown.on("communication", pid)] for pid in (1, 2)]
    assert ends[0] == ends[1]
    starts = [[start for _, start, _ in shown.on("communication", pid)] for pid in (1, 2)]
    assert [b - a for a, b in zip(*starts, strict=True)] == pytest.approx([0.2] * 3)
    assert [name for name, _, _ in shown.on("communication")] == ["AllReduce"] * 3
    assert [name for name, *_ in shown.on("transfer")] == ["host to device, pageable"]
    for place, one in enumerate(report.trace.ranks):
        exposed = sum(end - start for _, start, end in shown.on("communication: exposed", place + 1))
        assert exposed == pytest.approx(one.lanes.exposed_communication / 1e6)
    ready = {name for name, _ in shown.instants["communication"]}
    assert ready == {"ready: AllReduce"}


def test_waiting_for_input_is_exposed_where_the_device_had_nothing_to_do(tmp_path):
    made = HandTrace(0, 1)
    made.step(1, 0, 1000)
    made.work("gemm", 100, 400, launch=10)
    made.add("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 300, 500)
    made.work("gemm", 700, 900, launch=650)
    report = explain(made.write(tmp_path / "a.json"))
    report.to_perfetto(tmp_path / "out.json")
    assert Shown(tmp_path / "out.json").on("input: exposed") == [("exposed", 0.3, 0.6)]  # 400 to 700 us
    assert report.parts["input"].mean_ms == pytest.approx(0.3)


def test_an_export_is_no_trace_of_a_profiler(report, tmp_path):
    report.to_perfetto(tmp_path / "a.json")
    with pytest.raises(TraceError, match=r"no kernel, copy or operator among them: is it torch.profiler's"):
        explain(tmp_path / "a.json")


def test_nothing_to_write(tmp_path):
    with pytest.raises(ValueError, match="no step has been recorded yet"):
        StepMeter().report().to_perfetto(tmp_path / "a.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("method", ["to_perfetto", "save"])
def test_a_file_is_whole_or_as_it_was(report, tmp_path, monkeypatch, method):
    path = tmp_path / "a.json"
    path.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *names: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(report, method)(path)
    assert (os.listdir(tmp_path), path.read_text()) == (["a.json"], "before")
    getattr(report, method)(path)
    json.loads(path.read_text())
    with pytest.raises(FileNotFoundError):
        getattr(report, method)(tmp_path / "none" / "a.json")
    with pytest.raises(TypeError, match="path=5: give the name of a file"):
        getattr(report, method)(5)
