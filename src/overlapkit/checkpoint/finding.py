"""Which checkpoint is meant: a directory and a step, or the folder of one."""

import contextlib
import os
from pathlib import Path
from typing import Any, Literal

from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.errors import CheckpointError, StoreError
from overlapkit.checkpoint.manifest import Manifest, is_ours, read_manifest, step_folders, step_of
from overlapkit.checkpoint.opening import check_place, check_step
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.remote.store import place_of

Where = str | os.PathLike[str]
"""A directory of checkpoints, or the folder `step-N` of one of them; a path or an fsspec URL."""
Step = int | Literal["latest"]


def find_checkpoint(where: Where, step: Step = "latest") -> Path:
    """The folder of a checkpoint.

    Args:
        where: A directory of checkpoints, or the folder of one.
        step: Which one; "latest" is the one of the highest step, sound or not.

    Raises:
        FileNotFoundError: There is none.
        ValueError: `where` is the folder of another step, or no path.
        NotImplementedError: It is a URL that has lost a slash.
    """
    if not isinstance(where, StorePath):
        check_place("where", where)
    path = place_of(where)
    if not path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} does not exist, or is no folder")
    number = None if step == "latest" else check_step(step)
    here = path if isinstance(path, StorePath) else Path(os.path.abspath(path))  # so that "." has a name, too
    own = step_of(here.name)
    if own is not None and is_ours(path):
        if number not in (None, own):
            raise ValueError(f"step={number}: {str(path)!r} is the folder of step {own} alone")
        return path
    there = step_folders(path)
    if not there:
        raise FileNotFoundError(f"{str(path)!r} holds no checkpoint (a folder step-N), and is none itself")
    if number is None:
        return there[max(there)]
    if number not in there:
        raise FileNotFoundError(f"step={number}: {str(path)!r} has no such checkpoint, but {list(there)}")
    return there[number]


def sound_checkpoints(*places: Path) -> dict[int, dict[str, float]]:
    """The metrics of committed checkpoints, by step, ascending: those with a sound manifest and all files.

    Args:
        places: Where they are; of those of one step the first counts.

    Raises:
        StoreError: A store failed, which says nothing about what is in it.
    """
    return {step: numbers(manifest.metrics) for step, manifest in sound_manifests(*places).items()}


def sound_manifests(*places: Path) -> dict[int, Manifest]:
    """The manifests of `sound_checkpoints`."""
    found: dict[int, Manifest] = {}
    for place in places:
        for step, folder in step_folders(place).items():
            try:
                found.setdefault(step, read_manifest(folder))
            except StoreError:
                raise
            except CheckpointError:
                continue
    return dict(sorted(found.items()))


def numbers(metrics: Any) -> dict[str, float]:
    """Metrics as they were given; none where they are not what we write."""
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {name: float(value) for name, value in decode(metrics, str).items()}
    return {}
