"""What one rank writes of a plan, in the checkpointer's terms: pieces, their bytes, and the state's tree."""

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.codec import encode, root
from overlapkit.checkpoint.dcp.flatten import name_of, nest
from overlapkit.checkpoint.dcp.planner import SafetensorsSavePlanner
from overlapkit.checkpoint.layout import Inventory, Piece, check_tensor
from overlapkit.checkpoint.stage import Row, file_order
from overlapkit.checkpoint.tree import TREE


def take_share(plan: SavePlan, planner: SavePlanner) -> tuple[Inventory, list[Row]]:
    """Take a rank's share of a save apart.

    Host tensors are not copied; others are copied to the host.

    Args:
        plan: This rank's final plan.
        planner: Knows the rank's whole state.

    Returns:
        The state's tree with this rank's pieces, and the pieces' bytes in file order.

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

    inventory = Inventory()
    for key, value in nest(planner.state_dict, planner.mappings).items():
        inventory.entries[key] = {"kind": TREE, "value": encode(value, root(key), keep)}
    rows: dict[str, Row] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            piece = _piece(item, planner)
            if piece.name in rows:
                raise TypeError(
                    f"state {item.index.fqn!r} has several parts on this rank: what can be kept is a tensor, "
                    "or a DTensor, of which a rank has one"
                )
            rows[piece.name] = (piece, _host_bytes(piece.data))
    inventory.pieces = [piece for piece, _ in rows.values()]
    return inventory, sorted(rows.values(), key=lambda row: file_order(row[0]))


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


def _piece(item: WriteItem, planner: DefaultSavePlanner) -> Piece:
    key, about, data = item.index.fqn, item.tensor_data, planner.resolve_data(item)
    assert about is not None
    assert isinstance(data, torch.Tensor)
    box = Box(tuple(about.chunk.offsets), tuple(about.chunk.sizes))
    if tuple(data.shape) != box.shape:
        raise ValueError(
            f"state {key!r} has a local shape {tuple(data.shape)}, where its sharding says {box.shape}: this "
            "sharding cannot be kept"
        )
    name, sharded = name_of(planner.mappings.get(key, (key,))), item.type == WriteItemType.SHARD
    return Piece(name, data, data, tuple(about.size), box, own=False, late=False, sharded=sharded)


def _host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, in host memory: uint8 (n,)."""
    tensor = tensor.detach()
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    if not plain or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor.flatten().view(torch.uint8)
