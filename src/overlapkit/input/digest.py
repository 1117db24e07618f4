"""Which samples a batch was made of, as one number: an order that is drawn again must come to the same."""

import operator
import zlib
from typing import Any

import numpy as np
import torch


def digest(index: Any) -> int | None:
    """A checksum of the samples of a batch, or None where they are no numbers, text, or made of such."""
    samples = index if isinstance(index, list | tuple) else [index]
    try:
        return zlib.crc32(repr([_plain(sample) for sample in samples]).encode())
    except TypeError:
        return None


def _plain(sample: Any) -> Any:
    """A sample's index by its value: samplers give (index, size) and the like, too, and arrays.

    Raises:
        TypeError: It is something else, whose text may be another in another process.
    """
    if isinstance(sample, list | tuple):
        return [_plain(part) for part in sample]
    if isinstance(sample, np.ndarray) and sample.dtype.hasobject:
        return _plain(sample.tolist())
    if isinstance(sample, torch.Tensor | np.ndarray | np.generic):
        return sample.tolist()
    return sample if type(sample) in (str, float, bytes) else operator.index(sample)
