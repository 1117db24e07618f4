"""The checksums of a checkpoint, by the name under which its manifest keeps them.

xxh3_128 reads memory about as fast as it can be copied, and lets go of the interpreter's lock; crc32 is
what format version 1 had. Where a bare checkout runs without xxhash, what is written is blake2b_128, which
every Python has: it is slower by an order of magnitude, and is read everywhere.
"""

import hashlib
import zlib
from collections.abc import Callable

try:
    import xxhash
except ModuleNotFoundError:
    xxhash = None  # type: ignore[assignment]

WIDTH = 32
"""Characters of a checksum in hexadecimal, of either algorithm that is written."""

Buffer = bytes | memoryview


def _blake2b_128(data: Buffer) -> str:
    return hashlib.blake2b(data, digest_size=WIDTH // 2).hexdigest()


HASHES: dict[str, Callable[[Buffer], str | int]] = {"blake2b_128": _blake2b_128, "crc32": zlib.crc32}
"""What can be read."""
if xxhash is not None:
    HASHES["xxh3_128"] = xxhash.xxh3_128_hexdigest

ALGORITHM = "xxh3_128" if "xxh3_128" in HASHES else "blake2b_128"
"""What is written."""


def checksum(data: Buffer) -> str | int:
    """The checksum of some bytes, as it is written."""
    return HASHES[ALGORITHM](data)
