"""What cross entropy takes, in all its forms, and the checks of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlapkit.kernels.arguments import check_not_negative, check_number


class Options(NamedTuple):
    """The options as operators and kernels have them; the reduction is made outside of them."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    """0 for none."""
    group: str = ""
    """Name of the process group that the classes are sharded over; empty where they are whole."""

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """All but the group, in order."""
        return self[:4]


def check_options(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> None:
    """Refuse options of a wrong type or out of range."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index={ignore_index!r} is a {type(ignore_index).__name__}: pass an int")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'mean', 'sum' and 'none'")
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: allowed is 0 to 1")
    check_not_negative("z_loss", z_loss)
    if softcap is not None:
        check_not_negative("softcap", softcap)
        if softcap == 0.0:
            raise ValueError("softcap=0.0 leaves no logits: pass a positive number, or None for no cap")


def group_name(vocab_group: Any) -> tuple[str, int]:
    """Return name and size of the process group that the classes are sharded over; "" and 1 for None."""
    if vocab_group is None:
        return "", 1
    from torch.distributed import ProcessGroup

    if not isinstance(vocab_group, ProcessGroup):
        raise TypeError(
            f"vocab_group={vocab_group!r} is a {type(vocab_group).__name__}: pass a ProcessGroup, "
            'e.g. mesh.get_group("tp")'
        )
    return str(vocab_group.group_name), vocab_group.size()


def as_indices(target: Tensor, wanted: tuple[int, ...], of: str, x: Tensor, remedy: str = "") -> Tensor:
    """Return class indices as int64, of shape `wanted`; torch takes bytes for them, too."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target is a {type(target).__name__}: pass a torch.Tensor of class indices")
    if target.dtype == torch.uint8:
        target = target.long()
    if target.dtype != torch.int64:
        raise ValueError(f"target has dtype {target.dtype}: pass int64 class indices, e.g. target.long()")
    if target.shape != wanted:
        raise ValueError(
            f"target has shape {tuple(target.shape)}: {of} of shape {tuple(x.shape)} need "
            f"{tuple(wanted)}{remedy}"
        )
    if target.device != x.device:
        raise ValueError(f"target is on {target.device}, {of} on {x.device}: move target there")
    return target
