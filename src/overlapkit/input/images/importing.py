"""DALI's import, beside a script that goes on meanwhile: a third of a second of Python."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overlapkit.extras import require

_SWITCH_S = 2e-4
"""For how long the importing thread keeps the interpreter where another one wants it."""

_one_at_a_time = threading.Lock()  # else a second one would take the first one's interval for the usual


def import_dali() -> Any:
    """Import DALI, and leave the interpreter to other threads sooner than the 5 ms that are usual.

    A training script's own start is many short operations: each of them would wait so long for its turn.

    Raises:
        ImportError: DALI is missing.
    """
    with _one_at_a_time, _short_turns():
        return require("nvidia.dali", "images")


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:  # else somebody has set it meanwhile
            sys.setswitchinterval(before)
