"""Whether the job hangs, and whose absence it is: decided from what all ranks last said of themselves."""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from overlapkit.measure.across.sequence import Issues, Mismatch, find_mismatch
from overlapkit.measure.across.stacks import innermost
from overlapkit.measure.across.where import Where

HANG_EXIT_CODE = 87
"""The exit code of a rank that ends because the job hangs: no signal's, and none of sysexits.h."""

_SHOWN = 4  # missing ranks whose stacks are shown


@dataclass(frozen=True, slots=True)
class HangReport:
    """A job that does not go on.

    Attributes:
        missing: Ranks that the others wait for; empty where none can be told from the others.
        step: In which step the first of them is, or None where it never said.
        phase: In which phase.
        why: How that was told.
        waited_s: Seconds without progress.
        where: For each rank what it was doing, in words.
        stacks: Python stacks of all threads of missing ranks (4 at most) that could still say.
        mismatch: A collective in which ranks differ, or None.
    """

    missing: tuple[int, ...]
    step: int | None
    phase: str | None
    why: str
    waited_s: float
    where: Mapping[int, str]
    stacks: Mapping[int, str]
    mismatch: Mismatch | None

    def __str__(self) -> str:
        lines = [f"overlapkit: the job hangs: no rank has made progress for {self.waited_s:.1f} s"]
        if self.missing:
            who = f"rank{'s' if len(self.missing) > 1 else ''} {', '.join(map(str, self.missing[:8]))}"
            lines.append(f"  missing: {who}: {self.why}")
        else:
            lines.append(f"  missing: cannot be told: {self.why}")
        if self.mismatch is not None:
            lines.append(f"  collectives differ: {self.mismatch}")
        places: dict[str, list[int]] = {}
        for rank, text in self.where.items():
            places.setdefault(text, []).append(rank)
        lines += [f"  rank {_some(ranks)}: {text}" for text, ranks in places.items()]
        for rank, stacks in self.stacks.items():
            lines += [f"Python stacks of rank {rank}:", stacks]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HangReport":
        """What `to_dict` made, after a journey as JSON."""
        made = {
            "missing": tuple(data["missing"]),
            "where": {int(rank): text for rank, text in data["where"].items()},
            "stacks": {int(rank): text for rank, text in data["stacks"].items()},
            "mismatch": None if data["mismatch"] is None else Mismatch.from_dict(data["mismatch"]),
        }
        return cls(**{**data, **made})


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank tells once an alarm was given.

    Attributes:
        where: It is.
        stacks: Of all its threads.
        issued: What it gave to the backends lately; None where that is unknown.
    """

    where: Where
    stacks: str
    issued: Issues | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        issued = None if self.issued is None else self.issued.to_dict()
        return {"where": self.where.to_dict(), "stacks": self.stacks, "issued": issued}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Statement":
        """What `to_dict` made."""
        issued = None if data["issued"] is None else Issues.from_dict(data["issued"])
        return cls(Where(**data["where"]), data["stacks"], issued)


def hangs(own: Where, others: Mapping[int, Where], silent: Mapping[int, float], timeout: float) -> bool:
    """Whether nobody can be expected to go on.

    Only who is inside a step gives the alarm: after the last step, ranks may export or evaluate for long.

    Args:
        own: Of this rank.
        others: What the other ranks last said.
        silent: For how many seconds nothing was heard of those that stopped saying anything.
        timeout: Seconds without progress that are a hang.
    """
    if not own.inside or own.left or own.still_s < timeout:
        return False
    for rank, where in others.items():
        if where.left:
            continue
        if where.still_s + silent.get(rank, 0.0) < timeout * 0.9:  # what it said is a moment old
            return False
    return True


def make_report(
    told: Mapping[int, Statement],
    said: Mapping[int, Where],
    silent: Mapping[int, float],
    waited_s: float,
    unheard: Sequence[int] = (),
) -> HangReport:
    """Find who is missing.

    Args:
        told: By ranks that answered the alarm.
        said: What every rank last said.
        silent: As for `hangs`.
        waited_s: Seconds without progress.
        unheard: Ranks that never said anything.
    """
    issued = {rank: one.issued for rank, one in told.items() if one.issued is not None}
    mismatch = find_mismatch(issued)
    missing, why = _missing(told, said, silent, issued, mismatch, unheard)
    first = said.get(missing[0]) if missing else None
    where = dict.fromkeys(unheard, "never heard of")
    for rank in sorted(said):
        where[rank] = said[rank].text
        if said[rank].done is not None:
            where[rank] += f"; the last collective that ended: {said[rank].done}"
    return HangReport(
        missing=tuple(missing),
        step=None if first is None else first.step,
        phase=None if first is None else ("outside" if not first.inside else first.phase),
        why=why,
        waited_s=waited_s,
        where=where,
        stacks={rank: told[rank].stacks for rank in (missing or sorted(told))[:_SHOWN] if rank in told},
        mismatch=mismatch,
    )


def _missing(
    told: Mapping[int, Statement],
    said: Mapping[int, Where],
    silent: Mapping[int, float],
    issued: Mapping[int, Issues],
    mismatch: Mismatch | None,
    unheard: Sequence[int],
) -> tuple[list[int], str]:
    gone = [rank for rank in sorted(silent) if rank not in told and not said[rank].left]
    if gone:
        rank = gone[0]
        fate = _fate(said[rank])
        return gone, f"{said[rank].text}, not heard of for {silent[rank]:.1f} s: {fate}"
    front = max(where.position for where in said.values())
    left = [rank for rank, where in sorted(said.items()) if where.left and where.step <= front[0]]
    if left:
        return left, f"{said[left[0]].text}; others are in step {front[0]}: do all ranks make as many steps?"
    if mismatch is not None:
        return list(mismatch.ranks), f"{said[mismatch.ranks[0]].text}, in another collective than the others"
    behind = _least({rank: where.position for rank, where in said.items()})
    if behind:
        return behind, f"{said[behind[0]].text}, where others have come further"
    fewer = _fewer_issued(issued)
    if fewer is not None:
        return fewer[0], f"{said[fewer[0][0]].text}; {fewer[1]}"
    if unheard:
        return list(unheard), "never heard of: it made no StepMeter with hang_timeout, or ended before"
    odd = _odd({rank: innermost(one.stacks) for rank, one in told.items()})
    if odd:
        at = innermost(told[odd[0]].stacks)
        return odd, f"{said[odd[0]].text}, as the others, but at another place: {at}"
    return [], f"all ranks are at the same place ({next(iter(said.values())).text}): look at the network"


def _least(positions: Mapping[int, Any]) -> list[int]:
    """Who is behind, where not all are alike."""
    least = min(positions.values())
    if least == max(positions.values()):
        return []
    return [rank for rank, position in sorted(positions.items()) if position == least]


def _fewer_issued(issued: Mapping[int, Issues]) -> tuple[list[int], str] | None:
    for group in dict.fromkeys(group for one in issued.values() for group in one.groups):
        lasts = {rank: one.last(group) for rank, one in issued.items() if group in one.groups}
        behind = _least(lasts)
        if behind:
            front = max(lasts, key=lambda rank: lasts[rank])
            awaited = issued[front].text(group, lasts[behind[0]] + 1)
            name = f" of group {group!r}" if group else ""
            number = lasts[behind[0]]
            return behind, f"it has issued {number} collectives{name}; others wait in the next, {awaited}"
    return None


def _odd(places: Mapping[int, str]) -> list[int]:
    """Who is at another place than most."""
    counted = Counter(places.values()).most_common()
    if len(counted) < 2 or counted[0][1] == counted[1][1]:
        return []
    return [rank for rank, place in sorted(places.items()) if place != counted[0][0]]


def _fate(where: Where) -> str:
    """What became of a process that says nothing."""
    who = f"process {where.pid} on {where.host}"
    if where.host == socket.gethostname():
        with suppress(OSError, IndexError):
            try:
                with open(f"/proc/{where.pid}/stat") as file:
                    state = file.read().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                return f"{who} has ended" if os.path.isdir("/proc/self") else who
            if state in "Tt":
                return f"{who} is stopped (SIGSTOP, or a debugger)"
            if state in "ZX":
                return f"{who} has died"
    return f"{who} has died, is stopped, or holds Python's lock"


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
