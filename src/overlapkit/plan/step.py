"""One training step, played through: a compute lane that launches collectives and waits for them.

The order of events is that of FSDP2 with explicit prefetch, and of DDP with its buckets: an all-gather may
begin when the unit `depth` places before it begins to compute; a reduction when its unit's backward is over.
"""

from dataclasses import dataclass, field

from overlapkit.parallel.units import prefetch_places
from overlapkit.plan.wires import Transfer, Wires


@dataclass(frozen=True)
class Work:
    """One unit in one step of one rank. Seconds and bytes.

    Attributes:
        name: Of the unit.
        forward_s: Of its forward.
        backward_s: Of its backward, with what is recomputed in it.
        gather_bytes: Of its all-gather; 0 where it is never gathered.
        gather_s: How long that takes alone.
        regather_s: How long it takes in backward, where `regathers`.
        reduce_bytes: Of its gradients' reduction; 0 where nothing is trained.
        reduce_s: How long that takes alone.
        copies_s: How long the all-reduce between copies of its shard takes, when the reduction is done.
        regathers: Whether backward gathers it again.
        kept_bytes: What a rank holds of it from forward to backward, beside its share.
        pack_s: How long the compute lane copies before each of its all-gathers is launched.
        unpack_s: How long it copies when one has arrived.
        flatten_s: How long it copies gradients before the reduction is launched.
        copies_bytes: Of the all-reduce between copies of its shard, on a communicator of its own; 0 for none.
    """

    name: str
    forward_s: float
    backward_s: float
    gather_bytes: int = 0
    gather_s: float = 0.0
    regather_s: float = 0.0
    reduce_bytes: int = 0
    reduce_s: float = 0.0
    copies_s: float = 0.0
    regathers: bool = True
    kept_bytes: int = 0
    pack_s: float = 0.0
    unpack_s: float = 0.0
    flatten_s: float = 0.0
    copies_bytes: int = 0


@dataclass(frozen=True)
class Rules:
    """How the wrapper schedules.

    Attributes:
        forward_prefetch: How many units' all-gathers a unit starts ahead; 0: each when it is needed.
        backward_prefetch: The same in backward.
        separate: Reductions have a communicator of their own (`shard`'s separate_reduce_scatter), and share
            the link with all-gathers.
        buffers: Reductions in flight, at most, before backward stands still for the oldest; None for any.
        blocking: Each reduction is waited for where it is launched.
        microbatches: Forwards and backwards in a step, of which the last one reduces.
    """

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    separate: bool = False
    buffers: int | None = None
    blocking: bool = False
    microbatches: int = 1


def rules_of(device: str) -> Rules:
    """What `shard` does on a device, left alone.

    All its collectives queue on one communicator: gloo has one connection between two ranks, and sends what
    was posted first. On the CPU two reductions are in flight; on a GPU FSDP2 keeps the input of one.
    """
    return Rules(buffers=2 if device == "cpu" else 1)


@dataclass(frozen=True)
class Phase:
    """A stretch of the compute lane: forward, backward, or a wait, named as the spans of the parts are."""

    kind: str
    name: str
    start: float
    end: float


@dataclass
class Played:
    """What a step did, in seconds from its begin.

    Attributes:
        phases: The compute lane, gapless, in order.
        transfers: The collectives, in the order of their ends.
        end: When the last of both was over.
    """

    phases: list[Phase] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    end: float = 0.0

    @property
    def exposed_s(self) -> float:
        """For how long the compute lane stood still."""
        return sum(phase.end - phase.start for phase in self.phases if phase.kind == "communication")


class Step:
    """Plays one step.

    Args:
        work: The units in forward order, the root last. The root is gathered first and computes last.
        rules: The schedule.
    """

    def __init__(self, work: list[Work], rules: Rules) -> None:
        self._work = work
        self._rules = rules
        regathers = [one.regathers for one in work]
        self._order = prefetch_places(regathers, rules.forward_prefetch, rules.backward_prefetch)
        self._wires = Wires()
        self._now = 0.0
        self._played = Played()
        self._gathers: dict[int, Transfer] = {}
        self._whole: set[int] = set()  # that arrived
        self._reductions: list[Transfer] = []
        self._again = False  # in backward
        self._last = True  # microbatch

    def play(self) -> Played:
        """Forward and backward of each microbatch, and the tail."""
        for left in range(self._rules.microbatches - 1, -1, -1):
            self._last = left == 0
            self._forward()
            self._backward()
        self._wait_until(self._wires.drain(self._now), "reduction tail")
        self._played.transfers = self._wires.done
        self._played.end = self._now
        return self._played

    def _forward(self) -> None:
        last = len(self._work) - 1
        self._again = False
        self._gathers.clear()
        self._whole.clear()
        for place in [last, *range(last)]:  # the root's hook runs first
            self._gather(place)
            self._need(place)
            for ahead in self._order[place][0]:
                self._gather(ahead)
            if place != last:
                self._compute("forward", place, self._work[place].forward_s)
        self._compute("forward", last, self._work[last].forward_s)

    def _backward(self) -> None:
        last = len(self._work) - 1
        self._again = True
        self._gathers = {p: t for p, t in self._gathers.items() if not self._work[p].regathers}
        self._whole &= self._gathers.keys()
        self._gather(last)
        self._need(last)
        for ahead in self._order[last][1]:  # the root's hook runs first
            self._gather(ahead)
        self._compute("backward", last, self._work[last].backward_s)
        for place in range(last - 1, -1, -1):
            self._gather(place)
            self._need(place)
            for ahead in self._order[place][1]:
                self._gather(ahead)
            self._compute("backward", place, self._work[place].backward_s)
            self._reduce(place)
        self._reduce(last)

    def _gather(self, place: int) -> None:
        work = self._work[place]
        if place not in self._gathers and work.gather_bytes:
            seconds = work.regather_s if self._again else work.gather_s
            self._compute(self._pass, place, work.pack_s)
            self._gathers[place] = self._wires.launch(
                "gather", f"all_gather {work.name}", work.gather_bytes, seconds, self._now
            )

    def _need(self, place: int) -> None:
        if (transfer := self._gathers.get(place)) is not None and place not in self._whole:
            self._wait_until(self._wires.finish(transfer), f"wait {transfer.name}")
            self._compute(self._pass, place, self._work[place].unpack_s)
            self._whole.add(place)

    def _reduce(self, place: int) -> None:
        work = self._work[place]
        if not (work.reduce_bytes and self._last):
            return
        limit = self._rules.buffers
        if limit is not None and len(self._reductions) >= limit:
            oldest = self._reductions[-limit]
            self._wait_until(self._wires.finish(oldest), f"wait {oldest.name}")
        self._compute(self._pass, place, work.flatten_s)
        queue = "reduce" if self._rules.separate else "gather"
        transfer = self._wires.launch(
            queue, f"reduce_scatter {work.name}", work.reduce_bytes, work.reduce_s, self._now
        )
        if work.copies_bytes:
            transfer.then = "copies", self._copies(work)
        self._reductions.append(transfer)
        if self._rules.blocking:
            self._wait_until(self._wires.finish(transfer), transfer.name)
            if transfer.then is not None:
                self._wait_until(self._wires.finish(transfer.then[1]), transfer.then[1].name)

    def _copies(self, work: Work) -> Transfer:
        name, nan = f"all_reduce {work.name}", float("nan")
        return Transfer(name, work.copies_bytes, work.copies_s, nan, left=work.copies_s)

    @property
    def _pass(self) -> str:
        return "backward" if self._again else "forward"

    def _compute(self, kind: str, place: int, seconds: float) -> None:
        if seconds:
            self._phase(kind, self._work[place].name, self._now + seconds)

    def _wait_until(self, when: float, name: str) -> None:
        if when > self._now:
            self._phase("communication", name, when)

    def _phase(self, kind: str, name: str, end: float) -> None:
        self._played.phases.append(Phase(kind, name, self._now, end))
        self._now = end
