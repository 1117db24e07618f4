# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gradients' norm, and clipping by it: each program leaves one sum of squares and adds up all of them."""

import triton
import triton.language as tl

from overlapkit.launch import kernel
from overlapkit.optim.raw import columns as c
from overlapkit.optim.raw.access import at_address, gradient, store


@triton.jit
def clipped(live_ptr, sums_ptr, norm_ptr, unscale, LARGEST: tl.constexpr):
    """What the gradients are multiplied with. Each program adds the same sums in the same order."""
    n_sums = tl.load(live_ptr + c.N_SUMS)
    max_norm = tl.load(live_ptr + c.MAX_NORM).to(tl.float64, bitcast=True).to(tl.float32)
    total = _nothing((1024,), LARGEST)
    for start in range(0, n_sums, 1024):
        at = start + tl.arange(0, 1024)
        total = _with(total, tl.load(sums_ptr + at, mask=at < n_sums, other=0.0), LARGEST)
    if LARGEST:
        norm = tl.max(total, axis=0).to(tl.float32, bitcast=True) * unscale
    else:
        norm = tl.sqrt_rn(tl.sum(total, axis=0)) * unscale
    if tl.program_id(0) == 0:
        tl.store(norm_ptr, norm)
    share = tl.div_rn(max_norm, norm + 1e-6)  # the same 1e-6 as in torch.nn.utils.clip_grad_norm_
    return tl.where(share > 1.0, 1.0, share) * unscale  # NaN stays NaN


@triton.jit
def _nothing(shape: tl.constexpr, LARGEST: tl.constexpr):
    """Sums start at zero, and so do the bits of the largest number without a sign."""
    return tl.full(shape, 0, tl.int32 if LARGEST else tl.float32)  # all of a function's returns have one type


@triton.jit
def _with(total, x, LARGEST: tl.constexpr):
    """Add fp32 numbers to sums; or to the largest, as bits: these order NaN above all numbers."""
    if LARGEST:
        total = tl.maximum(total, tl.abs(x).to(tl.int32, bitcast=True))
    else:
        total += x
    return total


@kernel
def squares(
    rows_ptr,
    live_ptr,
    sums_ptr,
    KINDS: tl.constexpr,
    N_KINDS: tl.constexpr,
    N_MESHES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Each program's sum of the squares of its gradients, one for each mesh: fp32 (N_MESHES, programs).

    With LARGEST the largest absolute value in place of the sum.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    n_tensors, n_blocks = tl.load(live_ptr + c.N_TENSORS), tl.load(live_ptr + c.N_BLOCKS)
    end = n_blocks * (program + 1) // programs
    for mesh in range(N_MESHES):
        total = _nothing((8, 128), LARGEST)
        block = n_blocks * program // programs
        tensor = tl.load(rows_ptr + (n_tensors + 1) * c.ROW + program)
        while block < end:
            row = rows_ptr + tensor * c.ROW
            first = tl.load(row + c.FIRST_BLOCK)
            stop = tl.minimum(end, tl.load(row + c.ROW + c.FIRST_BLOCK))
            kind, numel = tl.load(row + c.KIND_AT), tl.load(row + c.NUMEL)
            address = tl.load(live_ptr + c.HEAD + tensor)
            if tl.load(row + c.MESH_AT) == mesh:
                for place in tl.static_range(N_KINDS):
                    if kind == place:
                        total = _over(
                            total, address, block - first, stop - first, numel, KINDS[place], LARGEST
                        )
            block = stop
            tensor += 1
        if LARGEST:
            found = tl.max(tl.max(total, axis=1), axis=0).to(tl.float32, bitcast=True)
        else:
            found = tl.sum(tl.sum(total, axis=1), axis=0)
        tl.store(sums_ptr + mesh * programs + program, found)


@triton.jit
def _over(total, address, block, stop, numel, KIND: tl.constexpr, LARGEST: tl.constexpr):
    """Add tiles `block` to `stop` of a gradient to sums of squares."""
    within = tl.arange(0, 8)[:, None] * c.LANES + tl.arange(0, 128)[None, :]
    for at in range(block, stop):
        at = tl.cast(at, tl.int64)
        if (at + 1) * c.TILE <= numel:
            g = gradient(address, at * c.TILE + within, within >= 0, KIND, False)
        else:
            g = gradient(address, at * c.TILE + within, at * c.TILE + within < numel, KIND, True)
        total = _with(total, g if LARGEST else g * g, LARGEST)
    return total


@kernel
def multiply(
    rows_ptr,
    live_ptr,
    sums_ptr,
    norm_ptr,
    KINDS: tl.constexpr,
    N_KINDS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Clip the gradients in place."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    n_tensors, n_blocks = tl.load(live_ptr + c.N_TENSORS), tl.load(live_ptr + c.N_BLOCKS)
    factor = clipped(live_ptr, sums_ptr, norm_ptr, tl.cast(1.0, tl.float32), LARGEST)
    block, end = n_blocks * program // programs, n_blocks * (program + 1) // programs
    tensor = tl.load(rows_ptr + (n_tensors + 1) * c.ROW + program)
    while block < end:
        row = rows_ptr + tensor * c.ROW
        first = tl.load(row + c.FIRST_BLOCK)
        stop = tl.minimum(end, tl.load(row + c.ROW + c.FIRST_BLOCK))
        kind, numel = tl.load(row + c.KIND_AT), tl.load(row + c.NUMEL)
        address = tl.load(live_ptr + c.HEAD + tensor)
        for place in tl.static_range(N_KINDS):
            if kind == place:
                for at in range(block - first, stop - first):
                    at = tl.cast(at, tl.int64)
                    if (at + 1) * c.TILE <= numel:
                        _times(address, factor, at, numel, KINDS[place], False)
                    else:
                        _times(address, factor, at, numel, KINDS[place], True)
        block = stop
        tensor += 1


@triton.jit
def _times(address, factor, block, numel, KIND: tl.constexpr, MASKED: tl.constexpr):
    """One tile of a gradient times the factor, in place."""
    offsets = block * c.TILE + (tl.arange(0, 8)[:, None] * c.LANES + tl.arange(0, 128)[None, :])
    mask = offsets < numel
    g = gradient(address, offsets, mask, KIND, MASKED) * factor
    if (c.GRAD_BF16 & KIND) != 0:
        near = g.to(tl.bfloat16).to(tl.int16, bitcast=True)
        store(at_address(address, tl.int16, KIND) + offsets, near, mask, MASKED)
    elif (c.GRAD_FP16 & KIND) != 0:
        store(at_address(address, tl.float16, KIND) + offsets, g.to(tl.float16), mask, MASKED)
    else:
        store(at_address(address, tl.float32, KIND) + offsets, g, mask, MASKED)
