"""One rank of benchmarks/plan.py: profiles a model and the link, or trains for some steps and times them.

    plan_rank.py '{"task": "profile", "blocks": 8, ...}'

Prints one line of JSON. A block's compute is a sleep, so that two cores hold several ranks, and its gradients
are written for real.
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlapkit as ok
from overlapkit.parallel import ShardPlan
from overlapkit.plan import probe_link, profile

WARMUP = 2


class _Sleep(torch.autograd.Function):
    """Forward and backward of one matrix, which take the time they are told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight.view(-1)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient, torch.full_like(weight, 1e-3), None


class Block(nn.Module):
    """A matrix of `elements` whose forward takes `seconds`, and its backward twice as long."""

    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements // 256, 256))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.seconds)


class Model(nn.Module):
    """Blocks one after the other; returns its loss."""

    def __init__(self, blocks: int, elements: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(elements, seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def main() -> None:
    task = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = Model(task["blocks"], task["elements"], task["seconds"])
    batch = torch.ones(1, requires_grad=True)
    answer = _measure(model, batch) if task["task"] == "profile" else _train(model, batch, task)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(answer))


def _measure(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    found = profile(model, batch, tokens=1, steps=3)
    return {"profile": found.to_json(), "link": probe_link(repeats=3).to_json()}


def _train(model: nn.Module, batch: Tensor, task: dict[str, Any]) -> dict[str, Any]:
    plan = None if task["plan"] is None else ShardPlan.from_json(task["plan"])
    wrap = ok.shard if task["wrapper"] == "shard" else ok.replicate
    model = wrap(model, plan=plan, **task.get("options", {}))
    meter = ok.StepMeter(model=model)
    times = []
    for turn in range(WARMUP + task["steps"]):
        dist.barrier()
        start = time.perf_counter()
        with meter.step():
            model(batch).backward()
        model.zero_grad(set_to_none=True)
        if turn >= WARMUP:
            times.append(time.perf_counter() - start)
    exposed = [record.exposed_share or 0.0 for record in meter.report(task["steps"]).records]
    meter.close()
    return {"step_s": median(times), "exposed": median(exposed)}


if __name__ == "__main__":
    main()
