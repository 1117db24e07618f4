"""Reading whole checkpoints against their checksums, and saying where all the damage is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from overlapkit.checkpoint.catalog import Catalog, Chunk, Saved, data_file, saved_tensors
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.finding import Step, Where, find_checkpoint
from overlapkit.checkpoint.manifest import Manifest, making_sense_of, read_manifest
from overlapkit.checkpoint.progress import Count, Progress
from overlapkit.checkpoint.reader import Reader
from overlapkit.checkpoint.remote.place import StorePath

_SHOWN = 20  # places that an error's text names; its `damage` has them all


@dataclass(frozen=True)
class Damage:
    """One place where a checkpoint is not what was written.

    Attributes:
        file: The damaged file.
        what: What is wrong there.
        tensor: Whose bytes they are; None where the file as a whole, or its header, is meant.
        start: The first byte in the file that may be wrong: one checksum covers a block of 4 MiB.
        stop: The byte after the last one.
    """

    file: Path
    what: str
    tensor: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{self.file}: {self.what}"
        return f"{self.file}: tensor {self.tensor!r}, bytes {self.start} to {self.stop}: {self.what}"


def verify(where: Where, step: Step = "latest", *, progress: Progress | None = None) -> None:
    """Read a whole checkpoint against its checksums.

    Args:
        where: A directory of checkpoints, or the folder of one.
        step: Which one; "latest" is the one of the highest step, sound or not.
        progress: Told how far the reading is.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        DamagedCheckpoint: Something differs. The message names file, tensor and bytes; `damage` has all
            places.
    """
    damage = find_damage(find_checkpoint(where, step), progress)
    if damage:
        shown = [str(place) for place in damage[:_SHOWN]]
        if len(damage) > _SHOWN:
            shown.append(f"and {len(damage) - _SHOWN} more places")
        raise DamagedCheckpoint("; ".join(shown), tuple(damage))


def find_damage(folder: Path, progress: Progress | None = None) -> list[Damage]:
    """All places where the checkpoint in a folder is not what was written."""
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint as error:
        return [_whole(folder, error)]
    count = Count(sum(file["bytes"] for file in manifest.files.values()), progress)
    damage = [place for rank in range(manifest.world) for place in damage_in_share(manifest, rank, count)]
    if not damage:  # each part is sound: are they all that there should be?
        try:
            Catalog(manifest, 0, manifest.world)
        except DamagedCheckpoint as error:
            damage.append(_whole(folder, error))
    return damage


def damage_in_share(manifest: Manifest, rank: int, count: Count) -> Iterator[Damage]:
    """The damage in one rank's files."""
    path = manifest.inside / f"rank-{rank:05d}.json"
    try:
        part = manifest.part(rank)
        with making_sense_of(path, "a part"):
            file = data_file(part, manifest, path)
            tensors = [saved for saved, _ in saved_tensors(part, manifest, path)]
        count.add(manifest.files[path.name]["bytes"])
    except DamagedCheckpoint as error:
        yield _whole(path, error)
        return
    if file is None:
        return
    with Reader() as reader:
        try:
            reader.check_header(file)
            count.add(file.header)
        except DamagedCheckpoint as error:
            yield _whole(file.path, error)
        for saved in tensors:
            yield from _joined(_in_tensor(saved, reader, count))


def _in_tensor(saved: Saved, reader: Reader, count: Count) -> Iterator[Damage]:
    for chunk in saved.chunks:
        for block in _blocks(chunk):
            try:
                reader.check(replace(saved, chunks=[block]))
            except DamagedCheckpoint as error:
                what = str(error).rsplit(": ", 1)[-1]
                yield Damage(block.path, what, saved.name, block.start, block.start + block.nbytes)
            count.add(block.nbytes)


def _blocks(chunk: Chunk) -> Iterator[Chunk]:
    """What one checksum covers each, as chunks of their own."""
    for number, at in enumerate(range(0, chunk.nbytes, chunk.block)):
        nbytes = min(chunk.block, chunk.nbytes - at)
        yield replace(chunk, start=chunk.start + at, nbytes=nbytes, sums=chunk.sums[number : number + 1])


def _joined(places: Iterator[Damage]) -> Iterator[Damage]:
    """Neighbouring blocks as one place."""
    last: Damage | None = None
    for place in places:
        if last is not None and (last.file, last.what, last.stop) == (place.file, place.what, place.start):
            last = replace(last, stop=place.stop)
            continue
        if last is not None:
            yield last
        last = place
    if last is not None:
        yield last


def _whole(path: Path, error: DamagedCheckpoint) -> Damage:
    """Damage that has no place in a tensor; an error's text begins with the file that it means."""
    named, _, what = str(error).partition(": ")
    if not what:
        return Damage(path, str(error))
    if isinstance(path, StorePath):
        return Damage(StorePath(path.store, named.removeprefix(f"{path.store.url}/")), what)
    return Damage(Path(named), what)
