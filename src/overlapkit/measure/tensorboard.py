"""A writer for TensorBoard: logged values, and what each lane exposes, as scalars."""

import math
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

from overlapkit.device import rank_and_world
from overlapkit.extras import require
from overlapkit.measure.arguments import check_count
from overlapkit.measure.report import StepReport


class TensorBoardWriter:
    """Give it to a meter: `StepMeter(..., on_report=[writer], on_log=[writer.log])`.

    Of several ranks only rank 0 writes. Names are those that were logged, and `step/...` for a report's
    numbers: period, parts, exposed share, tokens a second, peak memory. The verdict is a text.

    Args:
        directory: Where event files go.
        first_step: Added to the meter's step numbers: the step that a run was restored at.
        writer: Used in place of torch's SummaryWriter; then no directory is needed.

    Raises:
        TypeError: Neither a directory nor a writer is given, or both; or `first_step` is no int.
        ValueError: `first_step` is below 0.
        ImportError: tensorboard is missing (the extra tensorboard).
    """

    def __init__(
        self,
        directory: str | PathLike[str] | None = None,
        *,
        first_step: int = 0,
        writer: Any = None,
    ) -> None:
        if (directory is None) == (writer is None):
            raise TypeError(f"directory={directory!r}, writer={writer!r}: give one of the two")
        check_count("first_step", first_step, "give an int of at least 0", least=0)
        self._first_step = first_step
        self._writer = None
        if rank_and_world()[0]:
            return
        if directory is None:
            self._writer = writer
        else:  # ours to close: at exit, too, after the meter's last values, for the meter is younger
            self._writer = _summary_writer(directory)
            weakref.finalize(self, self._writer.close)

    def __call__(self, report: StepReport) -> None:
        """Write a report's numbers at its last step."""
        if self._writer is None or report.last_step is None:
            return
        step = self._first_step + report.last_step
        for name, value in _scalars(report).items():
            self._writer.add_scalar(f"step/{name}", value, step)
        self._writer.add_text("step/verdict", report.verdict, step)
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write logged values."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, self._first_step + step)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()


def _summary_writer(directory: str | PathLike[str]) -> Any:
    require("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory))


def _scalars(report: StepReport) -> dict[str, float]:
    """Numbers of a report by name; what was not measured is left out."""
    found = {
        "period_ms": report.period_ms,
        "exposed_percent": None if report.exposed_share is None else 100 * report.exposed_share,
        "tokens_per_s": report.tokens_per_s,
        "peak_memory_mib": None if report.peak_memory is None else report.peak_memory / 2**20,
        **{f"{name}_ms": part.mean_ms for name, part in report.parts.items()},
    }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
