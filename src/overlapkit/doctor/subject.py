"""Whom the doctor examines: a machine, its GPUs, the torch of this process, and its place in a job."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from overlapkit.doctor.gpus import Gpus
from overlapkit.doctor.machine import Machine

EXTRAS = {
    "data": "torchdata",
    "gpu": "pynvml",
    "images": "nvidia.dali",
    "remote": "fsspec",
    "viz": "matplotlib",
}
"""A module of each extra."""

_FSDP = "torch.distributed.fsdp", "FSDPModule"
FEATURES = {
    "own group for reduce-scatter": (*_FSDP, "set_separate_reduce_scatter_group"),
    "symmetric memory": ("torch.distributed._symmetric_memory", "empty"),
    "symmetric memory in FSDP2": (*_FSDP, "set_symm_mem_for_comm"),
    "buckets of differing sizes in DDP": (
        "torch.nn.parallel",
        "DistributedDataParallel",
        "bucket_cap_mb_list",
    ),
    "Triton kernels in torch.compile": ("torch.library", "triton_op"),
    "torchrun --numa-binding": ("torch.numa.binding", "AffinityMode"),
}
"""What later versions of torch brought, and where it is found."""


@dataclass(frozen=True)
class Torch:
    """What torch is and sees.

    Attributes:
        version: Its own.
        cuda, hip: The toolkit that it was built with, or None.
        nccl: Version of NCCL, None where the build has none.
        gloo: Whether it has gloo.
        devices: Compute capability of each CUDA device that this process sees.
        addresses: Their PCI addresses as sysfs writes them; empty where torch does not say.
        trouble: Why the devices could not be asked, or empty.
        architectures: What its own kernels were compiled for ("sm_90").
        mps: Whether it sees an Apple GPU.
        features: For each of FEATURES whether it is there.
        extras: For each of EXTRAS whether it is installed.
        triton: Version of Triton, None where it is not installed.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    nccl: tuple[int, ...] | None = None
    gloo: bool = True
    devices: tuple[tuple[int, int], ...] = ()
    addresses: tuple[str, ...] = ()
    trouble: str = ""
    architectures: tuple[str, ...] = ()
    mps: bool = False
    features: Mapping[str, bool] = field(default_factory=dict)
    extras: Mapping[str, bool] = field(default_factory=dict)
    triton: str | None = None

    @classmethod
    def imported(cls, trouble: str = "") -> "Torch":
        """The torch of this process.

        Args:
            trouble: Why the devices are not to be asked.
        """
        import torch
        import torch.distributed as dist

        nccl = dist.is_available() and dist.is_nccl_available()
        properties: list[Any] = []
        try:
            if not trouble:
                properties = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
        except RuntimeError as error:  # the driver is too old, or wedged
            trouble = " ".join(str(error).split())[:300]
        return cls(
            version=torch.__version__,
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            nccl=tuple(torch.cuda.nccl.version()) if nccl else None,
            gloo=dist.is_available() and dist.is_gloo_available(),
            devices=tuple((one.major, one.minor) for one in properties),
            addresses=tuple(_address(one) for one in properties if hasattr(one, "pci_bus_id")),
            trouble=trouble,
            architectures=tuple(torch.cuda.get_arch_list()) if properties else (),
            mps=torch.backends.mps.is_available(),
            features={name: _is_there(*where) for name, where in FEATURES.items()},
            extras={name: _is_installed(module) for name, module in EXTRAS.items()},
            triton=_version("triton"),
        )


@dataclass(frozen=True)
class Place:
    """This process's place in a job, as torchrun's environment states it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def nodes(self) -> int:
        """Machines of the job, where all hold equally many ranks."""
        return -(-self.world // max(self.local_world, 1))

    @classmethod
    def launched(cls, environ: Mapping[str, str]) -> "Place":
        """From the environment.

        Raises:
            ValueError: A variable holds no number, or they contradict each other.
        """
        names = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
        given = {one: environ.get(name, "").strip() for one, name in names.items()}
        given["local_world"] = environ.get("LOCAL_WORLD_SIZE", "").strip()
        try:
            place = cls(**{name: int(text) for name, text in given.items() if text})
        except ValueError:
            raise ValueError(
                f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE hold {given}: numbers belong there; "
                "start the job with torchrun, or unset them"
            ) from None
        if not 0 <= place.rank < place.world or place.local_world < 1:
            raise ValueError(
                f"RANK={place.rank} of WORLD_SIZE={place.world} (LOCAL_WORLD_SIZE={place.local_world}): "
                "ranks count from 0; start the job with torchrun, or unset them"
            )
        return place


@dataclass(frozen=True)
class Subject:
    """All of it.

    Attributes:
        machine: Files and environment.
        torch: What torch is and sees.
        place: Rank and ranks.
        gpus: The driver's answers, or why there are none.
    """

    machine: Machine
    torch: Torch
    place: Place
    gpus: Gpus | str

    @property
    def on_gpus(self) -> bool:
        """Whether this process computes on GPUs."""
        return bool(self.torch.devices)


def _address(properties: Any) -> str:
    """Function 0: GPUs have no other."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _is_there(module: str, name: str, method: str = "") -> bool:
    """Whether a module has it, with such a method or argument."""
    try:
        found: Any = getattr(import_module(module), name)
        return not method or hasattr(found, method) or method in inspect.signature(found).parameters
    except (ImportError, AttributeError, ValueError):
        return False


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing or broken
        return False


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
