# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How the kernels reach memory through the table's addresses: aligned, with a mask, gradients in fp32."""

import triton
import triton.language as tl

from overlapkit.optim.raw import columns as c
from overlapkit.optim.raw.rounding import widen


@triton.jit
def at_address(address, dtype: tl.constexpr, KIND: tl.constexpr):
    """A pointer. The table is built such that aligned kinds have aligned addresses only."""
    pointer = address.to(tl.pointer_type(dtype))
    if (c.ALIGNED & KIND) != 0:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(pointers, mask, MASKED: tl.constexpr):
    """With a mask only where a tile is not full: it would cut accesses of 128 bits."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    return tl.load(pointers)


@triton.jit
def store(pointers, value, mask, MASKED: tl.constexpr):
    """As `load`."""
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


@triton.jit
def gradient(address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    """A tile of a gradient in fp32."""
    if (c.GRAD_BF16 & KIND) != 0:
        return widen(load(at_address(address, tl.int16, KIND) + offsets, mask, MASKED))
    if (c.GRAD_FP16 & KIND) != 0:
        return load(at_address(address, tl.float16, KIND) + offsets, mask, MASKED).to(tl.float32)
    return load(at_address(address, tl.float32, KIND) + offsets, mask, MASKED)
