"""The memory of a process and of all that it started, shared pages counted once."""

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.02


class PeakMemory:
    """The most memory that this process and its descendants held together while in a `with` block.

    It is sampled: Linux keeps the peak of each process (VmHWM), but not of their proportional set sizes,
    the only ones that can be added up where processes share pages, as forked workers do.

    Attributes:
        nbytes: The peak, or None where the kernel does not tell (no /proc/PID/smaps_rollup).
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            last = self._done.wait(EVERY_S)
            if now := tree_memory(os.getpid()):
                self.nbytes = max(now, self.nbytes or 0)
            if last:
                return


def tree_memory(pid: int) -> int:
    """The proportional set sizes of a process and its descendants, in bytes; 0 where none can be read."""
    return sum(_proportional_size(process) for process in descendants(pid))


def descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    found = [pid]
    for process in found:
        with suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{process}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _proportional_size(pid: int) -> int:
    with suppress(OSError):
        if match := re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M):
            return 1024 * int(match[1])
    return 0
