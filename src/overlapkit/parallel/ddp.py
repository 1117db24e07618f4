"""`replicate`: DDP with its buckets kept as gradients, optional compression, and spans of every bucket."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from overlapkit.device import has_process_group, rank_and_world
from overlapkit.parallel.preconditions import check_model, check_unbuilt
from overlapkit.parallel.structure import can_forward

_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def replicate(
    model: nn.Module,
    *,
    bucket_cap_mb: float | None = None,
    plan: None = None,
    compress: str | None = None,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
) -> nn.Module:
    """Wrap a model in DistributedDataParallel over the default process group.

    Gradients are views of the buckets (no second copy of them), and the small first bucket, which lets
    communication begin early, is kept unless `bucket_cap_mb` is given.

    A process without a process group (no torchrun) has no replicas: the model comes back unchanged, so
    that one script serves one process and many.

    The wrapper gets an attribute `timings`: a callable that returns the `Span`s of the buckets reduced
    since its last call, each named after its first and last parameter, from the moment the bucket was
    ready; on CUDA from the moment its reduction began. "all_reduce tail" is the exposed part: from the
    moment the last bucket was ready until all are done, while backward has nothing left to compute.
    Recording takes DDP's communication hook, of which there is only one; gradients are the same to the
    bit, except with 3, 5, 6, 7 ... ranks where they are kept over several backwards (not set to None).

    Args:
        model: A module with parameters that require gradients, on one device, not wrapped or compiled.
        bucket_cap_mb: Size of a bucket in MiB. None for DDP's 25, and 1 for the first bucket.
        plan: Not there yet.
        compress: "bf16" or "fp16": gradients are rounded to that dtype, averaged in it, and written back.
        static_graph: As in DistributedDataParallel.
        find_unused_parameters: As in DistributedDataParallel.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument's value or the model's state forbids it; the message says what to do.
        RuntimeError: WORLD_SIZE is set above 1 and there is no process group.
        NotImplementedError: `plan` is set, or the model is on the meta device or tensor-parallel.
    """
    check_unbuilt(plan=plan)
    check_model(model, "replicate")
    if not can_forward(model):
        raise ValueError(
            f"model is a {type(model).__name__}, which has no forward: replicate takes a module "
            "that is called"
        )
    _check_options(model, bucket_cap_mb, compress)
    for name, flag in (("static_graph", static_graph), ("find_unused_parameters", find_unused_parameters)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: give True or False")
    rank_and_world()
    if not has_process_group():
        if compress is not None:
            raise ValueError(
                f"compress={compress!r} needs a process group, and this process has none: leave it out, "
                "or launch with torchrun"
            )
        return model
    from overlapkit.parallel.buckets import BucketTimes, all_reduce

    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=_device_ids(list(model.parameters())),
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    times = BucketTimes(names, None if compress is None else _WIRE[compress])
    wrapped.register_comm_hook(times, all_reduce)
    wrapped.__dict__["timings"] = times.take  # no parameter, buffer or module: nn.Module need not know
    return wrapped


def _check_options(model: nn.Module, bucket_cap_mb: Any, compress: Any) -> None:
    number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb is not None and not (number and math.isfinite(bucket_cap_mb) and bucket_cap_mb > 0):
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: give a size in MiB above 0, or None")
    if compress is not None and compress not in tuple(_WIRE):  # a dict would ask for its hash
        raise ValueError(f"compress={compress!r}: give 'bf16', 'fp16' or None")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient: leave replicate out")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise NotImplementedError(
                f"model.{name} has sparse gradients: not there yet in this version; make it with sparse=False"
            )


def _device_ids(parameters: Sequence[nn.Parameter]) -> list[int | torch.device] | None:
    """DDP wants the device named where the model is on one GPU, and nothing where it is not."""
    devices = {parameter.device for parameter in parameters}
    only = next(iter(devices))
    return [only] if len(devices) == 1 and only.type == "cuda" else None
