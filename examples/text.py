"""Real text that every machine already has: the sources of the installed Python standard library."""

import math
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def sources(held_out: float = 0.1) -> tuple[list[bytes], list[bytes]]:
    """All .py files of the standard library, split by file.

    Args:
        held_out: Share of the files for validation, chosen by a hash of the file's name.

    Returns:
        Files to train on and files for validation, by name.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] not in ("site-packages", "dist-packages"):
            parts[zlib.crc32(name.as_posix().encode()) % 1000 < 1000 * held_out].append(path.read_bytes())
    return parts


def standard_library() -> tuple[Tensor, Tensor]:
    """The same as one text each: training and validation, uint8 (n,)."""
    train, validation = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in sources())
    return train, validation


def entropies(text: Tensor) -> tuple[float, float]:
    """Nats per byte that a unigram and a bigram table of the text itself leave: what a model must beat.

    Args:
        text: Bytes, uint8 (n,).
    """
    codes = text.numpy().astype(np.int64)
    pairs = np.bincount(codes[:-1] * 256 + codes[1:], minlength=256 * 256).astype(float)
    both, first = _entropy(pairs), _entropy(pairs.reshape(256, 256).sum(1))
    return first, both - first


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return -math.fsum(share * np.log(share))


class Windows(Dataset):
    """Text cut into windows; item i holds `window` bytes and the one that follows, uint8 (window + 1,)."""

    def __init__(self, text: Tensor, window: int) -> None:
        self.text, self.window = text, window

    def __len__(self) -> int:
        """How many whole windows there are."""
        return (len(self.text) - 1) // self.window

    def __getitem__(self, index: int) -> Tensor:
        """Window number `index`, a view."""
        start = index * self.window
        return self.text[start : start + self.window + 1]


def inputs_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Split (B, window + 1) bytes into tokens and targets (B, window), int64; runs on the device."""
    return windows[:, :-1].long(), windows[:, 1:].long()
