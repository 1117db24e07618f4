"""Late: what is copied beside the next step, and what tells whether it is still what it was at the save.

A save is on the critical path, and looking at a tensor that no cache holds any more takes 0.3 us: at 5,000
tensors that alone is more than a save may take. So not everything is looked at there. Parameters, which
people do change by hand, are; and WITNESSES tensors evenly spread over all, which see what is done to many
at once. The rest is looked at a moment later, on the lane, before the copy begins.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from overlapkit.checkpoint.copying import portions
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.pieces import Piece

WITNESSES = 128

_version = operator.attrgetter("_version")
_data_ptr = torch.Tensor.data_ptr
_stride, _size = torch.Tensor.stride, torch.Tensor.size
_local = operator.attrgetter("_local_tensor")


class Counters:
    """The version counters of some tensors. A DTensor has two: its own, and its local part's.

    They are read through aliases, which share them: made in a row, these lie in a row in memory.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        counted = [(p.slot.name, p.source) for p in pieces]
        counted += [(p.slot.name, p.data) for p in pieces if p.slot.sharded]
        self._names = [name for name, _ in counted]
        with torch.no_grad():
            self._aliases = [tensor.detach() for _, tensor in counted]

    def read(self) -> list[int]:
        """All of them; one moves when its tensor is changed in place."""
        return list(map(_version, self._aliases))

    def moved(self, before: Sequence[int]) -> list[str]:
        """The names of the tensors that have changed since `read` gave these."""
        now = self.read()
        return [name for name, a, b in zip(self._names, now, before, strict=True) if a != b]


class Late:
    """The pieces that change in `optimizer.step()` only.

    Attributes:
        data: The live memory.
        nbytes: Of all of it.
        portions: The same as a thread copies it: to where it goes in the file.
        queued: Whether it is on the CUDA device whose lane copies it.
        at_save: The counters that are read inside the save.
        at_copy: Those that are read when the copy begins.
    """

    def __init__(self, pieces: Sequence[Piece], starts: Sequence[int], device: torch.device) -> None:
        self.data = [piece.data for piece in pieces]
        self.nbytes = sum(piece.slot.nbytes for piece in pieces)
        self._starts = starts
        self._on_cpu = device.type == "cpu"
        self.portions = portions(self.data, starts) if self._on_cpu else []
        self.queued = [device.type == "cuda" and piece.data.device == device for piece in pieces]
        self._names = [piece.slot.name for piece in pieces]
        places = range(0, len(pieces), max(1, -(-len(pieces) // WITNESSES)))
        seen = {*places, *(place for place, piece in enumerate(pieces) if not piece.moment)}
        self.at_save = Counters([pieces[place] for place in sorted(seen)])
        self.at_copy = Counters([piece for place, piece in enumerate(pieces) if place not in seen])
        self._all = _Memory(pieces)
        self._witnesses = _Memory([pieces[place] for place in places])
        self._addresses = list(map(_data_ptr, self.data))  # which may be behind the sources': see `follow`
        self._expected = [self._addresses[place] for place in places]
        self._parameters = [place for place, piece in enumerate(pieces) if not piece.moment]
        self._layouts = self._layouts_of(self.data)

    def in_place(self) -> bool:
        """Whether the witnesses' memory is where it was."""
        return self._witnesses.addresses() == self._expected

    def follow(self) -> None:
        """Find what has other memory since the last save: `tensor.data = other`, before this save.

        Memory that was replaced under the witnesses, too, was so after this save, in which they were where
        they had been: then what was there is copied.

        Raises:
            CheckpointError: What is there now has another shape or dtype.
        """
        found = self._all.tensors()
        addresses, layouts = list(map(_data_ptr, found)), self._layouts_of(found)
        if (addresses, layouts) == (self._addresses, self._layouts) or not self.in_place():
            return
        for place, memory in enumerate(found):
            known = self.data[place]
            if addresses[place] != self._addresses[place] or _layout(memory) != _layout(known):
                if (memory.shape, memory.dtype) != (known.shape, known.dtype):
                    self._expected = []  # so that the next save plans anew
                    raise CheckpointError(
                        f"{self._names[place]}: its data was replaced since the last save, and is now "
                        f"{memory.dtype} {tuple(memory.shape)}: use Checkpointer(stage='now')"
                    )
                self.data[place] = memory.detach()
        self._addresses, self._layouts = addresses, layouts
        if self._on_cpu:
            self.portions = portions(self.data, self._starts)

    def _layouts_of(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """How parameters lie in their memory: `tensor.data = tensor.data.t()` leaves them where they are."""
        parameters = [tensors[place] for place in self._parameters]
        return [*map(_stride, parameters), *map(_size, parameters)]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.shape


class _Memory:
    """Where tensors' memory is; of DTensors, their local parts'."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._sources = [piece.source for piece in pieces]
        self._sharded = [place for place, piece in enumerate(pieces) if piece.slot.sharded]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, with DTensors' local parts in their places."""
        found = self._sources.copy()
        for place in self._sharded:
            found[place] = _local(found[place])
        return found

    def addresses(self) -> list[int]:
        return list(map(_data_ptr, self.tensors()))
