"""Traces that torch.profiler makes here and now."""

import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

from overlapkit.measure import explain
from tests.ranks import run_ranks

SLEEP_S = 0.03


def train(model, path, late_s=0.0):
    """Three steps are recorded; `late_s` is slept in each, before forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8)
    with (
        warnings.catch_warnings(),
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            profile_memory=True,
        ) as profiler,
    ):
        warnings.simplefilter("ignore")  # that it forgets a cycle's events once they are handed over
        for (batch,) in loader:
            time.sleep(late_s)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def model():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])


def test_one_process(tmp_path):
    train(model(), tmp_path / "t.json.gz", SLEEP_S)
    report = explain(tmp_path / "t.json.gz")
    assert [step.number for step in report.trace.steps] == [1, 2, 3]
    record = max((step.record for step in report.trace.steps), key=lambda one: one.index)
    for part in ("forward", "backward", "optimizer", "input"):
        assert getattr(record, part) > 0, part
    assert record.other >= SLEEP_S * 1e9  # between batch and forward nothing happens
    told = {answer.name: answer for answer in report.answers}
    assert told["communication left"].value is None
    assert told["peak memory"].value > 0


@pytest.mark.timeout(60)
def test_a_rank_that_is_late_is_named(tmp_path):
    def job(rank):
        train(
            DistributedDataParallel(model(), bucket_cap_mb=0.02), tmp_path / f"r{rank}.json", SLEEP_S * rank
        )

    run_ranks(2, job)
    report = explain(tmp_path)
    arrivals = report.trace.arrivals
    assert arrivals.straggler.rank == 1
    assert arrivals.ranks[1].last > arrivals.ranks[0].last
    assert arrivals.ranks[0].waited >= 2 * SLEEP_S * 1e9
    assert len(report.trace.steps) == 6
    assert all(step.buckets and step.tail is not None for step in report.trace.steps)
    finding = next(one for one in report.findings if one.lane == "communication")
    assert finding.component == "rank 1"
