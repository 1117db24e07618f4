"""Windows over token shards: which tokens make up a sample, and how a batch of them is gathered."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from overlapkit.input.address_range import map_files
from overlapkit.input.documents import PackedTokens, write_documents
from overlapkit.input.landing import Empty, host_memory
from overlapkit.input.paging import Paging, read_alone
from overlapkit.input.shards import OFFSETS, Shard, check_offsets, check_unchanged

Batch = torch.Tensor | PackedTokens

_STRETCH_BITS = 16
"""Windows are cut into at most 2 to this power stretches; the shard of each one's first is known."""


@dataclass(slots=True)
class Places:
    """Where some windows are.

    Attributes:
        starts: First token, counted from the first address, int64 (n,).
        documents: int64 (3, n): the first token, counted in its shard, the offset of its document, counted
            from the first address, and that of the last token's document. None where nobody asks for them.
    """

    starts: np.ndarray
    documents: np.ndarray | None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: slice) -> "Places":
        return Places(self.starts[which], None if self.documents is None else self.documents[:, which])


class Windows:
    """All windows of a set of shards, and the mapped memory that they are read from.

    Window k of a shard is its tokens k * T to k * T + T, both included: neighbours share one token, so
    that each token but a shard's first is a target once. Windows do not cross shards; the fewer than T
    tokens at a shard's end that fill no window are left out.

    Args:
        shards: As `find_shards` returns them, with offsets where `documents` needs them.
        window: T, inputs in a window.
        documents: Whether rows tell documents apart.
        shuffled: Whether they are read in no order that the kernel could foresee.

    Attributes:
        count: How many windows there are.
        length: T + 1, tokens in a row.
        dtype: Of the tokens.
        documents: As given.
        digest: Of the shards' names and lengths.

    Raises:
        ValueError: A shard's offsets are not sound, or not there though `documents` needs them.
    """

    def __init__(self, shards: Sequence[Shard], window: int, documents: bool, shuffled: bool) -> None:
        size = shards[0].dtype.itemsize
        self.length = window + 1
        self.dtype = torch.uint16 if size == 2 else torch.uint32
        self.digest = _digest(shards)
        self._shards = shards
        counts = np.array([max(0, shard.tokens - 1) // window for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self.count = int(counts.sum())
        self._shift = max(0, self.count.bit_length() - _STRETCH_BITS)
        stretches = np.arange(0, self.count, 1 << self._shift)
        self._shard_at = np.searchsorted(self._ends, stretches, side="right")
        memory, bases = map_files([(shard.path, shard.nbytes) for shard in shards])
        self._tokens = memory.view(shards[0].dtype)
        tokens = torch.from_numpy(self._tokens)
        count = max(0, tokens.numel() - window)
        self._rows = tokens.as_strided((count, self.length), (1, 1))  # one from every token on
        row = np.dtype((np.void, self.length * size))
        self._void_rows: np.ndarray = np.ndarray((count,), row, self._tokens, strides=(size,))
        tokens_at = [base + shard.tokens_at for base, shard in zip(bases, shards, strict=True)]
        self._first_token = np.array(tokens_at, dtype=np.int64) // size
        self._zeroth = self._first_token - (self._ends - counts) * window  # where window 0 of all would begin
        self._offsets = memory.view(OFFSETS)
        offsets_at = [base + shard.offsets_at for base, shard in zip(bases, shards, strict=True)]
        self._first_offset = np.array(offsets_at, dtype=np.int64) // OFFSETS.itemsize
        self.documents = documents
        self._document_counts = np.array([shard.documents or 0 for shard in shards], dtype=np.int64)
        if documents:
            self._check_documents()
        self._paging = Paging(memory, size, self.length * size) if shuffled else None
        if shuffled:
            for first, shard in zip(self._first_token.tolist(), shards, strict=True):
                read_alone(self._tokens[first : first + shard.tokens])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "token shards cannot be copied or pickled: what is mapped has gaps. Open the directory again, in "
            "each process that reads it"
        )

    def check(self) -> None:
        """Refuse files that were changed since they were opened.

        Raises:
            ValueError: One was; the message names it.
        """
        for shard in self._shards:
            check_unchanged(shard)

    def alike(self) -> dict[str, Any]:
        """What is equal in all sources of one mixture."""
        pack = "documents" if self.documents else "windows"
        return {"kind": "tokens", "window": self.length - 1, "pack": pack, "dtype": self.dtype}

    def locate(self, samples: np.ndarray, epoch: np.ndarray | None = None) -> Places:
        """Find windows, int64 (n,), each in [0, count), the same in every epoch. Thousands are cheap."""
        shard = self._shard_at[samples >> self._shift]  # 5 ns a sample, a bisection 12 to 90
        beyond = samples >= self._ends[shard]
        shard[beyond] = np.searchsorted(self._ends, samples[beyond], side="right")
        start = self._zeroth[shard] + samples * (self.length - 1)
        if not self.documents:
            return Places(start, None)
        local = start - self._first_token[shard]
        first, last = self._document_of(shard, local), self._document_of(shard, local + self.length - 1)
        return Places(start, np.stack((local, first, last)))

    def new_batch(self, rows: int, empty: Empty) -> Batch:
        """Memory for a batch, uninitialised."""
        shape = rows, self.length
        if not self.documents:
            return empty(shape, self.dtype)
        return PackedTokens(empty(shape, self.dtype), empty(shape, torch.int32), empty(shape, torch.int32))

    def read(self, places: Places, empty: Empty) -> Batch:
        """A batch of a row for each place: one gather, whatever shards they are in."""
        if empty is host_memory and not self.documents:
            self._bring(places)
            # To numpy a row is one value: 610 ns, not torch's 680, at 2 KB; but in memory of its own alone.
            tokens = self._void_rows[places.starts].view(self._tokens.dtype)
            return torch.from_numpy(tokens.reshape(len(places), self.length))
        batch = self.new_batch(len(places), empty)
        self.fill(batch, places)
        return batch

    def mixer(self, rows: "Sequence[Windows]", batch_size: int) -> Callable[..., Batch]:
        """Gathers the rows of a batch by source, and from there to their places in it."""
        by_source = self.new_batch(batch_size, host_memory)

        def mix(places: list[Places], home: np.ndarray, empty: Empty) -> Batch:
            batch = self.new_batch(batch_size, empty)
            parts = split(by_source, [len(where) for where in places])
            for one, part, where in zip(rows, parts, places, strict=True):
                one.fill(part, where)
            for field, sorted_ in zip(fields(batch), fields(by_source), strict=True):
                torch.index_select(sorted_, 0, torch.from_numpy(home), out=field)
            return batch

        return mix

    def fill(self, batch: Batch, places: Places) -> None:
        """Put the rows into memory that is there."""
        self._bring(places)
        tokens = batch.tokens if isinstance(batch, PackedTokens) else batch
        torch.index_select(self._rows, 0, torch.from_numpy(places.starts), out=tokens)
        if isinstance(batch, PackedTokens):
            assert places.documents is not None
            write_documents(batch, self._offsets, *places.documents)

    def _bring(self, places: Places) -> None:
        """Read where all rows begin first, so that misses overlap: a tenth of the time at 2 KB."""
        if self._paging is not None:
            self._paging.ask(places.starts)
        self._tokens.take(places.starts)

    def _check_documents(self) -> None:
        for shard, first in zip(self._shards, self._first_offset.tolist(), strict=True):
            if shard.documents is None:
                raise ValueError(
                    f"{shard.path} has no tensor 'offsets', which pack='documents' needs: use pack='windows' "
                    "or write the shards with write_token_shards()"
                )
            check_offsets(shard, self._offsets[first : first + shard.documents + 1])

    def _document_of(self, shard: np.ndarray, token: np.ndarray) -> np.ndarray:
        """The last offset at or before each token: a bisection of all at once, over mapped memory."""
        low: np.ndarray = self._first_offset[shard]
        high = low + self._document_counts[shard]
        while (high - low > 1).any():
            middle = (low + high) // 2
            behind = self._offsets[middle] > token
            low, high = np.where(behind, low, middle), np.where(behind, middle, high)
        return low


def fields(batch: Batch) -> tuple[torch.Tensor, ...]:
    """The tensors that a batch consists of."""
    return batch if isinstance(batch, PackedTokens) else (batch,)


def split(batch: Batch, sizes: list[int]) -> Sequence[Batch]:
    """A batch in parts of so many rows, the same memory."""
    if isinstance(batch, PackedTokens):
        return [
            PackedTokens(*parts)
            for parts in zip(*(field.split_with_sizes(sizes) for field in batch), strict=True)
        ]
    parts: Sequence[torch.Tensor] = batch.split_with_sizes(sizes)
    return parts


def _digest(shards: Sequence[Shard]) -> str:
    held = repr([(shard.path.name, shard.tokens) for shard in shards])
    return hashlib.blake2b(held.encode(), digest_size=16).hexdigest()
