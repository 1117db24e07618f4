"""What a run's own records say that should not be: judged from the log alone, after the run.

Nothing here asks overlapkit, but for what is wrong with a checkpoint that it has read through. Losses are
compared with those of an undisturbed run, samples with the data set, checkpoints with what the loop was told.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos_life import Life, Records
from chaos_plan import ENDERS

Losses = Mapping[int, Sequence[str]]
"""By step, each rank's loss as float.hex()."""

ROUNDING = 2e-5
"""How far losses at another number of ranks may be apart, relative: some ten times what was seen."""
SETTLED = 40
"""Steps of a life after which its memory is compared."""
GROWTH_KIB, GROWTH_FDS = 32 << 10, 8


@dataclass(frozen=True)
class Shape:
    """What a run should have been.

    Attributes:
        steps: How many it takes.
        epoch: Steps of an epoch.
        samples: All of the data set.
        keep: Checkpoints that stay.
    """

    steps: int
    epoch: int
    samples: frozenset[str]
    keep: int


@dataclass
class Verdict:
    """What was wrong with a run.

    Attributes:
        wrong: Each in words.
        lost: Samples of an epoch that the final history does not have.
        doubled: Those that it has once too often.
        repeated: Steps that were taken more than once.
        apart: The largest relative difference of a loss from the undisturbed run's.
    """

    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    repeated: int = 0
    apart: float = 0.0


def judge(lives: Sequence[Life], references: Mapping[int, Losses], shape: Shape) -> Verdict:
    """All checks of a run that has come to its end.

    Args:
        lives: In their order.
        references: By number of ranks, the undisturbed run.
        shape: What it should have been.
    """
    verdict = Verdict()
    verdict.wrong += checkpoints(lives, shape.keep)
    for life in lives:
        verdict.wrong += [
            f"life {life.name}: {text}" for text in (*leftovers(life), *growth(life), *ends(life))
        ]
    losses(lives, references, verdict)
    samples(lives, shape, verdict)
    return verdict


def history(lives: Sequence[Life]) -> dict[int, tuple[Life, Records]]:
    """For each step the life, and the records, that the final state comes from."""
    final: dict[int, tuple[Life, Records]] = {}
    for life in lives:
        if life.restored is None:
            continue
        final = {step: one for step, one in final.items() if step <= life.restored}
        final |= {step: (life, records) for step, records in life.steps().items()}
    return final


def losses(lives: Sequence[Life], references: Mapping[int, Losses], verdict: Verdict) -> None:
    """Every step that was ever taken, against the undisturbed run: bitwise until ranks first change."""
    world, pure = next((life.world for life in lives if life.restored is not None), 0), True
    apart: list[str] = []
    taken: Counter[int] = Counter()
    for life in lives:
        pure = pure and (life.world == world or life.restored is None)
        expected = references[world if pure else life.world]
        for step, records in life.steps().items():
            taken[step] += 1
            got = [record["loss"] for record in records]
            difference = _difference(got, expected[step])
            verdict.apart = max(verdict.apart, difference)
            if (pure and got != list(expected[step])) or not difference <= ROUNDING:
                apart.append(f"step {step} of life {life.name}: loss {got}, undisturbed {expected[step]}")
    verdict.repeated = sum(count - 1 for count in taken.values())
    verdict.wrong += apart[:3] + ([f"and {len(apart) - 3} more losses"] if len(apart) > 3 else [])


def _difference(got: Sequence[str], expected: Sequence[str]) -> float:
    ours, theirs = (math.fsum(map(float.fromhex, one)) / len(one) for one in (got, expected))
    return abs(ours - theirs) / abs(theirs)


def samples(lives: Sequence[Life], shape: Shape, verdict: Verdict) -> None:
    """Of the final history, each epoch has each sample once."""
    final = history(lives)
    if missing := sorted(set(range(1, shape.steps + 1)) - final.keys()):
        verdict.wrong.append(f"steps {missing[:5]} of the final history were never taken")
    for begin in range(0, shape.steps, shape.epoch):
        seen: Counter[str] = Counter()
        for step in range(begin + 1, min(begin + shape.epoch, shape.steps) + 1):
            for record in final[step][1] if step in final else ():
                seen.update(record["samples"])
        lost = len(shape.samples - seen.keys())
        doubled = sum(seen.values()) - len(seen)
        strange = len(seen.keys() - shape.samples)
        if lost or doubled or strange:
            epoch = begin // shape.epoch
            verdict.wrong.append(f"epoch {epoch}: {lost} samples lost, {doubled} doubled, {strange} strange")
        verdict.lost += lost
        verdict.doubled += doubled


def checkpoints(lives: Sequence[Life], keep: int) -> Iterator[str]:
    """What the loop was told is there, is sound, and is what a life begins at."""
    known: set[int] = set()
    for life in lives:
        found = next((one["steps"] for one in life.of("found")), None)
        if found is not None:
            there = {int(step): damage for step, damage in found.items()}
            yield from (f"life {life.name}: {text}" for text in _found(there, known, life, keep))
            known |= there.keys()
        known |= {one["step"] for one in life.of("committed")}


_HEADER = "the checksum of its header differs"
"""Of a safetensors file: a restore has its places from the manifest, and neither reads nor checks that."""


def _found(there: dict[int, str], known: set[int], life: Life, keep: int) -> Iterator[str]:
    newest = set(sorted(known | there.keys())[-keep:])
    for step in sorted((newest & known) - there.keys()):
        yield f"step-{step} was committed, and is gone"
    damaged = {step for step, damage in there.items() if damage}
    for step in sorted(damaged - life.flipped):
        yield f"step-{step} is damaged, and nobody did that: {there[step]}"
    if len(there) > 3 * keep:
        yield f"{len(there)} checkpoints stay, where keep={keep}"
    damaged -= {step for step in damaged if _HEADER in there[step]}
    begun = {one["step"] for one in life.of("start")}
    expected = max(there.keys() - damaged, default=0)
    if begun and begun != {expected}:
        yield f"restored {sorted(begun)}, where the newest sound checkpoint is {expected}"
    for one in life.of("start"):
        said = " ".join(one["warned"])
        for step in sorted(step for step in damaged if step > expected):
            if f"step-{step} is damaged and is skipped" not in said:
                yield f"nothing was said of damaged step-{step}: {one['warned']}"
        if one["warned"] and not any(step > expected for step in damaged):
            yield f"warned without need: {one['warned']}"


def leftovers(life: Life) -> Iterator[str]:
    """Folders of dead saves after a start, threads after an end."""
    for one in life.of("start"):
        other = [name for name in one["names"] if not name.startswith("step-")]
        if len(other) != 1 or not other[0].startswith(".run-"):
            yield f"leftovers after a start: {other}"
    for one in life.of("over"):
        if one["left"]:
            yield f"threads are left at the end: {one['left']}"


def growth(life: Life) -> Iterator[str]:
    """Memory and descriptors that grow while a life goes on."""
    for begin, end in usages(life):
        for what, limit in (("rss", GROWTH_KIB), ("fds", GROWTH_FDS)):
            if end[what] - begin[what] > limit:
                steps = f"between steps {begin['step']} and {end['step']}"
                yield f"{what} of a rank grew from {begin[what]} to {end[what]} {steps}"


def usages(life: Life) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What each rank used when it had settled, and last."""
    for records in life.ranks.values():
        measured = [one for one in records if one["kind"] == "step" and "rss" in one]
        settled = [one for one in measured if one["step"] - (life.restored or 0) >= SETTLED]
        if len(settled) > 1:
            yield settled[0], settled[-1]


def ends(life: Life) -> Iterator[str]:
    """Whether each rank went on to the end, or stopped with the one right error."""
    kinds = {kind for kind, _ in life.faults}
    for rank in range(life.world):
        last = life.ranks.get(rank, [{}])[-1]
        if life.spoilt:
            if last.get("type") != "ValueError" or life.spoilt not in last["text"]:
                yield f"rank {rank} does not refuse {life.spoilt}: {_end(last)}"
        elif last.get("kind") != "over" and not kinds & ENDERS and not _named(last, kinds):
            yield f"rank {rank} ended, and {sorted(kinds) or 'nothing'} had happened to it: {_end(last)}"
    for one in life.of("error"):
        if one["type"] in _NEVER:
            yield f"no fault explains {_end(one)}"
    for one in life.of("save failed"):
        if not kinds & ENDERS and not _named(one, kinds):
            yield f"a save failed, and {sorted(kinds) or 'nothing'} had happened: {_end(one)}"
    if crash := re.search(r"terminate called|Fatal Python error|exitcode: -(?!9\b|15\b)\d+", life.output):
        yield f"a rank crashed: {life.output[crash.start() : crash.start() + 2000]}"
    yield from _right(life, kinds)


_NEVER = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "IndexError",
        "KeyError",
        "NameError",
        "RecursionError",
        "TypeError",
        "UnboundLocalError",
    }
)
"""Errors in a program: no fault from outside is told by one."""
_WORDS = {"full": "No space left on device", "read-only": "Read-only file system"}


def _named(record: dict[str, Any], kinds: set[str]) -> bool:
    return any(words in record.get("text", "") for kind, words in _WORDS.items() if kind in kinds)


def _right(life: Life, kinds: set[str]) -> Iterator[str]:
    """The error of the fault that ended a life, where nothing else can have been first."""
    errors = life.of("error")
    for kind, rank in life.faults if len(kinds & ENDERS) == 1 else ():
        if kind == "raise" and not any("planted by the test" in one["text"] for one in errors):
            yield f"no rank raised what its source did: {[_end(one) for one in errors]}"
        said = life.output + "".join(
            one["text"] for one in errors
        )  # between steps it is the loader that waits
        if kind == "freeze" and not names_absent(said, rank):
            yield f"nobody said that rank {rank} is missing"
        if kind in ("term", "term one") and not kinds & _WORDS.keys():
            yield from _saved(life)


def names_absent(said: str, rank: int) -> bool:
    """Whether a text says that a rank is not there: a hang's report, or the error of what waited for it.

    Rank 0 may serve the job's store; without that no rank can be told from the others.
    """
    if rank == 0 and "the host of rank 0, or of torchrun's rendezvous, is stopped" in said:
        return True
    lists = re.findall(r"missing: ranks? ([\d, ]+):|ranks?(?:\(s\))? ([\d, ]+) (?:did not|answer no)", said)
    return any(str(rank) in re.findall(r"\d+", "".join(one)) for one in lists)


def _saved(life: Life) -> Iterator[str]:
    """After a signal every rank has saved its last step, and says so."""
    for rank, records in life.ranks.items():
        last = max((one["step"] for one in records if one["kind"] == "step"), default=life.restored)
        told = max((one["step"] for one in records if one["kind"] == "committed"), default=None)
        if records[-1].get("code") != 143 or told != last:
            yield f"rank {rank} after SIGTERM: {_end(records[-1])}, saved {told}, stood at {last}"


def _end(record: dict[str, Any]) -> str:
    if not record:
        return "it never began"
    if record["kind"] in ("error", "save failed"):
        return f"{record['type']}: {record['text']}"[:600]
    return f"nothing more after {record['kind']} {record.get('step', '')}"
