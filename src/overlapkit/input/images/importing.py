"""DALI's import, beside a script that goes on meanwhile: a third of a second of Python."""

from typing import Any

from overlapkit.extras import require
from overlapkit.input.turns import ShortTurns

_TURN_S = 2e-4


def import_dali() -> Any:
    """Import DALI, and leave the interpreter to other threads sooner than the 5 ms that are usual.

    A training script's own start is many short operations: each of them would wait so long for its turn.

    Raises:
        ImportError: DALI is missing.
    """
    turns = ShortTurns(_TURN_S)
    try:
        return require("nvidia.dali", "images")
    finally:
        turns.end()
