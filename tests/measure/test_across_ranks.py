import pytest
import torch
import torch._dynamo  # DDP and optimizers import it; here once, and not in each rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlapkit import replicate, shard
from overlapkit.measure import StepMeter
from overlapkit.measure.summary import PARTS
from tests.ranks import run_ranks


def measured(wrap, steps=3):
    """Some steps of a small model; the report as a dictionary."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StepMeter(model, optimizer)
    for x in meter.steps([torch.randn(8, 64)] * steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = meter.report()
    for record in report.records:
        assert sum(getattr(record, part) or 0 for part in PARTS) == record.period
        assert record.forward > 0
        assert record.backward > 0
    return report.to_dict()


def three_wrappers(rank):
    return rank, measured(DistributedDataParallel), measured(replicate, 12), measured(shard, 12)


@pytest.fixture(scope="module")
def reports():
    return run_ranks(2, three_wrappers)


def test_a_foreign_wrapper_is_unmeasured_with_the_reason(reports):
    for rank, foreign, *_ in reports:
        assert (foreign["rank"], foreign["world"]) == (rank, 2)
        part = foreign["parts"]["communication"]
        assert part["mean_ms"] is None
        assert "foreign wrapper: DistributedDataParallel" in part["reason"]
        assert foreign["answers"][3]["value"] is None
        assert "ranks are compared after 5 measured steps" in foreign["answers"][4]["evidence"]


def test_our_wrappers_communication_is_measured(reports):
    for _, _, replicated, sharded in reports:
        for report in (replicated, sharded):
            assert report["parts"]["communication"]["mean_ms"] > 0
            assert report["answers"][3]["value"] >= 0  # a bucket became ready within backward
        gradients = 4 * (64 * 64 + 64) * 4
        assert replicated["parts"]["communication"]["bytes"] == gradients
        assert sharded["parts"]["communication"]["bytes"] >= 2 * gradients


def test_what_lies_within_the_parts_of_a_step_of_several_ranks(reports):
    forward = 4 * 2 * 8 * 64 * 64
    for _, _, replicated, sharded in reports:
        for report in (replicated, sharded):
            detail = report["detail"]
            assert detail["flops"] == 3 * forward - forward / 4  # the first layer's input needs no gradient
            assert len(detail["passes"]) == 1
            assert detail["buckets"][-1]["end_ms"] >= detail["buckets"][0]["start_ms"] >= 0
        assert {name for bucket in replicated["detail"]["buckets"] for name in bucket["parameters"]} == {
            f"{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")
        }
        units = [one["unit"] for one in sharded["detail"]["gathers"]]
        assert len(units) == len(set(units)) >= 4
        assert sum(one["exposed_ms"] for one in sharded["detail"]["gathers"]) > 0
