"""Import: a checkpoint of ours out of what torch.save or torch.distributed.checkpoint has written."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.exchange.dcp_folder import METADATA, DcpFolder
from overlapkit.checkpoint.exchange.foreign import KINDS, Foreign, Kind, Source, translate
from overlapkit.checkpoint.exchange.torch_file import TorchFile
from overlapkit.checkpoint.exchange.whole_file import is_file
from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.gather import Gathered
from overlapkit.checkpoint.once import Files, OneSave, one_save
from overlapkit.checkpoint.opening import check_place, check_step
from overlapkit.checkpoint.pieces import Slot
from overlapkit.checkpoint.progress import Count, Progress
from overlapkit.checkpoint.remote.store import place_of
from overlapkit.checkpoint.slices import row_slices

SHARE = 1 << 30
"""Bytes in memory at once, which are written as one part, as if by one rank."""

Part = tuple[Slot, torch.Tensor]
"""A part of one of the source's tensors: what it becomes, and that tensor."""


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
        source: A file, or a folder with a `.metadata`; a path or a URL. Of a folder in a store only what is
            needed is fetched, as it is needed; a file there is copied into the folder for temporary files
            (TMPDIR) first, and the copy is deleted.
        directory: What will be given to `Checkpointer`, a path or a URL; a folder is made if there is none.
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
        StoreError: A store failed.
    """
    check_place("source", source)
    check_place("directory", directory)
    save = one_save(place_of(directory), check_step(step), Disk())
    if wrong := [kind for kind in (kinds or {}).values() if kind not in KINDS]:
        raise ValueError(f"kinds= has {wrong[0]!r}: give one of {', '.join(KINDS)}")
    opened = _open(place_of(source))
    foreign = translate(opened, keys, kinds or {}, parameters or {})
    if save.there():
        raise FileExistsError(
            f"step={step}: {str(directory)!r} has that one already; give another step, or delete it"
        )
    save.begin()
    try:
        return _write_all(opened, foreign, save, step, progress)
    finally:
        save.end()


def _open(source: Path) -> Source:
    if is_file(source):  # asked first: some stores refuse to look for anything below a file
        return TorchFile(source)
    if is_file(source / METADATA):
        return DcpFolder(source)
    if source.is_dir():
        raise ValueError(f"source={str(source)!r} is a folder without DCP's {METADATA}: give one that has it")
    raise FileNotFoundError(f"source={str(source)!r} does not exist, or is no file")


def _write_all(source: Source, foreign: Foreign, save: OneSave, step: int, progress: Progress | None) -> Path:
    shares = list(_shares(source, foreign))
    plans = [FilePlan([slot for slot, _ in share], []) for share in shares]
    count = Count(sum(plan.nbytes for plan in plans), progress)
    files: Files = {}
    try:
        for rank, (plan, share) in enumerate(zip(plans, shares, strict=True)):
            about = {"step": step, "rank": rank, "world": len(shares), "rng": None}
            # the share's tensors are let go of before the next one is read
            files |= save.write(plan, foreign.entries, _read(source, plan, share, count), about)
    except BaseException:
        save.discard()
        raise
    return save.commit(files, len(shares))


def _shares(source: Source, foreign: Foreign) -> Iterator[list[Part]]:
    """What each part will hold; at least one part.

    Never two pieces of one tensor, which would have the same name: each leaves less room than one row.
    """
    share: list[Part] = []
    room = SHARE
    for slot, tensor in _parts(source, foreign):
        nbytes = slot.nbytes if slot.alias is None else 0
        if share and nbytes > room:
            yield share
            share, room = [], SHARE
        share.append((slot, tensor))
        room -= nbytes
    yield share


def _parts(source: Source, foreign: Foreign) -> Iterator[Part]:
    first: dict[Any, str] = {}
    for name, tensor in foreign.tensors.items():
        shape, alias = tuple(tensor.shape), name
        if tensor.data_ptr():  # 0: it is empty, or has no data yet
            same = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
            alias = first.setdefault(same, name)
        boxes = [*row_slices(shape, tensor.dtype.itemsize, SHARE)] if alias == name else []
        for box in boxes or [Box.whole(shape)]:
            yield (
                Slot(
                    name=name,
                    dtype=tensor.dtype,
                    shape=shape,
                    box=box,
                    own=False,
                    late=False,
                    sharded=source.sharded(tensor),
                    device="cpu",
                    alias=alias if alias != name else None,
                ),
                tensor,
            )


def _read(source: Source, plan: FilePlan, share: list[Part], count: Count) -> Gathered:
    """The bytes of a part, read in the order of its file."""
    starts, tensors = [], []
    for start, place in plan.in_file():
        slot, tensor = share[place]
        starts.append(start)
        tensors.append(source.read(tensor, slot.box))
        count.add(slot.nbytes)
    return Gathered(starts, tensors)
