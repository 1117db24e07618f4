"""DeviceLoader: the next batch is read, and copied to the device, while the step computes."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from overlapkit.device import as_device, rank_and_world
from overlapkit.input.arguments import check
from overlapkit.input.detect import open_source
from overlapkit.input.feed import Feed
from overlapkit.input.iterator import BatchIterator
from overlapkit.input.position import Position
from overlapkit.input.ranks import Ranks
from overlapkit.input.uneven import Uneven
from overlapkit.options import named_options
from overlapkit.span import Span
from overlapkit.warn import warn


class DeviceLoader:
    """Reads ahead of a training loop in a thread, and hands over batches that are on the device.

    ```python
    loader = DeviceLoader(DataLoader(dataset, batch_size=32, shuffle=True), "cuda")
    for x, y in loader:
        ...
    ```

    On a GPU the tensors of a batch are packed into one page-locked buffer, copied in one go on a side
    stream, and ordered before whatever the consumer's current stream is given next. A source that offers
    `iter_into(empty)`, as TokenShards does, makes its batches in that buffer: nothing is packed then. On
    the CPU batches are handed over as they are, read ahead.

    Batches keep their types: lists, tuples, named tuples, mappings, dataclasses of any nesting are rebuilt,
    tensors that share memory go on sharing it, what stands in a batch twice stays one object, objects with
    `.to` and `.pin_memory` move themselves, and all else (numpy arrays too) is handed over untouched. Tensors
    of one batch share one device allocation: one that is kept keeps all of it.

    `state_dict()` counts what the loop has taken, not what was read ahead, and what is loaded applies to
    the next `iter()`. A map-style DataLoader is taken up in mid-epoch by skipping indices in the same
    order, a list by index, a source with a state of its own by that; anything else only between epochs,
    or by `drop_through`. A state at an epoch's end starts the next epoch. Random augmentation goes on
    bitwise where each sample has its own, as SampleSeed gives it, and where the map-style dataset of a
    DataLoader without workers owns the generators that it draws from (torch's, random's, numpy's; in its
    transforms, too): their states go with each batch, and are brought back on as many ranks. Workers draw
    from copies, which no state holds. Global ones are shared by the loop with the reader's thread (and on a
    GPU `transform`): a source that is seen to draw from them is told, once.

    Source and transform run under the grad mode of `iter()` (in inference mode without grad), not under the
    loop's autocast or default device.

    Lists, map-style DataLoaders, and sources with a state and with `batches_left`, which counts those of the
    pass that their `iter()` began, know how many batches they have, and are held to that: an epoch that is
    silently short is lost data. (The `len()` of any other source is taken for an estimate.)

    Among several ranks a pass begins on all of them together, unless uneven is None. Where each knows how
    many batches it has, they say so once, through the job's store, and nothing is exchanged for a batch.
    Elsewhere a lane beside the reader agrees on each batch, in about four calls to the store, more while it
    waits for a slower rank, and as far ahead as batches are read. No rank waits longer than half of the
    process group's timeout: then it raises, and names the rank that did not come. One process exchanges
    nothing.

    Args:
        source: A re-iterable of batches: DataLoader, StatefulDataLoader, torchdata.nodes.Loader,
            TokenShards, Mixture, a list, a function that returns a fresh iterator for each epoch, or an
            iterator that is reset at each epoch's end, as DALI's are. Its `pin_memory` is best left False:
            batches are page-locked here.
        device: Where batches go; None for the current accelerator, else the CPU.
        depth: Batches read ahead, at least 1.
        pin: Page-lock host memory; None does so where the device is a GPU. Each pass under way takes at most
            (depth + 1) times its largest batch, and leaves that to the next.
        reuse_buffers: Hand over every batch at the same addresses, as CUDA graphs need it: a batch is valid
            until the next one is asked for, by which time the loop's stream must wait for whatever uses it
            on another. It costs one more copy a batch, on the device, for which the loop's stream stands
            still, and the memory of one batch for each layout (dtypes, shapes, strides), of which there may
            be 16. Tensors must be plain and dense. The reader's thread goes on while a graph is captured:
            use `torch.cuda.graph(graph, capture_error_mode="thread_local")`.
        transform: Applied to each batch: on a GPU on the device, on the side stream; else in the
            reader's thread.
        drop_through: Let a source without a state be taken up in mid-epoch all the same: its epoch begins
            again, with its generators and torch's as they were, and what was taken is read and dropped. (What
            persistent workers had kept from earlier epochs does not come back.)
        uneven: What to do where ranks have different numbers of batches in a pass: "error" raises on all,
            "drop" ends the pass on all with the shortest, "join" hands a rank's last batch over again until
            the longest is done (`filler` is True then: multiply the loss by 0); its containers are new, its
            tensors the same memory. None lets ranks be independent, and is for a loader that not every rank
            iterates, equally often. (Ranks tell their loaders apart by which was iterated first.)

    Raises:
        TypeError: `source` is no re-iterable of batches.
        ValueError: `source` is empty, or an argument is out of range. From a pass: ranks are uneven.
        RankFailed: From a pass: another rank failed, or did not come in time.
        RuntimeError: WORLD_SIZE is set but there is no process group: every rank would read the same.
    """

    @named_options
    def __init__(
        self,
        source: Any,
        device: torch.device | str | int | None = None,
        *,
        depth: int = 2,
        pin: bool | None = None,
        reuse_buffers: bool = False,
        transform: Callable[[Any], Any] | None = None,
        drop_through: bool = False,
        uneven: Uneven | None = "error",
    ) -> None:
        check(depth, pin, reuse_buffers, transform, drop_through, uneven)
        _, world = rank_and_world()
        opened = open_source(source, drop_through)
        there = as_device(device)
        on_gpu = there.type == "cuda"
        if pin and not on_gpu:
            warn(f"pin=True has no effect with device={str(there)!r}: nothing is copied")
        ranks = Ranks(uneven) if uneven is not None and world > 1 else None
        pin = on_gpu if pin is None else pin
        self._feed = Feed(opened, there, depth, pin, transform, reuse_buffers, ranks)
        self._resume: Position | None = None

    def __iter__(self) -> BatchIterator:
        """Start a pass: an epoch, or the rest of the one that a loaded state stands in.

        Passes are independent of each other where the source's are; where it has one iterator at a time
        (it has a state, or persistent workers), and with reuse_buffers, an earlier pass that was not
        finished is closed.
        """
        made = BatchIterator(self._feed, self._resume)
        self._resume = None
        return made

    def __len__(self) -> int:
        """Batches in an epoch, where the source knows."""
        return len(self._feed.source.original)

    @property
    def device(self) -> torch.device:
        """Where batches are handed over."""
        return self._feed.device

    @property
    def dataset(self) -> Any:
        """The source's dataset."""
        return self._forward("dataset")

    @property
    def sampler(self) -> Any:
        """The source's sampler."""
        return self._forward("sampler")

    @property
    def batch_sampler(self) -> Any:
        """The source's batch sampler."""
        return self._forward("batch_sampler")

    @property
    def batch_size(self) -> Any:
        """The source's batch size."""
        return self._forward("batch_size")

    @property
    def filler(self) -> bool:
        """Whether the batch handed over last has been handed over before: with uneven="join" at an end."""
        return self._feed.filler

    @property
    def next_epoch(self) -> int:
        """The epoch to set for the next pass: `for epoch in range(loader.next_epoch, epochs): ...`.

        0 at first; in front of a state in mid-epoch that epoch; after an epoch, or in front of a state at
        its end, the one that follows. Lists, map-style DataLoaders and overlapkit's own sources know
        their end.
        """
        epoch, position = self._feed.epoch, self._feed.position
        if position is not None and position.epoch == epoch and self._feed.source.over(position):
            return (epoch or 0) + 1
        return epoch or 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the source, or its samplers and dataset, which epoch the next pass is.

        Nothing happens where none of them has epochs.

        Raises:
            ValueError: `epoch` is no integer, or one that the source refuses.
        """
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: after the batch handed over last, or where a pass has begun since.

        Returns:
            Plain values and uint8 tensors, as far as the source's own state consists of such.
        """
        feed, position = self._feed, self._feed.position
        if position is None:
            position = feed.source.rest()
            position.epoch = feed.epoch
        return position.state_dict(feed.source.kind)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter()` start where the loop stood when `state` was taken.

        Raises:
            TypeError: `state` is no dict.
            ValueError: `state` is of another kind of source or another version, or stands where this
                source cannot be taken up.
        """
        position = Position.from_state(state, self._feed.source.kind)
        self._feed.source.check(position)
        if position.epoch is not None:
            self.set_epoch(position.epoch)
        self._resume = self._feed.position = position

    def timings(self) -> list[Span]:
        """The spans finished since the last call.

        Lane input: "source" (the reader asked the source), "drop" (it read what had been taken), "wait"
        (exposed: the loop waited for a batch), "agree" (exposed: it waited for other ranks to begin the
        pass), "watch" (exposed: it stood still, up to 50 ms for each of the first batches, to see whether the
        source draws from its generators), "transform" (CPU). Lane transfer: "pack" (into the host buffer),
        "copy" or "copy pageable" (with bytes), "transform", "wait" (exposed: the loop's stream waited),
        "reuse" (exposed: the copy to the fixed addresses).
        """
        return self._feed.log.take()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DeviceLoader cannot be copied or pickled: its thread and what it has read belong to it alone. "
            "Make one around the source where it is to be used"
        )

    def close(self) -> None:
        """End all passes and a DataLoader's persistent workers, and free the host buffers.

        The loader can be used again.
        """
        for iterator in list(self._feed.live):
            iterator.close()
        self._feed.free()

    def _forward(self, name: str) -> Any:
        try:
            return getattr(self._feed.source.original, name)
        except AttributeError as error:
            kind = type(self._feed.source.original).__name__
            raise AttributeError(f"source={kind} has no {name} that could be forwarded") from error
