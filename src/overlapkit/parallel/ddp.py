"""`replicate`: DDP with its buckets kept as gradients, optional compression, and spans of every bucket."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from overlapkit.device import has_process_group, rank_and_world
from overlapkit.options import named_options
from overlapkit.parallel.preconditions import check_model
from overlapkit.parallel.recomputing import recompute
from overlapkit.parallel.shard_plan import ShardPlan, fill
from overlapkit.parallel.structure import can_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_MB = 1.0  # torch's own first bucket


@named_options
def replicate(
    model: nn.Module,
    mesh: "DeviceMesh | None" = None,
    *,
    bucket_cap_mb: float | None = None,
    plan: ShardPlan | None = None,
    compress: str | None = None,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """Wrap a model in DistributedDataParallel.

    Gradients are views of the buckets (no second copy of them), and the first bucket is small, so that
    communication begins early. Parameters and buffers become those of rank 0. What DDP offers (`no_sync`,
    `join`, `state_dict`, ...) is there: the wrapper is one.

    A process without a process group (no torchrun) has no replicas: the model comes back unchanged, so
    that one script serves one process and many.

    The wrapper's `timings()` returns the `Span`s of the buckets reduced since its last call, each named
    after its first and last parameter, with `parameters` all of them, `ready` when this rank had the
    gradients, and `start` when the reduction began (on the host: when those before it were done).
    "all_reduce tail" is the exposed part: from the moment the last bucket was ready until all are done,
    while backward has nothing left to compute. Recording takes DDP's communication hook, of which there is
    only one. Gradients are divided by the number of ranks and summed, as by DDP; on the host, over gloo, they
    are the same to the bit however the buckets lie (docs/parallel.md).

    Args:
        model: A module with parameters that require gradients, on one device, not wrapped or compiled.
        mesh: 1-D: over which ranks; None for all ranks of the default process group.
        bucket_cap_mb: Size of a bucket in MiB; the first bucket has 1 at most. None for DDP's 25.
        plan: Its `bucket_caps_mb`, where set, are the buckets' sizes in the order in which gradients become
            ready; the last one is that of all further buckets. Its `recompute`, where set, is applied first,
            also in one process: see `recompute`.
        compress: "bf16" or "fp16": gradients are divided by the number of ranks, rounded to that dtype,
            summed in it (over gloo in fp32, and rounded once more), and written back. What overflows arrives
            as inf on every rank, where a GradScaler sees it.
        static_graph: As in DistributedDataParallel; it finds unused parameters by itself.
        find_unused_parameters: As in DistributedDataParallel: for parameters that get no gradient in some
            backwards, or on some ranks.
        broadcast_buffers: Whether forward begins with a broadcast of rank 0's buffers (BatchNorm's), as in
            DistributedDataParallel.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument's value or the model's state forbids it; the message says what to do.
        RuntimeError: WORLD_SIZE is set above 1 and there is no process group.
    """
    caps = _caps(bucket_cap_mb, plan)
    policy = None if plan is None else plan.recompute
    check_model(model, "replicate")
    _check_options(model, compress, static_graph, find_unused_parameters, broadcast_buffers)
    rank_and_world()
    if not has_process_group():
        if compress is not None:
            raise ValueError(
                f"compress={compress!r} needs a process group, and this process has none: leave it out, "
                "or launch with torchrun"
            )
        return recompute(model, policy)
    group = _group(model, mesh)
    _check_sparse(model, group, compress)
    recompute(model, policy)
    from overlapkit.parallel.replica import Replica

    wrapped = Replica(
        model,
        group,
        None if compress is None else _WIRE[compress],
        device_ids=_device_ids(list(model.parameters())),
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        **caps,
    )
    # Not an argument: torch 2.13 deprecates it there, and without buffers of rank 0 to begin with it would
    # mean something else in each version.
    wrapped.broadcast_buffers = broadcast_buffers
    return wrapped


def _caps(bucket_cap_mb: Any, plan: Any) -> dict[str, Any]:
    """DDP's arguments for the sizes of buckets. Any explicit size drops its small first bucket."""
    listed = fill(plan, bucket_caps_mb=(None, None))["bucket_caps_mb"]
    if bucket_cap_mb is None:
        return {} if listed is None else {"bucket_cap_mb_list": list(listed)}
    number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if not (number and math.isfinite(bucket_cap_mb) and bucket_cap_mb > 0):
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: give a size in MiB above 0, or None")
    if listed is not None:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb!r} is given, and the plan decides the buckets too ({listed!r}): "
            "leave one out, as in dataclasses.replace(plan, bucket_caps_mb=None)"
        )
    if bucket_cap_mb <= _FIRST_MB:
        return {"bucket_cap_mb": bucket_cap_mb}
    return {"bucket_cap_mb_list": [_FIRST_MB, bucket_cap_mb]}


def _check_options(model: nn.Module, compress: Any, static_graph: Any, unused: Any, buffers: Any) -> None:
    if not can_forward(model):
        raise ValueError(
            f"model is a {type(model).__name__}, which has no forward: replicate takes a module "
            "that is called"
        )
    if compress is not None and compress not in tuple(_WIRE):  # a dict would ask for its hash
        raise ValueError(f"compress={compress!r}: give 'bf16', 'fp16' or None")
    flags = {"static_graph": static_graph, "find_unused_parameters": unused, "broadcast_buffers": buffers}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: give True or False")
    if static_graph and unused:
        raise ValueError(
            "find_unused_parameters=True with static_graph=True: a static graph finds unused parameters by "
            "itself, once; leave one of the two out"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient: leave replicate out")


def _group(model: nn.Module, mesh: Any) -> "torch.distributed.ProcessGroup":
    """The process group to average over."""
    from torch.distributed.device_mesh import DeviceMesh

    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: give a torch DeviceMesh (init_device_mesh makes one), or None")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions: replicate averages over one; take it by its name, as in "
            "mesh['replicate'], or use shard, which takes two"
        )
    group = torch.distributed.group.WORLD if mesh is None else mesh.get_group()
    assert group is not None
    served = torch.distributed.get_backend_config(group)
    for device in {parameter.device.type for parameter in model.parameters()}:
        if f"{device}:" not in served:
            raise ValueError(
                f"model is on '{device}', and the process group serves {served}: move the model to its "
                "device before replicate"
            )
    return group


def _check_sparse(model: nn.Module, group: "torch.distributed.ProcessGroup", compress: Any) -> None:
    for name, module in model.named_modules():
        if not (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse):
            continue
        device = module.weight.device.type
        if f"{device}:nccl" in torch.distributed.get_backend_config(group):
            raise ValueError(
                f"model.{name} has sparse gradients, which NCCL cannot add up: make it with sparse=False, or "
                "initialise the process group with 'cuda:gloo'"
            )
        if compress is not None:
            raise ValueError(
                f"compress={compress!r}: model.{name} has sparse gradients, most of whose bytes are indices, "
                "which cannot be rounded: leave compress out, or make it with sparse=False"
            )


def _device_ids(parameters: Sequence[nn.Parameter]) -> list[int | torch.device] | None:
    """DDP wants the device named where the model is on one GPU, and nothing where it is not."""
    devices = {parameter.device for parameter in parameters}
    only = next(iter(devices))
    return [only] if len(devices) == 1 and only.type == "cuda" else None
