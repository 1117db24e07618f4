"""Many host tensors of one batch in one stretch of bytes, so that one copy moves them all.

Bytes are copied as they lie in their storages: strides survive (channels-last stays so), tensors that
share memory still share it on the device, and an expanded tensor costs what it holds.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_HOLES, _LITTLE = 8, 1 << 20
"""Views that share bytes are copied apart where their range is more than so many times their content, and
more than so many bytes: two columns of a mapped table must not bring all of it along."""
_FEW = 32
"""Views of one storage of which it is looked which share bytes: it takes a microsecond a pair."""
ALIGNMENT = 512
"""Bytes; where the caching allocator would start a tensor, so that vectorised kernels see no difference."""


@dataclass(slots=True)
class _Piece:
    """What is copied in one go: bytes of one storage, or one tensor that is compacted on the way.

    Attributes:
        source: The tensor, or one of those in the range.
        at: Where it goes in the packed bytes.
        nbytes: How much it is there.
        storage: Address of the storage that the range is of.
        start: Where the range begins in it.
        place: Of a tensor that is compacted; None for a range.
    """

    source: torch.Tensor
    at: int
    nbytes: int
    storage: int = 0
    start: int = 0
    place: "_Place | None" = None

    def joins(self, last: "_Piece") -> bool:
        """Whether this range lies in its storage behind `last` just as it will lie in the packed bytes."""
        return self.storage == last.storage and self.at - last.at == self.start - last.start

    def bytes(self) -> torch.Tensor:
        """The range, as uint8 (nbytes,)."""
        raw = self.source.as_strided((0,), (1,)).view(torch.uint8)
        return raw.as_strided((self.nbytes,), (1,), self.start)


@dataclass(slots=True)
class _Place:
    """Where a tensor lies in the packed bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int

    def view(self, typed: torch.Tensor) -> torch.Tensor:
        """The tensor, in the packed bytes seen as its dtype."""
        return torch.as_strided(typed, self.shape, self.stride, self.at // self.dtype.itemsize)


@dataclass(slots=True)
class _Extent:
    """The bytes of its storage that a tensor spans, holes included."""

    index: int
    tensor: torch.Tensor
    start: int
    end: int
    content: int


def packable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the host and no more than its bytes, dtype, shape and strides."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def is_plain(tensor: torch.Tensor, kind: type = torch.Tensor) -> bool:
    """Whether a tensor, wherever it is, is no more than its bytes, dtype, shape and strides.

    Args:
        tensor: Any.
        kind: The type of an ordinary tensor there.
    """
    return (
        type(tensor) is kind
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
    )


class Packing:
    """Where each of some packable tensors goes in one stretch of bytes.

    Args:
        tensors: Of any shapes, strides and dtypes; views of one storage, too.
        landed: The bytes themselves, where some of the tensors lie in them already: these stay where they
            are. uint8 (used,), at the start of its storage.

    Attributes:
        nbytes: Bytes in all.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], landed: torch.Tensor | None = None) -> None:
        self._pieces: list[_Piece] = []
        self._places: dict[int, _Place] = {}
        self.nbytes = 0
        home = None
        if landed is not None:
            self._reserve(landed.numel())
            home = landed.data_ptr()
        storages: dict[int, list[_Extent]] = {}
        for index, tensor in enumerate(tensors):
            extent = _extent(index, tensor)
            if extent.content == 0:
                self._places[index] = _Place(tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
            elif (address := tensor.untyped_storage().data_ptr()) == home:
                self._places[index] = _Place(tensor.dtype, tuple(tensor.shape), tensor.stride(), extent.start)
            else:
                storages.setdefault(address, []).append(extent)
        for address, extents in storages.items():
            for group in _overlapping(extents):
                self._add(group, address)

    @property
    def layout(self) -> tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]:
        """Of each tensor, in the order given, its dtype, shape, strides and offset in bytes."""
        places = [self._places[index] for index in range(len(self._places))]
        return tuple((place.dtype, place.shape, place.stride, place.at) for place in places)

    @property
    def copied(self) -> int:
        """Bytes that `fill` copies: all but those that lie where they belong, and what aligns them."""
        return sum(piece.nbytes for piece in self._pieces)

    def fill(self, packed: torch.Tensor) -> None:
        """Copy the tensors in. `packed` is uint8 of shape (nbytes,), on the host."""
        start = packed.data_ptr()
        for piece in self._pieces:
            if piece.place is None:  # a fifth of the time of torch's copy_ for small ones, and no GIL either
                ctypes.memmove(start + piece.at, piece.storage + piece.start, piece.nbytes)
            else:
                piece.place.view(packed.view(piece.place.dtype)).copy_(piece.source)

    def fill_there(self, packed: torch.Tensor) -> None:
        """Copy the tensors in on the device that they are on, on the current stream, as torch operations."""
        for piece in self._pieces:
            if piece.place is None:
                packed[piece.at : piece.at + piece.nbytes].copy_(piece.bytes(), non_blocking=True)
            else:
                piece.place.view(packed.view(piece.place.dtype)).copy_(piece.source, non_blocking=True)

    def views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in the order given, as views of `packed`: uint8 of shape (nbytes,), anywhere."""
        places = [self._places[index] for index in range(len(self._places))]
        typed = {dtype: packed.view(dtype) for dtype in {place.dtype for place in places}}
        return [place.view(typed[place.dtype]) for place in places]

    def _add(self, group: list[_Extent], storage: int) -> None:
        """Place tensors that lie among each other: as one range, or apart where that has more holes."""
        if max(extent.end for extent in group) - group[0].start <= sum(extent.content for extent in group):
            self._add_whole(group, storage)
            return
        for part in _sharing(group) if len(group) <= _FEW else [group]:
            content = sum(extent.content for extent in part)
            reach = max(extent.end for extent in part) - min(extent.start for extent in part)
            if len(part) > 1 and reach <= max(_LITTLE, _HOLES * content):
                self._add_whole(part, storage)
            else:
                for extent in part:
                    self._add_compacted(extent)

    def _add_whole(self, group: list[_Extent], storage: int) -> None:
        """As one range, in which they share what they share."""
        grain = max(extent.tensor.element_size() for extent in group)  # keeps every offset divisible
        start = min(extent.start for extent in group)
        start -= start % grain
        end = max(extent.end for extent in group)
        at = self._reserve(end - start)
        source = _longest(*(extent.tensor for extent in group))
        self._add_range(_Piece(source, at, end - start, storage, start))
        for extent in group:
            tensor = extent.tensor
            self._places[extent.index] = _Place(
                tensor.dtype, tuple(tensor.shape), tensor.stride(), at + extent.start - start
            )

    def _add_range(self, piece: _Piece) -> None:
        """Note a range to copy; it is copied with the one before where that is possible."""
        if self._pieces and piece.joins(last := self._pieces[-1]):
            last.nbytes = piece.at + piece.nbytes - last.at
            last.source = _longest(last.source, piece.source)
        else:
            self._pieces.append(piece)

    def _add_compacted(self, extent: _Extent) -> None:
        tensor = extent.tensor
        stride = torch.empty_like(tensor, device="meta").stride()
        place = _Place(tensor.dtype, tuple(tensor.shape), stride, self._reserve(extent.content))
        self._places[extent.index] = place
        self._pieces.append(_Piece(tensor, place.at, extent.content, place=place))

    def _reserve(self, nbytes: int) -> int:
        at = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return at


def _extent(index: int, tensor: torch.Tensor) -> _Extent:
    size, count = tensor.element_size(), tensor.numel()
    start = int(tensor.storage_offset()) * size
    if count == 0:
        return _Extent(index, tensor, start, start, 0)
    if tensor.is_contiguous():
        return _Extent(index, tensor, start, start + count * size, count * size)
    last = sum((n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(index, tensor, start, start + (last + 1) * size, count * size)


def _longest(*tensors: torch.Tensor) -> torch.Tensor:
    """The one whose storage holds all: two made from one numpy array can start at one address."""
    return tensors[0] if len(tensors) == 1 else max(tensors, key=lambda one: one.untyped_storage().nbytes())


def _overlapping(extents: list[_Extent]) -> list[list[_Extent]]:
    """Groups of extents of one storage that overlap, each by start."""
    groups: list[list[_Extent]] = []
    end = -1
    for extent in sorted(extents, key=lambda extent: extent.start):
        if extent.start < end:
            groups[-1].append(extent)
        else:
            groups.append([extent])
        end = max(end, extent.end)
    return groups


def _sharing(group: list[_Extent]) -> list[list[_Extent]]:
    """A group in parts that have no byte in common."""
    parts: list[list[tuple[_Extent, np.ndarray]]] = []
    for extent in group:
        here = np.asarray(_Bytes(extent))
        touched = [any(_shared(here, there) for _, there in part) for part in parts]
        one = [(extent, here)]
        for part, touches in zip(parts, touched, strict=True):
            one += part if touches else []
        parts = [part for part, touches in zip(parts, touched, strict=True) if not touches] + [one]
    return [[extent for extent, _ in part] for part in parts]


class _Bytes:
    """What numpy asks for to see where a tensor lies, on whatever device: it is never read."""

    def __init__(self, extent: _Extent) -> None:
        size = extent.tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "data": (ALIGNMENT + extent.start, True),  # not 0, which numpy takes for no memory
            "shape": tuple(extent.tensor.shape),
            "strides": tuple(size * step for step in extent.tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _shared(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # stubs know two bounds
    except RuntimeError:  # numpy's TooHardError: an integer problem that may take for ever: they might
        return True
