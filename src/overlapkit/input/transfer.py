"""Batches to the GPU: packed into a reused page-locked buffer, copied in one go on a side stream.

Destination memory is allocated for the consumer's stream, so it is reused in that stream's order and
no memory is held back for another stream.
"""

import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapkit.input.failed import Failed
from overlapkit.input.landing import Landing
from overlapkit.input.nesting import map_leaves, moves_itself
from overlapkit.input.packing import packable
from overlapkit.input.reach import reachable
from overlapkit.lane import Lane, Ticket
from overlapkit.pinned import PinnedRing
from overlapkit.span import SpanLog

Transform = Callable[[Any], Any]


class Arrival:
    """A batch on its way to the device.

    Invariants:
        * What the copy writes and the transform reads stays alive until the stream that its memory
          belongs to has been ordered after them, whether or not anyone receives the batch.
        * Nobody else keeps the batch: not the ticket, which outlives it in the ring of host buffers.

    Args:
        moved: The batch, in memory that the copy may still have to write.
        stream: Whose that memory is.
        log: Takes the spans of lane "transfer".
        block: What the copy writes; the batch need not refer to it.

    Attributes:
        made: What is handed over: `moved`, or what the transform made of it, or its error.
        ticket: Of the copy and the transform.
    """

    def __init__(
        self, moved: Any, stream: torch.cuda.Stream, log: SpanLog, block: torch.Tensor | None = None
    ) -> None:
        self.made = moved
        self.ticket: Ticket[None] | None = None
        self._moved = moved
        self._block = block
        self._stream = stream
        self._log = log

    def receive(self) -> Any:
        """The batch; what the current stream is given from now on runs after its copy and transform.

        Raises:
            BaseException: Whatever the transform raised.
        """
        current = torch.cuda.current_stream(self._stream.device)
        if self.ticket is not None:
            with self._log.stream("transfer", "wait", current, exposed=True):
                self.ticket.order()
        batch = self.made
        if current != self._stream:
            current.wait_stream(self._stream)
            self._stream.wait_stream(current)
            _also_used_on(current, batch)
        self.made = self.ticket = self._moved = self._block = None
        if isinstance(batch, Failed):
            raise batch.take()
        return batch

    def transform(self, transform: Transform) -> None:
        """Apply it, on the current stream, for a consumer on another."""
        side = torch.cuda.current_stream(self._stream.device)
        try:
            with self._log.stream("transfer", "transform", side):
                self.made = transform(self._moved)
        except BaseException as error:
            self.made = Failed(error)  # a value, so that the ticket orders streams all the same
        else:
            _also_used_on(self._stream, self.made)

    def __del__(self) -> None:
        if self.ticket is not None and not sys.is_finalizing():
            with torch.cuda.stream(self._stream):
                self.ticket.fence()


class Mover:
    """Sends batches to one device. Used by one reader at a time.

    Invariants:
        * A host buffer is filled again only when the copy out of it is done.
        * Host memory held is at most `slots` x the largest batch, rounded to pages.

    Args:
        device: A CUDA device.
        slots: Host buffers.
        pin: Page-lock them.
        transform: Applied to each batch on the device, on the side stream.
        log: Takes the spans of lane "transfer".

    Attributes:
        landing: The host memory that the next batch is copied from; a source may read straight into it.
    """

    def __init__(
        self, device: torch.device, slots: int, pin: bool, transform: Transform | None, log: SpanLog
    ) -> None:
        self._device = device
        self._pin = pin
        self._transform = transform
        self._log = log
        self._lane = Lane("transfer", device)
        self._ring = PinnedRing(slots, pin=pin)
        self.landing = Landing(self._ring)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._ring.nbytes

    def send(self, batch: Any, stream: torch.cuda.Stream) -> Arrival:
        """Start moving a batch. `stream`, the consumer's, must be current."""
        found: dict[int, torch.Tensor] = {}

        def collect(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and packable(leaf):
                found[id(leaf)] = leaf
            return leaf

        map_leaves(batch, collect)
        if not found and not self.landing.used:
            arrival = Arrival(map_leaves(batch, self._move_one), stream, self._log)
            if self._transform is not None:
                arrival.ticket = self._lane.submit(partial(arrival.transform, self._transform))
            return arrival
        return self._send_packed(batch, found, stream)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._ring.close()  # its memory must outlive the copies

    def _send_packed(self, batch: Any, found: dict[int, torch.Tensor], stream: torch.cuda.Stream) -> Arrival:
        packing, buffers = self.landing.lay_out(list(found.values()))
        ticket: Ticket[None] | None = None
        try:
            host = buffers[0].bytes(packing.nbytes)
            if packing.copied:
                with self._log.host("transfer", "pack", bytes=packing.copied):
                    packing.fill(host)
            block = torch.empty(packing.nbytes, dtype=torch.uint8, device=self._device)
            there = dict(zip(found, packing.views(block), strict=True))
            arrival = Arrival(map_leaves(batch, partial(self._place, there)), stream, self._log, block)
            ticket = arrival.ticket = self._lane.submit(partial(self._copy, block, host, arrival))
        finally:
            for buffer in buffers:
                buffer.give_back(ticket)
        return arrival

    def _copy(self, block: torch.Tensor, host: torch.Tensor, arrival: Arrival) -> None:
        """Runs with the side stream current."""
        name = "copy" if self._pin else "copy pageable"
        side = torch.cuda.current_stream(self._device)
        with self._log.stream("transfer", name, side, bytes=host.numel()):
            block.copy_(host, non_blocking=True)
        if self._transform is not None:
            arrival.transform(self._transform)

    def _place(self, there: dict[int, torch.Tensor], leaf: Any) -> Any:
        return there[id(leaf)] if id(leaf) in there else self._move_one(leaf)

    def _move_one(self, leaf: Any) -> Any:
        """Move what cannot be packed by its own means, on the consumer's stream: that needs no ordering."""
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == self._device else leaf.to(self._device, non_blocking=True)
        if not moves_itself(leaf):
            return leaf
        pinned = leaf.pin_memory() if self._pin else leaf
        try:
            signature(pinned.to).bind(self._device, non_blocking=True)
        except (TypeError, ValueError):
            return pinned.to(self._device)
        return pinned.to(self._device, non_blocking=True)


def _also_used_on(stream: torch.cuda.Stream, batch: Any) -> None:
    """Keep the allocator from reusing the batch's memory before `stream` is done with it.

    That of tensors within objects, too: a transform may return whatever it likes, and so may `.to`.
    """
    for held in reachable(batch, items=None):
        if isinstance(held, torch.Tensor):
            for part in _parts(held):
                if part.is_cuda:  # what a jagged tensor knows of its lengths is not
                    part.record_stream(stream)
        elif callable(record_stream := getattr(type(held), "record_stream", None)):
            record_stream(held, stream)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a sparse or nested one, or one that wraps others, consists of."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.values(),)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return tuple(part for name in names for part in _parts(getattr(tensor, name)))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
