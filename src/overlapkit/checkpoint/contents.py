"""What one checkpoint holds: its tensors, and all else as plain values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overlapkit.checkpoint.catalog import Catalog, Saved, saved_tensors
from overlapkit.checkpoint.codec import decode, join, root, tensor_names
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.finding import Step, Where, find_checkpoint
from overlapkit.checkpoint.manifest import Manifest, making_sense_of, read_manifest

_PAIRS = ("dict", "Counter", "OrderedDict")  # typed JSON's mappings that are kept as pairs


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
        name: Its path in the state.
        dtype: As saved.
        shape: Of the whole tensor, over all ranks.
        nbytes: What its data takes; 0 where it shares another one's.
        files: The names of the files that hold a part of it.
        shares: The tensor whose data it shares (tied weights), or None.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    files: tuple[str, ...]
    shares: str | None


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds for one rank.

    Attributes:
        folder: The checkpoint.
        step: Its step.
        world: How many ranks wrote it.
        rank: Whose own values and tensors these are (a loader's, a loose tensor); the rest is everyone's.
        metrics: What was given to `save(metrics=...)`.
        kinds: For each key of the state what it was: "module", "optimizer", "object" (with a state_dict),
            "tensor" or "value"; "tree" where torch.distributed.checkpoint wrote it, which does not tell.
        generators: Which random generators' states were saved.
        tensors: By their paths in the state.
        values: All that is no tensor, by path: plain values, which may be lists and tuples of such.
    """

    folder: Path
    step: int
    world: int
    rank: int
    metrics: dict[str, Any]
    kinds: dict[str, str]
    generators: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]


def describe(where: Where, step: Step = "latest", *, rank: int = 0) -> Contents:
    """Read what a checkpoint holds. No tensor's data is read.

    Args:
        where: A directory of checkpoints, or the folder of one.
        step: Which one; "latest" is the one of the highest step, sound or not.
        rank: Whose own values to show.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        DamagedCheckpoint: It cannot be read.
        ValueError: No such rank wrote it.
    """
    manifest = read_manifest(find_checkpoint(where, step))
    if not 0 <= rank < manifest.world:
        raise ValueError(f"rank={rank!r}: {manifest.folder} was written by ranks 0 to {manifest.world - 1}")
    catalog = Catalog(manifest, rank, manifest.world)
    values = {
        path: decode(leaf, str)
        for key, entry in catalog.entries.items()
        for path, leaf in entry_leaves(key, entry)
    }
    return Contents(
        folder=manifest.folder,
        step=manifest.step,
        world=manifest.world,
        rank=rank,
        metrics=decode(manifest.metrics, str),
        kinds={key: entry["kind"] for key, entry in catalog.entries.items()},
        generators=tuple(name for name, state in (catalog.rng or {}).items() if state is not None),
        tensors={name: _entry(name, saved) for name, saved in tensors_in_order(catalog).items()},
        values=values,
    )


class OwnShare(NamedTuple):
    """What one rank has of its own: tensors, and values as typed JSON, by path."""

    tensors: dict[str, Saved]
    values: dict[str, Any]


def own_share(manifest: Manifest, rank: int) -> OwnShare:
    """What a rank saved beside what all ranks hold together.

    Raises:
        DamagedCheckpoint: Its part differs from what was written.
    """
    part, path = manifest.part(rank), manifest.inside / f"rank-{rank:05d}.json"
    with making_sense_of(path, "a part"):
        tensors = {saved.name: saved for saved, own in saved_tensors(part, manifest, path) if own}
        values = dict(leaves(part["rng"], "rng"))
        for key, entry in part["state"].items():
            if entry["kind"] not in ("module", "optimizer"):
                values |= entry_leaves(key, entry)
    return OwnShare(tensors, values)


def tensors_in_order(catalog: Catalog) -> dict[str, Saved]:
    """All tensors of a rank, in the state's order.

    Raises:
        DamagedCheckpoint: The state names one that is in no file.
    """
    values = [entry["value"] for entry in catalog.entries.values()]
    names = list(dict.fromkeys(tensor_names(values)))
    if lost := [name for name in names if name not in catalog.tensors]:
        raise DamagedCheckpoint(f"step {catalog.step}: no file holds the tensor(s) {', '.join(lost)}")
    return {name: catalog.tensors[name] for name in names}


def entry_leaves(key: str, entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of one entry of a state that are no tensors. See `leaves`.

    Raises:
        DamagedCheckpoint: It is no entry.
    """
    try:
        value = entry["value"]
        if entry["kind"] == "optimizer":  # which is kept in two halves
            value = {"state": value["state"], **value["rest"]}
        yield from leaves(value, root(key))
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"the entry of {key!r} contradicts itself ({error})") from error


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values inside a typed JSON value that are no tensors, with their paths, themselves typed JSON.

    Mappings are gone through, and sequences that hold mappings or tensors; all else stays whole.
    """
    if _is_tensor(value):
        return
    if not _is_nested(value):
        yield path, value
        return
    members: Any
    if isinstance(value, list):
        members = enumerate(value)
    elif "$" not in value:
        members = value.items()
    elif value["$"] in _PAIRS:
        members = ((decode(key, str), item) for key, item in value["v"])
    else:
        members = enumerate(value["v"])
    for key, item in members:
        yield from leaves(item, join(path, key))


def _is_nested(value: Any) -> bool:
    """Whether a typed JSON value is a mapping with members, or a sequence that holds mappings or tensors."""
    if isinstance(value, list):
        return any(_is_nested(item) or _is_tensor(item) for item in value)
    if not isinstance(value, dict):
        return False
    if "$" not in value:
        return bool(value)
    if value["$"] in _PAIRS:
        return bool(value["v"])
    return isinstance(value["v"], list) and _is_nested(value["v"])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.get("$") == "tensor"


def _entry(name: str, saved: Saved) -> TensorEntry:
    shares = saved.name if saved.name != name else None
    nbytes = 0 if shares else math.prod(saved.shape) * saved.dtype.itemsize
    files = tuple(dict.fromkeys(chunk.path.name for chunk in saved.chunks))
    return TensorEntry(name, saved.dtype, saved.shape, nbytes, files, shares)
