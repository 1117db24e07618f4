"""Moments of a device's current stream, and the seconds between two of them; on the CPU those of the host."""

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """This moment: on a GPU when the current stream has done what it was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """From one mark to a later one; waits for it."""
    if isinstance(end, float):
        return end - float(start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
