"""Which checkpoints stay: the newest, multiples of a step, the best."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Best:
    """How checkpoints are compared.

    Attributes:
        metric: The name of the number that was given to `save(metrics=...)`.
        largest: Whether the largest is the best; else the smallest is.
    """

    metric: str
    largest: bool

    def ranked(self, found: Mapping[int, Metrics]) -> list[int]:
        """The steps of the checkpoints that have the metric, the best first; of equals, the higher step.

        NaN and infinity are no results: a checkpoint that has one of them is as one without the metric.
        """
        values = {step: metrics[self.metric] for step, metrics in found.items() if self.metric in metrics}
        finite = {step: value for step, value in values.items() if math.isfinite(value)}
        sign = -1 if self.largest else 1
        return sorted(finite, key=lambda step: (sign * finite[step], -step))


@dataclass(frozen=True)
class Policy:
    """What was asked for; see `Checkpointer`."""

    keep: int | None = None
    keep_every: int | None = None
    best: Best | None = None

    def surplus(self, found: Mapping[int, Metrics], verified: Collection[int], newest: int) -> list[int]:
        """The steps to delete, ascending.

        Nothing goes on the strength of a checkpoint that nobody has verified: a step is surplus only where
        `keep` verified ones are above it, and the best of the verified ones stays beside the best of all.
        Steps above `newest` are those of a branch that was left (somebody went back to an earlier step): they
        stay until the new one has passed them, and do not count, or they would cost the new one's.

        Args:
            found: The metrics of all committed, sound checkpoints.
            verified: Those whose every byte is known to be what was written.
            newest: The step just committed.
        """
        if self.keep is None:
            return []
        counted = {step: found[step] for step in sorted(found) if step in verified}
        branch = [step for step in counted if step <= newest]
        if len(branch) < self.keep:
            return []
        floor = branch[-self.keep]
        stay = {newest}
        if self.best is not None:
            stay |= {*self.best.ranked(found)[:1], *self.best.ranked(counted)[:1]}
        if self.keep_every is not None:
            stay |= {step for step in found if step % self.keep_every == 0}
        return [step for step in sorted(found) if step < floor and step not in stay]
