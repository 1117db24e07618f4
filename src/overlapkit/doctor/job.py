"""The ranks of a job, through its store: who is there, what each has seen. A rank that is absent is named.

No collectives, and no process group: a rank may be missing, or its network broken.
"""

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from overlapkit.device import has_process_group
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Place
from overlapkit.quorum import await_keys

_joined = itertools.count()


class Job:
    """This rank's connection to the others.

    Args:
        place: This rank.
        store: The job's.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, place: Place, store: Any, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.store = store
        # torchrun's store outlives the workers that it starts anew
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"overlapkit-doctor/{attempt}/{next(_joined)}"

    @classmethod
    def join(cls, place: Place, environ: Mapping[str, str], timeout: float) -> "Job":
        """Connect to the store that torchrun's environment names, or that of the process group that is there.

        Raises:
            Unreadable: It does not answer.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if has_process_group():
            from torch.distributed.distributed_c10d import _get_default_store

            served: Any = _get_default_store()
            return cls(place, served.clone(), timeout)
        where, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not where or not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise Unreadable(
                f"WORLD_SIZE={place.world}, and MASTER_ADDR={where!r}, MASTER_PORT={port!r} name no store: "
                "start the job with torchrun"
            )
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent serves it
        serves = place.rank == 0 and not by_agent
        if not serves:
            _knock(where, int(port), timeout)
        try:
            store = TCPStore(
                where,
                int(port),
                world_size=place.world,
                is_master=serves,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            raise Unreadable(f"the job's store at {where}:{port} does not answer: {_short(error)}") from None
        return cls(place, store, timeout)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Hand in a value (JSON). Rank 0 gets those of all ranks, None for who is absent; others their own.

        Args:
            key: The same on every rank, used once.
            value: This rank's.

        Raises:
            Unreadable: The store is gone.
        """
        place = self.place
        mine = [value if rank == place.rank else None for rank in range(place.world)]
        if place.rank:
            try:
                self.store.set(self._key(key, place.rank), json.dumps(value))
            except RuntimeError as error:
                raise Unreadable(f"the job's store does not answer: {_short(error)}") from None
            return mine
        others = range(1, place.world)
        await_keys(self.store, [self._key(key, rank) for rank in others], self.timeout)
        there = [rank for rank in others if self.store.check([self._key(key, rank)])]
        for rank in there:
            mine[rank] = json.loads(self.store.get(self._key(key, rank)))
        return mine

    def told(self, key: str, value: Any = None) -> Any:
        """What rank 0 says, on every rank.

        Args:
            key: The same on every rank, used once.
            value: On rank 0, what it says.

        Raises:
            Unreadable: Rank 0 said nothing.
        """
        name = self._key(key, 0)
        if self.place.rank == 0:
            self.store.set(name, json.dumps(value))
            return value
        patience = 2 * self.timeout  # rank 0 itself waits for others
        try:
            if await_keys(self.store, [name], patience):
                return json.loads(self.store.get(name))
            why = f"nothing within {patience:g} s"
        except RuntimeError as error:  # it served the store, and is gone
            why = _short(error)
        raise Unreadable(f"rank 0 is absent: {why}")

    def leave(self, there: Sequence[int]) -> None:
        """The last call: rank 0, which may serve the store, goes when all others have been told.

        Args:
            there: On rank 0, the ranks that are not absent.
        """
        with contextlib.suppress(RuntimeError):
            if self.place.rank:
                self.store.set(self._key("left", self.place.rank), "")
            elif others := [self._key("left", rank) for rank in there if rank]:
                await_keys(self.store, others, min(10.0, self.timeout))

    def store_of(self, name: str) -> Any:
        """A part of the store, for a process group."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"{self._prefix}/{name}", self.store)

    def _key(self, key: str, rank: int) -> str:
        return f"{self._prefix}/{key}/{rank}"


def _knock(where: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there: a store that finds nobody writes pages to stderr."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((where, port), timeout=timeout).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unreadable(f"rank 0's store at {where}:{port} does not answer: {error}") from None
        time.sleep(0.1)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
