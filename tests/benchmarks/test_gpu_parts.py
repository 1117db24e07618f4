"""The parts of the GPU run that have files of their own, on the CPU: figures, goals, what is refused."""

import gc
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import budget
import ceilings
import gpu_checkpoint
import gpu_input
import gpu_jobs
import gpu_step
import saving
from budget import Budget
from figure import Figure
from harness import Measurement, alternate, returned_seconds
from marks import mark, seconds_between
from tests.cuda_fake import fake_cuda

CPU = torch.device("cpu")


def run(module: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> dict[str, Any]:
    words = [f"{module.__name__}.py", "--quick", "--device", "cpu", "--json", str(path / "report.json")]
    monkeypatch.setattr(sys, "argv", [*words, *options])
    assert module.main() in (0, 3)
    return json.loads((path / "report.json").read_text())


def test_the_input_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = {f["name"]: f for f in run(gpu_input, monkeypatch, tmp_path)["figures"]}
    for name in ("ours", "ours over DataLoader"):
        assert figures[f"exposed, {name}"]["goal"].startswith("<= ")
        assert figures[f"step, {name}"]["goal"] == "<= 1.01 x compute only"
    for name in ("pageable", "DataLoader"):
        assert figures[f"exposed, {name}"]["value"] is not None
        assert figures[f"step, {name}"]["peer"] == "compute only"
    assert figures["exposed, pinned: needs a GPU"]["value"] is None


def test_a_batch_that_is_not_the_one_that_was_meant_ends_the_input_part() -> None:
    step = gpu_input.Step(CPU, 1e-4, 8)
    batches = [torch.full((2,), float(k)) for k in range(gpu_input.DISTINCT)]
    count = gpu_input.SETTLE + 3
    right = [batches[k % gpu_input.DISTINCT] for k in range(count)]
    loop = gpu_input.Loop(step, lambda: right, [batch.sum() for batch in batches])
    assert loop() > 0
    assert len(loop.exposed) == 2
    right[3] = right[2]  # as a buffer that is filled too early
    with pytest.raises(RuntimeError, match=r"steps \[3\] of 8"):
        loop()


def test_a_peer_that_fails_costs_no_other_figure() -> None:
    def broken() -> Any:
        raise OSError("no space left in /dev/shm")

    def hanging() -> Any:
        time.sleep(100)

    step = gpu_input.Step(CPU, 1e-4, 8)
    failed = gpu_input.Loop(step, broken, [torch.zeros(())] * 4)
    assert gpu_input.why_not(failed, 60.0) == "OSError: no space left in /dev/shm"
    hung = gpu_input.Loop(step, hanging, [torch.zeros(())] * 4)
    assert gpu_input.why_not(hung, 0.01) == "TimeoutError: the time is up"
    assert gpu_input.failure("DataLoader", "no space").met is None
    assert gpu_input.failure("ours over DataLoader", "no space").met is False


def test_the_checkpoint_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_checkpoint, "STATE", 200 << 20)  # of which --quick takes a MiB
    monkeypatch.setattr(gpu_checkpoint, "write_rate", lambda folder: 1e9)
    report = run(gpu_checkpoint, monkeypatch, tmp_path, "--folder", str(tmp_path))
    figures = {f["name"]: f for f in report["figures"]}
    assert figures["state, on a disk that writes 1.00 GB/s"]["value"] == pytest.approx(1e-3, rel=0.1)
    assert figures["stall, ours"]["goal"] == "<= 5 ms"
    assert figures["exposed, ours"]["goal"] == "<= 0.1 x dcp.async_save"
    for name in gpu_checkpoint.WAYS:
        parts = [figures[f"{part}, {name}"]["value"] for part in ("stall", "slowdown", "exposed")]
        assert parts[0] + parts[1] == pytest.approx(parts[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


def test_a_save_that_had_no_second_is_reported_as_such(tmp_path: Path) -> None:
    setting = saving.Setting("small", 1 << 16, 8, 1, 1e-3, tmp_path, "cpu")
    once = gpu_checkpoint.measure(setting, "ours", tmp_path, Budget(1e-9))
    assert (once["saves"], once["stall"]) == (1, once["first"])
    names = [figure.name for figure in gpu_checkpoint.figures_of({"ours": once})]
    assert "all of ours are of its first save, for want of time" in names


@pytest.mark.parametrize(
    ("rate", "free", "where", "gigabytes"),
    [
        (3e9, 100, "disk", 10),  # all of it, in 60 s
        (3e8, 100, "/dev/shm", 10),  # the disk would take 1.5 GB in that time
        (3e9, 20, "/dev/shm", 10),  # two saves of 10 GB have no room there
    ],
)
def test_where_and_how_much_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rate: float, free: int, where: str, gigabytes: int
) -> None:
    sizes = {tmp_path: free * 10**9, gpu_checkpoint.SHM: 60 * 10**9}
    monkeypatch.setattr(gpu_checkpoint, "write_rate", lambda folder: rate)
    monkeypatch.setattr(gpu_checkpoint, "available_memory", lambda: 100 * 10**9)
    found = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=sizes[folder]))
    monkeypatch.setattr(gpu_checkpoint, "shutil", found)
    place = gpu_checkpoint.choose(tmp_path, 10 * 10**9, CPU, 60.0)
    assert where in place.why
    assert place.nbytes == gigabytes * 10**9


def test_the_step_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eager only: compiling takes half a minute here."""
    eager = {name: flags for name, flags in gpu_step.VARIANTS.items() if not flags[1]}
    monkeypatch.setattr(gpu_step, "VARIANTS", eager)
    monkeypatch.setattr(gpu_step, "SMALL", gpu_step.SMALL[:1])
    report = run(gpu_step, monkeypatch, tmp_path, "--png", str(tmp_path / "step.png"))
    figures = {f["name"]: f for f in report["figures"]}
    assert figures["tiny, ours"]["goal"] == ">= 1 x eager"
    assert figures["tiny, ours"]["ratio"] > 0
    assert figures["tiny, ours: step"]["goal"] == "<= 1.05 x its compute"
    assert figures["tiny, eager: step"]["goal"] is None
    assert report["details"]["tiny, ours"]["steps"] > 0
    assert len(json.dumps(report["details"])) < 2**20  # gpu.json holds a few of them, below 16 MB
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_the_models_of_the_step_part_are_as_large_as_they_are_called() -> None:
    for size, wanted in zip(gpu_step.SIZES, (124e6, 1e9), strict=True):
        with torch.device("meta"):
            model = gpu_jobs.GPT(size.vocab, size.width, size.layers, size.heads, size.window, True)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(wanted, rel=0.02)
        matrices = size.flops_per_token(count) / 6 - size.layers * size.width * size.window
        assert matrices == count


def test_whole_models_and_their_blocks_are_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model: seen.append(model) or model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: seen.append(module))
    model = gpu_jobs.GPT(16, 32, 2, 4, 8, True)
    gpu_jobs.compile_(model, True, False)
    assert seen == [model]
    for ours, more in ((True, []), (False, [model.norm, model.loss])):
        seen.clear()
        gpu_jobs.compile_(model, False, ours)
        assert seen == [*model.blocks, *more]


def test_a_budget_leaves_out_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def one() -> list[Figure]:
        return [Figure("x", 1.0, "s")]

    def broken() -> list[Figure]:
        raise ValueError("no such kernel\nmore")

    assert Budget(None).attempt(1e9, "x", one) == one()
    assert capsys.readouterr().out == "x: 1.00 s\n"  # a log has it, whatever comes later
    (left_out,) = Budget(5.0).attempt(10.0, "x", one)
    assert (left_out.name, left_out.goal, left_out.met) == ("x: no time left", "<= 0 left out", False)
    (failed,) = Budget(None).attempt(0.0, "x", broken)
    assert (failed.name, failed.met) == ("x: ValueError: no such kernel", False)
    assert "Traceback" in capsys.readouterr().err


def test_a_device_that_is_broken_costs_no_figure_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def sticky() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", sticky)
    (failed,) = Budget(None).attempt(0.0, "x", lambda: sticky())  # type: ignore[func-returns-value]
    assert failed.name == "x: AcceleratorError: CUDA error: an illegal memory access was encountered"


def test_what_overruns_its_budget_is_ended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the whole part would be stopped before it has written what it knows."""

    def deaf() -> list[Figure]:
        with suppress(TimeoutError):  # as an error in a callback is lost
            time.sleep(100)
        time.sleep(100)
        return []

    monkeypatch.setattr(budget, "AGAIN_S", 0.05)
    (late,) = Budget(0.05).attempt(0.0, "x", deaf)
    assert (late.name, late.met) == ("x: TimeoutError: the time is up", False)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    (stuck,) = Budget(None).attempt(0.0, "x", lambda: time.sleep(100), at_most=0.05)  # type: ignore[arg-type,func-returns-value]
    assert stuck.name == "x: TimeoutError: the time is up"


def test_rounds_end_with_their_time_but_one_is_timed() -> None:
    calls = []
    turns = {"a": lambda: calls.append(0) or 1.0, "b": lambda: 2.0}
    took = alternate(turns, rounds=100, warmup=0, timer=returned_seconds, limit_s=-1.0)
    assert {name: one.samples for name, one in took.items()} == {"a": (1.0,), "b": (2.0,)}
    assert calls == [0]


def test_marks_of_a_gpu_are_events_of_its_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = object(), iter([10.0, 30.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.waited = False

        def record(self, on: object) -> None:
            assert on is stream
            self.at = next(now)

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, end: "Event") -> float:
            assert end.waited
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    start, end = mark(torch.device("cuda", 0)), mark(torch.device("cuda", 0))
    assert seconds_between(start, end) == 0.02
    assert 0 <= seconds_between(mark(CPU), mark(CPU)) < 60


def test_speed_of_a_step_is_beside_its_peer_and_its_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    size = gpu_step.SIZES[0]
    took = {
        name: {"whole": Measurement("whole", (whole,)), "compute": Measurement("compute", (compute,))}
        for name, whole, compute in (("torch.compile", 0.05, 0.05), ("ours + torch.compile", 0.04, 0.039))
    }
    device = torch.device("cuda", 0)
    figures = gpu_step.speed_figures(size, "ours + torch.compile", took, 2e13, device, 8e14)
    rate, step, share, mfu = figures
    assert (rate.value, rate.peer_value, rate.met) == (16_384 / 0.04, 16_384 / 0.05, True)
    assert step.ratio == pytest.approx(0.04 / 0.039)
    assert share.value == pytest.approx(100 * 2e13 / 0.04 / 8e14)
    assert mfu.value == pytest.approx(100 * 2e13 / 0.04 / 989.4e12)


def test_the_prefetcher_that_is_a_peer_orders_what_it_does() -> None:
    with fake_cuda() as machine:
        source = [torch.full((4,), float(k)) for k in range(6)]
        for batch in source:
            machine.pinned[batch.untyped_storage().data_ptr()] = batch.nbytes
        seen = []
        for batch in gpu_input.prefetched(source, torch.device("cuda", 0), lambda there: there * 2):
            seen.append((batch + 0).raw.sum().item())
            del batch
        gc.collect()
        assert seen == [8.0 * k for k in range(6)]
        assert machine.faults == []


def test_what_a_copy_reaches_alone_is_beside_that_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("host to device", "device to host")
    copies = dict.fromkeys(names, lambda: None), dict.fromkeys(names, 10**9)
    monkeypatch.setattr(ceilings, "copies", lambda nbytes, device: copies)
    for module in (gpu_input, gpu_checkpoint):
        monkeypatch.setattr(module, "timer_for", lambda device: lambda variant: 0.02)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device = torch.device("cuda", 0)
    spans = [SimpleNamespace(name="copy", bytes=40 * 10**9, start=0, end=10**9)]
    (into,) = gpu_input.copy_rate(SimpleNamespace(timings=lambda: spans), device)
    (out,) = gpu_checkpoint.staging_rate({"ours": {"staging": 40.0}}, device)
    assert [(one.value, one.peer_value) for one in (into, out)] == [(40.0, 50.0)] * 2
    assert gpu_checkpoint.staging_rate({"ours": {"staging": float("nan")}}, device) == []
