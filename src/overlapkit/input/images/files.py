"""Which files there are, and the class of each: a folder of class folders, or a list with labels."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = [
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".webp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".jp2",
]  # what DALI decodes without a GPU


@dataclass(frozen=True)
class Files:
    """Image files and their labels.

    Attributes:
        paths: As they will be opened.
        labels: int64 (n,).
        classes: Names of the classes, by label, where they came from a folder.
        digest: Of the names without their folders: a state means a place in this list.
    """

    paths: list[str]
    labels: np.ndarray
    classes: list[str] | None

    @property
    def digest(self) -> int:
        """A checksum of the names in their order, whatever folder they lie in."""
        return zlib.crc32("\0".join(map(os.path.basename, self.paths)).encode(errors="surrogateescape"))


def find_files(source: Any, labels: Any) -> Files:
    """The files of a folder, or of a list.

    Args:
        source: A folder that has one folder of images per class (torchvision's ImageFolder: classes are
            numbered in the order of their sorted names), or a sequence of paths.
        labels: None for a folder; for a list one integer each.

    Raises:
        FileNotFoundError: There is no such folder, or there are no images in it.
        TypeError: The source is neither, or labels are no integers.
        ValueError: Labels are missing, too many or too few.
    """
    if isinstance(source, str | os.PathLike):
        if labels is not None:
            raise ValueError(
                f"labels were given beside the folder {os.fspath(source)!r}, whose class folders are the "
                "labels: leave labels out, or give a list of files"
            )
        return _from_folder(Path(source))
    if not isinstance(source, Sequence) or not all(isinstance(path, str | os.PathLike) for path in source):
        raise TypeError(
            f"source is a {type(source).__name__}: give the folder of the class folders, or a list of paths"
        )
    paths = [os.fspath(path) for path in source]
    if not paths:
        raise ValueError("source is an empty list of files: there is nothing to read")
    return Files(paths, _as_labels(labels, len(paths)), None)


def _from_folder(root: Path) -> Files:
    if not root.is_dir():
        raise FileNotFoundError(f"source={str(root)!r} is no folder: give one that has a folder per class")
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        raise FileNotFoundError(
            f"source={str(root)!r} has no folders in it: images of class C belong in {root}/C/. "
            "For images without class folders give a list of files, and labels="
        )
    found = [_images_in(os.path.join(root, name)) for name in classes]
    if empty := [name for name, paths in zip(classes, found, strict=True) if not paths]:
        raise FileNotFoundError(
            f"no images in {', '.join(empty[:5])} of {str(root)!r}: remove what is no class. "
            f"Images end in {', '.join(SUFFIXES)}"
        )
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in found])
    return Files([path for paths in found for path in paths], labels, classes)


def _images_in(folder: str) -> list[str]:
    """The images below a folder: by folder, then by name."""
    return [
        os.path.join(at, name)
        for at, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(tuple(SUFFIXES))
    ]


def _as_labels(labels: Any, count: int) -> np.ndarray:
    if labels is None:
        raise ValueError("labels=None: a list of files needs one label each. Only a folder brings its own")
    given = np.asarray(labels)
    if given.ndim != 1 or len(given) != count:
        raise ValueError(f"labels has shape {given.shape}, there are {count} files: give one label each")
    if given.dtype.kind not in "iu":
        raise TypeError(f"labels are {given.dtype}: give one integer for each file")
    return given.astype(np.int64)
