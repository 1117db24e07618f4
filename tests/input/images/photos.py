"""Real photographs: parts of the one that matplotlib ships, of many shapes and as many files as wanted."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL import Image

HALF_COLOURS, FULL_COLOURS = 2, 0
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def photograph() -> "Image.Image":
    """512 x 600, in RGB."""
    import matplotlib  # here: this file is imported where neither is installed, and the tests are skipped
    from PIL import Image

    return Image.open(Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")).convert("RGB")


def write_photos(folder: Path, count: int, classes: int = 3) -> list[str]:
    """Files of `classes` classes, in the order of their names, each another part of the photograph.

    Every other one has its colours at half the resolution, as most photographs do.
    """
    whole, rng = photograph(), np.random.default_rng(5)
    paths = []
    for index in range(count):
        kind = index * classes // count
        width, height = rng.integers(60, 180, 2).tolist()
        left, top = rng.integers(0, 512 - width), rng.integers(0, 600 - height)
        path = folder / f"class{kind}" / f"{index:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.crop((left, top, left + width, top + height)).save(
            path, quality=90, subsampling=HALF_COLOURS if index % 2 else FULL_COLOURS
        )
        paths.append(str(path))
    return paths


def pixels(images: torch.Tensor) -> np.ndarray:
    """Batches (n, 3, h, w) as they were before normalisation: float64 (n, h, w, 3) in 0 to 255."""
    channels_last = images.double().numpy().transpose(0, 2, 3, 1)
    return (channels_last * STD + MEAN) * 255
