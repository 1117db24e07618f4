"""torch.distributed.checkpoint with overlapkit's files."""

from overlapkit.checkpoint.dcp.planner import SafetensorsLoadPlanner, SafetensorsSavePlanner
from overlapkit.checkpoint.dcp.reader import SafetensorsReader
from overlapkit.checkpoint.dcp.writer import SafetensorsWriter

__all__ = ["SafetensorsLoadPlanner", "SafetensorsReader", "SafetensorsSavePlanner", "SafetensorsWriter"]
