"""What this process and its children move to and from storage, from /proc/PID/io (Linux)."""

import contextlib
import multiprocessing
import os
import time
from collections import deque

from overlapkit.measure.detail import JobIO

_KEPT = 128  # samples


class IOWatch:
    """Samples of the totals, some steps apart."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int, int, int]] = deque(maxlen=_KEPT)

    def sample(self, step: int) -> None:
        """Read the totals; nothing happens where the system does not tell them."""
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
        totals = [total for pid in pids if (total := _totals(pid)) is not None]
        if totals:
            read, written = (sum(column) for column in zip(*totals, strict=True))
            self._samples.append((step, time.perf_counter_ns(), read, written, len(totals)))

    def rates(self, since: int) -> JobIO | str:
        """Between the first sample at or after a step (or the two newest) and the last; or why not."""
        if not self._samples:
            return "this system has no /proc/PID/io"
        recent = [sample for sample in self._samples if sample[0] >= since]
        if len(recent) < 2:
            recent = list(self._samples)[-2:]
        first, last = recent[0], recent[-1]
        if last[1] == first[1]:
            return "two samples are needed, 16 steps apart"
        seconds = (last[1] - first[1]) / 1e9
        # where a child ends, its totals go to its parent only once it was waited for
        return JobIO(max(0, last[2] - first[2]) / seconds, max(0, last[3] - first[3]) / seconds, last[4])


def _totals(pid: int) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, KeyError, ValueError), open(f"/proc/{pid}/io", "rb") as file:
        fields = dict(line.split(b": ") for line in file.read().splitlines())
        return int(fields[b"read_bytes"]), int(fields[b"write_bytes"])
    return None
