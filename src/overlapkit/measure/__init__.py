"""Measurement: what each lane of a training step still exposes, and what would hide it."""

from typing import TYPE_CHECKING

from overlapkit import _lazily
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

__getattr__ = _lazily(__name__, {"explain": "traces.explain"})  # msgspec is for those who read a trace
