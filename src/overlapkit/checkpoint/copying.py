"""Copying tensors into one stretch of host memory, past the caches, and by two threads at once.

On a lane's one thread `torch.cat` copies as the C library's memcpy does; `copy_` reads each line of its
target before it writes it. memcpy does not where a source is long (glibc: from 3/4 of a thread's share of
the last cache on): on an Intel Xeon where that is 19 MiB, one thread copies 10 GB/s so, and 5.5 GB/s with
`copy_`. Shorter ones memcpy copies with 6 GB/s there, in one call for many, in which the interpreter's lock
is free.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from overlapkit.lane import Lane

_AT_ONCE = 16 << 20  # bytes of short tensors that are copied by one call
_PART = 32 << 20  # the least that a long one is cut into, so that two threads end together


class Portion(NamedTuple):
    """What is copied at once.

    Attributes:
        start: Where it goes, in bytes.
        stop: The end of that.
        sources: Flat bytes, one after the other; or one tensor whose values lie in another order.
    """

    start: int
    stop: int
    sources: list[torch.Tensor]

    def copy(self, memory: torch.Tensor) -> None:
        """Copy it into memory, uint8 (n,)."""
        target, source = memory[self.start : self.stop], self.sources[0]
        if _is_bytes(source):
            torch.cat(self.sources, out=target)
        else:
            target.view(source.dtype).view(source.shape).copy_(source)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's own memory as uint8 (n,); None where that is not its values in their order, on the host."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.view(-1).view(torch.uint8)


def portions(tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> list[Portion]:
    """What copies tensors, none of them empty, to these places in memory of the host; by their starts."""
    found: list[Portion] = []
    for start, tensor in sorted(zip(starts, tensors, strict=True), key=lambda pair: pair[0]):
        flat = flat_bytes(tensor)
        if flat is None:
            found.append(Portion(start, start + tensor.nbytes, [tensor]))
            continue
        last, stop = found[-1] if found else None, start + len(flat)
        if last and last.stop == start and stop - last.start <= _AT_ONCE and _is_bytes(last.sources[0]):
            found[-1] = Portion(last.start, stop, last.sources)
            last.sources.append(flat)
            continue
        for part in flat.chunk(max(1, len(flat) // _PART)):
            found.append(Portion(start, start + len(part), [part]))
            start += len(part)
    return found


class SharedCopy:
    """A copy that a lane makes, and a second one beside it as soon as somebody only waits for it.

    Invariants:
        * When `run` returns, everything is copied, and nobody copies any more.
        * It is copied from the first byte to the last, so that what is there can be used before the rest is.
        * No thread of the script copies: it can be interrupted, its signal handlers may wait for the copy,
          too, and where it has several cores torch copies in another way.

    Args:
        second: A thread. What fails there the first copies again, and meets the error itself.
    """

    def __init__(self, second: Lane) -> None:
        self._pid = os.getpid()
        self._second = second
        self._helped = False
        self._begun = threading.Event()
        self._claims = threading.Condition()
        self._ahead = False
        self._over = False
        self._copying: set[int] = set()  # where what is being copied starts
        self._left: deque[Portion] = deque()
        self._memory: torch.Tensor | None = None

    def run(self, begin: Callable[[], tuple[torch.Tensor, Sequence[Portion]]]) -> None:
        """Copy, on the lane; `begin` says where to, uint8 (n,), and what."""
        try:
            self._memory, found = begin()
            self._left.extend(found)
            self._begun.set()
            while self._left:
                self._drain()
                self._settle()
        finally:
            self._helped = True  # who waits from now on needs no help
            with self._claims:  # where it failed, that nothing is left does not mean that all is there
                self._over = True
                self._left.clear()
            self._settle()
            self._memory = None
            self._begun.set()
            self._tell()

    def help(self, *, ahead: bool = False) -> None:
        """Have the second lane copy what is left. Returns at once, and takes no lock: see above.

        Args:
            ahead: Let `use_ahead` return, too.
        """
        if self._helped or os.getpid() != self._pid:  # in a forked child there is no lane that would begin
            return
        self._helped = True
        self._second.submit(lambda: self._help(ahead)).seen = True

    def use_ahead(self) -> bool:
        """Wait until the copy is over, or somebody wants what is there to be used; whether it is not over."""
        with self._claims:
            self._claims.wait_for(lambda: self._over or self._ahead)
            return not self._over

    def reach(self, stop: int) -> bool:
        """Wait until everything before this place is copied; whether the copy is not over, well or badly."""
        with self._claims:
            self._claims.wait_for(lambda: self._over or self._reached() >= stop)
            return not self._over

    def _reached(self) -> float:
        """How far everything is copied."""
        if not self._begun.is_set():
            return 0
        return min([*self._copying, self._left[0].start if self._left else math.inf])

    def _help(self, ahead: bool) -> None:
        self._ahead = ahead
        self._tell()
        self._begun.wait()
        self._drain()

    def _drain(self) -> None:
        while True:
            with self._claims:
                if not self._left:
                    return
                portion = self._left.popleft()
                self._copying.add(portion.start)
            try:
                assert self._memory is not None
                portion.copy(self._memory)
            except BaseException:
                self._left.appendleft(portion)  # in its place
                raise
            finally:
                with self._claims:
                    self._copying.remove(portion.start)
                    self._claims.notify_all()

    def _settle(self) -> None:
        """Wait until the second lane has copied what it took."""
        with self._claims:
            self._claims.wait_for(lambda: not self._copying)

    def _tell(self) -> None:
        with self._claims:
            self._claims.notify_all()


def _is_bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 1
