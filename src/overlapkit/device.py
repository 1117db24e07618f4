"""Which device, which rank: the two questions every component asks its surroundings."""

import os

import torch


def as_device(device: torch.device | str | int | None, argument: str = "device") -> torch.device:
    """Resolve a device argument to one that exists here, with its index where it has one.

    Args:
        device: A torch.device, its string, a CUDA index, or None for the current accelerator, else CPU.
        argument: The caller's name for it, used in errors.

    Raises:
        ValueError: It names no device, or one that this process cannot see.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # a build of torch without CUDA takes no bare index
        resolved = torch.device(f"cuda:{device}" if type(device) is int else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{argument}={device!r} names no device: use 'cpu', 'cuda', 'cuda:N' or a torch.device"
        ) from error
    if resolved.type == "cuda":
        seen = torch.cuda.device_count()
        if seen == 0:
            raise ValueError(
                f"{argument}={device!r}: this process sees no CUDA device; use device='cpu' or None"
            )
        if resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
        if resolved.index >= seen:
            raise ValueError(
                f"{argument}={device!r}: this process sees {seen} CUDA device(s), cuda:0 to cuda:{seen - 1}"
            )
    elif resolved.type != "cpu":
        raise ValueError(f"{argument}={device!r}: overlapkit runs on 'cpu' and 'cuda' (ROCm builds included)")
    return resolved


def has_process_group() -> bool:
    """Whether this process has joined a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) outside of a distributed job.

    Raises:
        RuntimeError: The launcher set WORLD_SIZE above 1 but no process group exists yet.
    """
    if has_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in ("", "1"):
        raise RuntimeError(
            f"WORLD_SIZE={launched} is set but there is no process group: call "
            "torch.distributed.init_process_group() before using overlapkit, or launch without torchrun"
        )
    return 0, 1
