"""FilePlan: where a rank's tensors lie in its file, and all of the file's text that no value changes."""

import itertools
import json
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from overlapkit.checkpoint.codec import Constant
from overlapkit.checkpoint.pieces import DTYPES, Slot

BLOCK = 4 << 20
"""Bytes under one checksum: a rank that reads a part of a tensor checks what it reads."""
PAGE = 4096
"""The data begins at a multiple of this, so that direct I/O can write it."""

_GROUP = 4 * BLOCK  # handed to one write

_RANK_OF = {dtype: place for place, dtype in enumerate(DTYPES)}


class FilePlan:
    """The order of a rank's tensors in its file, which is that of its staging buffers, too.

    Args:
        slots: What is written, in any order.
        left_out: (name, dtype, shape) of the replicated tensors that rank 0 writes for this rank.

    Attributes:
        tensors: How many there are in the file.
        nbytes: Of all their data.
        late: The places, in `slots`, of what is copied beside the next step.
        now: The places of what is copied at once.
    """

    def __init__(self, slots: Sequence[Slot], left_out: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        self._slots = slots
        self._left_out = left_out
        written = [place for place, slot in enumerate(slots) if slot.alias is None]
        # the widest dtypes first: so each tensor is aligned; what is copied together is together
        self._order = sorted(written, key=lambda place: (_RANK_OF[slots[place].dtype], not slots[place].late))
        self._in_file = [slots[place] for place in self._order]
        sizes = [slot.nbytes for slot in self._in_file]
        self._starts = list(itertools.accumulate(sizes, initial=0))[:-1]
        self.tensors = len(sizes)
        self.nbytes = sum(sizes)
        filled = [place for place in written if slots[place].nbytes]
        self.late = [place for place in filled if slots[place].late]
        self.now = [place for place in filled if not slots[place].late]
        self._views: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def in_file(self) -> list[tuple[int, int]]:
        """For each tensor in the file, in its order: where its data begins, and its place in `slots`."""
        return list(zip(self._starts, self._order, strict=True))

    def prepare(self) -> None:
        """Make now what the first save would make: texts of all tensors, under the interpreter's lock."""
        _ = self.header, self.groups, self.table.text, self.plain_tensors

    def views(self, memory: torch.Tensor, *, late: bool) -> list[torch.Tensor]:
        """Parts of a staging buffer, uint8 (nbytes,), with dtypes and shapes: for `late`, or for `now`.

        Made once for each buffer, and held.
        """
        key = memory.data_ptr(), late
        if key not in self._views:
            start_of = {place: start for start, place in self.in_file()}
            with torch.inference_mode(False):  # views of that mode could be filled in it only
                self._views[key] = [
                    _view(memory, start_of[place], self._slots[place])
                    for place in (self.late if late else self.now)
                ]
        return self._views[key]

    @cached_property
    def header(self) -> bytes:
        """The safetensors header, filled up with spaces to a whole number of pages."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for at, slot in zip(self._starts, self._in_file, strict=True):
            table[slot.name] = {
                "dtype": DTYPES[slot.dtype],
                "shape": list(slot.box.shape),
                "data_offsets": [at, at + slot.nbytes],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """The bytes of the data, from and to, under each checksum: never those of two tensors."""
        return [
            (start, min(start + BLOCK, at + slot.nbytes))
            for at, slot in zip(self._starts, self._in_file, strict=True)
            for start in range(at, at + slot.nbytes, BLOCK)
        ]

    @cached_property
    def groups(self) -> list[tuple[int, int, int, int]]:
        """The bytes, from and to, that are written at once, and which `blocks`, from and to, begin there."""
        firsts = [start for start, _ in self.blocks]
        return [
            (at, min(at + _GROUP, self.nbytes), bisect_left(firsts, at), bisect_left(firsts, at + _GROUP))
            for at in range(0, self.nbytes, _GROUP)
        ]

    @cached_property
    def table(self) -> Constant:
        """What the part says of each tensor; "sum" is the place of its first checksum."""
        table: dict[str, Any] = {}
        sums = 0
        for at, slot in zip(self._starts, self._in_file, strict=True):
            table[slot.name] = {
                "dtype": DTYPES[slot.dtype],
                "shape": list(slot.shape),
                "offset": list(slot.box.offset),
                "local": list(slot.box.shape),
                "own": slot.own,
                "sharded": slot.sharded,
                "device": slot.device,
                "at": at,
                "sum": sums,
            }
            sums += -(-slot.nbytes // BLOCK)
        return Constant(table | {s.name: {"alias": s.alias} for s in self._slots if s.alias is not None})

    @cached_property
    def plain_tensors(self) -> int:
        """A checksum of the names, dtypes and shapes of the tensors that rank 0 writes for all ranks."""
        mine = [(s.name, DTYPES[s.dtype], s.shape) for s in self._slots if not (s.own or s.sharded)]
        return zlib.crc32(repr(sorted([*mine, *self._left_out])).encode())


def _view(memory: torch.Tensor, start: int, slot: Slot) -> torch.Tensor:
    return memory[start : start + slot.nbytes].view(slot.dtype).view(slot.box.shape)
