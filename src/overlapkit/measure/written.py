"""Files that are whole or not there: written beside their name, then renamed."""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from typing import IO, cast


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to, packed where the name ends in .gz; under its name once the body is done.

    Raises:
        OSError: It cannot be written; what was there before is as it was.
    """
    name = fspath(path)
    part = f"{name}.part-{os.getpid()}"
    try:
        with open(part, "xb") as file:
            if name.endswith(".gz"):
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                    yield cast(IO[bytes], packed)
            else:
                yield file
        os.replace(part, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
