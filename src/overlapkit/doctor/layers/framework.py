"""torch and what came with it: does it fit the driver and the GPU, and which features are there."""

import re
import sys
from collections.abc import Iterator

from overlapkit.doctor.check import Check
from overlapkit.doctor.line import Layer, Line, joined
from overlapkit.doctor.subject import EXTRAS, Subject

FRAMEWORK = Layer("framework")
OLDEST = 2, 11


def versions(subject: Subject) -> Iterator[Line]:
    """Of Python and torch."""
    import overlapkit

    torch = subject.torch
    built = (
        f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "for CPUs, without CUDA"
    )
    python = ".".join(map(str, sys.version_info[:3]))
    saw = f"torch {torch.version} ({built}), Python {python}, overlapkit {overlapkit.__version__}"
    found = re.match(r"(\d+)\.(\d+)", torch.version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        yield FRAMEWORK.weak(
            "versions",
            saw,
            f"overlapkit needs torch {OLDEST[0]}.{OLDEST[1]} or newer: parts of it raise errors",
            "upgrade torch (pytorch.org)",
        )
    else:
        yield FRAMEWORK.ok("versions", saw)


def driver(subject: Subject) -> Iterator[Line]:
    """Whether the driver runs this CUDA, and this build knows the GPU."""
    torch, gpus = subject.torch, subject.gpus
    if torch.cuda is None:
        return
    newest = None if isinstance(gpus, str) else gpus.cuda
    built = tuple(int(part) for part in torch.cuda.split(".")[:2])
    if newest is not None and newest[0] < built[0]:
        yield FRAMEWORK.weak(
            "driver",
            f"the driver runs CUDA {newest[0]}.{newest[1]}, torch was built with {torch.cuda}",
            "CUDA does not start, or needs the compatibility package",
            "upgrade the driver, or install the build of torch for the older CUDA",
        )
        return
    strange = [
        f"{major}.{minor}"
        for major, minor in dict.fromkeys(torch.devices)
        if torch.architectures and not _covered(major, minor, torch.architectures)
    ]
    if strange:
        yield FRAMEWORK.weak(
            "driver",
            f"torch has no kernels for capability {joined(strange)}: {joined(torch.architectures, 9)}",
            "kernels are missing, or are built anew at the first start",
            "install a build of torch that names this GPU's architecture",
        )
    elif torch.devices:
        yield FRAMEWORK.ok("driver", "driver, torch and GPUs fit each other")


def features(subject: Subject) -> Iterator[Line]:
    """What newer versions of torch brought."""
    there = [name for name, found in subject.torch.features.items() if found]
    missing = [name for name, found in subject.torch.features.items() if not found]
    yield FRAMEWORK.ok("features", joined(there, 99) or "none of the newer ones")
    if missing:
        yield FRAMEWORK.absent(
            "features",
            f"not in torch {subject.torch.version}: {joined(missing, 99)}; asking for one is an error",
        )


def extras(subject: Subject) -> Iterator[Line]:
    """Optional packages."""
    missing = [name for name, found in subject.torch.extras.items() if not found]
    there = [name for name, found in subject.torch.extras.items() if found]
    if "gpu" in missing and subject.torch.cuda and subject.on_gpus:
        yield FRAMEWORK.weak(
            "extras",
            "nvidia-ml-py is not installed (extra gpu)",
            "NVLink, clocks, memory errors and other processes cannot be seen",
            "pip install 'overlapkit[gpu]'",
        )
    if there:
        yield FRAMEWORK.ok("extras", f"installed: {joined(sorted(there))}")
    if missing:
        names = ", ".join(f"{name} ({EXTRAS[name]})" for name in sorted(missing) if name in EXTRAS)
        yield FRAMEWORK.absent("extras", f"not installed: {names}; what needs one says so")


def _covered(major: int, minor: int, architectures: tuple[str, ...]) -> bool:
    """Code for sm_XY runs on that generation's GPUs from that model on, PTX of compute_XY on all later."""
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if found is None:  # AMD's, gfx942
            return True
        has = int(found[2]), int(found[3])
        if has <= (major, minor) and (found[1] == "compute" or has[0] == major):
            return True
    return False


CHECKS = (
    Check(FRAMEWORK, "versions", versions, shared=False),
    Check(FRAMEWORK, "driver", driver),
    Check(FRAMEWORK, "features", features),
    Check(FRAMEWORK, "extras", extras),
)
