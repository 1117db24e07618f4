"""Lanes 1 and 2: the next batch is ready, and on the device, before the step asks for it."""

from typing import TYPE_CHECKING

from overlapkit import _lazily

if TYPE_CHECKING:
    from overlapkit.input.documents import PackedTokens
    from overlapkit.input.loader import DeviceLoader
    from overlapkit.input.mixture import Mixture
    from overlapkit.input.sample_seed import SampleSeed, SeededDataset
    from overlapkit.input.sampler import ElasticSampler
    from overlapkit.input.shard_writer import write_token_shards
    from overlapkit.input.targets import PackedInputs, inputs_and_targets
    from overlapkit.input.tokens import TokenShards

__all__ = [
    "DeviceLoader",
    "ElasticSampler",
    "Mixture",
    "PackedInputs",
    "PackedTokens",
    "SampleSeed",
    "SeededDataset",
    "TokenShards",
    "inputs_and_targets",
    "write_token_shards",
]

__getattr__ = _lazily(  # images, say, need not wait for all that the other sources import
    __name__,
    {
        "DeviceLoader": "loader",
        "ElasticSampler": "sampler",
        "Mixture": "mixture",
        "PackedInputs": "targets",
        "PackedTokens": "documents",
        "SampleSeed": "sample_seed",
        "SeededDataset": "sample_seed",
        "TokenShards": "tokens",
        "inputs_and_targets": "targets",
        "write_token_shards": "shard_writer",
    },
)
