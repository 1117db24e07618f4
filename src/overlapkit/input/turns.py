"""Shorter turns at the interpreter, for as long as threads of ours work beside the script's.

Where one thread wants the interpreter and another one has it, Python lets 5 ms pass before it takes it away:
longer than many a step can spare, on either side.
"""

import os
import sys
import threading

_lock = threading.RLock()  # a pass may be collected, and end its turns, wherever another one's are counted
_wanted: set["ShortTurns"] = set()
_usual = _set = 0.0


class ShortTurns:
    """Lets turns be no longer than some seconds until `end`.

    What somebody else sets meanwhile, with `sys.setswitchinterval`, stays.
    """

    def __init__(self, seconds: float) -> None:
        global _usual, _set
        self.seconds = seconds
        with _lock:
            if not _wanted:
                _usual = _set = sys.getswitchinterval()
            _wanted.add(self)
            _apply()

    def end(self) -> None:
        """Let turns be as usual, as far as nobody else wants them short. Safe to call twice."""
        with _lock:
            _wanted.discard(self)
            _apply()


def _apply() -> None:
    global _set
    if sys.getswitchinterval() == _set:
        sys.setswitchinterval(min([_usual, *(turns.seconds for turns in _wanted)]))
        _set = sys.getswitchinterval()  # rounded


def _leave_the_parents() -> None:
    """In a forked child none of our threads works."""
    _wanted.clear()
    _apply()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_leave_the_parents)
