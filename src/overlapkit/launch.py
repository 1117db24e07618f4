"""How every Triton kernel is launched: whether a tensor runs through Triton, on which device, in which tiles.

Imports no Triton by itself: the module of a raw kernel does, and is imported when a tensor first needs it.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels compute with, always in fp32. Other dtypes take the plain-torch form on every device."""

_TRITON_FOUND = find_spec("triton") is not None
# Triton reads the variable when a kernel is decorated. A Kernel has both forms, and this flag chooses.
_interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def through_triton(x: Tensor) -> bool:
    """Whether a function of `x` runs its Triton kernel; if not, it runs its plain-torch form.

    CUDA tensors do, but no nested ones, and not inside torch.func's transforms. CPU tensors do in Triton's
    interpreter only, that is with TRITON_INTERPRET=1 in the environment: slow, and meant for testing.

    Raises:
        ImportError: A kernel is due and Triton is not installed.
    """
    if not (x.is_cuda or _interpret) or x.dtype not in DTYPES or x.is_nested or transformed():
        return False
    if not _TRITON_FOUND:
        raise ImportError(
            f"a tensor on {x.device} runs through Triton, which is not installed: install the triton that "
            "your build of torch names (CUDA builds bring it), or move the tensor to the CPU"
        )
    return True


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is being computed.

    Operators of torch.library have no rules for them: some end deep inside torch, and a forward-mode
    derivative would silently be zero.
    """
    if torch.compiler.is_compiling():  # which has its own way with transforms
        return False
    return (
        torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
    )


class Kernel:
    """A Triton kernel in both its forms, each built on first use: compiled, and interpreted.

    Triton's own decorator settles for one of them when it is applied. With both, one process can train
    on a GPU and test its kernels on the CPU.
    """

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    @cached_property
    def compiled(self) -> Any:
        """The triton.JITFunction."""
        from triton.runtime.jit import JITFunction

        return JITFunction(self.fn)

    @cached_property
    def interpreted(self) -> Any:
        """The form that Triton's interpreter runs, with NumPy on the CPU."""
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction(self.fn)

    def launch(self, grid: int, *args: Any, warps: int, resident: int = 0, **constants: Any) -> None:
        """Launch `grid` programs on the device of the first argument, whichever device is current.

        Args:
            grid: Number of programs, on axis 0: the other axes end at 65,535. With 0 nothing is launched.
            args: The kernel's arguments in order; the first is a tensor.
            warps: Warps a program.
            resident: How many programs a processor must have registers for; with 1 a program may use all that
                one can have, since the grid has only a few a processor, or each holds much. With 0 ptxas
                may spill a value or two, for an occupancy that such a grid never reaches or for one more.
            constants: Its constexpr arguments.
        """
        if grid == 0:
            return
        if _interpret:
            self.interpreted[(grid,)](*args, **constants)
            return
        with torch.cuda.device(args[0].device):
            self.compiled[(grid,)](*args, **options(warps, resident), **constants)


def options(warps: int, resident: int, *, amd: bool = torch.version.hip is not None) -> dict[str, int]:
    """Triton's compile options for a launch."""
    if amd:  # its warps are twice as wide, and a program has at most 1,024 threads; there is no cap to give
        return {"num_warps": min(warps, 16)}
    if not resident:
        return {"num_warps": warps}
    each = 65_536 // (32 * warps * resident)  # a processor deals them out by eights
    return {"num_warps": warps, "maxnreg": min(255, each // 8 * 8)}


def kernel(fn: Callable[..., None]) -> Kernel:
    """Decorate a raw kernel. Offsets of rows are int64 in it: one product a row, and no limit to pass."""
    return Kernel(fn)


def as_rows(x: Tensor) -> Tensor:
    """`x` (..., D) as (N, D) with dense rows: a view wherever strides allow, else a contiguous copy."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


class Tile(NamedTuple):
    """What one program works on at a time: `rows` x `cols` elements, powers of two, in `warps` warps."""

    rows: int
    cols: int
    warps: int


def tile(n_rows: int, n_cols: int, *, elements: int, whole_rows: bool = False) -> Tile:
    """Choose a tile of about `elements` elements for a (n_rows, n_cols) tensor.

    Args:
        n_rows: Rows of the tensor.
        n_cols: Columns of the tensor.
        elements: Wanted size, a power of two.
        whole_rows: A tile must span the row, however wide.
    """
    larger, more_warps = getattr(_chosen, "choice", BY_RULE)
    elements = int(elements * 2.0**larger)
    cols = next_power_of_2(n_cols) if whole_rows else min(next_power_of_2(n_cols), elements)
    rows = max(1, min(elements // cols, next_power_of_2(n_rows), 16))
    warps = min(max(int(rows * cols // 512 * 2.0**more_warps), 1), 16)
    return Tile(rows, cols, warps)


class Choice(NamedTuple):
    """How a tuned tile differs from the rule's: powers of two on its elements and on its warps."""

    elements: int
    warps: int


BY_RULE = Choice(0, 0)
_chosen = threading.local()  # backward runs in threads of autograd's, one for each device


@contextlib.contextmanager
def choosing(choice: Choice) -> Iterator[None]:
    """Let `tile` follow a choice in this thread."""
    before, _chosen.choice = getattr(_chosen, "choice", BY_RULE), choice
    try:
        yield
    finally:
        _chosen.choice = before


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; for the interpreter 132, an H100's."""
    return _multiprocessors(device) if device.type == "cuda" else 132


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
