"""One line of the doctor's report: what was looked at, how it stands, what that costs and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

LAYERS = ("gpu", "path", "fabric", "nccl", "kernels", "framework", "loop", "storage", "job")
"""The layers that a step stands on, bottom up."""

STATES = ("ok", "weak", "absent", "unknown")


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at.

    Attributes:
        layer: One of LAYERS.
        name: What it is; stable, for scripts.
        state: "ok"; "weak": it works and costs speed, or will fail; "absent": not there, and nothing needs
            it; "unknown": it could not be read, `saw` says why.
        saw: What was read or measured.
        cost: What a weak one costs.
        remedy: What to do about it.
        host: The machine it was seen on.
        ranks: The ranks that saw it; empty outside of a job.
    """

    layer: str
    name: str
    state: str
    saw: str
    cost: str = ""
    remedy: str = ""
    host: str = ""
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.layer in LAYERS, self.layer
        assert self.state in STATES, self.state
        assert self.state != "weak" or (self.cost and self.remedy), f"{self.name}: weak, without a remedy"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Line":
        """Of `to_dict`, also after a round trip through JSON."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


class Layer:
    """Makes the lines of one layer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ok(self, name: str, saw: str) -> Line:
        """It stands well."""
        return Line(self.name, name, "ok", saw)

    def weak(self, name: str, saw: str, cost: str, remedy: str) -> Line:
        """It costs something."""
        return Line(self.name, name, "weak", saw, cost, remedy)

    def absent(self, name: str, saw: str) -> Line:
        """It is not there, and need not be."""
        return Line(self.name, name, "absent", saw)

    def unknown(self, name: str, saw: str, remedy: str = "") -> Line:
        """It could not be read."""
        return Line(self.name, name, "unknown", saw, remedy=remedy)


def merged(lines: Iterable[Line]) -> list[Line]:
    """The lines of several ranks, by layer and name; ranks of one machine that saw the same share a line.

    Readings that differ a little (free space, a rate) are the same where the state is: the lowest rank's
    stands for all. What is weak is never merged with another text.
    """
    found: dict[tuple[str, ...], Line] = {}
    for line in lines:
        detail = line.saw if line.state == "weak" else ""
        key = (line.layer, line.name, line.state, detail, line.host)
        first = found.get(key)
        if first is None:
            found[key] = line
        else:
            found[key] = replace(first, ranks=tuple(sorted({*first.ranks, *line.ranks})))
    names = list(dict.fromkeys(line.name for line in found.values()))
    return sorted(found.values(), key=lambda line: (LAYERS.index(line.layer), names.index(line.name)))


def joined(names: Iterable[object], limit: int = 6) -> str:
    """Names with commas between them, a long list cut."""
    words = [str(name) for name in names]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def spans(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0-3, 6."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def gib(nbytes: float) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
