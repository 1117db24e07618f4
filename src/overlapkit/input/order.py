"""The order of an epoch as a function: which sample stands at a position, and which positions a rank takes.

Nothing is stored: a keyed bijection gives the sample at any position in O(1), so one integer resumes a
shuffled epoch exactly, at any number of ranks.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

BLOCK = 8192
"""Samples whose order is worked out at once: 30 ns each, where one at a time would cost microseconds."""

_ROUNDS = 6
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The samples that stand at some positions of a shuffled epoch.

    A Feistel network over the pairs (x, y) of a x b >= size, a and b near its root (the generalised
    Feistel cipher of Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); what falls outside
    of [0, size) walks on along its cycle until it falls inside. Round keys come from a hash of (seed, epoch).

    Args:
        positions: int64 (n,), each in [0, size). Thousands at a time cost about 30 ns each.
        size: Samples in an epoch, 1 to 2**62.
        seed: Any integer.
        epoch: Any integer.

    Returns:
        Samples, int64 (n,), each in [0, size): a bijection of the positions.
    """
    b = math.isqrt(size - 1) + 1
    a = -(-size // b)
    keys = _keys(seed, epoch)
    out = _network(positions.astype(np.uint64), np.uint64(a), np.uint64(b), keys)
    while (outside := out >= size).any():
        out[outside] = _network(out[outside], np.uint64(a), np.uint64(b), keys)
    return out.view(np.int64)


@dataclass(frozen=True)
class Order:
    """Who takes which sample when: one order of an epoch, dealt to the ranks like cards.

    A pass that begins at position p deals the samples at p, p + 1, p + 2, ... to ranks 0, 1, 2, ...: after
    k samples of each rank exactly the positions up to p + k * world are taken, so that one position
    describes all ranks, and another number of ranks can go on from it.

    Every rank takes equally many. Where the rest of an epoch does not divide, `drop_last` leaves up to
    world - 1 samples out; without it the first samples of the epoch's order are taken a second time to
    fill up, as DistributedSampler does.

    Args:
        size: Samples in an epoch.
        rank: This rank.
        world: Number of ranks.
        seed: Of the shuffle; the same on every rank.
        shuffle: False keeps samples in their own order.
        drop_last: Leave out, rather than repeat, where ranks cannot take equally many.
    """

    size: int
    rank: int
    world: int
    seed: int
    shuffle: bool
    drop_last: bool

    def share(self, position: int) -> int:
        """Samples that each rank takes of the epoch's rest after `position`."""
        rest = self.size - position
        return rest // self.world if self.drop_last else -(-rest // self.world)

    def after(self, position: int, taken: int) -> int:
        """Where the epoch stands when each rank has taken `taken` samples since `position`."""
        return min(self.size, position + taken * self.world)

    def samples(self, epoch: int, position: int, start: int, stop: int) -> np.ndarray:
        """This rank's samples number `start` to `stop`, int64, of a pass that began at `position`."""
        places = position + np.arange(start, stop, dtype=np.int64) * self.world + self.rank
        if len(places) and places[-1] >= self.size:  # beyond the end: those that are repeated
            places %= self.size
        return self.at(epoch, places)

    def at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The samples that stand at some places of an epoch, int64 (n,), each in [0, size)."""
        return permute(places, self.size, self.seed, epoch) if self.shuffle else places


def _network(value: np.ndarray, a: np.uint64, b: np.uint64, keys: list[np.uint64]) -> np.ndarray:
    x = value // b
    y = value - x * b  # numpy turns // by a constant into products, but not divmod
    for turn in range(0, _ROUNDS, 2):
        _add(x, _below(a, y, keys[turn]), a)
        _add(y, _below(b, x, keys[turn + 1]), b)
    x *= b
    x += y
    return x


def _below(limit: np.uint64, value: np.ndarray, key: np.uint64) -> np.ndarray:
    """A number in [0, limit) for each value, limit < 2**32: a keyed finaliser, scaled by its upper half."""
    mixed = mix(value, key)
    mixed &= np.uint64(0xFFFFFFFF)
    mixed *= limit
    mixed >>= _HALF
    return mixed


def mix(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """A keyed finaliser: a new array of 64 random-looking bits for each uint64."""
    mixed = value ^ key
    for multiplier in _MULTIPLIERS:
        mixed *= multiplier
        mixed ^= mixed >> _HALF
    return mixed


def _add(total: np.ndarray, addend: np.ndarray, modulus: np.uint64) -> None:
    """Total + addend modulo `modulus`, in place; both are below it."""
    total += addend
    np.minimum(total, total - modulus, out=total)  # below the modulus, the difference wraps around


def uniform(counters: np.ndarray, key: str) -> np.ndarray:
    """A number in [0, 1) for each of some counters (uint64), float64 of their shape; `key` names the draw."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    bits: np.ndarray = mix(counters, np.frombuffer(digest, dtype="<u8")[0]) >> np.uint64(11)
    return bits * 2.0**-53


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return [np.uint64(key) for key in np.frombuffer(digest, dtype="<u8")]
