"""A collective that failed, told in one error: which one, and which ranks are to blame as far as known.

A backend knows only that a connection closed or a time ran out. So each rank that sees a failure says so in
the job's store, and looks who else does: the one that died or is late stays silent.
"""

import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from overlapkit.quorum import Quorum

ROLL_S = 5.0
"""Seconds that a failed rank gives the others to say that it failed for them, too."""


class CollectiveFailed(RuntimeError):
    """A collective failed or timed out; the message says which one, and which ranks did not take part."""


class Roll:
    """The ranks of one process group, called when a collective of theirs fails.

    Nothing runs in the background. A rank that is blocked in a backend that does not fail it cannot answer,
    so silence alone proves nothing; that a process of this machine has ended is seen.

    Args:
        group: The process group. Every rank of it makes one Roll, before its first collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._key = f"overlapkit/roll/{group.group_name}"
        self._verdict: str | None = None
        self._once = threading.Lock()
        self._job: Quorum | None = None
        with suppress(RuntimeError):  # a store that cannot be asked twice at once, as of torch's fake group
            self._job = Quorum("failures") if len(self._ranks) > 1 else None
        if self._job is not None:
            signed = {"where": _where(), "pid": os.getpid()}
            self._job.store.set(f"overlapkit/pid/{self._rank}", json.dumps(signed))

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Raise what the backend raises in the body as a CollectiveFailed that names `what`."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CollectiveFailed) or not is_of_backend(error):
                raise
            raise self.failed(what, error) from error

    def failed(self, what: str, error: BaseException) -> CollectiveFailed:
        """The error to raise. Takes up to `ROLL_S` seconds the first time, none later.

        Args:
            what: The collective, as in "all_reduce of blocks.0".
            error: What the backend said.
        """
        with self._once:  # several buckets fail at once, each in a thread of the backend
            if self._verdict is None:
                self._verdict = self._call(f"{what}: {error}")
        return CollectiveFailed(f"{what} failed on rank {self._rank}{self._verdict} ({error})")

    def _call(self, text: str) -> str:
        if self._job is None:
            return ""
        try:
            return self._answers(self._job.store, text)
        except Exception as lost:  # rank 0 may serve the store; whatever it is must not hide the error
            return f"; the job's store does not answer, rank 0 or the launcher may be gone: {lost}"

    def _answers(self, store: Any, text: str) -> str:
        others = {rank: f"{self._key}/{rank}" for rank in self._ranks if rank != self._rank}
        before = store.check(list(others.values()))
        store.set(f"{self._key}/{self._rank}", text)
        ended: set[int] = set()
        deadline, pause = time.monotonic() + ROLL_S, 0.01
        while True:
            ended |= self._ended(store, set(others) - ended)
            awaited = [key for rank, key in others.items() if rank not in ended]
            if store.check(awaited) or time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        said = {rank: store.get(key).decode() for rank, key in others.items() if store.check([key])}
        return _verdict(set(others) - set(said), ended, said, before)

    def _ended(self, store: Any, ranks: set[int]) -> set[int]:
        """Those of the ranks whose process was on this machine and is no more."""
        keys = {rank: f"overlapkit/pid/{rank}" for rank in sorted(ranks)}
        there = [rank for rank, key in keys.items() if store.check([key])]
        signed = store.multi_get([keys[rank] for rank in there]) if there else []
        found = {rank: json.loads(value) for rank, value in zip(there, signed, strict=True)}
        return {rank for rank, it in found.items() if it["where"] == _where() and not _lives(it["pid"])}


_rolls: "weakref.WeakKeyDictionary[dist.ProcessGroup, Roll]" = weakref.WeakKeyDictionary()


def roll_of(group: dist.ProcessGroup) -> Roll:
    """The one Roll of a process group."""
    if group not in _rolls:
        _rolls[group] = Roll(group)
    return _rolls[group]


def is_of_backend(error: BaseException) -> bool:
    """Whether a RuntimeError comes from a process group; gloo's has no type of its own."""
    return isinstance(error, dist.DistError) or re.search(r"gloo/|NCCL", str(error)) is not None


def _verdict(silent: set[int], ended: set[int], said: dict[int, str], before: bool) -> str:
    """What is known of the other ranks, as the rest of a sentence.

    Args:
        silent: Those that did not report a failure.
        ended: Those whose process has ended, perhaps after a report.
        said: The others' reports.
        before: Whether all of them were there before this rank failed.
    """
    parts = []
    if silent & ended:
        parts.append(f"; {_listed(silent & ended)} ended, look at its log first")
    if silent - ended:
        parts.append(
            f"; {_listed(silent - ended)} did not report a failure within {ROLL_S:g} s: late, blocked "
            "elsewhere, or on a machine that is gone"
        )
    if before:
        parts.append("; every other rank had failed before: this one was late, or cut off")
    if said:
        first = min(said)
        parts.append(f"; rank {first} says: {said[first]}")
    return "".join(parts)


def _listed(ranks: Any) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _where() -> str:
    """Where a process id means the same: the machine, and on Linux the namespace."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _lives(pid: int) -> bool:
    """Whether a process of this machine goes on; one that nobody has reaped yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # no /proc, or gone between opening and reading
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
