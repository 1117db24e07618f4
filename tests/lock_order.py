"""Finds deadlocks that have not happened: in what order threads take overlapkit's locks, and wait under them.

While it watches, each Lock, RLock and Condition that a module of overlapkit makes is known by the line that
made it. To block on lock B while holding A is an edge from A to B. Edges that close a cycle are threads that
can wait for each other for ever, even if they never met. The other kind is a lock held while its holder waits
without bound for a ticket, a thread, an event or a queue, which may be waiting for that lock.

A lock that is only ever tried (`blocking=False`) is a flag: nobody waits for it, so it is in no cycle. A
Ticket's is a signal: its holder takes it again, and so waits until the worker releases it.
"""

import contextlib
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

_OURS = "overlapkit"
_SIGNALS = "overlapkit.lane:"
"""Where locks are made that serve to wait for another thread."""


@dataclass(frozen=True)
class Edge:
    """The first time that a lock was waited for, or something else was, with another lock held."""

    held: str
    wanted: str
    thread: str
    stack: str

    def __str__(self) -> str:
        return f"thread {self.thread}, holding {self.held}, waits for {self.wanted}:\n{self.stack}"


class LockOrder:
    """What was seen so far, of all threads of this process.

    Invariants:
        * What a thread holds is noted by that thread alone, but for a lock that another one releases.
        * An edge is noted before its thread blocks: a deadlock that does happen is on record.
    """

    def __init__(self) -> None:
        self._locks: dict[tuple[str, str], Edge] = {}
        self._waits: dict[tuple[str, str], Edge] = {}
        self._blocking: set[str] = set()  # those that somebody blocks on
        self._own = threading.local()
        self._said: set[str] = set()

    def news(self) -> list[str]:
        """What has not been said before: each cycle with the stacks that make it, and each wait."""
        found = [text for key, text in [*self._cycles(), *self._held_in_waits()] if key not in self._said]
        self._said |= {key for key, _ in [*self._cycles(), *self._held_in_waits()]}
        return found

    def _cycles(self) -> Iterator[tuple[str, str]]:
        edges = dict(self._locks)  # in one step: threads that are still there may add to it
        for start, _ in edges:
            for path in _paths(edges, start):
                key = "cycle " + " ".join(sorted(path))
                sides = [str(edges[pair]) for pair in zip(path, [*path[1:], start], strict=True)]
                yield key, "these locks are taken in different orders:\n" + "\n".join(sides)

    def _held_in_waits(self) -> Iterator[tuple[str, str]]:
        for (held, wanted), edge in dict(self._waits).items():
            if held in self._blocking:
                yield f"wait {held} {wanted}", f"a wait without bound under a lock:\n{edge}"

    @property
    def held(self) -> "list[_Watched]":
        """What this thread holds, in the order in which it was taken, without what is gone for good."""
        return [lock for ref in self.refs if (lock := ref()) is not None]

    @property
    def refs(self) -> "list[weakref.ref[_Watched]]":
        """The list behind `held`. A lock that nobody else has is not kept alive, and holds up nobody."""
        if not hasattr(self._own, "refs"):
            self._own.refs = []
        found: list[weakref.ref[_Watched]] = self._own.refs
        return found

    def wants(self, lock: "_Watched", blocking: bool, timeout: float) -> None:
        """This thread is about to take a lock."""
        if not blocking:
            return
        if lock.signal or lock in self.held:
            if lock.locked() and not lock.reentrant:
                self.waits(f"another thread ({lock.site})", timeout if timeout >= 0 else None)
            return
        self._blocking.add(lock.site)
        for other in self.held:
            self._note(self._locks, other.site, lock.site)

    def waits(self, what: str, timeout: float | None, but: "_Watched | None" = None) -> None:
        """This thread is about to wait for something that is no lock."""
        if timeout is None:
            for other in self.held:
                if other is not but:
                    self._note(self._waits, other.site, what)

    def _note(self, edges: dict[tuple[str, str], Edge], held: str, wanted: str) -> None:
        if (held, wanted) not in edges:
            stack = "".join(traceback.format_list(traceback.extract_stack(limit=12)[:-3]))
            edges[held, wanted] = Edge(held, wanted, threading.current_thread().name, stack)

    @contextlib.contextmanager
    def watching(self, *modules: str) -> Iterator[None]:
        """Watch the locks that overlapkit and `modules` make in the block, and every thread's waits."""
        modules = (_OURS, *modules)
        with contextlib.ExitStack() as stack:
            for name, reentrant in (("Lock", False), ("RLock", True)):
                made = self._factory(getattr(threading, name), reentrant, modules)
                stack.enter_context(mock.patch.object(threading, name, made))
            condition = self._condition(threading.Condition, modules)
            stack.enter_context(mock.patch.object(threading, "Condition", condition))
            stack.enter_context(mock.patch.object(queue, "SimpleQueue", self._queue()))
            for kind, method in ((threading.Event, "wait"), (threading.Thread, "join")):
                waiting = self._waiting(getattr(kind, method), f"{kind.__name__}.{method}")
                stack.enter_context(mock.patch.object(kind, method, waiting))
            yield

    def _factory(self, real: Any, reentrant: bool, modules: tuple[str, ...]) -> Callable[[], Any]:
        def make() -> Any:
            site = _site(modules)
            return real() if site is None else _Watched(self, site, real(), reentrant)

        return make

    def _condition(self, real: Any, modules: tuple[str, ...]) -> Callable[..., Any]:
        class Condition(real):  # type: ignore[misc]  # which of the two it is is known at run time
            def __init__(inner, lock: Any = None) -> None:
                site = _site(modules)
                if lock is None and site is not None:
                    lock = _Watched(self, site, threading._RLock(), True)  # type: ignore[attr-defined]
                super().__init__(lock)

            def wait(inner, timeout: float | None = None) -> bool:
                mine = inner._lock if isinstance(inner._lock, _Watched) else None
                if not _by_threading():
                    self.waits("Condition.wait", timeout, but=mine)
                return bool(super().wait(timeout))

        return Condition

    def _queue(self) -> type:
        class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
            def get(inner, block: bool = True, timeout: float | None = None) -> Any:
                if block:
                    self.waits("SimpleQueue.get", timeout)
                return super().get(block, timeout)

        return Queue

    def _waiting(self, real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wait(inner: Any, timeout: float | None = None) -> Any:
            if not _by_threading():
                self.waits(what, timeout)
            return real(inner, timeout)

        return wait


SEEN = LockOrder()
"""What all tests of this process have done: the two sides of an inversion may be in two of them."""


class _Watched:
    """A lock that says who takes it. Holds for RLocks and inside a Condition, too."""

    def __init__(self, order: LockOrder, site: str, real: Any, reentrant: bool) -> None:
        self.site = site
        self.reentrant = reentrant
        self.signal = site.startswith(_SIGNALS)
        self._order = order
        self._real = real
        self._holders: list[list[weakref.ref[_Watched]]] = []  # where it stands: any thread may release it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._order.wants(self, blocking, timeout)
        got = bool(self._real.acquire(blocking, timeout))
        if got and not self.signal:
            self._taken()
        return got

    def release(self) -> None:
        self._given_back()
        self._real.release()

    def locked(self) -> bool:
        return self.reentrant or bool(self._real.locked())  # before Python 3.14 an RLock does not say

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _taken(self) -> None:
        refs = self._order.refs
        refs[:] = [ref for ref in refs if ref() is not None]
        refs.append(weakref.ref(self))
        self._holders.append(refs)

    def _given_back(self) -> None:
        if self._holders:
            refs = self._holders.pop()
            with contextlib.suppress(ValueError):  # a signal's handler came in between
                refs.remove(weakref.ref(self))

    def _is_owned(self) -> bool:
        return bool(self._real._is_owned())

    def _release_save(self) -> Any:
        times = self._order.held.count(self)
        for _ in range(times):
            self._given_back()
        return times, self._real._release_save()

    def _acquire_restore(self, state: Any) -> None:
        times, inner = state
        self._real._acquire_restore(inner)
        for _ in range(times):
            self._taken()


def _site(modules: tuple[str, ...]) -> str | None:
    """The line that makes a lock, if it stands in one of these modules or packages."""
    frame = sys._getframe(2)
    name = str(frame.f_globals.get("__name__", ""))
    return f"{name}:{frame.f_lineno}" if f"{name}.".startswith(tuple(f"{m}." for m in modules)) else None


def _by_threading() -> bool:
    """Whether the module itself waits: Thread.start does for the thread, and an Event by a Condition."""
    return sys._getframe(2).f_globals.get("__name__") == "threading"


def _paths(edges: dict[tuple[str, str], Edge], start: str) -> Iterator[list[str]]:
    """The cycles through `start`, each without its end."""
    after: dict[str, list[str]] = {}
    for held, wanted in edges:
        after.setdefault(held, []).append(wanted)
    todo = [[start]]
    while todo:
        path = todo.pop()
        for wanted in after.get(path[-1], ()):
            if wanted == start:
                yield path
            elif wanted not in path and wanted > start:  # each cycle once, from its first site
                todo.append([*path, wanted])
