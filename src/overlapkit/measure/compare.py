"""Two reports side by side: what became faster or slower by more than noise, which findings are gone or new.

Reports are compared as `to_dict()` has them: saved ones, of other runs and other days, as well as new ones.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeAlias

from overlapkit.measure.compare_render import render, sentence
from overlapkit.measure.noise import noise

if TYPE_CHECKING:
    from overlapkit.measure.report import StepReport

_LEAST = 0.01  # of the step: what differs by less is the same, however well it is known
_LONGEST = 64 << 20  # bytes of a saved report; a trace's JSON may be far longer

Given: TypeAlias = "StepReport | Mapping[str, Any] | str | PathLike[str]"


@dataclass(frozen=True, slots=True)
class Change:
    """One mean time before and after, in milliseconds a step.

    Attributes:
        name: "step", or the part of it.
        before: None where it was not measured.
        after: Likewise.
        noise: By how much two such means may differ by chance (once in a thousand times, or by 1 % of the
            step); None where a report covers too few steps to tell.
        verdict: faster, slower, same (within noise), unknown (as `noise` is), or not measured.
    """

    name: str
    before: float | None
    after: float | None
    noise: float | None
    verdict: str

    @property
    def difference(self) -> float | None:
        """After less before."""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `StepReport.compare()` returns.

    Attributes:
        step: The whole step.
        parts: Its parts, in the report's order.
        tokens_per_s: Of all ranks, before and after; None where they were not counted.
        peak_memory: In bytes, before and after; None where it was not measured.
        gone: Findings of the first report alone, as "lane: component: setting".
        new: Findings of the second report alone.
        kept: Findings of both.
        differs: What else is not the same, so that the times may not compare: "world: 2, now 4".
    """

    step: Change
    parts: tuple[Change, ...]
    tokens_per_s: tuple[float | None, float | None]
    peak_memory: tuple[int | None, int | None]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    kept: tuple[str, ...]
    differs: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One sentence: whether a step became faster, and by what."""
        return sentence(self)

    def __str__(self) -> str:
        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"verdict": self.verdict, **json.loads(json.dumps(asdict(self)))}


def compare(before: Given, after: Given) -> Comparison:
    """See `StepReport.compare`."""
    one, two = _read(before, "before"), _read(after, "after")
    step = _change("step", one, two)
    names = [*one["parts"], *(name for name in two["parts"] if name not in one["parts"])]
    parts = tuple(_change(name, one, two) for name in names)
    gone, new, kept = _findings(one, two, {part.name for part in parts if part.verdict == "same"})
    return Comparison(
        step=step,
        parts=parts,
        tokens_per_s=(_tokens_per_s(one), _tokens_per_s(two)),
        peak_memory=(one.get("peak_memory"), two.get("peak_memory")),
        gone=gone,
        new=new,
        kept=kept,
        differs=tuple(_differs(one, two)),
    )


def _read(given: Any, argument: str) -> dict[str, Any]:
    """A report as a dict, and whether it is one.

    Raises:
        TypeError: It is neither a report nor a path.
        ValueError: It is no report, or of no step.
        OSError: The file cannot be read.
    """
    where = f"{argument}={type(given).__name__}"
    if isinstance(given, str | PathLike):
        where = fspath(given)
        given = _load(where)
    elif hasattr(given, "to_dict"):
        given = given.to_dict()
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: give a StepReport, its to_dict(), or the file that its save() wrote")
    if "traceEvents" in given:
        raise ValueError(f"{where} is a trace: overlapkit explain --json {where} makes a report of it")
    parts = given.get("parts")
    if not isinstance(parts, Mapping) or not all(isinstance(part, Mapping) for part in parts.values()):
        raise ValueError(f"{where} is no report: give what StepReport.save() wrote, or explain --json")
    if not isinstance(given.get("period_ms"), int | float):
        raise ValueError(f"{where} covers no step: there is nothing to compare")
    return dict(given)


def _load(path: str) -> Any:
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"  # save() packs what is named .gz
        file.seek(0)
        try:
            text = (gzip.GzipFile(fileobj=file) if packed else file).read(_LONGEST + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    if len(text) > _LONGEST:
        raise ValueError(f"{path} is longer than any report: overlapkit explain --json {path} reads a trace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def _change(name: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> Change:
    before, after = _mean(one, name), _mean(two, name)
    if before is None or after is None:
        return Change(name, before, after, None, "not measured")
    least = _LEAST * max(one["period_ms"], two["period_ms"])
    chance = noise(_error(one, name), _error(two, name))
    if abs(after - before) <= max(least, chance or 0.0):
        verdict = "same"
    elif chance is None:
        verdict = "unknown"
    else:
        verdict = "faster" if after < before else "slower"
    return Change(name, before, after, None if chance is None else max(least, chance), verdict)


def _mean(report: Mapping[str, Any], name: str) -> float | None:
    mean = report["period_ms"] if name == "step" else report["parts"].get(name, {}).get("mean_ms")
    return float(mean) if isinstance(mean, int | float) else None


def _error(report: Mapping[str, Any], name: str) -> tuple[float | None, int]:
    """The standard error of a mean, and of how many steps; reports of older versions have none."""
    errors, steps = report.get("error_ms"), report.get("steps")
    error = errors.get(name) if isinstance(errors, Mapping) else None
    return (error if isinstance(error, int | float) else None), steps if isinstance(steps, int) else 0


def _tokens_per_s(report: Mapping[str, Any]) -> float | None:
    rate = report.get("tokens_per_s")
    return rate * report.get("world", 1) if isinstance(rate, int | float) else None


Named = tuple[str, ...]


def _findings(one: Mapping[str, Any], two: Mapping[str, Any], same: set[str]) -> tuple[Named, Named, Named]:
    """Gone, new and kept. Where a lane costs the same, one that is just above the bar now is not new."""
    ours, theirs = (
        {(found["lane"], found["component"]): found.get("fix", "") for found in report.get("findings", ())}
        for report in (one, two)
    )

    def only(these: dict[tuple[str, str], str], those: dict[tuple[str, str], str]) -> Named:
        lanes = {lane for lane, _ in those}
        left = [key for key in these if key not in those and (key[0] in lanes or key[0] not in same)]
        return tuple(f"{key[0]}: {these[key]}" for key in left)

    kept = tuple(f"{key[0]}: {fix}" for key, fix in theirs.items() if key in ours)
    return only(ours, theirs), only(theirs, ours), kept


def _differs(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    facts = {name: (one.get(name), two.get(name)) for name in ("device", "world", "rank")}
    versions = [report.get("versions") or {} for report in (one, two)]
    for name in sorted({*versions[0], *versions[1]}):
        facts[name] = (versions[0].get(name), versions[1].get(name))
    found = [f"{name}: {was}, now {now}" for name, (was, now) in facts.items() if was != now]
    tokens = [_tokens_a_step(report) for report in (one, two)]
    if tokens[0] is not None and tokens[1] is not None and abs(tokens[0] - tokens[1]) > 0.01 * tokens[0]:
        found.append(f"tokens a step: {tokens[0]:,.0f}, now {tokens[1]:,.0f}")
    return found


def _tokens_a_step(report: Mapping[str, Any]) -> float | None:
    rate = _tokens_per_s(report)
    return None if rate is None else rate * float(report["period_ms"]) / 1e3
