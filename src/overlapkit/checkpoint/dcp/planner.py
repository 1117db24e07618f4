"""Planners that carry what is no tensor as typed JSON, where DCP's own would pickle it."""

import io
import json
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem, WriteItemType

from overlapkit.checkpoint.codec import decode, encode
from overlapkit.checkpoint.dcp.flatten import Flat, Path, flatten
from overlapkit.checkpoint.errors import CheckpointError, MismatchError


class SafetensorsSavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner, except that values that are no tensors are typed JSON.

    Every rank keeps its own values; tensors are planned as ever. A dict or list without tensors is one
    value, and comes back exactly: int keys, tuples, sets, Counter, bytes, numpy scalars.

    Args:
        dedup_save_to_lowest_rank: The lowest rank writes what several have, instead of the least busy one.
        enable_plan_caching: Plan again only when the state's structure has changed.
    """

    def __init__(self, *, dedup_save_to_lowest_rank: bool = False, enable_plan_caching: bool = False) -> None:
        super().__init__(
            flatten_state_dict=False,  # done here, in our way
            flatten_sharded_tensors=False,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See SavePlanner.

        Raises:
            TypeError: A value cannot be kept; the message names it.
        """
        flat = flatten(state_dict)
        for key, value in flat.values.items():
            if not isinstance(value, torch.Tensor):
                encode(value, key, refuse_tensor)  # now, and not after some ranks have begun to write
        super().set_up_planner(flat.values, storage_meta, is_coordinator)
        self.mappings: dict[str, Path] = flat.paths

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """See DefaultSavePlanner."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(encode(object, write_item.index.fqn, refuse_tensor)).encode())
        return object


class SafetensorsLoadPlanner(DefaultLoadPlanner):
    """DefaultLoadPlanner for what SafetensorsSavePlanner or a Checkpointer saved; nothing is unpickled.

    Args:
        allow_partial_load: Leave as it is what the checkpoint does not have.
    """

    def __init__(self, *, allow_partial_load: bool = False) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=allow_partial_load
        )
        self._flat = Flat()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See LoadPlanner."""
        self._flat = flatten(state_dict)
        tensors = {key: value for key, value in self._flat.values.items() if isinstance(value, torch.Tensor)}
        super().set_up_planner(tensors, metadata, is_coordinator)  # it would put None in place of other types
        for key, tensor in tensors.items():
            if tensor is not self._flat.values[key]:  # it was on the meta device
                self._flat.put(key, tensor)
        self.original_state_dict, self.state_dict = state_dict, self._flat.values

    def create_local_plan(self) -> LoadPlan:
        """See LoadPlanner.

        Raises:
            MismatchError: Missing keys, other shapes or dtypes: all of them.
        """
        assert self.metadata is not None
        there = self.metadata.state_dict_metadata
        problems = []
        for key, here in self.state_dict.items():
            if key not in there:
                if not self.allow_partial_load:
                    problems.append(f"missing: {key!r}")
            elif (found := _describe(there[key])) != (wanted := _describe(here)):
                problems.append(f"mismatch: {key!r} is {wanted}, in the checkpoint {found}")
        if problems:
            raise misfit(problems)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See LoadPlanner.

        Raises:
            CheckpointError: It is not typed JSON, but was saved by another planner.
        """
        key = read_item.dest_index.fqn
        try:
            loaded = decode(json.loads(value.read()), _no_tensor)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{key!r} is not typed JSON ({error}): save it with planner=SafetensorsSavePlanner(); what "
                "other planners pickle is never unpickled"
            ) from error
        self._flat.put(key, _numbered(self._flat.values[key], loaded, self._flat.paths[key][-1]))


def misfit(problems: list[str]) -> MismatchError:
    """An error that lists everything that does not fit."""
    return MismatchError(
        "the checkpoint does not fit the state:" + "".join(f"\n    {one}" for one in problems)
    )


def refuse_tensor(path: str, tensor: torch.Tensor) -> str:
    """Called for a tensor where only dicts and lists may hold some: DCP looks nowhere else."""
    raise TypeError(
        f"state {path!r} is a tensor inside of a tuple, set or deque: torch.distributed.checkpoint finds "
        "tensors in dicts and lists only; put it in one"
    )


def _no_tensor(name: str) -> Any:
    raise ValueError(f"it refers to a tensor, {name!r}")


def _describe(thing: Any) -> str:
    if isinstance(thing, TensorStorageMetadata):
        return f"{thing.properties.dtype} {tuple(thing.size)}"
    return f"{thing.dtype} {tuple(thing.shape)}" if isinstance(thing, torch.Tensor) else "no tensor"


def _numbered(current: Any, loaded: Any, place: object) -> Any:
    """Parameter groups with numbers in place of names, where the optimizer that takes them has numbers.

    A Checkpointer names parameters, and so does torch's get_optimizer_state_dict; optimizer.state_dict()
    counts them, in the same order.
    """
    if place == "params" and _all(int, current) and _all(str, loaded):
        if len(current) != len(loaded):
            raise MismatchError(
                f"mismatch: a parameter group has {len(current)} parameters, in the checkpoint {len(loaded)}"
            )
        return current
    if type(current) is dict and type(loaded) is dict:
        return {key: _numbered(current.get(key), value, key) for key, value in loaded.items()}
    if type(current) is list and type(loaded) is list and len(current) == len(loaded):
        return [_numbered(*pair, place) for pair in zip(current, loaded, strict=True)]
    return loaded


def _all(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)
