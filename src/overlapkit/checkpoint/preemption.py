"""Preemption: a signal to any rank makes all ranks save at the end of one step, and exit.

The ranks agree through the job's store, in a thread of each. The training thread learns of it in `save()`.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from overlapkit.checkpoint.errors import RankFailed
from overlapkit.checkpoint.save import Save
from overlapkit.checkpoint.wakeup import Wakeup
from overlapkit.quorum import Quorum, Report

ABANDONED = os.EX_TEMPFAIL
"""Exit status (75) where the deadline came before the checkpoint was there."""

_TICK_S = 0.1
_END_S = 10.0  # for a thread to come out of the store's code: the interpreter's exit would cut it off there
_LAST_WORDS_S = 0.3
_ASKED_A_SECOND = 2000  # how often the store is asked for a signal, by all ranks together

_Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclass(frozen=True)
class _Terms:
    deadline: float
    exit_code: int
    previous: _Handler


class Preemption:
    """Waits for a signal to any rank, and for the call of `save` that all ranks then agree on.

    Invariants:
        * The handler sets one attribute. It can come at any instruction of the training thread; while that
          is in C code (a collective), it does not come, and the thread hears of the signal all the same.
        * A rank is marked as asked before it says which call of `save` is its next: whatever its training
          thread does, it is held in that call or sooner, until all ranks have spoken. They agree on the
          highest of these calls, so none has passed it, and none waits for a step that needs a held rank.
        * From the signal to the end of `finish` the deadline holds: the thread ends the process at it.
        * Once closed, no thread of it asks the store: an interpreter that exits meanwhile would abort.

    Args:
        name: The checkpointer's directory: the same on every rank.
        call: How many calls of `save` there were.
    """

    def __init__(self, name: str, call: int) -> None:
        self.asked = False
        self._quorum = Quorum(f"checkpoint/{name}/preemption", failure=RankFailed)
        self._key = f"{self._quorum.name}/signal"  # a name is by order: taken here, where all ranks come
        self._name = name
        self._pid = os.getpid()
        self._terms: dict[int, _Terms] = {}
        self._signal: int | None = None
        self._chosen: _Terms | None = None
        self._call = call
        self._agreed: int | None = None
        self._wakeup: Wakeup | None = None
        self._why: Exception | None = None
        self._known = threading.Event()
        self._over = threading.Event()
        self._quorum.given_up = self._over.is_set
        self._agreeing: threading.Thread | None = None
        self._reached = self._saved = self._closed = False
        self._thread = threading.Thread(target=self._watch, name="overlapkit-preemption", daemon=True)

    def listen(self, signum: int, deadline: float, exit_code: int) -> None:
        """Take over a signal. Called in the main thread."""
        if signum in self._terms:
            raise ValueError(f"signum={_name_of(signum)}: it is listened to already")
        previous = signal.getsignal(signum)
        if previous is None:
            raise RuntimeError(f"{_name_of(signum)} has a handler that is not Python's, and cannot be had")
        self._terms[signum] = _Terms(deadline, exit_code, previous)
        try:
            signal.signal(signum, self._on_signal)
        except OSError as error:
            del self._terms[signum]
            raise ValueError(f"signum={_name_of(signum)}: no process can handle it ({error})") from None
        if self._thread.ident is None:
            self._wakeup = Wakeup()
            self._thread.start()

    def is_now(self, call: int) -> bool:
        """Whether this call of `save` is the one agreed on. Waits only where that is being agreed."""
        self._call = call
        if not self.asked:
            return False
        self._known.wait()
        assert self._agreed is not None
        self._reached = call >= self._agreed
        return self._reached

    def finish(self, save: Save, checkpointer: AbstractContextManager[Any]) -> NoReturn:
        """Wait for the agreed save, close, exit.

        Raises:
            SystemExit: It is committed; an error of an earlier save is printed only.
            Exception: Whatever made it fail.
        """
        assert self._chosen is not None
        try:
            with checkpointer:
                save.wait()
                self._saved = True
        except Exception:
            if not self._saved:
                raise
            traceback.print_exc()
        raise SystemExit(self._chosen.exit_code)

    def retire(self) -> None:
        """The checkpointer is being closed: no save can be agreed on any more."""
        if not self._reached:
            self._over.set()
            if self._wakeup is not None:
                self._wakeup.wake()

    def close(self) -> None:
        """Give the signals back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.retire()
        self._over.set()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            self._give_back()
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        if self._agreeing is not None:  # which the other thread has made
            self._agreeing.join(_END_S)
        if in_main and self._wakeup is not None and not self._thread.is_alive():
            self._wakeup.close()
        if self._signal is not None and not self._reached:
            warnings.warn(
                f"{_name_of(self._signal)} came, and no call of save() after it: nothing was saved for it",
                RuntimeWarning,
                stacklevel=3,
            )

    def _give_back(self) -> None:
        for signum, terms in self._terms.items():
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, terms.previous)
        if self._wakeup is not None:
            self._wakeup.detach()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The handler. A second signal changes nothing: launchers and schedulers often both send one."""
        mine = os.getpid() == self._pid and not self._closed
        if mine and self._signal is None:
            self._signal = signum
        previous = self._terms[signum].previous
        if callable(previous):
            if not mine or previous is not signal.default_int_handler:  # KeyboardInterrupt would end the step
                previous(signum, frame)
        elif not mine and previous == signal.SIG_DFL:  # in a forked child, or closed in another thread
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _watch(self) -> None:
        """The thread that keeps the deadline: from the signal on it asks for nothing that may be stuck."""
        signum = self._await_signal()
        if signum is None:
            return
        self._chosen = self._terms.get(signum) or next(iter(self._terms.values()))
        self._agreeing = threading.Thread(target=self._agree, name="overlapkit-preemption-agree", daemon=True)
        self._agreeing.start()
        if not self._over.wait(self._chosen.deadline) or self._why is not None:
            self._abandon()

    def _agree(self) -> None:
        assert self._chosen is not None
        until = time.monotonic() + self._chosen.deadline
        self.asked = True  # before the call is read: see the class
        report = {"call": self._call + 1}
        try:
            if self._signal is not None and self._quorum.store is not None:
                self._quorum.store.set(self._key, str(self._signal))
            self._quorum.timeout = 0.9 * self._chosen.deadline  # so that there is time to say who is missing
            verdict = self._quorum.settle("call", report, _highest)
        except Exception as error:
            if not self._over.is_set():
                self._why = error
                self._over.set()
            return
        self._agreed = verdict["call"]
        self._known.set()
        if not self._over.wait(until - time.monotonic() - _LAST_WORDS_S) and self._quorum.rank != 0:
            with contextlib.suppress(RuntimeError):  # rank 0 would like to know which rank it is that is late
                self._quorum.store.set(f"{self._quorum.name}/at/{self._quorum.rank}", str(self._call))

    def _await_signal(self) -> int | None:
        """The signal that came to this rank or another one; None where the checkpointer was closed."""
        store, asked = self._quorum.store, time.monotonic()
        pause = max(_TICK_S / 2, self._quorum.world / _ASKED_A_SECOND)
        assert self._wakeup is not None
        while not self._over.is_set():
            come = [signum for signum in self._wakeup.wait(_TICK_S) if signum in self._terms]
            if come and self._signal is None:
                self._signal = come[0]
            if self._signal is not None:
                return self._signal
            if store is None or time.monotonic() - asked < pause:
                continue
            asked = time.monotonic()
            try:
                if store.check([self._key]):
                    return int(store.get(self._key))
            except RuntimeError:
                store = None  # whoever served it is gone: the job is at its end
        return None

    def _abandon(self) -> NoReturn:
        """End the process. Nothing half is left: a checkpoint exists once it has its name."""
        assert self._chosen is not None
        code = self._chosen.exit_code if self._saved else ABANDONED
        last_words = threading.Thread(target=self._tell, args=(code,), daemon=True)
        last_words.start()
        last_words.join(1.0)  # the store may not answer, and stdout be locked by a thread that is stuck
        os._exit(code)

    def _tell(self, code: int) -> None:
        assert self._chosen is not None
        what = "it is saved, but closing takes too long" if self._saved else str(self._why or self._late())
        text = (
            f"overlapkit: {self._name}, rank {self._quorum.rank}: a signal came, with "
            f"{self._chosen.deadline:g} s for it: {what}. Earlier checkpoints are as they were. "
            f"Exit status {code}.\n"
        )
        os.write(2, text.encode())
        sys.stdout.flush()

    def _late(self) -> str:
        """Who has come least far, on rank 0; of others, how far they are themselves."""
        calls = {self._quorum.rank: self._call}
        try:
            for rank in range(1, self._quorum.world) if self._quorum.rank == 0 else ():
                key = f"{self._quorum.name}/at/{rank}"
                calls[rank] = int(self._quorum.store.get(key)) if self._quorum.store.check([key]) else -1
        except RuntimeError as error:
            return f"the store of the job is gone ({error})"
        if self._agreed is None:
            return "the ranks came to no agreement"
        least = min(calls.values())
        if least >= self._agreed:
            return "the save is not finished"
        who = ", ".join(str(rank) for rank, call in calls.items() if call == least)
        if least < 0:
            return f"rank(s) {who} answer no more"
        return (
            f"rank(s) {who} had begun {least} calls of save(), where call {self._agreed} was to be the last"
        )


def _highest(reports: list[Report]) -> Report:
    return {"call": max(report["call"] for report in reports)}


def _name_of(signum: int) -> str:
    return next((known.name for known in signal.Signals if known == signum), str(signum))
