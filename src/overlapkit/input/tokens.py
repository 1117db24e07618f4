"""TokenShards: batches of windows over tokenised text, in an order that one integer resumes."""

import os
from collections.abc import Iterator
from typing import Any, Literal

from overlapkit.counted import counted
from overlapkit.input.checks import as_count, as_rank, as_seed, check_choice
from overlapkit.input.landing import Empty, host_memory
from overlapkit.input.order import Order
from overlapkit.input.progress import Progress
from overlapkit.input.shards import find_shards
from overlapkit.input.windows import Batch, Windows, split
from overlapkit.options import named_options

_BLOCK = 1 << 15
"""Samples whose order is worked out at once: 21 ns each, against 1.6 us in blocks of 32."""

_GATHERED = 1 << 18
"""Bytes that are gathered at once where batches need no memory of their own: a call costs some 5 us, and more
than this no longer stays in a core's cache on the way."""


class TokenShards:
    """Batches of a set of token shards, gathered from mapped files; nothing is copied to memory first.

    ```python
    shards = TokenShards("data/train", window=1024, batch_size=32)
    for inputs, targets in DeviceLoader(shards, device, transform=inputs_and_targets):
        ...
    ```

    Yields tokens (B, T + 1) as they are stored, uint16 or uint32: a window of T inputs and, one further,
    its T targets. `inputs_and_targets` makes the int64 of both, on the device. A shard's windows start
    every T tokens and share one token with the next, so that each token but the shard's first is a target
    once an epoch. Windows do not cross shards; fewer than T tokens at a shard's end are left out.

    With pack="documents" rows are the same, and come as `PackedTokens` with document numbers and positions
    that begin anew at each document: for attention within documents only. `inputs_and_targets` then leaves
    out, as targets, the documents' first tokens.

    Each pass is an epoch, with its own order: a pass that follows another is the next epoch, unless
    `set_epoch` or `load_state_dict` said otherwise. All ranks together take a prefix of the epoch's order,
    so a state can be loaded at another number of ranks or another batch size; no window is lost or repeated.
    After its last batch an epoch is over, whatever `drop_last` has left out.

    Args:
        directory: What `write_token_shards` wrote, or any safetensors files with a one-dimensional tensor
            `tokens`, uint16 or uint32. All are checked here, before any token is read. They must not be
            changed while they are used: each pass begins with a look at sizes and times of change, but a
            file that is cut short within a pass reads as zeros, or ends the process with SIGBUS.
        window: T, inputs in a window.
        batch_size: B, windows in a batch of one rank.
        seed: Of the order; the same on every rank.
        rank: This rank, or None for the process group's.
        world_size: Number of ranks; given with `rank`, or not at all.
        shuffle: False keeps the order of the files.
        drop_last: Leave out the windows at an epoch's end that do not make a batch for every rank. False
            makes a smaller last batch of them, the same size on every rank, for which up to
            world_size - 1 windows of the epoch's beginning are taken again.
        pack: "windows" or "documents".

    Attributes:
        batch_size: As given.
        order: Who takes which window when.
        windows: All windows, and how they are read.

    Raises:
        ValueError: An argument is out of range, the directory or a file of it is not sound, or it holds
            no batch for each rank. From `iter()`: a file was changed since.
        RuntimeError: WORLD_SIZE is set but there is no process group: every rank would read the same.
    """

    @named_options
    def __init__(
        self,
        directory: str | os.PathLike[str],
        window: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        pack: Literal["windows", "documents"] = "windows",
    ) -> None:
        window, batch_size = as_count("window", window), as_count("batch_size", batch_size)
        if batch_size * (window + 1) >= 2**29:  # numpy knows no value of 2 GiB, and gathers rows as values
            raise ValueError(
                f"batch_size={batch_size} x window={window}: a batch has fewer than 2**29 tokens"
            )
        seed = as_seed(seed)
        check_choice("shuffle", shuffle)
        check_choice("drop_last", drop_last)
        if pack not in ("windows", "documents"):
            raise ValueError(f"pack={pack!r}: use 'windows' or 'documents'")
        rank, world_size = as_rank(rank, world_size)
        self.batch_size = batch_size
        documents = pack == "documents"
        self.windows = Windows(find_shards(directory, documents), window, documents, shuffle)
        self.order = Order(self.windows.count, rank, world_size, seed, shuffle, drop_last)
        if self.windows.count < (batch_size * world_size if drop_last else 1):
            raise ValueError(
                f"directory={str(directory)!r} holds {counted(self.windows.count, 'window')} of "
                f"window={window}: that makes no batch of batch_size={batch_size} for each of "
                f"{world_size} ranks. Lower these"
            )
        least = batch_size if drop_last else 1
        dtype = str(self.windows.dtype).removeprefix("torch.")
        identity = {"window": window, "dtype": dtype, "shards": self.windows.digest}
        self._progress = Progress(self.order, least, identity)
        self._passes = 0  # number of the latest one

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass."""
        nbytes = self.batch_size * self.windows.length * self.windows.dtype.itemsize
        return self._begin(host_memory, group=max(1, round(_GATHERED / nbytes)))

    def iter_into(self, empty: Empty) -> Iterator[Batch]:
        """Begin a pass whose batches are gathered straight into the memory that `empty` gives for them.

        Args:
            empty: Called with a shape and a dtype, within the `next()` that makes the batch.
        """
        return self._begin(empty, group=1)

    def __len__(self) -> int:
        """Batches that each rank takes in a whole epoch."""
        return -(-self._whole_batches(self.order.share(0)) // self.batch_size)

    @property
    def batches_left(self) -> int:
        """Batches that the latest pass has not yielded yet, equally many on every rank."""
        return -(-self._whole_batches(self.order.share(self._progress.position)) // self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch of the latest pass, or of the next one where it was set."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch: what is left of it where it was resumed, else all of it."""
        self._passes += 1  # the pass that is under way moves nothing any more
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest pass stands, after the batch that it yielded last; the same on every rank."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state stands, at whatever number of ranks and batch size.

        Raises:
            TypeError: It is no dict.
            ValueError: It is damaged, or was saved over other shards or in another order.
        """
        self._passes += 1
        self._progress.load_state_dict(state)

    def is_over(self, state: dict[str, Any]) -> bool:
        """Whether the state's epoch has no batch left, so that the next pass is the next epoch."""
        return self._progress.is_over(state["position"])

    def _sizes(self, rows: int) -> list[int]:
        whole, rest = divmod(rows, self.batch_size)
        return [self.batch_size] * whole + [rest] * (rest > 0)

    def _whole_batches(self, share: int) -> int:
        return share - share % self.batch_size if self.order.drop_last else share

    def _begin(self, empty: Empty, group: int) -> Iterator[Batch]:
        self.windows.check()
        share = self._progress.begin()
        self._passes += 1
        begin = self._progress.epoch, self._progress.position
        return self._batches(empty, group, self._passes, *begin, self._whole_batches(share))

    def _batches(
        self, empty: Empty, group: int, number: int, epoch: int, position: int, share: int
    ) -> Iterator[Batch]:
        """The batches of a pass, `group` of them gathered at once."""
        taken, at_once = 0, group * self.batch_size
        block = -(-_BLOCK // at_once) * at_once
        for first in range(0, share, block):
            samples = self.order.samples(epoch, position, first, min(first + block, share))
            places = self.windows.locate(samples)
            for at in range(0, len(places), at_once):
                here = places[at : at + at_once]
                gathered = self.windows.read(here, empty)
                for batch in [gathered] if group == 1 else split(gathered, self._sizes(len(here))):
                    taken += self.batch_size
                    if number == self._passes:
                        self._progress.finish() if taken >= share else self._progress.take(taken)
                    yield batch
