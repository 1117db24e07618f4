"""Python stacks of this process: as text for a person, and as a sign of life."""

import sys
import threading
from collections.abc import Iterator
from types import FrameType

_DEEP = 30  # innermost frames of a thread that are shown
_LONG = 16 * 1024  # characters in all

_COMPILING = tuple(
    f"torch/{name}.py" for name in ("_dynamo/convert_frame", "_inductor/async_compile", "_inductor/graph")
)
_OURS = ("overlapkit-watch", "overlapkit-beat", "overlapkit-ranks")  # they only wait, and tell nothing

_BOUNDED = "overlapkit/checkpoint/"


def all_stacks(training: int | None) -> str:
    """The stacks of all threads, the training thread's first, as faulthandler writes them.

    No source lines: a file system that hangs may be the reason for all of this.

    Args:
        training: Identity of the training thread, or None.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != training)
    parts = []
    for ident, frame in frames:
        if names.get(ident, "") in _OURS:
            continue
        mine = " (trains)" if ident == training else ""
        lines = [f"Thread {names.get(ident, 'without a name')}{mine}, most recent call first:"]
        for place, one in enumerate(_up(frame)):
            if place == _DEEP:
                lines.append("  ...")
                break
            lines.append(f'  File "{one.f_code.co_filename}", line {one.f_lineno}, in {one.f_code.co_name}')
        parts.append("\n".join(lines))
    return "\n".join(parts)[:_LONG]


class StackActivity:
    """Whether a thread still gets about: it is seen at places where it has not been since the last reset.

    A thread that is blocked is seen at one place; one that polls in a loop soon has been everywhere in it.
    One that compiles or reads a model comes to new places all the time.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reset(self) -> None:
        """It was seen to make progress otherwise."""
        self._seen.clear()

    def moved(self, thread: int | None) -> bool:
        """Look where it is. True also within torch.compile, and our checkpointer: its waits are bounded."""
        frame = sys._current_frames().get(thread) if thread is not None else None
        if frame is None:
            return False
        place = 0
        for one in _up(frame):
            name = one.f_code.co_filename
            if name.endswith(_COMPILING) or _BOUNDED in name:
                return True
            place = hash((place, id(one.f_code), one.f_lasti))
        new = place not in self._seen
        self._seen.add(place)
        return new


def innermost(stacks: str) -> str:
    """Where the training thread of `all_stacks` is: its first line that names a file."""
    return next((line.strip() for line in stacks.splitlines() if line.startswith("  File")), "")


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
