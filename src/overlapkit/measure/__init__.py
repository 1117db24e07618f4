"""Measurement: what each lane of a training step still exposes, and what would hide it."""

from overlapkit.measure.meter import StepMeter
from overlapkit.measure.record import StepRecord
from overlapkit.measure.report import StepReport
from overlapkit.measure.tensorboard import TensorBoardWriter
from overlapkit.measure.traces.explain import explain
from overlapkit.measure.traces.opening import TraceError

__all__ = ["StepMeter", "StepRecord", "StepReport", "TensorBoardWriter", "TraceError", "explain"]
