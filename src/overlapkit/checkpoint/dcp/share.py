"""What one rank writes of a plan, in the checkpointer's terms: the state's tree, a file plan, its bytes."""

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.codec import encode, root
from overlapkit.checkpoint.dcp.flatten import name_of, nest
from overlapkit.checkpoint.dcp.planner import SafetensorsSavePlanner
from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.gather import Gathered
from overlapkit.checkpoint.layout import check_tensor
from overlapkit.checkpoint.pieces import Slot
from overlapkit.checkpoint.tree import TREE
from overlapkit.checkpoint.writer import Bytes


def take_share(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str, Any], FilePlan, Bytes]:
    """Take a rank's share of a save apart.

    Args:
        plan: This rank's final plan.
        planner: Knows the rank's whole state.

    Returns:
        The state's entries, where this rank's tensors go in its file, and their bytes.

    Raises:
        TypeError: Something cannot be kept; the message names it.
        ValueError: A tensor is not what the plan says of it.
    """
    if not isinstance(planner, DefaultSavePlanner):
        raise TypeError(
            f"planner is a {type(planner).__name__}: SafetensorsWriter needs a DefaultSavePlanner, or one "
            "that derives from it, such as SafetensorsSavePlanner"
        )
    if not isinstance(planner, SafetensorsSavePlanner):
        _refuse_values(planner)

    def keep(path: str, tensor: torch.Tensor) -> str:
        check_tensor(path, tensor)
        return path

    entries = {
        key: {"kind": TREE, "value": encode(value, root(key), keep)}
        for key, value in nest(planner.state_dict, planner.mappings).items()
    }
    taken: dict[str, tuple[Slot, torch.Tensor]] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            slot, tensor = _piece(item, planner)
            if slot.name in taken:
                raise TypeError(
                    f"state {item.index.fqn!r} has several parts on this rank: what can be kept is a tensor, "
                    "or a DTensor, of which a rank has one"
                )
            taken[slot.name] = slot, tensor
    file_plan = FilePlan([slot for slot, _ in taken.values()], [])
    tensors = [tensor for _, tensor in taken.values()]
    order = file_plan.in_file()
    return entries, file_plan, Gathered([start for start, _ in order], [tensors[place] for _, place in order])


def _refuse_values(planner: DefaultSavePlanner) -> None:
    values = [
        f"{key!r} ({type(value).__name__})"
        for key, value in planner.state_dict.items()
        if not isinstance(value, torch.Tensor)
    ]
    if values:
        raise TypeError(
            f"the state has values that are no tensors, which {type(planner).__name__} would pickle: "
            f"{_some(values)}. Give planner=SafetensorsSavePlanner(), which keeps them as typed JSON"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _piece(item: WriteItem, planner: DefaultSavePlanner) -> tuple[Slot, torch.Tensor]:
    key, about, data = item.index.fqn, item.tensor_data, planner.resolve_data(item)
    assert about is not None
    assert isinstance(data, torch.Tensor)
    box = Box(tuple(about.chunk.offsets), tuple(about.chunk.sizes))
    if tuple(data.shape) != box.shape:
        raise ValueError(
            f"state {key!r} has a local shape {tuple(data.shape)}, where its sharding says {box.shape}: this "
            "sharding cannot be kept"
        )
    return Slot(
        name=name_of(planner.mappings.get(key, (key,))),
        dtype=data.dtype,
        shape=tuple(about.size),
        box=box,
        own=False,
        late=False,
        sharded=item.type == WriteItemType.SHARD,
        device=data.device.type,
        alias=None,
    ), data
