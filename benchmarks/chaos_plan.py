"""What will go wrong in a run, and when: a function of a seed and the run's number, and of nothing else."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

KINDS = {
    "kill": "SIGKILL of a rank",
    "kill early": "SIGKILL of a rank that has just been started",
    "kill all": "SIGKILL of all ranks and their launcher",
    "term": "SIGTERM of the job, with a deadline",
    "term one": "SIGTERM of one rank",
    "stop": "SIGSTOP of a rank for seconds",
    "freeze": "SIGSTOP of a rank for longer than hang_timeout",
    "resize": "restart at another world size",
    "full": "a full disk",
    "read-only": "a read-only moment",
    "slow": "slow storage",
    "flip": "a flipped byte in the newest checkpoint",
    "shard": "a corrupt data shard",
    "raise": "a data source that raises",
    "stall": "a data source that stalls",
    "throttle": "a host link throttled",
}
"""Every kind of fault, in words."""

ENDERS = frozenset(
    {"kill", "kill early", "kill all", "term", "term one", "freeze", "resize", "flip", "shard", "raise"}
)
"""Kinds that end all ranks."""
NEED_MOUNT, NEED_LAB = frozenset({"full", "read-only"}), frozenset({"throttle"})
"""Kinds that need a file system of their own, and network namespaces."""

_OFTEN = {"kill": 3, "stop": 2, "flip": 2, "term": 2}
_SELDOM = {"freeze": 0.3}
_COLD = frozenset({"kill", "stop", "term"})
"""What a quick run does to ranks that start slowly; the rest is for the others, but for what takes long."""
_JOINING = frozenset({"kill", "kill all", "stop", "term", "term one"})
LAUNCHERS = ("torchrun", "fork", "lab")
"""How ranks start: by torchrun, each a new interpreter; forked from here; forked, each on a host of a lab."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: A key of KINDS.
        after: How many steps the job has taken since it recovered from the fault before.
        delay_s: And how many seconds after that step.
        rank: Whom it hits, modulo the number of ranks.
        seconds: How long it lasts, where it does.
        share: A number in [0, 1) for what is left open: how slow, how full, which byte.
        joins: Whether it may come while another one lasts.
    """

    kind: str
    after: int
    delay_s: float
    rank: int
    seconds: float
    share: float
    joins: bool

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v}' for k, v in asdict(self).items() if k != 'kind')})"


@dataclass(frozen=True)
class Setting:
    """How a run is set up.

    Attributes:
        number: Of the run.
        launcher: One of LAUNCHERS.
        wrap: "shard" or "replicate".
        worlds: The numbers of ranks it is started with, in turns.
        stop: Whether a failed save ends the job.
    """

    number: int
    launcher: str
    wrap: str
    worlds: tuple[int, ...]
    stop: bool


def settings(seed: int, ranks: Sequence[int], launchers: Sequence[str], quick: bool) -> Iterator[Setting]:
    """The runs, without end: each launcher meets each choice of ranks before one comes again.

    Quick ones are two: one by torchrun, and one in which ranks start fast and change their number.
    """
    draw = random.Random(f"settings {seed}")
    if quick:
        wrap = draw.choice(("shard", "replicate"))
        yield from (
            Setting(number, launcher, wrap, tuple(ranks[: number + 1]), stop=False)
            for number, launcher in enumerate(dict.fromkeys((launchers[0], launchers[-1])))
        )
        return
    sizes = [(world,) for world in ranks]
    sizes += [tuple(ranks), tuple(reversed(ranks))] if len(ranks) > 1 else []
    number = 0
    while True:
        pairs = [(launcher, worlds) for launcher in launchers for worlds in sizes]
        draw.shuffle(pairs)
        for launcher, worlds in pairs:
            wrap, stop = draw.choice(("shard", "replicate")), draw.random() < 0.4
            yield Setting(number, launcher, wrap, worlds, stop)
            number += 1


def faults(seed: int, setting: Setting, kinds: Sequence[str], quick: bool) -> Iterator[Fault]:
    """What goes wrong in a run, without end. Quick ones have each kind once."""
    draw = random.Random(f"faults {seed} {setting.number}")
    possible = [kind for kind in kinds if _possible(kind, setting) and not (quick and kind == "freeze")]
    if quick:
        possible = [kind for kind in possible if (kind in _COLD) == (setting.launcher == "torchrun")]
        draw.shuffle(possible)
        yield from (_fault(draw, kind, range(2, 6), longest_s=0.8) for kind in possible)
        return
    weights: list[Any] = [_OFTEN.get(kind, 1) * _SELDOM.get(kind, 1) for kind in possible]
    while True:
        yield _fault(draw, draw.choices(possible, weights)[0], range(2, 24))


def _possible(kind: str, setting: Setting) -> bool:
    if kind in NEED_LAB:
        return setting.launcher == "lab"
    return kind != "resize" or len(setting.worlds) > 1


def _fault(draw: random.Random, kind: str, after: range, longest_s: float = 2.0) -> Fault:
    return Fault(
        kind,
        draw.choice(after),
        round(draw.uniform(0.0, 0.1), 4),
        draw.randrange(64),
        round(draw.uniform(0.3, longest_s), 3),
        round(draw.random(), 6),
        draw.random() < 0.3 and kind in _JOINING,
    )
