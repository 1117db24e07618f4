"""Triton's interpreter, on inside a block: kernels then run on CPU tensors, with NumPy, in this process.

Outside of the block nothing is left of it, so that one pytest process tests the plain-torch path, the
interpreted kernels and (on a GPU) the compiled ones. Three things of Triton itself need help meanwhile:

* `tl.sum` and its like, and device functions of raw kernels, were decorated when Triton was imported
  without the interpreter: they are exchanged for their interpreted form, and Triton's own patches of
  triton.language, some of which it never takes back, are taken back.
* The interpreter's fp32 -> bf16 truncates, where hardware rounds to nearest even (Triton 3.7).
* Bounds of loops are arrays of one element, which NumPy 2.4 no longer takes for an int (Triton 3.6).

Every address that a kernel touches is checked on the way (tests/kernels/guard.py).
"""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from overlapkit import launch
from tests.kernels.guard import guarded


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Run kernels in Triton's interpreter inside the block."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as engine
    from triton.runtime.jit import JITFunction

    ours = _raw_modules()
    spaces: list[Any] = [tl, tl.core, tl.math, tl.random, tl.standard, engine, launch, *ours]
    spaces += [tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
    before = [(space, dict(vars(space))) for space in spaces]
    was_on = launch._interpret
    with triton.knobs.runtime.scope(), np.errstate(all="ignore"):
        triton.knobs.runtime.interpret = True
        if not was_on:
            for space in (tl.random, tl.standard, tl, *ours):
                for name, value in list(vars(space).items()):
                    if isinstance(value, JITFunction):
                        setattr(space, name, engine.InterpretedFunction(value.fn))
        engine._convert_float = _rounding(engine._convert_float)
        engine._patch_lang_tensor = _indexing(engine._patch_lang_tensor)
        launch._interpret = True
        try:
            with guarded():
                yield
        finally:
            for space, names in before:
                for name in set(vars(space)) - set(names):
                    if not (name.startswith("__") or isinstance(space, ModuleType)):
                        delattr(space, name)
                for name, value in names.items():
                    if vars(space).get(name) is not value:
                        setattr(space, name, value)


def _raw_modules() -> list[ModuleType]:
    """All of them, imported now: inside the block Triton would decorate them for the interpreter only."""
    files = sorted(Path(launch.__file__).parent.glob("*/raw/[!_]*.py"))
    return [import_module(f"overlapkit.{file.parent.parent.name}.raw.{file.stem}") for file in files]


def _rounding(convert: Any) -> Any:
    """Wrap the interpreter's `_convert_float` so that fp32 -> bf16 rounds to nearest even."""
    import triton.language as tl

    def convert_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return rounded.view(torch.uint16).numpy().reshape(data.shape)
        return convert(data, source, target, mode)

    return convert_float


def _indexing(patch: Any) -> Any:
    """Wrap the interpreter's `_patch_lang_tensor` so that a tensor of one element is an index."""

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch_lang_tensor
