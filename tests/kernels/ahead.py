"""Launches recorded instead of run, and compiled for GPUs that are not here."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    options: dict[str, int]
    constants: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on: launches that share it share their code."""
        names = self.kernel.compiled.arg_names
        kinds = [
            (self._type(value), self._divisible(value)) for _, value in zip(names, self.args, strict=False)
        ]
        return self.kernel, *kinds, *self.options.items(), *self.constants.items()

    def compile(self, capability: int) -> Any:
        """The triton.compiler.CompiledKernel for sm_<capability>, with what a real launch specialises on.

        Pointers are taken as aligned; integers divisible by 16 are marked so, and a 1 becomes a constant.
        """
        key = (capability, *self.key)
        if key not in _compiled:
            _compiled[key] = self._compile(capability)
        return _compiled[key]

    def _compile(self, capability: int) -> Any:
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
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=self.options)

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

    def record(
        self: Kernel, grid: int, *args: Any, warps: int, resident: bool = False, **constants: Any
    ) -> None:
        launches.append(Launch(self, grid, args, launch.options(warps, resident), constants))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", record)
        yield launches


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
