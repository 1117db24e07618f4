"""The checkpoints of a directory, sound or not."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.finding import Where
from overlapkit.checkpoint.manifest import MANIFEST, making_sense_of, read_manifest, step_folders
from overlapkit.checkpoint.opening import check_place
from overlapkit.checkpoint.progress import Progress
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.remote.store import place_of
from overlapkit.checkpoint.verification import verify


@dataclass
class Listed:
    """One checkpoint of a directory.

    Attributes:
        step: Its step.
        folder: Where it is.
        written: When it was committed (UTC); None where its manifest is missing.
        nbytes: What its files take.
        state: "committed" (the manifest is sound, all files are there in full length), "verified" (and every
            byte was read against its checksum), or "damaged".
        damage: What is wrong with it; None where nothing was found.
        world: How many ranks wrote it; None where that cannot be read, as with the next two.
        keys: The keys of the state.
        metrics: What was given to `save(metrics=...)`.
    """

    step: int
    folder: Path
    written: datetime | None = None
    nbytes: int = 0
    state: Literal["committed", "verified", "damaged"] = "committed"
    damage: str | None = None
    world: int | None = None
    keys: tuple[str, ...] | None = None
    metrics: dict[str, Any] | None = None


def list_checkpoints(
    directory: Where, *, check: bool = False, progress: Callable[[int], Progress | None] | None = None
) -> list[Listed]:
    """List the checkpoints of a directory, damaged ones too, by ascending step.

    Args:
        directory: What was given to `Checkpointer`.
        check: Read every byte against its checksum. Otherwise only the manifests, the files' lengths and
            rank 0's parts are looked at.
        progress: With `check`: called with each step, it returns what is told how far the reading is.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    check_place("directory", directory)
    root = place_of(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"directory={str(root)!r} does not exist, or is no folder")
    looked = [_look(step, folder) for step, folder in step_folders(root).items()]
    found = [listed for listed in looked if listed is not None]
    for listed in found if check else ():
        try:
            verify(listed.folder, progress=progress(listed.step) if progress is not None else None)
        except DamagedCheckpoint as error:
            listed.state, listed.damage = "damaged", str(error)
        else:
            listed.state = "verified"
    return found


def _look(step: int, folder: Path) -> Listed | None:
    """What there is to say of one; None where it was deleted meanwhile."""
    listed = Listed(step, folder)
    if isinstance(folder, StorePath):
        listed.nbytes = sum(folder.store.sizes(folder.key).values())
        listed.written = folder.store.modified((folder / MANIFEST).key)
    with contextlib.suppress(FileNotFoundError):  # a run that lives deletes and replaces
        for path in () if isinstance(folder, StorePath) else list(folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                listed.nbytes += status.st_size if path.is_file() else 0
                if path.name == MANIFEST:
                    listed.written = datetime.fromtimestamp(status.st_mtime, UTC)
    try:
        manifest = read_manifest(folder)
        listed.world, listed.metrics = manifest.world, decode(manifest.metrics, str)
        with making_sense_of(folder / "rank-00000.json", "a part"):
            listed.keys = tuple(manifest.part(0)["state"])
    except DamagedCheckpoint as error:
        if not isinstance(folder, StorePath) and not folder.exists():
            return None
        listed.state, listed.damage = "damaged", str(error)
    return listed
