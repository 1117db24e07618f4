"""The process group that links are measured through: the job's own where it has one, else a new one."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from overlapkit.device import has_process_group
from overlapkit.doctor.subject import Place


@contextlib.contextmanager
def group(place: Place, store: Any, timeout: float) -> Iterator[str]:
    """The device whose tensors it takes: "cuda", with the rank's device set, or "cpu".

    Args:
        place: This rank.
        store: For this group alone; all ranks are known to be there.
        timeout: Seconds of a collective.
    """
    import torch
    import torch.distributed as dist

    if has_process_group():
        yield "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        return
    count = torch.cuda.device_count()
    one_each = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # the launcher shows each rank its own
    on_gpus = dist.is_nccl_available() and (place.local_world <= count or one_each)
    if on_gpus:
        torch.cuda.set_device(0 if one_each else place.local_rank)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield "cuda" if on_gpus else "cpu"
    except BaseException:
        if on_gpus:  # destroying NCCL's would wait for the rank that failed
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
