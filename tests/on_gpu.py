"""What tests on a GPU share: kernels of milliseconds, poison in freed memory, a host that must not wait."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SPIN_S = 0.005
"""What `spin` takes: several milliseconds, so that whoever does not wait for it is early."""


def spin(seconds: float = SPIN_S) -> None:
    """Hold up the current stream."""
    torch.cuda._sleep(int(seconds * 2e9))  # cycles, at about 2 GHz


def poison(nbytes: int, count: int = 4) -> None:
    """Take memory of this size from the current stream's free blocks, fill it with NaN, and give it back.

    Who still reads a tensor of that size that was given back too early reads NaN.
    """
    held = [torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(count)]
    held.clear()


@contextmanager
def no_waits() -> Iterator[None]:
    """In the body an operation that makes the host wait for the device raises, in every thread."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_flat(step: Callable[[], object], *, slack: int = 0, steps: int = 200, settle: int = 20) -> None:
    """After the first steps, the device's memory does not grow, neither what is in use nor what is held.

    Args:
        step: One step.
        slack: Bytes that may come and go, where a thread runs ahead of the steps.
        steps: How many are taken.
        settle: How many before them.
    """

    def held_after(count: int) -> tuple[int, int]:
        for _ in range(count):
            step()
            torch.cuda.synchronize()  # how far the host runs ahead is not what is tested
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    in_use, held = held_after(settle)
    in_use_later, held_later = held_after(steps)
    assert in_use_later <= in_use + slack, f"{in_use_later - in_use} bytes more in use after {steps} steps"
    assert held_later <= held + slack, f"{held_later - held} bytes more held after {steps} steps"
