"""The checksums of a checkpoint, by the name under which its manifest keeps them.

xxh3_128 reads memory about as fast as it can be copied, and lets go of the interpreter's lock; crc32 is
what format version 1 had.
"""

import zlib
from collections.abc import Callable

import xxhash

ALGORITHM = "xxh3_128"
"""What is written."""
WIDTH = 32
"""Characters of one of its checksums."""

Buffer = bytes | memoryview

HASHES: dict[str, Callable[[Buffer], str | int]] = {
    ALGORITHM: xxhash.xxh3_128_hexdigest,
    "crc32": zlib.crc32,
}
"""What can be read."""


def checksum(data: Buffer) -> str | int:
    """The checksum of some bytes, as it is written."""
    return HASHES[ALGORITHM](data)
