"""StepReport: one sentence, the parts of a step, the seven answers, and what to change."""

import json
import platform
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from overlapkit.measure.across.ranks import Ranks
from overlapkit.measure.advice import Finding, find
from overlapkit.measure.answers import Answer, answer
from overlapkit.measure.closeup import Seen
from overlapkit.measure.compare import Comparison, Given, compare
from overlapkit.measure.detail import StepDetail
from overlapkit.measure.draw import save_drawing
from overlapkit.measure.ledger import Ledger, Trace
from overlapkit.measure.noise import standard_error
from overlapkit.measure.perfetto import Rank, save_perfetto
from overlapkit.measure.record import StepRecord
from overlapkit.measure.render import render, sentence
from overlapkit.measure.speed import Speed
from overlapkit.measure.summary import PartSummary, Window
from overlapkit.measure.within import look_within
from overlapkit.measure.written import replacing
from overlapkit.span import Span

if TYPE_CHECKING:
    from overlapkit.measure.traces.detail import TraceDetail


@dataclass(frozen=True)
class StepReport:
    """What `StepMeter.report()` and `explain()` return. What was not measured is None, and says why.

    Attributes:
        steps: How many records it covers.
        first_step: Index of the first of them, or None.
        last_step: Index of the last, or None.
        device: Whose clock timed the phases.
        rank: Of this process; every rank reports for itself, and all that `ranks` holds.
        world: Number of ranks.
        period_ms: Mean milliseconds a step.
        exposed_share: Share of the time in which steps stood still for transfer, communication,
            checkpoint or input, 0 to 1.
        tokens_per_s: Tokens of this rank a second.
        peak_memory: Bytes at the highest point so far.
        parts: forward, backward, optimizer, input, transfer, communication, checkpoint, compilation,
            garbage (Python's collector), other: where the period went.
        answers: The seven, in order.
        findings: What is worth mending, the costliest first; empty where all is well.
        detail: What lies within the parts: buckets, units, microbatches, saves and so on.
        ranks: All ranks side by side: median, worst and skew of each part, who came late, whose collectives
            differ. None where they were not compared; answer 5 says why.
        records: The steps themselves.
        trace: What `explain()` found beside: the lanes of the whole trace, of each step and of each rank.
            Of a meter with `trace_every`, those of the latest step that it traced.
        traced_step: Which step that was.
        trace_note: Why there is no later one, where one was due.
    """

    steps: int
    first_step: int | None
    last_step: int | None
    device: str
    rank: int
    world: int
    period_ms: float | None
    exposed_share: float | None
    tokens_per_s: float | None
    peak_memory: int | None
    parts: dict[str, PartSummary]
    answers: tuple[Answer, ...]
    findings: tuple[Finding, ...]
    records: tuple[StepRecord, ...] = field(repr=False)
    _traces: tuple[Trace, ...] = field(repr=False)
    _spans: tuple[Span, ...] = field(repr=False)
    trace: "TraceDetail | None" = field(default=None, repr=False)
    detail: StepDetail | None = field(default=None, repr=False)
    traced_step: int | None = None
    trace_note: str | None = None
    ranks: Ranks | None = None

    def __str__(self) -> str:
        return render(self)

    @property
    def verdict(self) -> str:
        """One sentence: what costs most, and what to do about it."""
        return sentence(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: every field but the records, the verdict, and the versions it was made with.

        `error_ms` has the standard error of each mean, for `compare`.
        Of a trace also `lanes_us` of the whole, `per_step`, `per_rank` and `arrivals`, in microseconds.
        """
        names = ("steps", "first_step", "last_step", "device", "rank", "world", "period_ms", "exposed_share")
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in (*names, "tokens_per_s", "peak_memory")},
            "traced_step": self.traced_step,
            "trace_note": self.trace_note,
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "error_ms": self._errors(),
            "answers": [asdict(one) for one in self.answers],
            "findings": [{**asdict(one), "fix": one.fix} for one in self.findings],
            "ranks": None if self.ranks is None else self.ranks.to_dict(),
            "versions": _versions(),
            **({"detail": self.detail.to_dict()} if self.detail is not None else {}),
            **(self.trace.to_dict() if self.trace is not None else {}),
        }

    def _errors(self) -> dict[str, float | None]:
        fields = {"step": "period", **{part: part for part in self.parts}}
        errors: dict[str, float | None] = {}
        for name, field_ in fields.items():
            steps: dict[int, list[float]] = {}  # a trace's ranks wait for each other: a step is one value
            for one in self.records:
                if (time := getattr(one, field_, None)) is not None:
                    steps.setdefault(one.index, []).append(time / 1e6)
            errors[name] = standard_error([sum(times) / len(times) for times in steps.values()])
        return errors

    @staticmethod
    def compare(before: Given, after: Given) -> Comparison:
        """What became faster or slower from one report to another, and which findings are gone or new.

        A difference counts where it is more than chance makes of the spread of the steps (once in a thousand
        times), and more than 1 % of the step. What differs from run to run but not within one (another
        node, a neighbour) is not in that spread.

        Args:
            before: A report, its `to_dict()`, or the name of the file that `save()` wrote.
            after: Likewise.

        Returns:
            `str()` of it is a sentence and a table; `to_dict()` is plain JSON.

        Raises:
            TypeError: An argument is something else.
            ValueError: A file holds no report, or a report covers no step.
            OSError: A file cannot be read.
        """
        return compare(before, after)

    def save(self, path: str | PathLike[str]) -> None:
        """Write `to_dict()` as JSON; packed if named .gz.

        Raises:
            TypeError: `path` is no path.
            OSError: The file cannot be written.
        """
        _check_path(path)
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        with replacing(path) as file:
            file.write(text.encode() + b"\n")

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Write the steps as a trace for ui.perfetto.dev (Chrome's trace events); packed if named .gz.

        One process a rank (all ranks of an explained trace, on one clock), one track a lane; what a step
        stood still for is on a track of its own beneath. Of a meter the steps of this report, at most the
        last 100; of a trace its last 8 steps.

        Raises:
            TypeError: `path` is no path.
            ValueError: No step has been recorded.
            OSError: The file cannot be written; what was there is as it was.
        """
        _check_path(path)
        if not self._traces:
            raise ValueError("no step has been recorded yet: there is nothing to write")
        save_perfetto(path, self._ranks(), {"verdict": self.verdict, **_versions()})

    def _ranks(self) -> list[Rank]:
        if self.trace is not None and self.traced_step is None:
            return self.trace.shown()
        first = self.first_step or 0
        traces = [trace for trace in self._traces if trace.index >= first]
        name = f"rank {self.rank} of {self.world} on {self.device}"
        return [Rank(self.rank, name, traces, self._spans, self.records)]

    def plot(self, path: str | PathLike[str], *, steps: int = 3) -> None:
        """Draw the lanes over time for the last few steps, exposed parts marked, as PNG.

        Args:
            path: Where to write it.
            steps: How many steps, at most 8 (fewer are drawn where fewer are there).

        Raises:
            TypeError: `path` is no path, or `steps` is not an int.
            ValueError: No step has been recorded, or `steps` is out of range.
            ImportError: matplotlib is missing (the extra viz).
        """
        _check_path(path)
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"steps={steps!r}: give an int, 1 to 8")
        if not 1 <= steps <= 8:
            raise ValueError(f"steps={steps}: draw 1 to 8")
        if not self._traces:
            raise ValueError("no step has been recorded yet: there is nothing to draw")
        notes = {
            lane: f"not measured: {part.reason}"
            for lane in ("input", "transfer", "communication", "checkpoint", "optimizer")
            if (part := self.parts[lane]).mean_ms is None
        }
        save_drawing(path, self._traces[-steps:], self._spans, notes)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__)}


def _check_path(path: object) -> None:
    if not isinstance(path, (str, PathLike)):  # a number would be an open file, whosever it is
        raise TypeError(f"path={path!r}: give the name of a file, as a str or a pathlib.Path")


def make_report(
    ledger: Ledger,
    window: int,
    looked: Seen | None,
    rank: int,
    ranks: Ranks | str = "not compared",
    *,
    peak_flops: float | None = None,
    flops_per_token: float | None = None,
) -> StepReport:
    """Look back over the last `window` records.

    Args:
        ledger: Of the meter.
        window: How many records.
        looked: What was seen in some steps only.
        rank: Of this process.
        ranks: All ranks compared, or why they are not.
        peak_flops: A second, of the device, or None to look it up.
        flops_per_token: Of the model, or None to count.
    """
    seen = Window(ledger, window, ranks)
    looked = looked or Seen()
    speed = Speed(looked, seen.coverage.device, seen.tokens, peak_flops, flops_per_token)
    detail = look_within(seen, looked, speed)
    records = tuple(seen.records)
    findings = find(seen, detail, looked.products)
    return StepReport(
        steps=len(records),
        first_step=records[0].index if records else None,
        last_step=records[-1].index if records else None,
        device=str(ledger.coverage.device),
        rank=rank,
        world=ledger.coverage.world,
        period_ms=seen.period_ms,
        exposed_share=seen.exposed_share(),
        tokens_per_s=seen.tokens_per_s(),
        peak_memory=records[-1].peak_memory if records else None,
        parts=seen.parts,
        answers=answer(seen, looked.peaks.top if looked.peaks is not None else None, findings, detail),
        findings=findings,
        records=records,
        detail=detail,
        _traces=tuple(seen.traces),
        _spans=tuple(seen.spans),
        ranks=ranks if isinstance(ranks, Ranks) else None,
    )
