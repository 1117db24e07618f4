"""Checkpoints in a store: the manifest is the commit, and what makes it go is the end of the manifest.

step-100/
    manifest.json                          the last object written, the first deleted
    0123456789ab-7/rank-00000.json         a save's objects are in a folder of its own (run and number): those
    0123456789ab-7/rank-00000.safetensors  of the step's earlier save, or of another run, are not touched

Without the rename of a file system nothing can be put aside: who reads a checkpoint that is being replaced or
deleted finds objects missing, and takes it for damaged.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from overlapkit.checkpoint.errors import CheckpointError, StoreError
from overlapkit.checkpoint.finding import sound_checkpoints
from overlapkit.checkpoint.manifest import (
    MANIFEST,
    SAVE,
    Manifest,
    manifest_bytes,
    read_manifest,
    step_name,
    step_of,
)
from overlapkit.checkpoint.remote.store import Store
from overlapkit.checkpoint.retention import Policy
from overlapkit.quorum import Quorum, Report

LEFT_OVER = timedelta(days=1)
"""Objects that no manifest names are a dead save's when all are older than this: no lock says who lives."""


def publish(
    store: Store, step: int, save: str, files: dict[str, dict[str, Any]], about: dict[str, Any]
) -> None:
    """Make a checkpoint of objects that all ranks have written. Called by rank 0 only.

    Args:
        store: Where they are.
        step: The step.
        save: The save's name.
        files: Of all ranks.
        about: world and metrics, for the manifest; and hash, where that is not what is written now.

    Raises:
        CheckpointError: An object is not what its rank wrote, and nothing is committed; or, as the message
            says, it is, and the objects of the step's earlier save cannot be deleted.
    """
    folder = step_name(step)
    sizes = store.sizes(f"{folder}/{save}")
    for name, file in files.items():
        if sizes.get(name) != file["bytes"]:
            where = f"{store.url}/{folder}/{save}/{name}"
            raise CheckpointError(f"{where}: {sizes.get(name)} bytes, where {file['bytes']} were written")
    replaced = _objects(store, step)
    manifest = manifest_bytes(step, files, save=save, **about)
    store.put(f"{folder}/{MANIFEST}", manifest, f"{folder}/{save}/{MANIFEST}")
    try:
        store.remove(replaced)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{store.url}/{folder} is committed, but what it replaces cannot be deleted: {error}"
        ) from error


def publish_together(
    store: Store,
    quorum: Quorum,
    key: str,
    step: int,
    save: str,
    work: Callable[[], Report],
    agree: Callable[[list[Report]], dict[str, dict[str, Any]]],
    about: dict[str, Any],
    verdict: Callable[[list[Report]], Report] = lambda _: {},
) -> Report:
    """Let every rank write its objects, and rank 0 publish them.

    Args:
        store: Where to.
        quorum: The ranks.
        key: Unique within it.
        step: The step.
        save: The save's name.
        work: Writes this rank's objects.
        agree: The files of all ranks, of what `work` returned on each.
        about: See `publish`.
        verdict: What rank 0 says to all ranks when it has.

    Returns:
        That.

    Raises:
        RankFailed: Another rank could not; nothing was committed.
        Exception: This rank could not; nothing was committed on any.
    """
    begun = False

    def judge(reports: list[Report]) -> Report:
        nonlocal begun
        files = agree(reports)
        begun = True
        publish(store, step, save, files, about)
        return verdict(reports)

    try:
        return quorum.together(key, work, judge)
    except BaseException:
        if quorum.rank == 0 and not begun:  # a manifest that could not be written may be there all the same
            abandon(store, f"{step_name(step)}/{save}")
        raise


def abandon(store: Store, folder: str, beginning: str = "") -> None:
    """Remove what a failed save has written, names with this beginning, as far as that is possible now."""
    with contextlib.suppress(CheckpointError, OSError):  # swept later; what led here matters more
        names = [name for name in store.sizes(folder) if name.startswith(beginning)]
        store.remove([f"{folder}/{name}" for name in names])


class Withdrawal:
    """What rank 0 deletes from a store; see Deletion. All that is there in full length counts as verified.

    Reading it back would cost as much as writing it did.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store = store
        self._policy = policy

    def committed(self, step: int) -> None:
        """This run has committed a step: delete what is surplus now.

        Raises:
            StoreError: The store failed.
            OSError: Something cannot be deleted.
        """
        if self._policy.keep is not None:
            found = sound_checkpoints(self._store.root)
            for old in self._policy.surplus(found, found, step):
                withdraw(self._store, old)

    def finish(self) -> None:
        """Nothing is out of sight."""

    def unseen(self) -> list[CheckpointError]:
        """`committed` has told all."""
        return []

    def read_whole(self, step: int) -> None:
        """It counted already."""

    def close(self) -> None:
        """Nothing runs."""


def withdraw(store: Store, step: int) -> None:
    """Delete a checkpoint: first its manifest, so that a crash leaves no half of it."""
    objects = _objects(store, step)
    store.remove([f"{step_name(step)}/{MANIFEST}"])
    store.remove(objects)


def sweep_store(store: Store, dead: Collection[str] = ()) -> None:
    """Remove what dead saves left behind. Whatever is not certainly of one stays.

    Args:
        store: Where.
        dead: Names of runs that are known to be dead: what they left need not be old.
    """
    before = datetime.now(UTC) - LEFT_OVER
    try:
        for path in store.root.iterdir():
            if step_of(path.name) is not None:
                _sweep_step(store, path.name, before, dead)
    except (CheckpointError, OSError) as error:
        warnings.warn(f"what dead saves left in {store.url} cannot be removed: {error}", stacklevel=2)


def _sweep_step(store: Store, folder: str, before: datetime, dead: Collection[str]) -> None:
    saves = [path.name for path in (store.root / folder).iterdir() if SAVE.fullmatch(path.name)]
    kept = _manifest(store, folder)
    if kept is None and (store.root / folder / MANIFEST).exists():
        return  # damaged, or of a later version: it may mean any of them
    for save in saves:
        if kept is None or kept.save != save:
            objects = [f"{folder}/{save}/{name}" for name in store.sizes(f"{folder}/{save}")]
            if objects and (save.split("-")[0] in dead or _older(store, objects, before)):
                store.remove(objects)


def _older(store: Store, objects: list[str], before: datetime) -> bool:
    """Whether all of these were certainly written before a time."""
    written = [store.modified(name) for name in objects]
    return all(when is not None and when < before for when in written)


def _objects(store: Store, step: int) -> list[str]:
    """The objects of a step's checkpoint, but for its manifest."""
    found = _manifest(store, step_name(step))
    if found is None:
        return []
    folder = f"{step_name(step)}/{found.save}".rstrip("/")
    return [f"{folder}/{name}" for name in found.files]


def _manifest(store: Store, folder: str) -> Manifest | None:
    try:
        return read_manifest(store.root / folder)
    except StoreError:
        raise
    except CheckpointError:  # damaged, or of a later version
        return None
