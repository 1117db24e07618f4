"""The manifest: the last file of a checkpoint, and what makes a folder one of ours.

step-100/
    manifest.json            format, hash, step, world size, size of every file, checksum of every part
    rank-00000.json          part: the rank's JSON state, and where its tensors lie
    rank-00000.safetensors   the rank's tensors, readable by plain safetensors

On an object store the ranks' files are in a folder within, of the save's own name, which the manifest gives.
"""

import contextlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint
from overlapkit.checkpoint.hashing import ALGORITHM, HASHES
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.writer import FORMAT, JSON_LIMIT, VERSION

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_FILE = re.compile(r"rank-(\d{5,})\.(json|safetensors)")
SAVE = re.compile(r"[0-9a-f]{12}-\d+")
"""The name of a save's own folder: its run's, and its number there."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents, checked against the files' sizes.

    Attributes:
        folder: Where it is.
        step: Its step.
        world: How many ranks wrote it.
        files: Name -> "bytes", and the checksum of a part under the name of its algorithm.
        hash: That algorithm.
        metrics: Typed JSON.
        save: The folder within that the files are in, or nothing.
    """

    folder: Path
    step: int
    world: int
    files: dict[str, dict[str, Any]]
    hash: str
    metrics: dict[str, Any]
    save: str = ""

    @property
    def inside(self) -> Path:
        """The folder that the files are in."""
        return self.folder / self.save if self.save else self.folder

    def part(self, rank: int) -> dict[str, Any]:
        """A rank's part, checked against its checksum.

        Raises:
            DamagedCheckpoint: It differs from what was written.
        """
        name = f"rank-{rank:05d}.json"
        data = _read(self.inside / name)
        if HASHES[self.hash](data) != self.files[name].get(self.hash):
            raise DamagedCheckpoint(f"{self.inside / name}: its checksum differs from the manifest's")
        with making_sense_of(self.inside / name, "a part"):
            part: dict[str, Any] = _parse(data)
            return part


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def step_folders(root: Path) -> dict[int, Path]:
    """Folders by step, for everything named as a committed checkpoint, sound or not, ascending."""
    if not root.is_dir():
        return {}
    found = {step: path for path in root.iterdir() if (step := step_of(path.name)) is not None}
    return {step: found[step] for step in sorted(found) if is_ours(found[step])}


def is_ours(folder: Path) -> bool:
    """Whether a folder was a checkpoint of ours once; it may be damaged now."""
    return any((folder / name).exists() for name in (MANIFEST, "rank-00000.json"))


def manifest_bytes(
    step: int,
    files: dict[str, dict[str, Any]],
    world: int,
    metrics: dict[str, Any],
    save: str = "",
    hash: str = ALGORITHM,
) -> bytes:
    """A manifest with its own checksum: crc32, so that version 1 can tell that it is sound."""
    inner: dict[str, Any] = {"step": step, "world": world, "files": files, "metrics": metrics}
    if save:
        inner["save"] = save
    document = {"format": FORMAT, "version": VERSION, "hash": hash, "checkpoint": inner}
    return json.dumps({"crc32": _checksum(document), **document}).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest, and check that all its files are there, in full length.

    Raises:
        DamagedCheckpoint: They are not, or the manifest itself is damaged or none of ours.
        CheckpointError: It was written by a later version of overlapkit.
    """
    path = folder / MANIFEST
    data = _read(path)
    with making_sense_of(path, "a manifest"):
        document = _parse(data)
        sound = document.pop("crc32") == _checksum(document) and document["format"] == FORMAT
        if sound and document["version"] > VERSION:
            raise CheckpointError(
                f"{path}: format version {document['version']}, this overlapkit reads {VERSION}: upgrade it"
            )
        inner = document["checkpoint"]
        hash = document.get("hash", "crc32")  # version 1 does not name it
        if sound and hash == "xxh3_128" and hash not in HASHES:
            raise CheckpointError(f"{path}: its checksums are {hash}, which xxhash makes: pip install xxhash")
        HASHES[hash]
        save = inner.get("save", "")
        found = Manifest(folder, inner["step"], inner["world"], inner["files"], hash, inner["metrics"], save)
        numbers = [found.step, found.world - 1, *(file["bytes"] for file in found.files.values())]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a number in it is none, or too small")
        dict(decode(found.metrics, str))
    if not sound or step_name(found.step) != folder.name:
        raise DamagedCheckpoint(f"{path}: its checksum, or its step, does not agree with its content")
    if found.save != "" and not _is_save(found):
        raise DamagedCheckpoint(f"{path}: names {found.save!r}, which is no folder of a save")
    sizes = _sizes(found)
    for name, file in found.files.items():
        if not _FILE.fullmatch(name):
            raise DamagedCheckpoint(f"{path}: names {name!r}, which is no file of a checkpoint")
        size = sizes.get(name)
        if size != file["bytes"]:
            was = "missing" if size is None else f"{size} bytes long"
            raise DamagedCheckpoint(f"{found.inside / name}: {was}, where {file['bytes']} bytes were written")
    if any(f"rank-{rank:05d}.json" not in found.files for rank in range(found.world)):
        raise DamagedCheckpoint(f"{path}: lists fewer parts than its {found.world} ranks wrote")
    return found


def _sizes(manifest: Manifest) -> dict[str, int | None]:
    inside = manifest.inside
    if isinstance(inside, StorePath):
        return {**inside.store.sizes(inside.key)}  # one request, where one for each file would be slow
    return {name: size_of(inside / name) for name in manifest.files if _FILE.fullmatch(name)}


def _is_save(manifest: Manifest) -> bool:
    if not isinstance(manifest.save, str) or not SAVE.fullmatch(manifest.save):
        return False
    return isinstance(manifest.inside, StorePath) or not manifest.inside.is_symlink()


def _checksum(document: Any) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def size_of(path: Path) -> int | None:
    """Length of a plain file; None for anything else. Symbolic links are not followed."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextlib.contextmanager
def making_sense_of(path: Path, what: str) -> Iterator[None]:
    """Whatever fails in this block, because of what is written in a file, is damage."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"{path}: not {what} ({type(error).__name__}: {error})") from error


def _parse(data: bytes) -> Any:
    """JSON in which every number is one, and no key comes twice."""
    return json.loads(data, parse_constant=_refuse, object_pairs_hook=_unique)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _read(path: Path) -> bytes:
    """A plain file of JSON. Nothing else is waited for, followed or taken into memory."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if isinstance(path, StorePath):
            return path.read_bytes()
        with open(os.open(path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > JSON_LIMIT:
                raise DamagedCheckpoint(f"{path}: no plain file of up to {JSON_LIMIT} bytes")
            return file.readall()
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error})") from error
