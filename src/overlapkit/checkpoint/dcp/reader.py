"""SafetensorsReader: torch.distributed.checkpoint loads overlapkit's checkpoints."""

import dataclasses
import io
import itertools
import json
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.catalog import Catalog, Chunk, Saved
from overlapkit.checkpoint.codec import encode
from overlapkit.checkpoint.dcp.keys import Keys
from overlapkit.checkpoint.dcp.place import AtStep, Place, place_or_refusal
from overlapkit.checkpoint.dcp.planner import SafetensorsLoadPlanner, misfit, refuse_tensor
from overlapkit.checkpoint.errors import MismatchError
from overlapkit.checkpoint.manifest import read_manifest, step_folders
from overlapkit.checkpoint.reader import Reader
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.device import has_process_group, rank_and_world


class SafetensorsReader(AtStep, StorageReader):
    """A StorageReader for what SafetensorsWriter or a Checkpointer wrote, at any number of ranks.

    For `dcp.load`. Every rank reads the bytes of its own shards and checks each block against its
    checksum. Tensors need no planner; other values need `planner=SafetensorsLoadPlanner()`, which also
    lists everything that does not fit, where DCP's own stops at the first. Nothing is unpickled.

    DCP loads in place: when it raises, what was asked for may be loaded in part. A Checkpointer's
    `restore` changes nothing then.

    Args:
        path: The checkpoint to read: a path or URL that ends in step-N. None where `checkpoint_id` says it.

    Raises:
        TypeError: It is no path. With several ranks this and the following is raised by the load, on all.
        ValueError: It does not end in step-N, or there is no such kind of store.
        ImportError: What reads this kind of store is not installed.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._place: Place | Exception | None = None
        self._keys: Keys | None = None
        self._failure: Exception | None = None
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another load begins, of another checkpoint if one is given."""
        self._keys = None
        if checkpoint_id is not None:
            self._place = place_or_refusal(checkpoint_id)

    def read_metadata(self, *args: Any) -> Metadata:
        """What the checkpoint holds. Errors wait for `set_up_storage_reader`: DCP would drop them here."""
        self._failure = None
        try:
            self._keys = self._read_keys()
        except Exception as error:
            self._failure = error
            return Metadata({})
        found: dict[str, Any] = {key: _tensor_metadata(saved) for key, saved in self._keys.tensors.items()}
        found |= dict.fromkeys(self._keys.values, BytesStorageMetadata())
        return Metadata(found, planner_data=self._keys.paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See StorageReader.

        Raises:
            ValueError: No checkpoint is named.
            FileNotFoundError: There is none at this path.
            DamagedCheckpoint: It is damaged; the message names the file.
        """
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See StorageReader."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part of the plan.

        Raises:
            MismatchError: Tensors have other dtypes, which DCP would cast; or the planner cannot take
                values. All of them are listed.
            DamagedCheckpoint: A checksum differs; the message names file, tensor and bytes.
        """
        assert self._keys is not None
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if values and not isinstance(planner, SafetensorsLoadPlanner):
            keys = ", ".join(repr(item.dest_index.fqn) for item in values)
            raise MismatchError(
                f"{keys}: no tensors, and {type(planner).__name__} would unpickle them. Give "
                "planner=SafetensorsLoadPlanner(), for which they are typed JSON"
            )
        reads = [_Read(item, self._keys.tensors[item.storage_index.fqn], planner) for item in tensors]
        if problems := [problem for read in reads if (problem := read.problem())]:
            raise misfit(problems)
        with Reader() as reader:
            for read in sorted(reads, key=lambda read: (read.chunk.path.name, read.chunk.start)):
                read.carry_out(reader)
        for item in values:
            value = encode(self._keys.values[item.storage_index.fqn], item.storage_index.fqn, refuse_tensor)
            planner.load_bytes(item, io.BytesIO(json.dumps(value).encode()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_keys(self) -> Keys:
        if self._place is None:
            raise ValueError("no checkpoint_id: give one to dcp.load, or a path to SafetensorsReader")
        if isinstance(self._place, Exception):
            raise self._place
        if not self._place.folder.is_dir():
            raise FileNotFoundError(_missing(self._place))
        manifest = read_manifest(self._place.folder)
        rank, world = rank_and_world() if has_process_group() else (0, 1)
        return Keys(manifest, Catalog(manifest, rank, world))


def _missing(place: Place) -> str:
    """Why a checkpoint is not there."""
    root = place.root
    if not isinstance(root, StorePath) and any(root.glob(f".old-*-{place.step}")):
        return (
            f"{place.folder} was being replaced when the save was killed: the next save into {root} puts it "
            "back, and so does overlapkit.Checkpointer(...) on that folder"
        )
    there = [folder.name for folder in step_folders(root).values()]
    return f"there is no checkpoint {place.folder}, but {', '.join(there) or 'none at all'}"


class _Read:
    """One read item: a part of one chunk, and the tensor that takes it."""

    def __init__(self, item: ReadItem, saved: Saved, planner: LoadPlanner) -> None:
        self._item = item
        self._planner = planner
        self._target = planner.resolve_tensor(item).detach()
        self.chunk = _chunk(item, saved)
        self._saved = dataclasses.replace(saved, chunks=[self.chunk])
        offset = (a + b for a, b in zip(self.chunk.box.offset, item.storage_offsets, strict=True))
        self._box = Box(tuple(offset), tuple(item.lengths))

    def problem(self) -> str | None:
        """What does not fit, or None."""
        here, there = (self._target.dtype, tuple(self._target.shape)), (self._saved.dtype, self._box.shape)
        if here == there:
            return None
        key = self._item.dest_index.fqn
        return f"mismatch: {key!r} is {here[0]} {here[1]}, in the checkpoint {there[0]} {there[1]}"

    def carry_out(self, reader: Reader) -> None:
        """Read, check, and put in place."""
        target = self._target
        if target.device.type == "cpu" and target.is_contiguous():
            reader.fill(target, self._box, self._saved)
        else:
            host = torch.empty(self._box.shape, dtype=target.dtype, device="cpu")
            reader.fill(host, self._box, self._saved)
            target.copy_(host)
        self._planner.commit_tensor(self._item, target)


def _chunk(item: ReadItem, saved: Saved) -> Chunk:
    """The chunk that DCP has planned to read, by its offset; its place in our list is a hint."""
    index = item.storage_index
    hint = () if index.index is None else saved.chunks[index.index : index.index + 1]
    offset = tuple(index.offset or ())
    return next(chunk for chunk in itertools.chain(hint, saved.chunks) if chunk.box.offset == offset)


def _tensor_metadata(saved: Saved) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape))
        for chunk in saved.chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)
