"""Launches recorded instead of run, and compiled for GPUs that are not here."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from overlapkit import launch
from overlapkit.launch import Kernel

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


_compiled: dict[tuple[Any, ...], Any] = {}


@dataclass
class Launch:
    """One launch as launch.py made it, tile sizes and warps included."""

    kernel: Kernel
    grid: int
    args: tuple[Any, ...]
    warps: int
    resident: int
    constants: dict[str, Any]
    by_rule: bool
    """Whether launch.tile's own rule chose it, and not one of autotune's candidates."""

    @property
    def name(self) -> str:
        """As in `norm_forward._forward`."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on: launches that share it share their code."""
        names = self.kernel.compiled.arg_names
        kinds = [
            (self._type(value), self._divisible(value)) for _, value in zip(names, self.args, strict=False)
        ]
        return self.kernel, *kinds, self.warps, self.resident, *self.constants.items()

    @property
    def configuration(self) -> dict[str, Any]:
        """What launch code chose: the kernel, dtypes, warps and constants, whatever the numbers are."""
        names = self.kernel.compiled.arg_names
        types = {
            name: _TYPES[value.dtype]
            for name, value in zip(names, self.args, strict=False)
            if isinstance(value, torch.Tensor)
        }
        return {"kernel": self.name, "warps": self.warps, "resident": self.resident} | types | self.constants

    def compile(self, architecture: int | str) -> Any:
        """The triton.compiler.CompiledKernel for sm_<architecture> or gfx..., specialised as a launch does.

        Pointers are taken as aligned; integers divisible by 16 are marked so, and a 1 becomes a constant.
        """
        key = (architecture, *self.key)
        if key not in _compiled:
            _compiled[key] = self.compile_anew(architecture)
        return _compiled[key]

    def compile_anew(self, architecture: int | str) -> Any:
        """`compile`, which keeps nothing in this process."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        fn = self.kernel.compiled
        signature, constants, attributes = {}, {}, {}
        for index, (name, value) in enumerate(zip(fn.arg_names, self.args, strict=False)):
            signature[name] = self._type(value)
            if self._divisible(value):
                attributes[(index,)] = [["tt.divisibility", 16]]
            if signature[name] == "constexpr":
                constants[(index,)] = value
        for name, value in self.constants.items():
            signature[name] = "constexpr"
            constants[(fn.arg_names.index(name),)] = value
        source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
        amd = isinstance(architecture, str)
        target = GPUTarget("hip", architecture, 64) if amd else GPUTarget("cuda", architecture, 32)
        options = launch.options(self.warps, self.resident, amd=amd)
        return triton.compile(source, target=target, options=options)

    @staticmethod
    def _divisible(value: Any) -> bool:
        return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)

    @staticmethod
    def _type(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return "*" + _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value == 1:
            return "constexpr"
        return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record every launch in the block and run none. Meta tensors will do, so any size costs nothing."""
    launches: list[Launch] = []

    def record(self: Kernel, grid: int, *args: Any, warps: int, resident: int = 0, **constants: Any) -> None:
        by_rule = getattr(launch._chosen, "choice", launch.BY_RULE) == launch.BY_RULE
        launches.append(Launch(self, grid, args, warps, resident, constants, by_rule))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", record)
        yield launches


class Resources(NamedTuple):
    """What a program needs of a processor.

    Attributes:
        registers: A thread's.
        spills: Bytes of a thread's memory for what did not fit into them: stack and local memory, or scratch
            on AMD (whose scalar registers spill into vector registers: those are counted there).
        shared: Bytes of shared memory.
    """

    registers: int
    spills: int
    shared: int


SHARED_AT_MOST = {80: 166_912, 90: 232_448, 100: 232_448, "gfx942": 65_536}
"""Bytes of shared memory that a program can have: the CUDA programming guide's table of compute capabilities,
and the CDNA 3 instruction set's local data share. Its keys are what is compiled for."""


def needed(compiled: Any) -> Resources:
    """Read from a compiled kernel's binary, or from the metadata in AMD's assembly."""
    if "cubin" in compiled.asm:
        used = resources(compiled.asm["cubin"])
        return Resources(used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared)
    said = {k: int(v) for k, v in re.findall(r"^\s+\.(\w+):\s+(\d+)$", compiled.asm["amdgcn"], re.MULTILINE)}
    return Resources(said["vgpr_count"], said["private_segment_fixed_size"], compiled.metadata.shared)


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, ... of a compiled kernel, by NVIDIA's cuobjdump: spills show in STACK and LOCAL."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
