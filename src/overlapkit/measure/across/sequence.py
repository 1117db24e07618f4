"""The order in which a rank gave collectives to its backend, and the first one in which ranks differ.

Read from torch's flight recorder: it notes every collective of gloo and NCCL, whoever calls it, with its
operation, shapes and dtype, and costs the training thread nothing more.
"""

import contextlib
import pickle
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlapkit.measure.arrival import Ints

_KEPT = 1000  # of each process group, the latest
_GROUPS = 8
_LONG = 160  # characters of a text


@dataclass(frozen=True, slots=True)
class Issues:
    """What a rank gave to the backends, by process group.

    Attributes:
        kinds: Texts, e.g. "all_reduce (4, 4) Float".
        groups: For each group the number of its first collective here, and for each from there on its place
            in `kinds`.
    """

    kinds: tuple[str, ...]
    groups: Mapping[str, tuple[int, Ints]]

    def text(self, group: str, number: int) -> str:
        """The collective of that number, or that there is none."""
        first, kinds = self.groups.get(group, (0, np.zeros(0, dtype=np.int64)))
        return self.kinds[kinds[number - first]] if 0 <= number - first < len(kinds) else "nothing"

    def last(self, group: str) -> int:
        """The number of the latest one, or -1."""
        first, kinds = self.groups.get(group, (0, ()))
        return first + len(kinds) - 1 if len(kinds) else -1

    def latest(self, count: int) -> "Issues":
        """Of each group the last `count`."""
        groups = {
            group: (max(first, first + len(kinds) - count), kinds[-count:])
            for group, (first, kinds) in self.groups.items()
        }
        return Issues(self.kinds, groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        groups = {group: [first, kinds.tolist()] for group, (first, kinds) in self.groups.items()}
        return {"kinds": list(self.kinds), "groups": groups}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Issues":
        """What `to_dict` made."""
        groups = {
            group: (first, np.array(kinds, dtype=np.int64))
            for group, (first, kinds) in data["groups"].items()
        }
        return cls(tuple(data["kinds"]), groups)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first collective in which ranks differ.

    Attributes:
        group: Name of the process group, "" for that of all ranks.
        where: The collective's number in its group, or the step.
        ranks: Those that differ from most others, at most 8 of them.
        issued: What they gave to the backend there.
        others: What most ranks did.
    """

    group: str
    where: str
    ranks: tuple[int, ...]
    issued: str
    others: str

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Mismatch":
        """What `dataclasses.asdict` made, after a journey as JSON."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})

    def __str__(self) -> str:
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        group = f" of group {self.group!r}" if self.group else ""
        return f"{self.where}{group}: {who} issued {self.issued}, the others {self.others}"


def read_issues() -> Issues | str:
    """What this process has issued lately; or why that is unknown. Takes some milliseconds of the GIL."""
    entries = _entries()
    if isinstance(entries, str):
        return entries
    kinds: dict[str, int] = {}
    found: dict[str, dict[int, int]] = {}
    for entry in entries:
        group = _group(entry["process_group"])
        place = kinds.setdefault(_kind(entry), len(kinds))
        found.setdefault(group, {})[entry["collective_seq_id"]] = place
    groups = {}
    for group, numbered in list(found.items())[-_GROUPS:]:
        last = first = max(numbered)
        while first - 1 in numbered and last - first + 1 < _KEPT:
            first -= 1
        groups[group] = first, np.array([numbered[n] for n in range(first, last + 1)], dtype=np.int64)
    return Issues(tuple(kinds), groups)


def _entries() -> list[dict[str, Any]] | str:
    """Of the recorders of this process, those of collectives (point-to-point excluded)."""
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for dump in filter(None, dumps):
        with contextlib.suppress(RuntimeError, TypeError, KeyError):
            trace = pickle.loads(dump(True, False, False))  # this process's own bytes
            for entry in sorted(trace.get("entries", ()), key=lambda entry: entry["record_id"]):
                if entry.get("is_p2p"):
                    continue
                numbered, number = (
                    found.setdefault(_group(entry["process_group"]), {}),
                    entry["collective_seq_id"],
                )
                if number < max(numbered, default=0):  # of a group of this name that is no more
                    numbered.clear()
                numbered[number] = entry
    if found:
        return [entry for numbered in found.values() for entry in numbered.values()]
    return "torch's flight recorder holds no collective (it is off with TORCH_FR_BUFFER_SIZE=0)"


def _group(named: Sequence[str]) -> str:
    return "" if named[1] == "default_pg" else str(named[0])


def _kind(entry: Mapping[str, Any]) -> str:
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    sizes, results = entry["input_sizes"], entry.get("output_sizes", ())
    dtypes = ", ".join(dict.fromkeys(map(str, entry["input_dtypes"])))
    plain = operation.replace("_", "")
    alike = any(word in plain for word in ("reduce", "allgather", "broadcast"))
    if not alike or (plain.endswith("allgather") and len({tuple(size) for size in results}) > 1):
        return f"{operation} {dtypes}".strip()  # its shapes may differ from rank to rank
    text = f"{operation} {', '.join(str(tuple(size)) for size in sizes)} {dtypes}"
    if len(text) < _LONG:
        return text
    return f"{text[:_LONG]}... ({len(sizes)} tensors, {zlib.crc32(text.encode()):08x})"


def find_mismatch(handed: Mapping[int, Issues]) -> Mismatch | None:
    """The earliest number at which ranks of one group issued different collectives.

    A rank that has not come to a number yet differs in nothing.

    Args:
        handed: By rank.
    """
    groups = dict.fromkeys(group for issues in handed.values() for group in issues.groups)
    for group in groups:
        members = {rank: issues for rank, issues in handed.items() if group in issues.groups}
        number = _first_difference(group, members)
        if number is not None:
            here = {
                rank: issues.text(group, number)
                for rank, issues in members.items()
                if issues.groups[group][0] <= number <= issues.last(group)
            }
            return name_odd(group, f"collective {number}", here)
    return None


def _first_difference(group: str, members: Mapping[int, Issues]) -> int | None:
    known: dict[str, int] = {}
    begin = max(issues.groups[group][0] for issues in members.values())
    end = max(issues.last(group) for issues in members.values())
    seen = np.full(max(0, end - begin + 1), -1, dtype=np.int64)
    first: int | None = None
    for issues in members.values():
        start, kinds = issues.groups[group]
        table = np.array([known.setdefault(text, len(known)) for text in issues.kinds], dtype=np.int64)
        mine = table[kinds[begin - start :]][: len(seen)]
        theirs = seen[: len(mine)]
        differ = np.flatnonzero((theirs >= 0) & (theirs != mine))
        if len(differ) and (first is None or begin + differ[0] < first):
            first = begin + int(differ[0])
        theirs[theirs < 0] = mine[theirs < 0]
    return first


def name_odd(group: str, where: str, issued: Mapping[int, str]) -> Mismatch:
    """Say who differs from most; of two ranks, the higher one.

    Args:
        group: Of these ranks.
        where: In words.
        issued: By rank, what each issued there.
    """
    most = Counter(issued[rank] for rank in sorted(issued)).most_common(1)[0][0]
    odd = sorted(rank for rank, text in issued.items() if text != most)
    mine = issued[odd[0]]
    return Mismatch(group, where, tuple(rank for rank in odd if issued[rank] == mine)[:8], mine, most)
