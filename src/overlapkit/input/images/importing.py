"""DALI's import, beside a script that goes on meanwhile: a third of a second of Python."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overlapkit.extras import require
from overlapkit.input.turns import ShortTurns

_TURN_S = 2e-4

_RARELY = 2**30
"""New objects before garbage is collected: an import makes little of it, and torch is looked through, too."""

_one_at_a_time = threading.Lock()  # else a second one would take the first one's threshold for the usual
_usual = 0


def import_dali() -> Any:
    """Import DALI, and leave the interpreter to other threads sooner than the 5 ms that are usual.

    A training script's own start is many short operations: each of them would wait so long for its turn.
    Collections, a fifth of the import, would hold up all of them, and wait until it is done.

    Raises:
        ImportError: DALI is missing.
    """
    with _one_at_a_time, _few_collections():
        turns = ShortTurns(_TURN_S)
        try:
            return require("nvidia.dali", "images")
        finally:
            turns.end()


@contextmanager
def _few_collections() -> Iterator[None]:
    """By the threshold, not by gc.disable(): that is the script's to call, meanwhile too."""
    global _usual
    _usual, *older = gc.get_threshold()
    if _usual:  # 0: there are none
        gc.set_threshold(_RARELY, *older)
    try:
        yield
    finally:
        _as_usual()


def _as_usual() -> None:
    now, *older = gc.get_threshold()
    if now == _RARELY:  # else somebody has set it meanwhile
        gc.set_threshold(_usual, *older)


def _leave_the_parents() -> None:
    """In a forked child nobody imports: a DataLoader's worker may begin at any time."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _as_usual()


os.register_at_fork(after_in_child=_leave_the_parents)
