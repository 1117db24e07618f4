"""What is still open when the interpreter exits is closed in order."""

import atexit
import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class _Open(Protocol):
    def close(self) -> None: ...


def close_at_exit(open_one: _Open, root: Path) -> Callable[[], object]:
    """Close something at exit, before the lanes' own hook, which has less patience than a slow disk.

    Args:
        open_one: Closed in the process that calls this only; forgotten when it is collected.
        root: Named where closing fails.

    Returns:
        Calling it calls this off.
    """
    at_exit = functools.partial(_close, weakref.ref(open_one), root, os.getpid())
    undo = weakref.finalize(open_one, atexit.unregister, at_exit)
    undo.atexit = False
    atexit.register(at_exit)
    return undo


def _close(alive: "weakref.ref[_Open]", root: Path, pid: int) -> None:
    open_one = alive()
    if open_one is None or pid != os.getpid():
        return
    try:
        open_one.close()
    except Exception as error:
        print(f"overlapkit: a save to {root} failed at exit:", file=sys.stderr)
        traceback.print_exception(error)
