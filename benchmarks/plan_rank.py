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
    batch = torch.ones(1, requires_grad=True)
    answer = _measure(task, batch) if task["task"] == "profile" else _train(task, batch)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(answer))


def _model(task: dict[str, Any]) -> Model:
    return Model(task["blocks"], task["elements"], task["seconds"])


def _measure(task: dict[str, Any], batch: Tensor) -> dict[str, Any]:
    found = profile(_model(task), batch, tokens=1, steps=3)
    return {"profile": found.to_json(), "link": probe_link(repeats=3).to_json()}


def _train(task: dict[str, Any], batch: Tensor) -> dict[str, Any]:
    """Each variant in turns, one step a round; what the first rounds pay once is left out."""
    models = {one["name"]: _wrapped(task, one) for one in task["variants"]}
    meters = {name: ok.StepMeter(model=model) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(WARMUP + task["rounds"]):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            with meters[name].step():
                model(batch).backward()
            if turn >= WARMUP:
                times[name].append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
    answer = {}
    for name, meter in meters.items():
        records = meter.report(task["rounds"]).records
        exposed = [(record.communication or 0) / (record.period - record.outside) for record in records]
        answer[name] = {"step_s": median(times[name]), "exposed": median(exposed)}
        meter.close()
    return answer


def _wrapped(task: dict[str, Any], variant: dict[str, Any]) -> nn.Module:
    plan = None if variant["plan"] is None else ShardPlan.from_json(variant["plan"])
    wrap = ok.shard if variant["wrapper"] == "shard" else ok.replicate
    return wrap(_model(task), plan=plan)


if __name__ == "__main__":
    main()
