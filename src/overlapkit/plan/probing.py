"""`probe_link`: how long each collective takes between the ranks of this job, by message size."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overlapkit.one_tensor import all_gather, reduce_scatter
from overlapkit.parallel import exchange, ring
from overlapkit.plan.arguments import check_amount, check_ranks
from overlapkit.plan.host_cost import LARGEST, copy_seconds
from overlapkit.plan.links import OPS, LinkTable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SIZES = tuple(4**power for power in range(6, 14))
"""Bytes: 4 KiB to 64 MiB."""

_COPY = "copy"


def probe_link(
    mesh: "DeviceMesh | dist.ProcessGroup | None" = None,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    seconds: float = 20.0,
) -> LinkTable:
    """Time all-gather, reduce-scatter and all-reduce. Every rank of the mesh calls it; all get one table.

    They are those that `shard` and `replicate` use on this device.

    What a rank copies into and out of the flat buffers of a sharded model is timed as well.

    Each size is run once to warm up and `repeats` times, with float32 data; a rank's figure is the median and
    the table's the slowest rank's. After the two smallest sizes, larger ones are left out once `seconds` have
    passed.

    Args:
        mesh: Of one dimension, or a process group; None for all ranks.
        sizes: Bytes of the whole, ascending; each is rounded up so that every rank has the same share.
        repeats: How often each is timed.
        seconds: When to stop going on to larger sizes.

    Raises:
        RuntimeError: There is no process group.
        ValueError: The mesh has several dimensions or one rank, or an argument is out of range.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "probe_link times collectives: launch with torchrun and make a process group first"
        )
    group = _group_of(mesh)
    check_ranks("repeats", repeats)
    check_amount("seconds", seconds)
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes={list(sizes)}: give two or more numbers of bytes, ascending")
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError("the mesh has one rank: there is no link to probe")
    return _Probe(group, ranks, repeats).run(sizes, seconds)


def _group_of(mesh: Any) -> Any:
    if mesh is None:
        return dist.group.WORLD
    if not hasattr(mesh, "get_group"):
        return mesh
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions: give one of them, as in mesh['shard']")
    return mesh.get_group()


class _Probe:
    def __init__(self, group: Any, ranks: int, repeats: int) -> None:
        self._group = group
        self._ranks = ranks
        self._repeats = repeats
        on_gpu = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._tags = None if on_gpu else exchange.new_tags(group)

    def run(self, sizes: Sequence[int], seconds: float) -> LinkTable:
        begin = time.perf_counter()
        rows: dict[str, list[tuple[int, float]]] = {op: [] for op in (*OPS, _COPY)}
        for turn, size in enumerate(sizes):
            if turn >= 2 and self._slowest(time.perf_counter() - begin) > seconds:
                break
            share = -(-size // (4 * self._ranks))
            whole = torch.zeros(share * self._ranks, device=self._device)
            part = torch.zeros(share, device=self._device)
            for op, collective in self._collectives(whole, part).items():
                took = self._slowest(self._time(collective))
                before = rows[op][-1][1] if rows[op] else 0.0
                rows[op].append((whole.nbytes, max(took, before)))  # noise must not make more bytes cheaper
            if whole.nbytes <= LARGEST or not rows[_COPY]:
                before = rows[_COPY][-1][1] if rows[_COPY] else 0.0
                rows[_COPY].append((whole.nbytes, max(self._slowest(self._copy(whole)), before)))
        table = {op: tuple(pairs) for op, pairs in rows.items()}
        copies = table.pop(_COPY)
        return LinkTable(self._ranks, table, f"measured between {self._ranks} ranks", copies)

    def _copy(self, whole: torch.Tensor) -> float:
        if self._device.type == "cpu":
            return copy_seconds(self._group, whole.numel(), self._repeats)
        return self._time(lambda: torch.empty_like(whole).copy_(whole))

    def _collectives(self, whole: torch.Tensor, part: torch.Tensor) -> dict[str, Callable[[], Any]]:
        group = self._group
        collectives: dict[str, Callable[[], Any]] = {
            # FSDP2's buffers are new every time: their pages are first touched then.
            "all_gather": lambda: all_gather(torch.empty_like(whole), part, group=group),
            "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
        }
        tags = self._tags
        if tags is not None and exchange.direct(group):  # what `shard` and `replicate` do there
            collectives = {
                "all_gather": lambda: exchange.gather(torch.empty_like(whole), part, group, tags[0])(),
                "reduce_scatter": lambda: exchange.reduce(part, whole, group, tags[1], average=True)(),
                "all_reduce": lambda: ring.all_reduce(whole, [whole.numel()], group, tags[0]),
            }
        return collectives

    def _time(self, collective: Callable[[], Any]) -> float:
        times = []
        for turn in range(self._repeats + 1):
            dist.barrier(self._group)
            self._wait()
            start = time.perf_counter()
            collective()
            self._wait()
            if turn:
                times.append(time.perf_counter() - start)
        return median(times)

    def _slowest(self, seconds: float) -> float:
        """Of all ranks."""
        value = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return float(value)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
