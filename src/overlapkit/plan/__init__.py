"""The schedule chosen from measurements, and the step at any number of ranks."""

from overlapkit.plan.choosing import choose
from overlapkit.plan.costs import Profile, UnitProfile
from overlapkit.plan.failures import Failures
from overlapkit.plan.links import Fabric, LinkTable, Wire
from overlapkit.plan.probing import probe_link
from overlapkit.plan.profiling import profile
from overlapkit.plan.scaling import Scaling, scale
from overlapkit.plan.simulation import SimulatedReport, simulate
from overlapkit.plan.step import Rules

__all__ = [
    "Fabric",
    "Failures",
    "LinkTable",
    "Profile",
    "Rules",
    "Scaling",
    "SimulatedReport",
    "UnitProfile",
    "Wire",
    "choose",
    "probe_link",
    "profile",
    "scale",
    "simulate",
]
