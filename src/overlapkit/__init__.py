"""Parts for PyTorch training loops whose six lanes should run at once, and a meter of what is exposed.

Names resolve on first use, so that importing the package imports neither Triton nor any part of
torch that `import torch` leaves alone, starts no thread and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapkit import kernels
    from overlapkit.checkpoint import Checkpointer
    from overlapkit.input import DeviceLoader, ElasticSampler, Mixture, TokenShards, write_token_shards
    from overlapkit.measure import StepMeter, StepReport
    from overlapkit.optim import AdamW
    from overlapkit.parallel import replicate, shard

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "Checkpointer",
    "DeviceLoader",
    "ElasticSampler",
    "Mixture",
    "StepMeter",
    "StepReport",
    "TokenShards",
    "kernels",
    "replicate",
    "shard",
    "write_token_shards",
]

_HOME = {
    "AdamW": "optim",
    "Checkpointer": "checkpoint",
    "DeviceLoader": "input",
    "ElasticSampler": "input",
    "Mixture": "input",
    "StepMeter": "measure",
    "StepReport": "measure",
    "TokenShards": "input",
    "replicate": "parallel",
    "shard": "parallel",
    "write_token_shards": "input",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name == "kernels":
        return import_module(f"{__name__}.kernels")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
