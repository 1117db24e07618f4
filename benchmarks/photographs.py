"""Real photographs as JPEG files: crops of the two that scikit-learn ships, the same on every machine."""

from pathlib import Path

import numpy as np

QUALITY = 90  # with sides of 0.565 to 1 times those of the originals (640 x 427): 51 KB a file


def write_photographs(folder: Path, count: int) -> list[str]:
    """Write `count` crops of the originals in turn, each of a size and at a place of its own.

    Returns:
        Their paths, sorted.

    Raises:
        ImportError: scikit-learn or Pillow is not installed.
    """
    from PIL import Image
    from sklearn.datasets import load_sample_images

    originals = load_sample_images().images  # uint8 (H, W, 3)
    random = np.random.default_rng(0)
    files = [folder / f"{number:05}.jpg" for number in range(count)]
    for number, file in enumerate(files):
        original = originals[number % len(originals)]
        height, width = (int(side * random.uniform(0.565, 1)) for side in original.shape[:2])
        top = random.integers(original.shape[0] - height + 1)
        left = random.integers(original.shape[1] - width + 1)
        crop = original[top : top + height, left : left + width]
        Image.fromarray(crop).save(file, quality=QUALITY)
    return [str(file) for file in files]
