"""A check: one thing to look at, with the time that it may take. Whatever goes wrong in it is a line, too."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from overlapkit.doctor.bounded import Late, bounded
from overlapkit.doctor.line import Layer, Line
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Subject


class Check(NamedTuple):
    """One thing to look at.

    Attributes:
        layer: Whose line is written where it fails.
        name: Likewise.
        look: Looks at it.
        shared: All ranks of a machine would see the same: the first one looks.
        seconds: How long it may take.
        needs: A folder of the kernel's without which there is nothing to look at.
    """

    layer: Layer
    name: str
    look: Callable[[Subject], Iterable[Line]]
    shared: bool = True
    seconds: float = 15.0
    needs: str = ""

    def run(self, subject: Subject) -> list[Line]:
        """The lines; those that were there before something went wrong, and what went wrong."""
        if self.needs and not subject.machine.has(self.needs):
            return [self.layer.absent(self.name, f"this system has no {self.needs} to read it from")]
        lines: list[Line] = []
        try:
            bounded(lambda: lines.extend(self.look(subject)), self.seconds, self.name)
        except (Unreadable, Late) as error:
            return [*lines, self.layer.unknown(self.name, str(error))]
        except Exception as error:  # one broken answer must not hide all others
            return [*lines, self.layer.unknown(self.name, f"{type(error).__name__}: {error}")]
        return lines
