"""Parts for PyTorch training loops whose six lanes should run at once, and a meter of what is exposed.

Names resolve on first use, so that importing the package imports neither Triton nor any part of
torch that `import torch` leaves alone, starts no thread and touches no device.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapkit import kernels, optim, parallel, plan
    from overlapkit.checkpoint import Checkpointer
    from overlapkit.input import DeviceLoader, ElasticSampler, Mixture, TokenShards, write_token_shards
    from overlapkit.measure import StepMeter, StepReport, collect_garbage
    from overlapkit.optim import AdamW
    from overlapkit.parallel import accumulate, replicate, shard

__version__ = "0.1.0"


def _check_torch() -> None:
    """An old torch is one error here, not a name that is missing somewhere; torch itself is not imported."""
    try:
        found = str(sys.modules["torch"].__version__ if "torch" in sys.modules else version("torch"))
    except PackageNotFoundError:  # built in place: it says itself what it cannot do
        return
    if tuple(map(int, found.split(".")[:2])) < (2, 11):
        raise ImportError(
            f"overlapkit {__version__} needs torch 2.11 or newer, and this is torch {found}: "
            "pip install --upgrade torch, or give overlapkit an environment of its own"
        )


_check_torch()

__all__ = [
    "AdamW",
    "Checkpointer",
    "DeviceLoader",
    "ElasticSampler",
    "Mixture",
    "StepMeter",
    "StepReport",
    "TokenShards",
    "accumulate",
    "collect_garbage",
    "kernels",
    "optim",
    "parallel",
    "plan",
    "replicate",
    "shard",
    "write_token_shards",
]


def _lazily(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are first used.

    Args:
        package: Its full name.
        homes: For each name the module of the package that defines it, or that it is.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        value = module if name == homes[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve


__getattr__ = _lazily(
    __name__,
    {
        "AdamW": "optim",
        "Checkpointer": "checkpoint",
        "DeviceLoader": "input",
        "ElasticSampler": "input",
        "Mixture": "input",
        "StepMeter": "measure",
        "StepReport": "measure",
        "TokenShards": "input",
        "accumulate": "parallel",
        "collect_garbage": "measure",
        "kernels": "kernels",
        "optim": "optim",
        "parallel": "parallel",
        "plan": "plan",
        "replicate": "parallel",
        "shard": "parallel",
        "write_token_shards": "input",
    },
)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
