"""Kernels: does Triton build one here, where does it keep them, and what was left switched on."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from overlapkit.doctor.check import Check
from overlapkit.doctor.line import Layer, Line, gib
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.mounts import mount_of
from overlapkit.doctor.subject import Subject

KERNELS = Layer("kernels")
_TRIAL_S = 90.0
_ROOM = 1 << 30
LEFT_ON = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: nothing overlaps"),
    "HIP_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: nothing overlaps"),
    "AMD_SERIALIZE_KERNEL": ("1 2 3", "kernels wait for each other"),
    "NVIDIA_TF32_OVERRIDE": ("0", "float32 matmuls use no tensor cores, whatever the program says"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "each allocation goes to the driver, and waits for the GPU"),
    "PYTORCH_NO_HIP_MEMORY_CACHING": ("1", "each allocation goes to the driver, and waits for the GPU"),
    "TORCHDYNAMO_DISABLE": ("1", "torch.compile does nothing"),
    "TORCH_COMPILE_DISABLE": ("1", "torch.compile does nothing"),
    "TORCH_COMPILE_DEBUG": ("1", "every compilation writes what it does to disk"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("1", "torch.compile starts from nothing at each start"),
    "TRITON_ALWAYS_COMPILE": ("1", "no kernel is taken from the cache"),
    "TRITON_DEBUG": ("1", "kernels check what they index"),
    "TRITON_INTERPRET": ("1 true yes on y", "Triton kernels run in Python: some thousand times slower"),
    "DISABLE_PTXAS_OPT": ("1", "kernels are not optimised"),
}
"""Variables for finding faults: the values that do harm, and what they cost."""


def trial(environ: dict[str, str]) -> dict[str, Any]:
    """What the trial kernel's process says."""
    with tempfile.TemporaryDirectory(prefix="overlapkit-doctor-") as cache:
        done = subprocess.run(
            [sys.executable, "-m", "overlapkit.doctor.trial_kernel"],
            env={**environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            timeout=_TRIAL_S,
        )
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": last[0][:300]}
    return said


def compiler(subject: Subject, trial: Callable[[dict[str, str]], dict[str, Any]] = trial) -> Iterator[Line]:
    """Whether Triton builds a kernel here, from nothing."""
    if subject.torch.triton is None:
        if subject.on_gpus:
            yield KERNELS.weak(
                "compiler",
                "Triton is not installed",
                "overlapkit's kernels and torch.compile raise an error on CUDA tensors",
                "install the triton that your build of torch names: pip show torch",
            )
        else:
            yield KERNELS.absent("compiler", "Triton is not installed: kernels run as plain torch on the CPU")
        return
    said = trial(subject.machine.environ)
    if "error" in said:
        yield KERNELS.weak(
            "compiler",
            f"Triton {subject.torch.triton}: {said['error']}",
            "overlapkit's kernels and torch.compile fail at their first call",
            "gcc and Python's headers in the image; no TRITON_PTXAS_PATH; torch and triton of one release",
        )
    else:
        what = (
            f"ran on {said['ran']}" if "ran" in said else f"built for {said['built']} (no GPU to run it on)"
        )
        yield KERNELS.ok(
            "compiler", f"Triton {subject.torch.triton}: a kernel {what} in {said['seconds']:.1f} s"
        )


def c_compiler(subject: Subject) -> Iterator[Line]:
    """Triton's launchers and inductor's CPU code need one."""
    asked = subject.machine.environ.get("CC")
    path = subject.machine.environ.get("PATH")
    found = [name for name in ([asked] if asked else ["gcc", "clang", "cc"]) if shutil.which(name, path=path)]
    if found:
        yield KERNELS.ok("C compiler", found[0])
    elif subject.on_gpus or asked:
        yield KERNELS.weak(
            "C compiler",
            f"CC={asked} is not there" if asked else "none of gcc, clang, cc",
            "Triton cannot build what launches its kernels",
            "install gcc, or let CC name a compiler",
        )
    else:
        yield KERNELS.absent("C compiler", "none: torch.compile for the CPU would need one")


def assembler(subject: Subject) -> Iterator[Line]:
    """Another ptxas than Triton's own."""
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        path = subject.machine.environ.get(name)
        if path and not os.access(path, os.X_OK):
            yield KERNELS.weak(
                "ptxas", f"{name}={path} is no program", "every kernel fails to build", f"unset {name}"
            )
        elif path:
            yield KERNELS.ok("ptxas", f"{name}={path}")


def caches(subject: Subject) -> Iterator[Line]:
    """Where built kernels are kept: writable, on a disk of this machine, with room."""
    env = subject.machine.environ
    home = env.get("TRITON_HOME") or env.get("HOME") or str(Path.home())
    folders = {"Triton's cache": env.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache"}
    if "TORCHINDUCTOR_CACHE_DIR" in env:
        folders["inductor's cache"] = env["TORCHINDUCTOR_CACHE_DIR"]
    for name, folder in folders.items():
        yield _cache(subject, name, os.path.abspath(folder))


def left_on(subject: Subject) -> Iterator[Line]:
    """What is meant for finding faults, and costs speed."""
    bad = False
    for name, (values, cost) in LEFT_ON.items():
        value = subject.machine.environ.get(name, "")
        if value and value.strip().lower() in values.split():
            bad = True
            yield KERNELS.weak("left on", f"{name}={value}", cost, f"unset {name}")
    if not bad:
        yield KERNELS.ok("left on", "no variable that slows kernels down")


def _cache(subject: Subject, name: str, folder: str) -> Line:
    try:
        mount = mount_of(subject.machine, folder)
    except Unreadable:  # not Linux
        mount = None
    if mount is not None and mount.is_network:
        return KERNELS.weak(
            name,
            f"{folder} on {mount}",
            "each start of each rank reads small files over the network, and all ranks wait for the slowest",
            "put it on a disk of the machine: TRITON_CACHE_DIR=/tmp/triton",
        )
    above = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if not os.access(above, os.W_OK):
        return KERNELS.weak(
            name,
            f"{folder} is not writable",
            "kernels are built anew at each start, or not at all",
            "TRITON_CACHE_DIR=/tmp/triton, or make the folder writable",
        )
    free = shutil.disk_usage(above).free
    if free < _ROOM:
        return KERNELS.weak(
            name, f"{folder}: {gib(free)} free", "builds fail when the disk is full", "make room on it"
        )
    return KERNELS.ok(name, f"{folder}{f' ({mount.kind})' if mount else ''}, writable, {gib(free)} free")


CHECKS = (
    Check(KERNELS, "compiler", compiler, seconds=_TRIAL_S + 10),
    Check(KERNELS, "C compiler", c_compiler),
    Check(KERNELS, "ptxas", assembler),
    Check(KERNELS, "caches", caches),
    Check(KERNELS, "left on", left_on, shared=False),
)
