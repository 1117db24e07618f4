"""Agreement of all ranks through the job's store: one report from each, one verdict for all.

No collectives: this also runs in a background thread, beside the training step's own.
"""

import contextlib
import itertools
import json
import os
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from overlapkit.device import rank_and_world

Report = dict[str, Any]
Judge = Callable[[list[Report]], Report]

_opened: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


class RankFailed(RuntimeError):
    """Another rank failed or did not report in time, so no rank went on; the message says which, and why.

    Attributes:
        undecided: Rank 0 has not spoken in time; it may yet find that all went well.
    """

    undecided = False


class Quorum:
    """All ranks of the job.

    Invariants:
        * Every rank settles the same keys in the same order.
        * The keys of a settlement are deleted when rank 0 has all reports of the next one: by then every
          rank has read its verdict.

    Args:
        name: The same on every rank; quorums of one name are told apart by the order of their first use.
        timeout: Seconds that a rank waits for the others, or for rank 0's verdict; None for as long as the
            process group's own store does.
        failure: What is raised where another rank failed.

    Attributes:
        store: The job's, or None where there is one rank. No call to it may block: quorums share it.
        given_up: Whether nobody wants to know any more: a settlement that waits then fails at once.

    Raises:
        RuntimeError: A launcher started several ranks and there is no process group yet.
    """

    def __init__(
        self, name: str, timeout: float | None = None, *, failure: type[RankFailed] = RankFailed
    ) -> None:
        self.rank, self.world = rank_and_world()
        self.timeout = timeout or 0.0
        self.store: Any = None
        self.given_up: Callable[[], bool] = lambda: False
        self._link: _Link | None = None
        self._name = name
        self._failure = failure
        self._settled: list[str] = []
        if self.world > 1:
            self._link = _Link.to_the_job()
            self.store = self._link.store
            self.timeout = timeout or self.store.timeout.total_seconds()

    @cached_property
    def name(self) -> str:
        """What its keys begin with. One that is never used, and on one rank only, shifts no other's."""
        return f"overlapkit/{zlib.crc32(self._name.encode()):08x}/{next(_opened[self._name])}"

    def together(self, key: str, work: Callable[[], Report], judge: Judge) -> Report:
        """Do a piece of work on every rank; where it fails on one, it fails on all.

        Args:
            key: Unique within this quorum.
            work: This rank's share; returns its report.
            judge: Called on rank 0 with all reports, by rank, when no work failed.

        Raises:
            RankFailed: Another rank's work failed. Where this rank's own work failed, its error is raised.
        """
        own: BaseException | None = None
        try:
            report = work()
        except BaseException as error:
            own, report = error, {"error": f"{type(error).__name__}: {error}"}
        try:
            return self.settle(key, report, lambda reports: judge(self._unless_failed(reports)))
        except BaseException:
            if own is None:
                raise
        raise own

    def settle(self, key: str, report: Report, judge: Judge) -> Report:
        """Hand in this rank's report; return what rank 0 made of all of them.

        Args:
            key: Unique within this quorum.
            report: JSON.
            judge: Called on rank 0 with all reports, by rank. When it raises, rank 0 raises that error
                and the others raise RankFailed with its text.

        Raises:
            RankFailed: A rank did not report within the timeout, or rank 0 gave no verdict.
        """
        if self.world == 1:
            return judge([report])
        prefix = f"{self.name}/{key}"
        if self.rank != 0:
            self.store.set(f"{prefix}/{self.rank}", json.dumps(report))
            verdict: Report = json.loads(self._await_verdict(prefix))
            if "raised" in verdict:
                raise self._failure(verdict["raised"])
            return verdict
        try:
            verdict = judge([report, *self._await_reports(prefix)])
        except BaseException as error:
            if not self.given_up():  # else the others go on without this rank, as if it had never come
                self.store.set(f"{prefix}/verdict", json.dumps({"raised": _text(error)}))
            raise
        self.store.set(f"{prefix}/verdict", json.dumps(verdict))
        return verdict

    def fail(self, key: str, error: BaseException) -> None:
        """Let `together` fail on the other ranks, without waiting for them.

        Args:
            key: Theirs; this rank does nothing more about it.
            error: What is wrong here.
        """
        if self.world == 1:
            return
        prefix, text = f"{self.name}/{key}", f"{type(error).__name__}: {error}"
        if self.rank != 0:
            self.store.set(f"{prefix}/{self.rank}", json.dumps({"error": text}))
            return
        self.store.set(f"{prefix}/verdict", json.dumps({"raised": f"rank 0: {text}"}))
        self._settled += [f"{prefix}/{rank}" for rank in range(1, self.world)] + [f"{prefix}/verdict"]

    @contextlib.contextmanager
    def telling(self, key: str) -> Iterator[None]:
        """Whatever is raised in this block makes `together` fail on the other ranks; see `fail`."""
        try:
            yield
        except BaseException as error:
            self.fail(key, error)
            raise

    def leave(self) -> None:
        """The last call of every rank. Rank 0, which may serve the store, goes when all others have.

        Never raises, and waits for 5 s at most: a rank may have died.
        """
        if self.world == 1:
            return
        keys = [f"{self.name}/left/{rank}" for rank in range(1, self.world)]
        with contextlib.suppress(RuntimeError):
            if self.rank != 0:
                self.store.set(keys[self.rank - 1], "")
            elif await_keys(self.store, keys, min(self.timeout, 5.0)):
                for key in [*keys, *self._settled]:
                    self.store.delete_key(key)

    def _await_reports(self, prefix: str) -> list[Report]:
        keys = [f"{prefix}/{rank}" for rank in range(1, self.world)]
        ours = dict.fromkeys([*keys, f"{prefix}/verdict"])
        earlier = [key for key in self._settled if key not in ours]  # ours: this one was interrupted before
        self._settled = [*earlier, *ours]  # without all reports, too: the next settlement deletes them
        if not await_keys(self.store, keys, self.timeout, self.given_up):
            missing = [rank for rank, key in enumerate(keys, start=1) if not self.store.check([key])]
            raise self._failure(
                f"rank(s) {', '.join(map(str, missing)) or 'none'} did not report within {self.timeout} s: "
                "every rank must make the same calls, and be alive"
            )
        for key in earlier:
            self.store.delete_key(key)
        self._settled = list(ours)
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def _await_verdict(self, prefix: str) -> bytes:
        key = f"{prefix}/verdict"
        try:
            if await_keys(self.store, [key], self.timeout, self.given_up):
                verdict: bytes = self.store.get(key)
                return verdict
            why = ""
        except RuntimeError as error:  # rank 0 may have served the store, and be gone
            why = f" ({error})"
        failed = self._failure(f"rank 0 gave no verdict within {self.timeout} s{why}")
        failed.undecided = True
        raise failed

    def _unless_failed(self, reports: list[Report]) -> list[Report]:
        failed = [f"rank {rank}: {it['error']}" for rank, it in enumerate(reports) if "error" in it]
        if failed:
            raise self._failure("; ".join(failed))
        return reports


class _Link:
    """A connection to the job's store that is not the process group's own, whose calls may block.

    The quorums of a process share one: where ranks connect at the same time, that may take seconds.
    """

    _made: "weakref.WeakValueDictionary[tuple[int, int], _Link]" = weakref.WeakValueDictionary()

    def __init__(self, served: Any) -> None:
        self.served = served  # on rank 0 this may be the server itself: it must not go before us
        self.store = served.clone()

    @classmethod
    def to_the_job(cls) -> "_Link":
        """The link to the default process group's store; a forked child makes its own."""
        from torch.distributed.distributed_c10d import _get_default_store

        served: Any = _get_default_store()
        key = os.getpid(), id(served)
        link = cls._made.get(key)
        if link is None:
            link = cls._made[key] = cls(served)
        return link


def await_keys(
    store: Any, keys: list[str], timeout: float, given_up: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until all keys are in the store; False where they are not within `timeout` seconds.

    Asks again and again, after pauses that grow with the time waited: one long wait inside the store could
    be neither interrupted nor given up.

    Args:
        store: A torch.distributed Store.
        keys: To wait for.
        timeout: Seconds.
        given_up: Whether nobody wants to know any more.
    """
    began = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - began
        if waited >= timeout or given_up():
            return False
        time.sleep(min(max(waited / 10, 1e-4), 0.02))
    return True


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, RankFailed) else f"rank 0: {type(error).__name__}: {error}"
