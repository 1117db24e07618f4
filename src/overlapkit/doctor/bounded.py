"""A call with a deadline: what hangs in the kernel (a dead NFS server, a wedged device) is left behind."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Late(Exception):
    """There was no answer in time."""


def bounded(work: Callable[[], T], seconds: float, what: str) -> T:
    """Return what `work()` returns, or raise what it raises, within `seconds`.

    It runs in a daemon thread, which no exit waits for; one that is late is never asked again.

    Raises:
        Late: There was no answer in time.
    """
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=run, name=f"overlapkit-doctor {what}", daemon=True).start()
    try:
        value, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise Late(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
