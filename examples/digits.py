"""Real images that come with scikit-learn: 1,797 handwritten digits, as JPEG files in a folder per class."""

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

SIZE = 32
"""Height and width of the files: four times those of the originals, so that crops can be fine."""


def split() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images and labels to train on, and a held-out quarter with the same share of each digit.

    Returns:
        Twice images (n, 8, 8), 0 to 16, and labels (n,); always the same.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    x, held_x, y, held_y = train_test_split(
        digits.images, digits.target, test_size=0.25, stratify=digits.target, random_state=0
    )
    return (x, y), (held_x, held_y)


def write_jpegs(folder: Path) -> None:
    """Write folder/train/DIGIT/*.jpg and folder/held_out/DIGIT/*.jpg, unless they are there already.

    They are written beside it and appear by one rename: an interrupted call leaves no half of them.
    """
    from PIL import Image

    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as unfinished:
        for name, (images, labels) in zip(("train", "held_out"), split(), strict=True):
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                path = Path(unfinished, folder.name, name, str(label), f"{number:04}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                grey = Image.fromarray((image * 255 / 16).round().astype(np.uint8))
                grey.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(path, quality=95)
        with suppress(FileExistsError):  # another run was faster: its images are the same
            Path(unfinished, folder.name).rename(folder)


def nearest_neighbour() -> float:
    """The share of held-out digits whose nearest training image has the same label: what is to be beaten."""
    (x, y), (held_x, held_y) = split()
    x, held_x = x.reshape(len(x), -1), held_x.reshape(len(held_x), -1)
    distances = (held_x**2).sum(1)[:, None] - 2 * held_x @ x.T + (x**2).sum(1)
    return float((y[distances.argmin(1)] == held_y).mean())
