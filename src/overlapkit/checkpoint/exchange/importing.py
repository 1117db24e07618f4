"""Import: a checkpoint of ours out of what torch.save or torch.distributed.checkpoint has written."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.commit import RunLock, commit
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.exchange.dcp_folder import METADATA, DcpFolder
from overlapkit.checkpoint.exchange.foreign import KINDS, Foreign, Kind, Source, translate
from overlapkit.checkpoint.exchange.torch_file import TorchFile
from overlapkit.checkpoint.layout import Inventory, Piece
from overlapkit.checkpoint.manifest import step_name
from overlapkit.checkpoint.opening import check_step, open_directory
from overlapkit.checkpoint.progress import Count, Progress
from overlapkit.checkpoint.slices import row_slices
from overlapkit.checkpoint.stage import Row, file_order
from overlapkit.checkpoint.writer import write_share

SHARE = 1 << 30
"""Bytes in memory at once, which are written as one part, as if by one rank."""


def import_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int,
    keys: Mapping[str, str] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    parameters: Mapping[str, Sequence[str]] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Make a checkpoint out of a file of torch.save or a folder of torch.distributed.checkpoint.

    Nothing is unpickled but tensors and plain values (torch.load with weights_only=True; DCP's metadata
    through an unpickler that knows DCP's own records only), and torch.save's checksums are looked at. The
    source is taken over in parts of at most 1 GiB (or one row of a tensor), which count as ranks.
    `Checkpointer.restore` takes the result at any world size; random generators are not in it.

    Which key is what is seen from its form: a dict of tensors is a module, a dict with `param_groups` an
    optimizer, any other dict an object with a state_dict (a scheduler), all else a value. A state_dict that
    was saved alone becomes "model". `module.` and `_orig_mod.` are taken off the names.

    Args:
        source: A file, or a folder with a `.metadata`.
        directory: What will be given to `Checkpointer`; made if it does not exist.
        step: The step of the new checkpoint.
        keys: Which of the source's keys to take, and what they are called in the state; None is all of them,
            under their own names.
        kinds: For keys of the state, what they are where their form misleads.
        parameters: For an optimizer that knows its parameters by number alone (most of torch.save's), their
            names in its order: `{"optimizer": [name for name, _ in model.named_parameters()]}`.
        progress: Told how many of the tensors' bytes are written.

    Returns:
        The committed checkpoint.

    Raises:
        FileNotFoundError: There is no such source.
        FileExistsError: The directory has a checkpoint of that step.
        DamagedCheckpoint: The source is damaged. Nothing is committed then, nor with the following.
        TypeError: It holds what cannot be kept without pickling; the message says where.
        ValueError: An argument is wrong, or an optimizer's parameters are unknown.
    """
    step, root = check_step(step), Path(directory)
    if wrong := [kind for kind in (kinds or {}).values() if kind not in KINDS]:
        raise ValueError(f"kinds= has {wrong[0]!r}: give one of {', '.join(KINDS)}")
    opened = _open(Path(source))
    foreign = translate(opened, keys, kinds or {}, parameters or {})
    if (root / step_name(step)).exists():
        raise FileExistsError(
            f"step={step}: {root / step_name(step)} exists; give another step, or delete it"
        )
    open_directory(root)
    lock = RunLock(root)
    try:
        return _write_all(opened, foreign, root, lock.run, step, progress)
    finally:
        lock.release()


def _open(source: Path) -> Source:
    if (source / METADATA).is_file():
        return DcpFolder(source)
    if source.is_dir():
        raise ValueError(f"source={str(source)!r} is a folder without DCP's {METADATA}: give one that has it")
    if not source.is_file():
        raise FileNotFoundError(f"source={str(source)!r} does not exist, or is no file")
    return TorchFile(source)


def _write_all(
    source: Source, foreign: Foreign, root: Path, run: str, step: int, progress: Progress | None
) -> Path:
    disk, temporary = Disk(), root / f".tmp-{run}-0"
    shares = list(_shares(source, foreign))
    count = Count(sum(piece.nbytes for share in shares for piece in share if piece.alias is None), progress)
    files: dict[str, dict[str, int]] = {}
    try:
        for rank, share in enumerate(shares):
            about = {"step": step, "rank": rank, "world": len(shares), "rng": None}
            rows = list(_rows(source, share, count))
            files |= write_share(disk, temporary, Inventory(foreign.entries, share), rows, about)
        return commit(disk, temporary, step, files, {"world": len(shares), "metrics": {}})
    except BaseException:
        disk.remove(temporary)
        raise


def _shares(source: Source, foreign: Foreign) -> Iterator[list[Piece]]:
    """What each part will hold; at least one part.

    Never two pieces of one tensor, which would have the same name: each leaves less room than one row.
    """
    share: list[Piece] = []
    room = SHARE
    for piece in _pieces(source, foreign):
        nbytes = piece.nbytes if piece.alias is None else 0
        if share and nbytes > room:
            yield share
            share, room = [], SHARE
        share.append(piece)
        room -= nbytes
    yield share


def _pieces(source: Source, foreign: Foreign) -> Iterator[Piece]:
    first: dict[Any, str] = {}
    for name, tensor in foreign.tensors.items():
        shape, alias = tuple(tensor.shape), name
        if tensor.data_ptr():  # 0: it is empty, or has no data yet
            same = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
            alias = first.setdefault(same, name)
        whole = Box.whole(shape)
        boxes = [*row_slices(shape, tensor.dtype.itemsize, SHARE)] if alias == name else []
        for box in boxes or [whole]:
            stand_in = torch.empty((), dtype=tensor.dtype, device="cpu").expand(box.shape)  # takes no memory
            piece = Piece(name, stand_in, tensor, shape, box, False, False, source.sharded(tensor))
            piece.alias = alias if alias != name else None
            yield piece


def _rows(source: Source, share: list[Piece], count: Count) -> Iterator[Row]:
    for piece in sorted(share, key=file_order):
        if piece.alias is None:
            data = source.read(piece.source, piece.box).resolve_conj().resolve_neg().contiguous()
            yield piece, data.reshape(-1).view(torch.uint8)
            count.add(piece.nbytes)
