"""The words for a state that is taken apart: slots, pieces of tensors, and an inventory of both."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.codec import Constant

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The dtypes that safetensors names, the widest first: in this order every tensor starts aligned."""


class Slot(NamedTuple):
    """What of a piece is the same from save to save.

    Attributes:
        name: Path in the state, unique.
        dtype: Of the tensor.
        shape: Of the global tensor.
        box: The part of it that this rank writes.
        own: True where every rank has a tensor of its own of this name (a loader's state, a loose tensor);
            False where all ranks' pieces make up one tensor.
        late: It changes in `optimizer.step()` only.
        sharded: It is a DTensor.
        device: Type of the device that it is on.
        alias: The name under which the same memory is written already, or None.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    own: bool
    late: bool
    sharded: bool
    device: str
    alias: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.box.numel * self.dtype.itemsize


class Piece(NamedTuple):
    """The part of one tensor that this rank writes.

    Attributes:
        slot: What it is.
        data: The live memory, of shape `slot.box.shape`.
        source: The tensor that it was taken from; a DTensor's own version counter is not its local part's.
        moment: It is the state of an optimizer, which is copied late.
    """

    slot: Slot
    data: torch.Tensor
    source: torch.Tensor
    moment: bool


@dataclass
class Inventory:
    """A state, or a half of one, taken apart.

    Attributes:
        entries: Typed JSON, which refers to tensors by name; for each key of the state.
        pieces: What this rank writes.
        left_out: (name, dtype, shape) of the replicated tensors that rank 0 writes for this one.
        optimizers: Those whose parameters and state may be copied late.
        groups: For each optimizer, the names of each group's parameters.
        seen: Where memory is that has a name already.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    left_out: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    groups: dict[str, list[Constant]] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], str] = field(default_factory=dict)
