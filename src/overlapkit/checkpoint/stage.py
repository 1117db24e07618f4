"""Staging: the state's tensors on their way into host memory, beside the next forward and backward."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.layout import DTYPES, Inventory, Piece
from overlapkit.lane import Lane, Ticket
from overlapkit.pinned import PinnedBuffer, PinnedRing
from overlapkit.span import SpanLog

LANE = "checkpoint"
_RANK_OF = {dtype: place for place, dtype in enumerate(DTYPES)}

Row = tuple[Piece, torch.Tensor]
"""A piece and its bytes in host memory, uint8 (n,)."""


def file_order(piece: Piece) -> int:
    """Sort key of the pieces in a file and in a buffer: wide dtypes first keeps every tensor aligned."""
    return _RANK_OF[piece.data.dtype]


class Staging:
    """One save's tensors, copied or being copied.

    Attributes:
        ticket: Done when everything is in host memory.
        stall_s: Seconds for which the optimizer's step was held up.
    """

    def __init__(self, late: Sequence[Piece]) -> None:
        self.ticket: Ticket[None]
        self.stall_s = 0.0
        self._late = late
        self._versions = [piece.version for piece in late]
        self._changed: list[str] | None = None
        self._lock = threading.Lock()
        self._halves: list[_Half] = []

    def seal(self) -> None:
        """Look, once, whether something has changed what is copied late since `save()`.

        Called before the optimizer may change it, hence before any step that is ordered after the copy.
        """
        with self._lock:
            if self._changed is None:
                pairs = zip(self._late, self._versions, strict=True)
                self._changed = [piece.name for piece, version in pairs if piece.version != version]

    def rows(self) -> list[Row]:
        """All pieces with their bytes, in file order, once everything is in host memory.

        Raises:
            CheckpointError: A tensor was changed outside of `optimizer.step()` while it was copied.
        """
        self.ticket.wait()
        self.seal()
        if self._changed:
            names = ", ".join(self._changed[:5]) + (" ..." if len(self._changed) > 5 else "")
            raise CheckpointError(
                f"changed outside of optimizer.step() while they were being copied: {names}: wait for "
                "save(...).staged before changing parameters by hand, or use Checkpointer(stage='now')"
            )
        rows = [row for half in self._halves for row in half.rows]
        return sorted(rows, key=lambda row: file_order(row[0]))

    def release(self) -> None:
        """Give the buffers back and let go of the state's tensors."""
        for half in self._halves:
            half.release()
        self._halves = []
        with self._lock:  # sealing is over, whoever comes late
            self._changed = self._changed or []
            self._late = []


class _Staged(Ticket[None]):
    """The lane's ticket of a late copy, which seals the staging before it lets anyone change a parameter.

    On a CUDA lane nothing of ours runs at the copy's end: the first who learns of it looks for changes.
    """

    def __init__(self, copy: Ticket[None], staging: Staging) -> None:
        self.__dict__ = copy.__dict__  # the same ticket for the lane, which holds the other
        self._staging = staging

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        self._staging.seal()

    def order(self) -> None:
        super().order()
        self._staging.seal()

    def done(self) -> bool:
        done = super().done()
        if done:
            self._staging.seal()
        return done


class _Half:
    """The pieces that go into one buffer, and that buffer."""

    def __init__(self, pieces: Sequence[Piece], ring: PinnedRing) -> None:
        self.pieces = sorted(pieces, key=file_order)
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.rows: list[Row] = []
        self._ring = ring
        self._buffer: PinnedBuffer | None = None

    def copy(self, beside: torch.device) -> None:
        """Copy the pieces into the buffer; from `beside`, a CUDA device, without blocking the host."""
        if not self.pieces:
            return
        self._buffer = self._ring.take(max(1, self.nbytes))  # nothing but empty tensors
        memory = self._buffer.bytes(self.nbytes)
        sizes = [piece.nbytes for piece in self.pieces]
        self.rows = list(zip(self.pieces, torch.split(memory, sizes), strict=True))
        sides: dict[bool, tuple[list[torch.Tensor], list[torch.Tensor]]] = {True: ([], []), False: ([], [])}
        for target, piece in zip(_typed(memory, self.pieces), self.pieces, strict=True):
            if piece.data.numel():
                targets, sources = sides[piece.data.device == beside]
                targets.append(target)
                sources.append(piece.data)
        for queued, (targets, sources) in sides.items():
            if targets:  # one call, in which the interpreter's lock is free
                torch._foreach_copy_(targets, sources, non_blocking=queued and beside.type == "cuda")

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer.give_back()
        self._buffer, self.rows, self.pieces = None, [], []


def _typed(memory: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Views of the buffer with the pieces' dtypes and shapes, one after the other."""
    views: list[torch.Tensor] = []
    at = 0
    for _, pieces_of_dtype in itertools.groupby(pieces, key=file_order):
        group = list(pieces_of_dtype)
        nbytes = sum(piece.nbytes for piece in group)
        flat = memory[at : at + nbytes].view(group[0].data.dtype)
        parts = torch.split(flat, [piece.data.numel() for piece in group])
        views += [part.view(piece.data.shape) for part, piece in zip(parts, group, strict=True)]
        at += nbytes
    return views


class Stager:
    """Copies states into reused host memory.

    Invariants:
        * What is not late is copied (CUDA: queued on the caller's stream) before `stage` returns.
        * What is late is copied before a hooked optimizer's next step begins.
        * A buffer is filled again only after its save has released it.
        * Memory held: (late bytes + other bytes) x in_flight.

    Args:
        in_flight: How many stagings there can be at once.
        log: Where spans go.
    """

    def __init__(self, in_flight: int, log: SpanLog) -> None:
        self._in_flight = in_flight
        self._log = log
        self._device: torch.device | None = None
        self._lane: Lane | None = None
        self._rings: tuple[PinnedRing, PinnedRing] | None = None
        self._active: list[Staging] = []
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()

    def stage(self, inventory: Inventory) -> Staging:
        """Copy a state. Errors of what is copied at once are raised here, others by the ticket."""
        pieces = [piece for piece in inventory.pieces if piece.alias is None]
        lane, (late_ring, now_ring), device = self._ready(pieces)
        late = _Half([piece for piece in pieces if piece.late], late_ring)
        now = _Half([piece for piece in pieces if not piece.late], now_ring)
        staging = Staging(late.pieces)
        staging._halves = [late, now]
        try:
            staging.ticket = self._copy_now(lane, now, device)
            if late.pieces:
                for optimizer in inventory.optimizers:
                    self._hook(optimizer)
                copy = _late_copy(late, staging, lane, device)
                staging.ticket = _Staged(lane.submit(copy, name="stage", bytes=late.nbytes), staging)
                self._active.append(staging)
        except BaseException:
            staging.release()
            raise
        return staging

    def release(self, staging: Staging) -> None:
        """The save is over, well or badly: its buffers may be used again."""
        if staging in self._active:
            self._active.remove(staging)
        staging.release()

    def prewarm(self, inventory: Inventory) -> None:
        """Hold the memory that a save of this state takes: fresh pages cost twenty times the copy."""
        pieces = [piece for piece in inventory.pieces if piece.alias is None]
        rings = self._ready(pieces)[1]
        for ring, late in zip(rings, (True, False), strict=True):
            nbytes = sum(piece.nbytes for piece in pieces if piece.late == late)
            if ring.nbytes > 2 * nbytes * self._in_flight:
                ring.close()  # a restore needed far more than saves will
            if nbytes:
                for buffer in [ring.take(nbytes) for _ in range(self._in_flight)]:
                    buffer.give_back()

    def borrow(self, nbytes: int) -> PinnedBuffer:
        """A staging buffer to read a checkpoint into; no save may be in flight."""
        return self._ready_on(self._device or torch.device("cpu"))[1][0].take(max(1, nbytes))

    def close(self) -> None:
        """Take the hooks out, end the lane, free the memory."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        if self._lane is not None and self._rings is not None:
            self._lane.close()
            for ring in self._rings:
                ring.close()

    def before_step(self) -> None:
        """Order what the caller does next after all copies. The optimizers' pre-hook."""
        for staging in list(self._active):
            start = time.perf_counter_ns()
            self._order(staging)
            staging.seal()
            staging.stall_s += (time.perf_counter_ns() - start) / 1e9

    def _order(self, staging: Staging) -> None:
        if staging.ticket.done():
            return
        lane = self._lane
        assert lane is not None
        if lane.kind == "cuda":
            stream = torch.cuda.current_stream(lane.device)
            waiting: AbstractContextManager[None] = self._log.stream(
                LANE, "wait for staging", stream, exposed=True
            )
        else:
            waiting = self._log.host(LANE, "wait for staging", exposed=True)
        with waiting:
            staging.ticket.fence()  # a failed copy fails the save, never the step

    def _copy_now(self, lane: Lane, half: _Half, device: torch.device) -> Ticket[None]:
        if device.type == "cuda":  # on the lane, and the caller's stream after it: the host never waits
            ticket = lane.submit(lambda: half.copy(device))
        else:
            ticket = Lane(LANE, kind="inline").submit(lambda: half.copy(device))
        ticket.order()
        return ticket

    def _hook(self, optimizer: Optimizer) -> None:
        if optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(_pre_hook(weakref.ref(self)))

    def _ready(self, pieces: Sequence[Piece]) -> tuple[Lane, tuple[PinnedRing, PinnedRing], torch.device]:
        devices = (piece.data.device for piece in pieces)
        return self._ready_on(next((d for d in devices if d.type == "cuda"), torch.device("cpu")))

    def _ready_on(self, device: torch.device) -> tuple[Lane, tuple[PinnedRing, PinnedRing], torch.device]:
        if self._lane is None or self._rings is None or device != self._device:
            if self._lane is not None:
                self._lane.close()
            pin = device.type == "cuda"
            self._device = device
            self._lane = Lane(LANE, device, log=self._log)
            self._rings = (PinnedRing(self._in_flight, pin=pin), PinnedRing(self._in_flight, pin=pin))
        return self._lane, self._rings, device


def _late_copy(late: _Half, staging: Staging, lane: Lane, device: torch.device) -> Callable[[], None]:
    """The lane's work. On a CUDA lane it only queues copies, and looking for changes must wait."""
    queued = lane.kind == "cuda"

    def copy() -> None:
        late.copy(device)
        if not queued:
            staging.seal()

    return copy


def _pre_hook(stager: "weakref.ref[Stager]") -> Callable[..., None]:
    """A step pre-hook that does not keep a forgotten checkpointer alive."""

    def order_after_staging(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := stager()) is not None:
            alive.before_step()

    # What torch.compiler.disable sets, without importing the compiler: a compiled step() breaks here.
    order_after_staging._torchdynamo_disable = True  # type: ignore[attr-defined]
    return order_after_staging
