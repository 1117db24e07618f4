"""Measurement: what each lane of a training step still exposes, and what would hide it."""

from overlapkit.measure.meter import StepMeter
from overlapkit.measure.record import StepRecord
from overlapkit.measure.report import StepReport

__all__ = ["StepMeter", "StepRecord", "StepReport"]
