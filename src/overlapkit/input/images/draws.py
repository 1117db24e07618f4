"""Random numbers that belong to a sample of an epoch, whoever draws them and whenever.

Augmentation that is a function of (seed, epoch, sample) needs no state to go on bitwise, at any number of
ranks and however batches are cut.
"""

import hashlib

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))


def uniforms(samples: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """`count` random numbers for each sample.

    A counter through the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), its start a hash of (seed, epoch).

    Args:
        samples: int64 (n,), from 0 on.
        count: Numbers for each; another count gives other numbers.
        seed: Any integer.
        epoch: Any integer.

    Returns:
        float64 (n, count) in [0, 1).
    """
    digest = hashlib.blake2b(f"draws/{seed}/{epoch}".encode(), digest_size=8).digest()
    start = np.frombuffer(digest, dtype="<u8")
    value: np.ndarray = np.add.outer(
        samples.astype(np.uint64) * np.uint64(count), np.arange(count, dtype=np.uint64)
    )
    value *= _STEP
    value += start
    for shift, multiplier in _MIX:
        value ^= value >> shift
        value *= multiplier
    value ^= value >> np.uint64(31)
    return (value >> np.uint64(11)) * 2.0**-53
