"""What a sharded unit costs the training thread on the CPU beside waiting: copies into and out of buffers.

There FSDP2 copies a unit's shards into a new buffer, what was gathered out of it, and gradients into another.
The time is that of real steps of a model that does nothing else, so pages that are touched first count, too.
"""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlapkit.parallel.fsdp import shard

LARGEST = 1 << 24
"""Bytes up to which it is measured; beyond, copies take longer in proportion."""

_UNITS = 2


class _Nothing(nn.Module):
    """One parameter and no work."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0]


def copy_seconds(group: dist.ProcessGroup, elements: int, repeats: int) -> float:
    """How long this rank copies a unit of so many float32 elements once. Every rank of the group calls it.

    In a step a unit is gathered twice and reduced once. A gather copies the rank's part and the whole, a
    reduction the whole; so the unit's time is that of 3 + 2 / ranks such copies.

    Args:
        group: Of host tensors.
        elements: A multiple of the ranks.
        repeats: How many steps are timed, after one to warm up.
    """
    model = nn.Sequential(*(_Nothing(elements) for _ in range(_UNITS)))
    alone = _step_s(model, group, repeats)
    mesh = DeviceMesh.from_group(group, "cpu")
    sharded = shard(model, mesh=mesh, units=[str(place) for place in range(_UNITS)], reshard=True)
    beside = _step_s(sharded, group, repeats) - alone
    return max(beside / _UNITS / (3 + 2 / group.size()), 1e-9)


def _step_s(model: Any, group: dist.ProcessGroup, repeats: int) -> float:
    """Median seconds of a step, less what the thread waited for collectives."""
    take = getattr(model, "timings", list)
    x = torch.ones(1, requires_grad=True)
    times: list[float] = []
    for turn in range(repeats + 1):
        dist.barrier(group)
        take()
        start = time.perf_counter()
        model(x).sum().backward()
        took = time.perf_counter() - start
        waited = sum(span.end - span.start for span in take() if span.exposed) / 1e9
        model.zero_grad(set_to_none=True)
        if turn:
            times.append(took - waited)
    return median(times)
