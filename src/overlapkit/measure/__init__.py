"""Measurement: what each lane of a training step still exposes, and what would hide it."""

from typing import TYPE_CHECKING, Any

from overlapkit.measure.across.hang import HANG_EXIT_CODE, HangReport
from overlapkit.measure.compare import Comparison
from overlapkit.measure.detail import StepDetail
from overlapkit.measure.garbage import collect_garbage
from overlapkit.measure.meter import StepMeter
from overlapkit.measure.progress import ProgressLine
from overlapkit.measure.record import StepRecord
from overlapkit.measure.report import StepReport
from overlapkit.measure.tensorboard import TensorBoardWriter
from overlapkit.measure.traces.opening import TraceError

if TYPE_CHECKING:
    from overlapkit.measure.traces.explain import explain

__all__ = [
    "Comparison",
    "HANG_EXIT_CODE",
    "HangReport",
    "ProgressLine",
    "StepDetail",
    "StepMeter",
    "StepRecord",
    "StepReport",
    "TensorBoardWriter",
    "TraceError",
    "collect_garbage",
    "explain",
]


def __getattr__(name: str) -> Any:
    if name == "explain":  # msgspec is imported by those only who read a trace
        from overlapkit.measure.traces.explain import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
