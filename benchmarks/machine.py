"""Where a figure was measured: hardware, versions and commit, as every benchmark's JSON carries them."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # a checkout in which nothing was installed is enough

import overlapkit  # noqa: E402

_PACKAGES = (
    "holistictraceanalysis",
    "liger-kernel",
    "matplotlib",
    "msgspec",
    "numpy",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "pillow",
    "rich",
    "safetensors",
    "simplejpeg",
    "spdl",
    "torchdata",
    "triton",
    "typer",
    "xxhash",
)


def hardware() -> dict[str, Any]:
    """CPU, memory and GPUs of this machine; what cannot be read is None."""
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": platform.platform(),
        "gpus": gpus,
        "driver": _driver() if gpus else None,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, CUDA or ROCm, this package and its peers; None for what is not there."""
    found = {name: _installed(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "overlapkit": overlapkit.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **found,
    }


def commit(root: Path = ROOT) -> str:
    """The checkout's commit, with "-dirty" where files differ from it.

    In a copy without .git it is the environment's GIT_COMMIT, else "unknown".
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():  # a copy inside of somebody else's checkout
        return os.environ.get("GIT_COMMIT") or "unknown"
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-dirty" if _git(root, "status", "--porcelain") else head


def environment() -> dict[str, str]:
    """For processes that a benchmark starts: they find the checkout's package, installed or not."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _gpu(index: int) -> dict[str, Any]:
    seen = torch.cuda.get_device_properties(index)
    return {
        "name": seen.name,
        "memory_gib": round(seen.total_memory / 2**30, 1),
        "capability": f"{seen.major}.{seen.minor}",
        "processors": seen.multi_processor_count,
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None


if __name__ == "__main__":
    print(json.dumps({"commit": commit(), "hardware": hardware(), "versions": versions()}))
