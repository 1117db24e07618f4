"""What earlier runs committed locally and did not get uploaded: which of it the next run uploads."""

import json
import os
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint
from overlapkit.checkpoint.finding import numbers, sound_manifests
from overlapkit.checkpoint.hashing import checksum
from overlapkit.checkpoint.manifest import MANIFEST, Manifest, read_manifest, step_name
from overlapkit.checkpoint.progress import Count
from overlapkit.checkpoint.remote.store import Store
from overlapkit.checkpoint.retention import Policy
from overlapkit.checkpoint.verification import damage_in_share


class Pending(NamedTuple):
    """A checkpoint to upload.

    Attributes:
        step: Its step.
        content: A checksum of what its files are: another save of this step has another one.
        stays: It is not given up for a later one.
    """

    step: int
    content: str
    stays: bool


class _Hold(Protocol):
    def take(self, folder: Path, files: dict[str, dict[str, Any]]) -> None: ...


@dataclass(frozen=True)
class Earlier:
    """What was committed in a local directory when a run began.

    Attributes:
        there: The manifests by step, ascending, and when they were written.
    """

    there: dict[int, tuple[Manifest, datetime]] = field(default_factory=dict)

    @classmethod
    def found(cls, root: Path) -> Self:
        """What is committed there now."""
        there = {}
        for step, manifest in sound_manifests(root).items():
            written = (manifest.folder / MANIFEST).stat().st_mtime
            there[step] = manifest, datetime.fromtimestamp(written, UTC)
        return cls(there)

    def pending(self, store: Store, policy: Policy) -> list[Pending]:
        """What a store lacks of it and would not delete, the newest first.

        A step that the store has with other files is another save of it. The later of both counts, as ever;
        that is told by two clocks, of this machine and of the store.

        Args:
            store: Where to.
            policy: What stays there.

        Raises:
            StoreError: The store failed.
        """
        far = sound_manifests(store.root)
        lacks = {
            step: manifest
            for step, (manifest, when) in self.there.items()
            if step not in far
            or (manifest.files != far[step].files and _before(store.modified(_manifest_of(step)), when))
        }
        found = {step: numbers(manifest.metrics) for step, manifest in sorted((far | lacks).items())}
        surplus = policy.surplus(found, found, max(found, default=0))
        best = [] if policy.best is None else policy.best.ranked(found)[:1]
        every = policy.keep_every
        return [
            Pending(step, _content(manifest), step in best or (every is not None and step % every == 0))
            for step, manifest in reversed(lacks.items())
            if step not in surplus
        ]


def take(cargo: _Hold, root: Path, one: Pending, rank: int, world: int) -> dict[str, Any]:
    """Open and check a rank's share of the files: those of every world-th rank that wrote it.

    What is uploaded counts as verified in the store, so every byte is read against its checksum first.

    Args:
        cargo: Holds the files.
        root: The local directory.
        one: The checkpoint.
        rank: This one.
        world: How many ranks upload.

    Returns:
        What the manifest says beside the files (see `publish`); nothing where the checkpoint is not there
        any more, or is damaged (with a warning).
    """
    folder = root / step_name(one.step)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    try:
        manifest = read_manifest(folder)
        if _content(manifest) != one.content:
            return {}
        mine = range(rank, manifest.world, world)
        files = {name: file for name, file in manifest.files.items() if _writer(name) in mine}
        cargo.take(manifest.inside, files)
        count = Count(0, None)
        damage = [place for writer in mine for place in damage_in_share(manifest, writer, count)]
        if damage:
            raise DamagedCheckpoint(str(damage[0]))
        about = {"world": manifest.world, "metrics": manifest.metrics, "hash": manifest.hash}
        return about if _is(folder, fd) else {}
    except (CheckpointError, FileNotFoundError) as error:
        if _is(folder, fd):  # else a save or retention has taken it away under this
            warnings.warn(f"{folder} is damaged and is not uploaded: {error}", stacklevel=1)
        return {}
    finally:
        os.close(fd)


def _is(folder: Path, fd: int) -> bool:
    """Whether a path still leads to the folder that is open: then all that was found in it is of one save."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(fd))
    except FileNotFoundError:
        return False


def _content(manifest: Manifest) -> str:
    return str(checksum(json.dumps(manifest.files, sort_keys=True).encode()))


def _writer(name: str) -> int:
    """The rank that wrote a file."""
    return int(name.removeprefix("rank-").partition(".")[0])


def _manifest_of(step: int) -> str:
    return f"{step_name(step)}/{MANIFEST}"


def _before(first: datetime | None, second: datetime) -> bool:
    return first is not None and first < second
