"""Lanes 1 and 2: the next batch is ready, and on the device, before the step asks for it."""

from overlapkit.input.loader import DeviceLoader

__all__ = ["DeviceLoader"]
