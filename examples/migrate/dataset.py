"""The dataset, as it was before the migration and is after it: a file is read for each sample."""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class StandardLibrary(Dataset):
    """One window of each source file of the Python standard library: inputs and targets, int64 (window,)."""

    def __init__(self, window: int = 64) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        installed = {root / "site-packages", root / "dist-packages"}
        self.window = window
        self.paths = [
            path
            for path in sorted(root.rglob("*.py"))
            if installed.isdisjoint(path.parents) and path.stat().st_size > window
        ]

    def __len__(self) -> int:
        """How many files there are."""
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Read a file, and cut a window out."""
        text = self.paths[index].read_bytes()
        start = zlib.crc32(text) % (len(text) - self.window)
        window = torch.tensor(list(text[start : start + self.window + 1]))
        return window[:-1], window[1:]
