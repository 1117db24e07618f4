"""Export of a model as Hugging Face lays it out: one safetensors file, or several with an index."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from overlapkit.checkpoint.catalog import Catalog
from overlapkit.checkpoint.exchange.casting import castable, check_cast
from overlapkit.checkpoint.exchange.export_files import Row, divided
from overlapkit.checkpoint.exchange.export_places import check_folder, write_files
from overlapkit.checkpoint.exchange.weights import find_weights
from overlapkit.checkpoint.finding import Step, Where, find_checkpoint
from overlapkit.checkpoint.manifest import read_manifest
from overlapkit.checkpoint.opening import check_place
from overlapkit.checkpoint.progress import Count, Progress
from overlapkit.checkpoint.remote.store import place_of

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


@dataclass(frozen=True)
class Exported:
    """What an export has written.

    Attributes:
        files: The files, the index last where there is one.
        tensors: How many tensors they hold.
        nbytes: The tensors' bytes.
        tied: For each name that shares another's data, and so is not in the files, the name that is.
        left_out: What the model's state has beside weights: extra state that is no tensor.
    """

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]


def export(
    where: Where,
    out: str | os.PathLike[str],
    *,
    step: Step = "latest",
    only: str | None = None,
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Exported:
    """Write a checkpoint's model to safetensors files that Hugging Face's libraries read.

    The folder gets `model.safetensors`, or, where the tensors take more than `shard_size`, files
    `model-00001-of-0000N.safetensors` and then `model.safetensors.index.json`. They appear under these names
    when all of them are on the disk. Names are the model's own, without `module.` and `_orig_mod.`; tensors
    that share their data are written once, under the first of their names, and the file's metadata has the
    others. Memory holds a slice of 64 MiB (or one row, where that is longer) of one tensor.

    Args:
        where: A directory of checkpoints, or the folder of one.
        out: A folder, made if it does not exist, or the URL of one on an object store, where the files appear
            one after the other, the index last. It may hold other files (a config.json).
        step: Which checkpoint; "latest" is the one of the highest step.
        only: The key of the state to export: a module, or a dict of tensors (rank 0's). None: the one module.
        dtype: Cast tensors of 16, 32 and 64 bit floating point to this; None leaves them as they are.
        shard_size: The most tensor bytes in one file: a number, or such as "5GB" (10**9) or "4GiB" (2**30).
            A longer tensor has a file of its own.
        progress: Told how many of the bytes to write are written.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        FileExistsError: The folder has weights already, or another export's unfinished files.
        DamagedCheckpoint: The checkpoint is damaged; nothing is left in the folder.
        ValueError: An argument is wrong, or a value is too large for `dtype`.
        StoreError: A store failed; what was written there is removed, as far as that is possible.
    """
    if dtype is not None:
        check_cast(dtype)
    check_place("out", out)
    limit, folder = parse_size(shard_size), place_of(out)
    check_folder(folder)
    manifest = read_manifest(find_checkpoint(where, step))
    weights = find_weights(Catalog(manifest, 0, manifest.world), only)
    rows = [
        Row(name, saved, dtype if dtype is not None and castable(saved.dtype) else saved.dtype)
        for name, saved in weights.tensors.items()
    ]
    files = divided(rows, limit)
    count = Count(sum(row.nbytes for row in rows), progress)
    placed = write_files(folder, files, weights.tied, count)
    return Exported(
        files=tuple(placed),
        tensors=len(rows),
        nbytes=sum(row.nbytes for row in rows),
        tied=weights.tied,
        left_out=tuple(weights.left_out),
    )


def parse_size(size: int | str) -> int:
    """Bytes, from a number or such as "5GB", "512 MiB".

    Raises:
        ValueError: It is none, or 0.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        unit = (match[2] or "").upper()
        scale = (1024 if unit.endswith("I") else 1000) ** (" KMGT".index(unit[0]) if unit else 0)
        if (nbytes := int(float(match[1]) * scale)) > 0:
            return nbytes
    raise ValueError(f"shard_size={size!r}: give bytes above 0, or such as '5GB' (10**9) or '4GiB' (2**30)")
