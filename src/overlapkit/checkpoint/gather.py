"""Gathered: a file's bytes, copied together from tensors a few MiB at a time, wherever these are."""

import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence

import torch


class Gathered:
    """The data of a file that its tensors make up, one after the other.

    Invariant:
        * Each thread has a buffer of its own, on a page boundary, and what a call returns lies in it.

    Args:
        starts: Where each tensor's bytes begin, ascending; they follow each other without a gap.
        tensors: On any device, with any strides.
    """

    def __init__(self, starts: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self._starts = starts
        self._tensors = tensors
        self._mine = threading.local()
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()  # another thread's copies know no streams

    def __call__(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop`."""
        buffer = self._buffer(stop - start)
        for place in range(bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1)):
            flat, at = self._flat(place), self._starts[place]
            first, last = max(at, start), min(at + flat.numel(), stop)
            if first < last:
                buffer[first - start : last - start].copy_(flat[first - at : last - at])
        return memoryview(buffer.numpy().data)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        held: torch.Tensor | None = getattr(self._mine, "buffer", None)
        if held is None or held.numel() < nbytes:
            held = self._mine.buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return held[:nbytes]

    def _flat(self, place: int) -> torch.Tensor:
        """A tensor's bytes in row-major order, uint8 (n,), on its device; the last one is kept."""
        known: tuple[int, torch.Tensor] | None = getattr(self._mine, "flat", None)
        if known is None or known[0] != place:
            tensor = self._tensors[place].detach()
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            known = self._mine.flat = place, tensor.flatten().view(torch.uint8)
        return known[1]
