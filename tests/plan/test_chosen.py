"""From a model to a plan that `shard` and `replicate` take: what is trained is what one process trains."""

import pytest
import torch
import torch._dynamo  # noqa: F401 # DDP imports it; here once, and not in each rank
from torch import nn

import overlapkit as ok
from overlapkit.parallel import ShardPlan, describe
from overlapkit.plan import choose, probe_link, profile
from tests.plan.models import Small
from tests.ranks import run_ranks


class Loss(nn.Module):
    """Without batch statistics, which ranks would not share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Small(width=32, blocks=4)
        self.inner.norm = nn.Identity()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(x, y)


def seeded() -> tuple[Loss, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Loss(), torch.randint(50, (4, 8)), torch.randint(50, (4, 8))


def trained(rank: int) -> list[tuple[str, list[torch.Tensor]]]:
    """Gradients of the whole batch, under a plan of each wrapper."""
    found = []
    for wrapper, wrap in (("shard", ok.shard), ("replicate", ok.replicate)):
        model, x, y = seeded()
        measured = profile(model, (x[:2], y[:2]), tokens=16, steps=1)
        link = probe_link(sizes=(1024, 1 << 16), repeats=1)
        plan = choose(measured, link, wrapper=wrapper)  # type: ignore[arg-type]
        shared = [plan.to_json()]
        torch.distributed.broadcast_object_list(shared)  # each rank's times differ a little
        plan = ShardPlan.from_json(shared[0])
        measured.check_model(model)
        wrapped = wrap(model, plan=plan)
        if wrapper == "shard":
            units = [tuple(row.name.split("+")) for row in describe(wrapped).units[:-1]]
            assert units == list(plan.units or ())
        mine = slice(2 * rank, 2 * rank + 2)
        wrapped(x[mine], y[mine]).backward()
        gradients = [p.grad for p in wrapped.parameters()]
        found.append((wrapper, [getattr(g, "full_tensor", lambda g=g: g)() for g in gradients]))
    return found


def test_what_is_chosen_is_taken_and_trains_as_one_process() -> None:
    model, x, y = seeded()
    model(x, y).backward()
    expected = [p.grad for p in model.parameters()]
    for wrapper, gradients in run_ranks(2, trained)[0]:
        for ours, theirs in zip(gradients, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6), wrapper
