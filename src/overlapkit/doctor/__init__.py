"""`overlapkit doctor`: what machine and job cost a training step, layer by layer, and what to do."""

from overlapkit.doctor.diagnosis import Diagnosis
from overlapkit.doctor.examine import examine
from overlapkit.doctor.line import Line

__all__ = ["Diagnosis", "Line", "examine"]
