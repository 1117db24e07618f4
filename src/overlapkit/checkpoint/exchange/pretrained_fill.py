"""Filling tensors from safetensors files, several at a time."""

import contextlib
import math
import os
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.errors import MismatchError
from overlapkit.checkpoint.exchange.casting import cast
from overlapkit.checkpoint.exchange.safetensors_file import Stored, open_plain, read_box, room
from overlapkit.checkpoint.slices import row_slices

_READERS = 4  # threads: a fast disk, or a network, wants several reads at once
_SLICE = 4 << 20  # bytes that each of them holds; one row, where that is longer


@dataclass(frozen=True)
class Job:
    """One tensor to fill.

    Attributes:
        local: The memory that this rank has of it.
        box: Which part of the tensor that is.
        sources: Where its values are. Further ones, of names tied to the first, must say the same.
    """

    local: torch.Tensor
    box: Box
    sources: list[Stored]


def fill(jobs: Sequence[Job]) -> int:
    """Fill tensors. All files are open before the first of them is changed.

    Returns:
        The bytes read.

    Raises:
        DamagedCheckpoint: A file cannot be opened, or ends too early.
        MismatchError: Tied names have different values.
        ValueError: A value is too large for a tensor's dtype.
    """
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for path in dict.fromkeys(stored.path for job in jobs for stored in job.sources):
            files[path] = open_plain(path)
            stack.callback(os.close, files[path])
        filler = _Filler(files)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS, thread_name_prefix="overlapkit-pretrained"))
        try:
            return sum(pool.map(filler, jobs))
        except BaseException as error:
            error.add_note("the model has been loaded in part: load it anew before it is used")
            raise


class _Filler:
    """Carries out jobs, from several threads.

    Invariants:
        * There are as many buffers as threads, each one thread's at a time: none waits for one.
        * After one has failed, no other begins.
    """

    def __init__(self, files: dict[Path, int]) -> None:
        self._files = files
        self._failed = False
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_READERS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def __call__(self, job: Job) -> int:
        """Fill one tensor; returns the bytes read."""
        if self._failed:
            return 0  # the pool may be long in finding out
        try:
            nbytes = sum(
                self._fill(job, stored, part)
                if stored is job.sources[0]
                else self._compare(job, stored, part)
                for stored in job.sources
                for part in _parts(stored, job.box)
            )
        except BaseException:
            self._failed = True
            raise
        if nbytes:
            torch.autograd.graph.increment_version(job.local)  # reading into its memory has moved none
        return nbytes

    def _fill(self, job: Job, stored: Stored, part: Box) -> int:
        place, need = job.local[part.inside(job.box)], room(stored, part)
        direct = place.device.type == "cpu" and place.dtype == stored.dtype and place.is_contiguous()
        if direct and place.nbytes == need:
            read_box(self._files[stored.path], stored, part, _bytes(place))
            return need
        buffer = self._buffers.get()
        try:
            buffer = buffer if buffer.numel() >= need else torch.empty(need, dtype=torch.uint8, device="cpu")
            values = read_box(self._files[stored.path], stored, part, buffer)
            place.copy_(cast(values, place.dtype, stored.name))
        finally:
            self._buffers.put(buffer)
        return need

    def _compare(self, job: Job, stored: Stored, part: Box) -> int:
        other = Job(torch.empty_like(job.local[part.inside(job.box)], device="cpu"), part, [stored])
        need = self._fill(other, stored, part)
        mine = job.local[part.inside(job.box)].cpu()
        if not torch.equal(_bytes(mine), _bytes(other.local)):  # of bytes: a NaN is the same NaN
            raise MismatchError(
                f"{job.sources[0].name!r} and {stored.name!r} are one tensor in the model, and differ in the "
                "files: untie them, or leave one out with rename="
            )
        return need


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def _parts(stored: Stored, box: Box) -> list[Box]:
    """A box in parts of whole rows, of about `_SLICE` bytes to read each."""
    assert stored.dtype is not None
    if not box.numel:
        return []
    limit = math.ceil(_SLICE * box.numel * stored.dtype.itemsize / room(stored, box))
    return [
        Box(tuple(a + b for a, b in zip(box.offset, part.offset, strict=True)), part.shape)
        for part in row_slices(box.shape, stored.dtype.itemsize, limit)
    ]
