"""Agreement of all ranks through the job's store: one report from each, one verdict for all.

No collectives: this also runs in a background thread, beside the training step's own.
"""

import contextlib
import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from overlapkit.checkpoint.errors import RankFailed
from overlapkit.device import rank_and_world

Report = dict[str, Any]
Judge = Callable[[list[Report]], Report]

_opened: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


class NoVerdict(RankFailed):
    """Rank 0 has not spoken in time; it may yet find that all went well."""


class Quorum:
    """All ranks of the job.

    Invariants:
        * Every rank settles the same keys in the same order.
        * The keys of a settlement are deleted when rank 0 has all reports of the next one: by then every
          rank has read its verdict.

    Args:
        name: The same on every rank; what is settled under one name is counted together.
        timeout: Seconds that a rank waits for the others, or for rank 0's verdict.

    Raises:
        RuntimeError: A launcher started several ranks and there is no process group yet.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.rank, self.world = rank_and_world()
        self.timeout = timeout
        self._settled: list[str] = []
        self._store: Any = None
        if self.world > 1:
            from torch.distributed.distributed_c10d import _get_default_store

            store: Any = _get_default_store()
            self._served = store  # on rank 0 this may be the server itself
            self._store = store.clone()  # a clone may be used from another thread
            self._name = f"overlapkit/checkpoint/{zlib.crc32(name.encode()):08x}/{next(_opened[name])}"

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
            return self.settle(key, report, lambda reports: judge(_unless_failed(reports)))
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
            RankFailed: A rank did not report within the timeout; NoVerdict where rank 0 gave none.
        """
        if self.world == 1:
            return judge([report])
        prefix = f"{self._name}/{key}"
        if self.rank != 0:
            self._store.set(f"{prefix}/{self.rank}", json.dumps(report))
            verdict: Report = json.loads(self._await_verdict(prefix))
            if "raised" in verdict:
                raise RankFailed(verdict["raised"])
            return verdict
        try:
            verdict = judge([report, *self._await_reports(prefix)])
        except BaseException as error:
            self._store.set(f"{prefix}/verdict", json.dumps({"raised": _text(error)}))
            raise
        self._store.set(f"{prefix}/verdict", json.dumps(verdict))
        return verdict

    def leave(self) -> None:
        """The last call of every rank. Rank 0, which may serve the store, goes when all others have.

        Never raises, and waits for 5 s at most: a rank may have died.
        """
        if self.world == 1:
            return
        keys = [f"{self._name}/left/{rank}" for rank in range(1, self.world)]
        with contextlib.suppress(RuntimeError):
            if self.rank != 0:
                self._store.set(keys[self.rank - 1], "")
                return
            self._store.wait(keys, timedelta(seconds=min(self.timeout, 5.0)))
            for key in [*keys, *self._settled]:
                self._store.delete_key(key)

    def _await_reports(self, prefix: str) -> list[Report]:
        keys = [f"{prefix}/{rank}" for rank in range(1, self.world)]
        earlier, ours = self._settled, [*keys, f"{prefix}/verdict"]
        self._settled = earlier + ours  # without all reports, too: the next settlement deletes them
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:  # DistStoreError
            missing = [rank for rank, key in enumerate(keys, start=1) if not self._store.check([key])]
            raise RankFailed(
                f"rank(s) {', '.join(map(str, missing)) or 'none'} did not report within {self.timeout} s: "
                f"every rank must make the same calls, and be alive ({error})"
            ) from error
        for key in earlier:
            self._store.delete_key(key)
        self._settled = ours
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def _await_verdict(self, prefix: str) -> bytes:
        key = f"{prefix}/verdict"
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
            verdict: bytes = self._store.get(key)
        except RuntimeError as error:
            raise NoVerdict(f"rank 0 gave no verdict within {self.timeout} s ({error})") from error
        return verdict


def _unless_failed(reports: list[Report]) -> list[Report]:
    failed = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if "error" in report]
    if failed:
        raise RankFailed("; ".join(failed))
    return reports


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, RankFailed) else f"rank 0: {type(error).__name__}: {error}"
