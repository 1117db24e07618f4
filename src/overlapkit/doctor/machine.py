"""What the kernel says about this machine, read below a root, so that a tree of a few files can stand in.

A file that is not there, may not be read or holds garbage is `Unreadable`, with the reason.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from overlapkit.doctor.ethtool import statistics

_MOST = 1 << 16  # CPUs of a machine
_LONGEST = 1 << 20  # bytes; /proc and /sys hold nothing longer that is read here


class Unreadable(Exception):
    """The machine does not say; the message says why."""


class Machine:
    """Files of /proc and /sys, and the environment.

    Args:
        root: Where /proc and /sys lie.
        environ: The environment; this process's where not given.
        ethtool: The driver's counters of a network interface; empty where it has none.

    Attributes:
        environ: The environment.
        ethtool: As given.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] = "/",
        environ: Mapping[str, str] | None = None,
        *,
        ethtool: Callable[[str], dict[str, int]] = statistics,
    ) -> None:
        self._root = Path(root)
        self.environ = dict(os.environ if environ is None else environ)
        self.ethtool = ethtool

    def text(self, path: str) -> str:
        """A file, stripped.

        Raises:
            Unreadable: It is not there, or cannot be read.
        """
        try:
            with open(self._at(path), "rb") as file:
                return file.read(_LONGEST).decode("utf-8", "replace").strip("\0 \n")
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    def number(self, path: str) -> int:
        """A file that holds one whole number.

        Raises:
            Unreadable: It cannot be read, or holds something else.
        """
        text = self.text(path)
        try:
            return int(text, 0)
        except ValueError:
            raise Unreadable(f"{path} holds {text[:40]!r} where a number belongs") from None

    def maybe(self, path: str) -> str | None:
        """A file, or None where it cannot be read."""
        try:
            return self.text(path)
        except Unreadable:
            return None

    def count(self, path: str) -> int | None:
        """A file's number, or None."""
        try:
            return self.number(path)
        except Unreadable:
            return None

    def has(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        try:
            return self._at(path).exists()
        except OSError:
            return False

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted; nothing where it cannot be read."""
        try:
            return sorted(os.listdir(self._at(folder)))
        except OSError:
            return []

    def resolve(self, path: str) -> PurePosixPath:
        """Where a link leads, as a path below the root.

        Raises:
            Unreadable: It leads nowhere, or out of the root.
        """
        try:
            found = self._at(path).resolve(strict=True)
            return PurePosixPath("/") / found.relative_to(self._root.resolve())
        except (OSError, ValueError, RuntimeError) as error:
            raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    def table(self, path: str) -> dict[str, str]:
        """A file of `name: value` lines.

        Raises:
            Unreadable: It cannot be read.
        """
        pairs = (line.partition(":") for line in self.text(path).splitlines())
        return {name.strip(): value.strip() for name, sign, value in pairs if sign}

    def memory(self, name: str) -> int:
        """A value of /proc/meminfo, in bytes.

        Raises:
            Unreadable: It is not there.
        """
        value = self.table("/proc/meminfo").get(name, "").split()
        if not value or not value[0].isdigit():
            raise Unreadable(f"/proc/meminfo does not say {name}")
        return int(value[0]) * 1024

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def numbers(text: str) -> set[int]:
    """A list of the kernel's, such as 0-3,8.

    Raises:
        Unreadable: It is none.
    """
    found: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if high - low > _MOST:
                raise ValueError
            found |= set(range(low, high + 1))
    except ValueError:
        raise Unreadable(f"{text[:40]!r} is no list of numbers") from None
    return found
