"""Lanes 1 and 2: the next batch is ready, and on the device, before the step asks for it."""

from overlapkit.input.loader import DeviceLoader
from overlapkit.input.sample_seed import SampleSeed, SeededDataset
from overlapkit.input.sampler import ElasticSampler

__all__ = ["DeviceLoader", "ElasticSampler", "SampleSeed", "SeededDataset"]
