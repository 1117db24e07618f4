"""A file layer that fails, or is killed, at a chosen point; and what tells whether a directory survived."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable

import torch

from overlapkit.checkpoint import Checkpointer
from overlapkit.checkpoint.disk import Disk


class Faulty(Disk):
    """Counts its calls; at call number `at` it does `fault()`, for a write after half of the bytes.

    With `after`, the fault comes when the call is done.
    """

    def __init__(
        self, at: int | None = None, fault: Callable[[], None] = lambda: None, *, after: bool = False
    ):
        self.at = at
        self.fault = fault
        self.after = after
        self.calls: list[tuple[str, str]] = []

    def _do(self, call: str, path: object, real: Callable[[], object]):
        self.calls.append((call, os.path.basename(str(path))))
        here = len(self.calls) - 1 == self.at
        if here and not self.after:
            self.fault()
        result = real()
        if here and self.after:
            self.fault()
        return result

    def make_folder(self, path):
        self._do("make_folder", path, lambda: super(Faulty, self).make_folder(path))

    def create(self, path):
        return self._do("create", path, lambda: super(Faulty, self).create(path))

    def write_at(self, fd, view, offset):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if len(self.calls) == self.at and not self.after:
            super().write_at(fd, view[: view.nbytes // 2], offset)
        self._do("write", path, lambda: super(Faulty, self).write_at(fd, view, offset))

    def write(self, fd, views):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if len(self.calls) == self.at and not self.after:
            super().write(fd, [view[: view.nbytes // 2] for view in views])
        self._do("write", path, lambda: super(Faulty, self).write(fd, views))

    def sync(self, fd):
        self._do("sync", os.readlink(f"/proc/self/fd/{fd}"), lambda: super(Faulty, self).sync(fd))

    def sync_folder(self, path):
        self._do("sync_folder", path, lambda: super(Faulty, self).sync_folder(path))

    def rename(self, old, new):
        self._do("rename", new, lambda: super(Faulty, self).rename(old, new))

    def remove(self, path):
        self._do("remove", path, lambda: super(Faulty, self).remove(path))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def in_child(fn: Callable[[], None], limit: float = 30) -> int:
    """Run something in a forked child; its exit code (-9 when killed)."""
    process = multiprocessing.get_context("fork").Process(target=_single_threaded, args=(fn,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: done on purpose
        process.start()
    process.join(limit)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def _single_threaded(fn: Callable[[], None]) -> None:
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP pool
    fn()


def value_state(value: int) -> dict[str, object]:
    """A state all of whose parts say `value`."""
    model = torch.nn.Linear(40, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + value)
    return {"model": model, "optimizer": optimizer, "t": torch.full((9,), float(value)), "n": value}


def read_value(directory: object, step: int | str = "latest") -> tuple[int, int]:
    """(step, value) of what a restore gives; fails unless all parts say the same."""
    state = value_state(-1)
    with Checkpointer(directory) as checkpointer:
        at = checkpointer.restore(state, step)
        for step_there in checkpointer.steps():
            checkpointer.verify(step_there)
    numbers = {p.item() for parameter in state["model"].parameters() for p in parameter.flatten()}
    numbers |= {t.item() for t in state["t"]} | {state["n"], state["optimizer"].param_groups[0]["lr"] - 1}
    assert len(numbers) == 1, f"a mixture: {numbers}"
    return at, int(numbers.pop())
