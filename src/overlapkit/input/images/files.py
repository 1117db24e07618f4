"""Which files there are, and the class of each: a folder of class folders, or a list with labels."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        digest: Of the names: a state means a place in this list.
    """

    paths: list[str]
    labels: np.ndarray
    classes: list[str] | None

    @cached_property
    def digest(self) -> str:
        """A hash of the names in their order, from the folder on that all of them lie in: that may move."""
        shared = os.path.commonprefix([min(self.paths), max(self.paths)])  # and so by all between them
        start = shared.rfind(os.sep) + 1
        names = "\0".join(path[start:] for path in self.paths)
        return hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16).hexdigest()


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
        return _from_folder(Path(source).absolute())  # opened after a chdir, too
    if not isinstance(source, Sequence) or not all(isinstance(path, str | os.PathLike) for path in source):
        raise TypeError(
            f"source is a {type(source).__name__}: give the folder of the class folders, or a list of paths"
        )
    paths = [os.fsdecode(path) for path in source]
    if not paths:
        raise ValueError("source is an empty list of files: there is nothing to read")
    if "" in paths:
        raise ValueError(f"source[{paths.index('')}] is an empty name: give the path of a file")
    whole = [path if os.path.isabs(path) else os.path.join(os.getcwd(), path) for path in paths]
    return Files(whole, _as_labels(labels, len(paths)), None)


def _from_folder(root: Path) -> Files:
    if not root.is_dir():
        raise FileNotFoundError(f"source={str(root)!r} is no folder: give one that has a folder per class")
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        raise FileNotFoundError(
            f"source={str(root)!r} has no folders in it: images of class C belong in {root}/C/. "
            "For images without class folders give a list of files, and labels="
        )
    above = {_identity(folder) for folder in (root, *root.resolve().parents)}
    found = [_images_in(os.path.join(root, name), above) for name in classes]
    if empty := [name for name, paths in zip(classes, found, strict=True) if not paths]:
        raise FileNotFoundError(
            f"no images in {', '.join(empty[:5])} of {str(root)!r}: remove what is no class. "
            f"Images end in {', '.join(SUFFIXES)}"
        )
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in found])
    return Files([path for paths in found for path in paths], labels, classes)


def _images_in(folder: str, above: set[tuple[int, int]]) -> list[str]:
    """The images below a folder: by folder, then by name."""
    return [
        os.path.join(at, name)
        for at, names in sorted(_folders(folder, above))
        for name in sorted(names)
        if name.lower().endswith(tuple(SUFFIXES))
    ]


def _folders(folder: str, above: set[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """A folder and those below it, with their files; links are followed, but to no folder a second time."""
    seen = set(above)
    for at, below, names in os.walk(folder, followlinks=True):
        if (identity := _identity(at)) in seen:
            below.clear()
            continue
        seen.add(identity)
        below.sort()  # which of two ways to a folder is taken must not depend on the file system
        yield at, names


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _as_labels(labels: Any, count: int) -> np.ndarray:
    if labels is None:
        raise ValueError("labels=None: a list of files needs one label each. Only a folder brings its own")
    given = np.asarray(labels)
    if given.ndim != 1 or len(given) != count:
        raise ValueError(f"labels has shape {given.shape}, there are {count} files: give one label each")
    if given.dtype.kind not in "iu":
        raise TypeError(f"labels are {given.dtype}: give one integer for each file")
    return given.astype(np.int64)
