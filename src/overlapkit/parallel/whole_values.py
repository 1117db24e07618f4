"""Code that initialises tensors sees sharded ones whole: its values are those of one process."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from overlapkit.parallel.tensor_parallel import is_split, local_part

_OPEN = 2
"""How many whole tensors are kept at least: `normal_` and the zeroed row that follows have the same one."""


class WholeValues(TorchDispatchMode):
    """Within it, an operator on a DTensor works on a whole tensor in its place, of which a part is put back.

    torch's own way draws random numbers for each shard apart (other values at each number of ranks, and on
    the CPU the same in all shards), and a write into a part of a DTensor, such as an embedding's padding row,
    is lost.

    Every rank must do the same, with generators in the same state. Memory: a few whole tensors at a time.

    Args:
        fresh: DTensors without values. Others are gathered when they are first used.
    """

    def __init__(self, fresh: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fresh = {id(tensor): tensor for tensor in fresh}
        self._open: dict[int, _Whole] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._close(_OPEN)
        args, kwargs = tree_map(self._whole, (args, kwargs or {}))
        return tree_map(self._split, func(*args, **kwargs))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for whole in self._open.values():
            whole.close()
        self._open.clear()

    def _whole(self, value: Any) -> Any:
        if not is_split(value):
            return value
        key = id(value)
        if key not in self._open:
            self._open[key] = _Whole(value, fresh=self._fresh.pop(key, None) is not None)
        return self._open[key].tensor

    def _split(self, value: Any) -> Any:
        """What an in-place operator returns is the DTensor that it was called on."""
        return next((whole.split for whole in self._open.values() if whole.tensor is value), value)

    def _close(self, most: int) -> None:
        """Let go of the oldest ones, but for those that a view still writes to."""
        for key, whole in list(self._open.items())[: max(0, len(self._open) - most)]:
            if whole.alone():
                whole.close()
                del self._open[key]


class _Whole:
    """A whole tensor in place of a DTensor."""

    def __init__(self, split: Any, fresh: bool) -> None:
        self.split = split
        if fresh:
            local = local_part(split)
            self.tensor = local.new_empty(split.shape)
            if local.is_floating_point() or local.is_complex():
                self.tensor.fill_(float("nan"))
        else:
            self.tensor = split.detach().full_tensor().clone()  # torch 2.11 cannot detach what it gathered
        self._users = self._count()

    def alone(self) -> bool:
        """Whether nothing else refers to its memory, as far as torch can say."""
        return self._users is not None and self._count() == self._users

    def close(self) -> None:
        """Put this rank's part into the DTensor."""
        local_part(self.split).copy_(part_of(self.tensor, self.split))

    def _count(self) -> int | None:
        count = getattr(torch._C, "_storage_Use_Count", None)
        return None if count is None else int(count(self.tensor.untyped_storage()._cdata))


def part_of(whole: torch.Tensor, split: Any) -> torch.Tensor:
    """The part of a whole tensor that this rank holds in a DTensor of the same shape, as a view.

    FSDP2 shards what tensor parallelism has left of a tensor: where both take the same dimension, its
    placement is strided, and comes last.

    Raises:
        ValueError: The DTensor holds partial sums.
    """
    mesh = split.device_mesh
    places = list(zip(split.placements, mesh.get_coordinate(), range(mesh.ndim), strict=True))
    for placement, place, dim in sorted(places, key=lambda each: hasattr(each[0], "split_factor")):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(
                f"a tensor with placements {split.placements} holds partial sums: it has no parts"
            )
        chunks = whole.chunk(mesh.size(dim), placement.dim)
        whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole
