"""What is measured once and read again later: a file of JSON."""

from os import PathLike, fspath
from pathlib import Path
from typing import Self


class Stored:
    """Has `to_json` and `from_json`."""

    def to_json(self) -> str:
        """All of it as JSON."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        raise NotImplementedError

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: It holds something else; the message names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{fspath(path)}: {error}") from error
