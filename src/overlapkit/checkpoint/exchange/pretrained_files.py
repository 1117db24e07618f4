"""Which files pretrained weights are in: one safetensors file, or an index and its files."""

import json
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.exchange.export_files import INDEX, SINGLE
from overlapkit.checkpoint.exchange.safetensors_file import Stored, read_header

_LONGEST = 100_000_000  # bytes of an index


def find_tensors(source: Path) -> dict[str, Stored]:
    """The tensors of pretrained weights, by name. Headers are read, and no tensor's data.

    Args:
        source: A folder with `model.safetensors` or `model.safetensors.index.json`, or such a file.

    Raises:
        FileNotFoundError: There is neither.
        DamagedCheckpoint: A file is missing, cut short, contradicts itself or the index, or the index names
            a file that is not in the folder.
    """
    if source.is_dir():
        named = [source / name for name in (SINGLE, INDEX) if (source / name).exists()]
        if not named:
            raise FileNotFoundError(f"{str(source)!r} has neither {SINGLE} nor {INDEX}")
        source = named[0]  # the order in which Hugging Face's libraries look
    if not source.is_file():
        raise FileNotFoundError(f"{str(source)!r} does not exist, or is no file")
    if source.suffix != ".json":
        return read_header(source)
    weight_map = _weight_map(source)
    paths = [
        _member(source, name) for name in dict.fromkeys(weight_map.values())
    ]  # all, before any is opened
    found: dict[str, Stored] = {}
    for path in paths:
        for name, stored in read_header(path).items():
            if name in found:
                raise DamagedCheckpoint(f"{path}: has {name!r}, and so does {found[name].path.name}")
            found[name] = stored
    for name, file in weight_map.items():
        if name not in found or found[name].path.name != file:
            raise DamagedCheckpoint(f"{source}: {name!r} should be in {file}, and is not")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > _LONGEST:
        raise DamagedCheckpoint(f"{index}: longer than the {_LONGEST} bytes that are read")
    try:
        found: Any = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(file, str) for file in found.values()):
            raise TypeError("a file's name is none")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{index}: no index of safetensors files ({error!r})") from error
    weight_map: dict[str, str] = found
    return weight_map


def _member(index: Path, name: str) -> Path:
    """A file that an index names: in its folder, and there not a link that leads out of it.

    In the Hugging Face cache, files are links into the `blobs` beside the `snapshots` that they are in.
    """
    folder, path = index.parent, index.parent / name
    if "\0" in name or Path(name).name != name:
        raise DamagedCheckpoint(f"{index}: names {name!r}, which is no file of this folder")
    if not path.is_file():
        raise DamagedCheckpoint(f"{path}: is missing, or no file")
    here, target = folder.resolve(), path.resolve()
    allowed = [here, here.parent.parent / "blobs"] if here.parent.name == "snapshots" else [here]
    if target.parent not in allowed:
        raise DamagedCheckpoint(f"{path}: is a link that leads out of the folder, to {target}")
    return path
