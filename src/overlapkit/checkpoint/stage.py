"""Staging: the state's tensors on their way into host memory, beside the next forward and backward."""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from overlapkit.checkpoint.copying import Portion, SharedCopy
from overlapkit.checkpoint.errors import CheckpointError
from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.late import Late
from overlapkit.checkpoint.planner import Share
from overlapkit.checkpoint.writer import Bytes, held
from overlapkit.lane import Lane, Ticket
from overlapkit.optimizer_step import before_update
from overlapkit.pinned import PinnedBuffer, PinnedRing
from overlapkit.span import SpanLog

LANE = "checkpoint"


class Staging:
    """One save's tensors, copied or being copied.

    Attributes:
        ticket: Done when everything is in host memory.
        stall_s: Seconds for which the optimizer's step was held up.
        shared: The late copy, where a thread makes it.
    """

    def __init__(self, share: Share) -> None:
        self.ticket: Ticket[None]
        self.shared: SharedCopy | None = None
        self.stall_s = 0.0
        self._share: Share | None = share
        self._at_save = share.late.at_save.read()
        self._at_copy: list[int] | None = None
        self._changed: list[str] | None = None
        self._lock = threading.Lock()
        self._buffer: PinnedBuffer | None = None

    def begin(self) -> Late:
        """What is copied late, as it is from now on."""
        assert self._share is not None
        late = self._share.late
        late.follow()
        self._at_copy = late.at_copy.read()
        return late

    def seal(self) -> None:
        """Look, once, whether something has changed what is copied late since `save()`.

        Called before the optimizer may change it, hence before any step that is ordered after the copy.
        """
        with self._lock:
            if self._changed is None and self._share is not None:
                late = self._share.late
                self._changed = late.at_save.moved(self._at_save)
                if self._at_copy is not None:
                    self._changed += late.at_copy.moved(self._at_copy)

    def memory(self) -> torch.Tensor:
        """All tensors as they lie in the file, uint8 (nbytes,), once everything is in host memory.

        Raises:
            CheckpointError: A tensor was changed outside of `optimizer.step()` while it was copied.
        """
        self.ticket.wait()
        if self._changed:
            names = ", ".join(self._changed[:5]) + (" ..." if len(self._changed) > 5 else "")
            raise CheckpointError(
                f"changed outside of optimizer.step() while they were being copied: {names}: wait for "
                "save(...).staged before changing parameters by hand, or use Checkpointer(stage='now')"
            )
        return self.target()

    def ahead(self) -> Bytes:
        """The bytes that `memory` has, part by part, for a writer that calls `memory` itself when it is done.

        Waits until all of it is there, or until somebody waits for the save: then a core is free to write.
        Each part is there when it is returned.

        Raises:
            CheckpointError: As `memory`, here or where a part is asked for.
        """
        shared = self.shared
        if shared is None or not shared.use_ahead():
            return held(self.memory())
        return lambda start, stop: held(self.target() if shared.reach(stop) else self.memory())(start, stop)

    def target(self) -> torch.Tensor:
        """The buffer that `take` borrowed, uint8 (nbytes,)."""
        assert self._share is not None
        assert self._buffer is not None
        return self._buffer.bytes(self._share.plan.nbytes)

    def take(self, ring: PinnedRing) -> torch.Tensor:
        """Borrow a buffer, once: uint8 (nbytes,)."""
        assert self._share is not None
        if self._buffer is None:
            self._buffer = ring.take(max(1, self._share.plan.nbytes))  # nothing but empty tensors
        return self.target()

    def help(self, *, ahead: bool = False) -> None:
        """Have a second thread copy, too, where a lane's thread copies: for who only waits for it.

        Args:
            ahead: He waits until it is written: what is copied may be written now.
        """
        if self.shared is not None:
            self.shared.help(ahead=ahead)

    def release(self) -> None:
        """Give the buffer back and let go of the state's tensors."""
        if self._buffer is not None:
            self._buffer.give_back()
        self._buffer = None
        with self._lock:  # sealing is over, whoever comes late
            self._share = None


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


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], queued: list[bool]) -> None:
    """Copy tensors; those on the lane's CUDA device are `queued`: the host does not wait for them."""
    for waits in (False, True):
        places = [place for place, other in enumerate(queued) if other is not waits]
        if len(places) == len(sources):
            both = targets, sources
        else:
            both = [targets[place] for place in places], [sources[place] for place in places]
        if places:  # one call, in which the interpreter's lock is free
            torch._foreach_copy_(*both, non_blocking=not waits)


class Stager:
    """Copies states into reused host memory.

    Invariants:
        * What is not late is copied (CUDA: queued on the caller's stream) before `stage` returns.
        * What is late is copied before a hooked optimizer's next step changes anything: before the step, or
          after the closure that runs forward and backward in it.
        * A buffer is filled again only after its save has released it.
        * Memory held: the state's bytes x in_flight.

    Args:
        in_flight: How many stagings there can be at once.
        log: Where spans go.
    """

    def __init__(self, in_flight: int, log: SpanLog) -> None:
        self._in_flight = in_flight
        self._log = log
        self._device: torch.device | None = None
        self._lane: Lane | None = None
        self._second = Lane(f"{LANE}-second", kind="thread")
        self._ring: PinnedRing | None = None
        self._warming: Ticket[None] | None = None
        self._active: list[Staging] = []
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()

    def stage(self, share: Share) -> Staging:
        """Copy a state. Errors of what is copied at once are raised here, others by the ticket."""
        lane, ring = self._ready(share.device)
        staging = Staging(share)
        beside = bool(share.late.data)
        aside: list[torch.Tensor] = []
        try:
            if lane.kind == "thread" and beside:
                if ring.is_warm(share.plan.nbytes):
                    _copy_now(staging, share, ring, on_cuda=False)
                else:  # new memory is made on the lane
                    aside = [tensor.clone() for tensor in share.now]
            else:  # on a CUDA lane, and the caller's stream after it: the host never waits
                at_once = lane if lane.kind == "cuda" else Lane(LANE, kind="inline")
                on_cuda = lane.kind == "cuda"
                staging.ticket = at_once.submit(lambda: _copy_now(staging, share, ring, on_cuda=on_cuda))
                staging.ticket.order()
            if beside:
                for optimizer in share.optimizers:
                    self._hook(optimizer)
                if lane.kind == "thread":
                    staging.shared = SharedCopy(self._second)
                copy = _late_copy(staging, share, ring, aside)
                ticket = lane.submit(copy, name="stage", bytes=share.late.nbytes)
                staging.ticket = _Staged(ticket, staging)
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

    def prewarm(self, share: Share, *, beside: bool = False) -> None:
        """Hold the memory that saves of this state take: fresh pages cost twenty times the copy.

        With `beside` it is touched on the lane, where that is a thread; a save that comes meanwhile waits.
        """
        lane, ring = self._ready(share.device)

        def warm() -> None:
            _warm(ring, share.plan, self._in_flight, on_cuda=lane.kind == "cuda")

        if beside and lane.kind == "thread":
            self._warming = lane.submit(warm, name="prewarm")
            self._warming.seen = True  # memory that cannot be had is the next save's error
        elif lane.kind == "thread":  # which is made by this, too
            lane.submit(warm).wait()
        else:
            warm()

    def borrow(self, nbytes: int) -> PinnedBuffer:
        """A staging buffer to read a checkpoint into; no save may be in flight."""
        return self._ready(self._device or torch.device("cpu"))[1].take(max(1, nbytes), present=False)

    def close(self) -> None:
        """Take the hooks out, end the lane, free the memory."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        if self._lane is not None and self._ring is not None:
            self._lane.close()
            self._second.close()
            self._ring.close()

    def before_step(self) -> None:
        """Order what the caller does next after all copies. The optimizers' pre-hook."""
        for staging in list(self._active):
            start = time.perf_counter_ns()
            self._order(staging)
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
            staging.help()
            staging.ticket.fence()  # a failed copy fails the save, never the step

    def _hook(self, optimizer: Optimizer) -> None:
        if optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(_pre_hook(weakref.ref(self)))

    def _ready(self, device: torch.device) -> tuple[Lane, PinnedRing]:
        if self._warming is not None:
            self._warming.settle()
            self._warming = None
        if self._lane is None or self._ring is None or device != self._device:
            if self._lane is not None:
                self._lane.close()
            self._device = device
            self._lane = Lane(LANE, device, log=self._log)
            self._ring = PinnedRing(self._in_flight, pin=device.type == "cuda")
        return self._lane, self._ring


def _warm(ring: PinnedRing, plan: FilePlan, buffers: int, *, on_cuda: bool) -> None:
    if ring.nbytes > 2 * plan.nbytes * buffers:
        ring.close()  # a restore needed far more than saves will
    for _ in range(buffers if plan.nbytes else 0):
        buffer = ring.take(plan.nbytes)  # the one that was given back first: each in turn
        for late in (False, True) if on_cuda else (False,):  # a thread copies to places, without views
            plan.views(buffer.bytes(plan.nbytes), late=late)
        buffer.give_back()


def _copy_now(staging: Staging, share: Share, ring: PinnedRing, *, on_cuda: bool) -> None:
    """Copy all but the late tensors; take the buffer for both."""
    queued = [on_cuda and tensor.device == share.device for tensor in share.now]
    _copy(share.plan.views(staging.take(ring), late=False), share.now, queued)


def _late_copy(
    staging: Staging, share: Share, ring: PinnedRing, aside: list[torch.Tensor]
) -> Callable[[], None]:
    """The lane's work. On a CUDA lane it only queues copies, and looking for changes must wait."""

    def begin() -> tuple[torch.Tensor, list[Portion]]:
        memory = staging.take(ring)
        if aside:
            _copy(share.plan.views(memory, late=False), aside, [False] * len(aside))
        return memory, staging.begin().portions

    def copy() -> None:
        if staging.shared is None:
            targets = share.plan.views(staging.take(ring), late=True)
            _copy(targets, staging.begin().data, share.late.queued)
            return
        staging.shared.run(begin)
        staging.seal()

    return copy


def _pre_hook(stager: "weakref.ref[Stager]") -> Callable[..., Any]:
    """A step pre-hook that does not keep a forgotten checkpointer alive."""

    def order_after_staging(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        alive = stager()
        return None if alive is None else before_update(args, kwargs, alive.before_step)

    # What torch.compiler.disable sets, without importing the compiler: a compiled step() breaks here.
    order_after_staging._torchdynamo_disable = True  # type: ignore[attr-defined]
    return order_after_staging
