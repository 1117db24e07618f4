"""Lane: an ordered queue of work beside the caller, on a CUDA stream, on a worker thread, or inline.

The scheduling of every component is written once against Lane and Ticket, and runs with and without
a GPU: a thread lane is truly asynchronous on a CPU-only machine, so a missing wait shows up as wrong
data in an ordinary test.
"""

import atexit
import os
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

import torch

from overlapkit.span import SpanLog

T = TypeVar("T")
Kind = Literal["cuda", "thread", "inline"]

_asking = threading.local()  # .quietly: this thread waits without counting as having asked; others may ask


class Ticket(Generic[T]):
    """What `Lane.submit` returns: the handle of one piece of work.

    An exception that the work raised is raised again by `wait` and by `order`: the same object, with
    its original traceback.

    Attributes:
        seen: Somebody has been told how the work ended; set it where its error was raised otherwise.
    """

    def __init__(self, lane: str) -> None:
        self.seen = False
        self._lane = lane
        self._pid = os.getpid()
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._waiting: list[threading.Lock] = []  # one for each thread that blocks: none where work is done
        self._event: torch.cuda.Event | None = None

    def wait(self, timeout: float | None = None) -> T:
        """Block the host until the work is done, on its device too, and return its result.

        Args:
            timeout: Seconds to wait for the host's part of the work, or None for no limit.

        Raises:
            TimeoutError: The work is not done within `timeout`.
            RuntimeError: The work was submitted by the parent of this forked process.
        """
        try:
            return self._result(timeout)
        finally:
            if self._event is not None:  # work that failed may have queued a part of itself
                self._event.synchronize()

    def order(self) -> T:
        """Make what the caller's current stream is given from now on run after the work.

        Does not block the host on a CUDA lane; on a thread lane it waits on the host.
        """
        try:
            return self._result(None)
        finally:
            if self._event is not None:
                torch.cuda.current_stream(self._event.device).wait_event(self._event)

    def settle(self) -> None:
        """`wait`, whatever came of the work: raises none of its errors and does not count as asking."""
        self._quietly(self.wait)

    def fence(self) -> None:
        """`order`, whatever came of the work: raises none of its errors and does not count as asking."""
        self._quietly(self.order)

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once. Never blocks."""
        return self._settled and (self._event is None or self._event.query())

    @property
    def error(self) -> BaseException | None:
        """What the work raised, as far as it has run. Looking does not count as asking."""
        return self._error

    def _quietly(self, ask: Callable[[], T]) -> None:
        if self._pid != os.getpid() and not self._settled:
            return  # nothing of it runs in a forked child
        before, _asking.quietly = getattr(_asking, "quietly", False), True
        try:
            ask()
        except BaseException as error:
            if error is not self.error:
                raise  # not the work's: an interrupt of this thread
        finally:
            _asking.quietly = before

    def _result(self, timeout: float | None) -> T:
        if not self._settled:
            self._block(timeout)
        if not getattr(_asking, "quietly", False):
            self.seen = True
        if self._error is None:
            return self._value  # type: ignore[return-value]  # None only where the work's result is
        try:
            raise self._error
        finally:
            del self  # the traceback refers to this frame

    def _block(self, timeout: float | None) -> None:
        """Wait for the work. An own lock for each waiter: an interrupted one keeps nothing from another."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"lane {self._lane!r}: this work was submitted in process {self._pid}, before the fork; "
                "a forked child does not have it: submit it again here"
            )
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            if not self._settled:
                lock.acquire(timeout=-1 if timeout is None else max(0, timeout))
        finally:  # a ticket lives on, and where it settled just before, nobody released this
            self._waiting.remove(lock)
        if not self._settled:
            raise TimeoutError(f"lane {self._lane!r}: the work was not done after {timeout} s")

    def _settle(self, value: T | None, error: BaseException | None) -> None:
        """Note how the work ended. Who registers after `_settled` is true sees it, and does not block."""
        self._value, self._error = value, error
        self._settled = True
        for lock in tuple(self._waiting):
            lock.release()


class _Job(Generic[T]):
    """A callable and the ticket that it settles."""

    def __init__(self, ticket: Ticket[T], fn: Callable[[], T], failed: list[Ticket[Any]]) -> None:
        self.ticket = ticket
        self.fn = fn
        self.failed = failed

    def run(self) -> None:
        try:
            value = self.fn()
        except BaseException as error:  # whatever it is, it belongs to whoever holds the ticket
            self.failed[:] = [*(old for old in self.failed if not old.seen), self.ticket]
            self.ticket._settle(None, error)
            del self  # the traceback refers to this frame: without this, work and error keep each other alive
        else:
            del self.fn  # who has waited for the ticket finds nothing of the work held
            self.ticket._settle(value, None)


def _work(inbox: "queue.SimpleQueue[Callable[[], None] | None]", threads: int) -> None:
    """A worker thread's life. It refers to its queue only, so that a forgotten lane can be collected.

    It computes on one core: a lane must not take those that the step computes on. torch also notes the
    number as that of all threads to come, so a thread that ends at once puts back what it was.
    """
    torch.get_num_threads()  # a thread's first question sets it up, and would undo what comes next
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()
    while (job := inbox.get()) is not None:
        job()
        del job  # an idle lane keeps nothing of its last job alive
    _leaving.append(threading.get_native_id())


_leaving: "deque[int]" = deque(maxlen=64)
"""Threads that end or have ended, the latest ones, by the system's numbers."""
_LEAVING_S = 1.0


def _see_them_off() -> None:
    """Before a fork, wait until no thread is still ending: join() returns before that, until Python 3.13.

    What computed gives back its memory last, under MKL's lock; a child made meanwhile finds it held for ever,
    and a DataLoader's worker computes nothing.
    """
    deadline = time.monotonic() + _LEAVING_S
    while _leaving:
        number = _leaving.popleft()
        while os.path.exists(f"/proc/self/task/{number}") and time.monotonic() < deadline:
            time.sleep(1e-4)


os.register_at_fork(before=_see_them_off)


EXIT_PATIENCE_S = 10.0
"""How long the interpreter's exit waits for each lane; whoever owns work that takes longer waits before."""
EXIT_PATIENCE_BRIEF_S = 1.0
"""The same where nothing is lost. Not 0: a thread that leaves C++ while Python ends can crash it."""


class _Worker(NamedTuple):
    """What exit must know of a worker thread: its lane may be gone, and it in the middle of its last work."""

    lane: str
    inbox: "queue.SimpleQueue[Callable[[], None] | None]"
    lasting: bool


_workers: "weakref.WeakKeyDictionary[threading.Thread, _Worker]" = weakref.WeakKeyDictionary()


@atexit.register
def _finish_at_exit() -> None:
    """Let every lane finish what it was given; a daemon thread would be cut off in the middle."""
    for thread, worker in list(_workers.items()):
        if thread.is_alive():  # in a forked child none is
            worker.inbox.put(None)
            thread.join(EXIT_PATIENCE_S if worker.lasting else EXIT_PATIENCE_BRIEF_S)
            if thread.is_alive() and worker.lasting:
                warnings.warn(
                    f"lane {worker.lane!r} was still busy {EXIT_PATIENCE_S:g} s after the end of the "
                    "program: its work is cut off; close what owns it",
                    RuntimeWarning,
                    stacklevel=1,
                )


class Lane:
    """An ordered queue of work beside the caller.

    Invariants:
        * Work runs in the order in which it was submitted, one piece at a time.
        * On a CUDA lane, work runs after everything that the caller's current stream held when it was
          submitted; what the caller queues after `Ticket.order()` runs after the work.
        * An exception reaches the caller whole, through the ticket, or through `close()` where nobody
          asked the ticket. It never ends the lane.
        * The stream or the thread is made at the first submit, once, and never shared with a forked
          child: the child makes its own.

    Args:
        name: Used for the thread's name, for spans and in errors.
        device: Where the work's tensors live. A CUDA device gives a CUDA lane, others a thread.
        kind: Overrides that choice.
        log: Where the lane records one span per piece of work that was given a name.
        lasting: Whether its work is for more than this process: the interpreter's exit waits for it, and
            says what it cut off. A collective is not, and may wait for a rank that never comes.
    """

    delay_s: float = 0.0
    """Seconds to idle before each piece of work. Tests set it, on one lane or the class, to force races."""

    def __init__(
        self,
        name: str,
        device: torch.device | None = None,
        *,
        kind: Kind | None = None,
        log: SpanLog | None = None,
        lasting: bool = True,
    ) -> None:
        on_cuda = device is not None and device.type == "cuda"
        if kind not in (None, "cuda", "thread", "inline"):
            raise ValueError(f"kind={kind!r}: a lane is 'cuda', 'thread' or 'inline'")
        if kind == "cuda" and not on_cuda:
            raise ValueError(f"kind='cuda' needs a CUDA device, got device={device}")
        self.name = name
        self.kind: Kind = kind or ("cuda" if on_cuda else "thread")
        self.device = device
        self.lasting = lasting
        self._log = log
        self._closed = False
        self._start_afresh()

    def submit(self, fn: Callable[[], T], *, name: str | None = None, bytes: int | None = None) -> Ticket[T]:
        """Queue work.

        On a CUDA lane `fn` is called at once, with the lane's stream current, to queue work there; on a
        thread lane the worker calls it.

        Args:
            fn: The work. It must keep alive what it reads.
            name: Recorded as a span of this name, where the lane has a log.
            bytes: Bytes moved, for the span.

        Raises:
            RuntimeError: The lane is closed.
            KeyboardInterrupt: And other errors that are no Exception, from work that ran in this thread.
        """
        if self._closed:
            raise RuntimeError(f"lane {self.name!r} is closed: submit before close()")
        if self._pid != os.getpid():
            self._start_afresh()
        ticket: Ticket[T] = Ticket(self.name)
        job = _Job(ticket, fn, self._failed)
        if self.kind == "thread":
            self._worker_inbox().put(self._timed(job.run, name, bytes))
            return ticket
        if self.kind == "cuda":
            self._run_on_stream(job, name, bytes)
        else:
            self._timed(job.run, name, bytes)()
        if isinstance(ticket.error, BaseException) and not isinstance(ticket.error, Exception):
            ticket.wait()  # Ctrl-C and the like hit the caller's own thread: they are not the work's to keep
        return ticket

    def close(self, timeout: float | None = None) -> None:
        """Finish everything submitted, end the worker, and raise the first error that nobody has seen.

        Safe to call twice, and in a forked child (where there is nothing to finish).

        Raises:
            TimeoutError: The worker is still busy after `timeout` seconds; it goes on in the background.
        """
        self._closed = True
        if self._pid != os.getpid():
            return
        if self._inbox is not None and self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"lane {self.name!r}: still busy {timeout} s after close()")
        if self._stream is not None:
            self._stream.synchronize()
        unseen = [ticket for ticket in self._failed if not ticket.seen]
        self._failed.clear()
        if unseen:
            unseen[0].wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"lane {self.name!r} also failed: {late!r}")  # the original error comes first

    def _start_afresh(self) -> None:
        """Forget threads, streams and errors: at construction, and in a forked child."""
        self._pid = os.getpid()
        self._failed: list[Ticket[Any]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def _worker_inbox(self) -> "queue.SimpleQueue[Callable[[], None] | None]":
        if self._inbox is None:
            inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work,
                args=(inbox, torch.get_num_threads()),
                name=f"overlapkit-{self.name}",
                daemon=True,
            )
            weakref.finalize(self, inbox.put, None).atexit = False  # a forgotten lane ends its thread
            _workers[thread] = _Worker(self.name, inbox, self.lasting)
            thread.start()  # when a signal's handler raises in it, the lane has none yet, and makes another
            self._inbox, self._thread = inbox, thread
        return self._inbox

    def _timed(self, run: Callable[[], None], name: str | None, bytes: int | None) -> Callable[[], None]:
        """The work with the lane's delay and span around it; refers to no part of the lane itself."""
        delay, log, lane = self.delay_s, self._log, self.name
        if not delay and (log is None or name is None):
            return run

        def timed() -> None:
            if delay:
                time.sleep(delay)
            if log is None or name is None:
                return run()
            with log.host(lane, name, bytes=bytes):
                return run()

        return timed

    def _run_on_stream(self, job: _Job[Any], name: str | None, bytes: int | None) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if self.delay_s:
                torch.cuda._sleep(int(self.delay_s * 1e9))  # cycles: about a GHz, and only tests set it
            if self._log is None or name is None:
                job.run()
            else:
                with self._log.stream(self.name, name, stream, bytes=bytes):
                    job.run()
            event = torch.cuda.Event()
            event.record(stream)
        job.ticket._event = event
