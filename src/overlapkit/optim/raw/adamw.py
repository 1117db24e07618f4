# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""AdamW over every tensor of a table in one launch.

Programs get equally many tiles, one after the other through all tensors. Each reads what it must know of a
tensor once. Everything is computed in fp32, the few numbers that a whole tensor shares in fp64.
"""

import triton
import triton.language as tl

from overlapkit.launch import kernel
from overlapkit.optim.raw import columns as c
from overlapkit.optim.raw.access import at_address, gradient, load, store
from overlapkit.optim.raw.clipping import clipped
from overlapkit.optim.raw.rounding import (
    join,
    mix,
    random_bits,
    signed_code,
    signed_value,
    split,
    stochastic,
    unsigned_code,
    unsigned_value,
    widen,
)


@triton.jit
def _number(group_ptr, PLACE: tl.constexpr, POINTER: tl.constexpr):
    """A hyperparameter in fp64: from the table, or from the tensor that the table points to."""
    value = tl.load(group_ptr + PLACE).to(tl.float64, bitcast=True)
    address = tl.load(group_ptr + POINTER)
    if address != 0:
        value = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return value


@triton.jit
def _read_weights(addresses, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Parameters in fp32, together with what is kept of them elsewhere."""
    if (c.HALF_PARAM & KIND) == 0:
        return load(at_address(addresses[0], tl.float32, KIND) + offsets, mask, MASKED)
    half = load(at_address(addresses[0], tl.int16, KIND) + offsets, mask, MASKED)
    if (c.MASTER & KIND) != 0:
        return join(half, load(at_address(addresses[4], tl.int16, KIND) + offsets, mask, MASKED))
    if (c.KAHAN & KIND) != 0:
        return widen(half) + widen(load(at_address(addresses[4], tl.int16, KIND) + offsets, mask, MASKED))
    return widen(half)


@triton.jit
def _write_weights(w, bits, addresses, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    if (c.HALF_PARAM & KIND) == 0:
        store(at_address(addresses[0], tl.float32, KIND) + offsets, w, mask, MASKED)
    else:
        if (c.ROUNDED & KIND) != 0:
            high, low = stochastic(w, bits & 0xFFFF), 0
        elif (c.MASTER & KIND) != 0:
            high, low = split(w)
        else:
            high = w.to(tl.bfloat16).to(tl.int16, bitcast=True)
            low = (w - widen(high)).to(tl.bfloat16).to(tl.int16, bitcast=True)
        store(at_address(addresses[0], tl.int16, KIND) + offsets, high, mask, MASKED)
        if (c.ROUNDED & KIND) == 0:
            store(at_address(addresses[4], tl.int16, KIND) + offsets, low, mask, MASKED)


@triton.jit
def _read_moment(address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    """One that is not int8, in fp32."""
    if (c.BF16 & KIND) != 0:
        return widen(load(at_address(address, tl.int16, KIND) + offsets, mask, MASKED))
    return load(at_address(address, tl.float32, KIND) + offsets, mask, MASKED)


@triton.jit
def _write_moment(x, random, address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    if (c.BF16 & KIND) != 0:
        store(at_address(address, tl.int16, KIND) + offsets, stochastic(x, random), mask, MASKED)
    else:
        store(at_address(address, tl.float32, KIND) + offsets, x, mask, MASKED)


@triton.jit
def _read_int8(addresses, offsets, mask, groups, there, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Both moments from their codes and the scales of their blocks."""
    scale = tl.load(at_address(addresses[5], tl.float32, KIND) + groups, mask=there, other=0.0)
    scale_sq = tl.load(at_address(addresses[6], tl.float32, KIND) + groups, mask=there, other=0.0)
    m = signed_value(load(at_address(addresses[1], tl.int8, KIND) + offsets, mask, MASKED), scale)
    v = unsigned_value(load(at_address(addresses[2], tl.uint8, KIND) + offsets, mask, MASKED), scale_sq)
    return m, v


@triton.jit
def _write_int8(
    m, v, bits, addresses, offsets, mask, groups, there, KIND: tl.constexpr, MASKED: tl.constexpr
):
    """A number that is none spoils its whole block's scale, and so is not lost."""
    scale = tl.max(tl.abs(m), axis=1, keep_dims=True) + tl.sum(m * 0.0, axis=1, keep_dims=True)
    scale_sq = tl.max(v, axis=1, keep_dims=True) + tl.sum(v * 0.0, axis=1, keep_dims=True)
    code, code_sq = (
        signed_code(m, scale, bits >> 16),
        unsigned_code(v, scale_sq, mix(bits ^ 0x85EBCA6B) >> 16),
    )
    store(at_address(addresses[1], tl.int8, KIND) + offsets, code, mask, MASKED)
    store(at_address(addresses[2], tl.uint8, KIND) + offsets, code_sq, mask, MASKED)
    tl.store(at_address(addresses[5], tl.float32, KIND) + groups, scale, mask=there)
    tl.store(at_address(addresses[6], tl.float32, KIND) + groups, scale_sq, mask=there)


@triton.jit
def _places(shape, block, KIND: tl.constexpr):
    """A tile's local offsets and whether they are there; its rows' int8 blocks, and whether those are."""
    numel, n_cols, n_groups = shape
    groups = block * 8 + tl.arange(0, 8)[:, None]
    if (c.INT8 & KIND) != 0 and (c.WHOLE_ROWS & KIND) == 0:
        cols = (groups % n_groups) * c.LANES + tl.arange(0, 128)[None, :]
        offsets = groups // n_groups * n_cols + cols
        mask = (offsets < numel) & (cols < n_cols)
    else:
        offsets = block * c.TILE + (tl.arange(0, 8)[:, None] * c.LANES + tl.arange(0, 128)[None, :])
        mask = offsets < numel
    return offsets, mask, groups, groups < n_groups * (numel // n_cols)


@triton.jit
def _random(key, index, offsets, block, KIND: tl.constexpr):
    """Random bits for the global indices of local offsets."""
    base, inner, outer = index
    within = tl.arange(0, 8)[:, None] * c.LANES + tl.arange(0, 128)[None, :]
    if (c.SPLIT & KIND) != 0 or ((c.INT8 & KIND) != 0 and (c.WHOLE_ROWS & KIND) == 0):
        return random_bits(key, base + offsets // inner * outer + offsets % inner, within * 0)
    return random_bits(key, base + block * c.TILE, within)


@triton.jit
def _tile(
    addresses, grad_address, shape, index, numbers, key, block, KIND: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of one tensor. Operations and their order are those of torch's own loop."""
    factor, decay, keep1, beta2, keep2, step_size, root2, eps = numbers
    offsets, mask, groups, there = _places(shape, block, KIND)
    w = _read_weights(addresses, offsets, mask, KIND, MASKED)
    g = gradient(grad_address, offsets, mask, KIND, MASKED) * factor
    if (c.INT8 & KIND) != 0:
        m, v = _read_int8(addresses, offsets, mask, groups, there, KIND, MASKED)
    else:
        m = _read_moment(addresses[1], offsets, mask, KIND, MASKED)
        v = _read_moment(addresses[2], offsets, mask, KIND, MASKED)
    w = w * decay
    m = m + (g - m) * keep1
    v = v * beta2 + g * keep2 * g
    largest = v
    if (c.AMSGRAD & KIND) != 0:
        largest = tl.maximum(_read_moment(addresses[3], offsets, mask, KIND, MASKED), v)
    w = w - m / (tl.sqrt(largest) / root2 + eps) * step_size
    bits = tl.full((8, 128), 0, tl.uint32)
    if ((c.ROUNDED | c.BF16 | c.INT8) & KIND) != 0:
        bits = _random(key, index, offsets, block, KIND)
    _write_weights(w, bits, addresses, offsets, mask, KIND, MASKED)
    if (c.INT8 & KIND) != 0:
        _write_int8(m, v, bits, addresses, offsets, mask, groups, there, KIND, MASKED)
    else:
        other = mix(bits ^ 0x85EBCA6B)
        _write_moment(m, bits >> 16, addresses[1], offsets, mask, KIND, MASKED)
        _write_moment(v, other >> 16, addresses[2], offsets, mask, KIND, MASKED)
        if (c.AMSGRAD & KIND) != 0:
            _write_moment(largest, other & 0xFFFF, addresses[3], offsets, mask, KIND, MASKED)


@triton.jit
def _numbers(group_ptr, step, factor):
    """What all elements of a tensor share in a step, in fp32 but computed in fp64.

    In fp32 1 - beta2 ** step would lose four digits in the first steps.
    """
    beta1, beta2 = _number(group_ptr, c.BETA1, c.BETA1_AT), _number(group_ptr, c.BETA2, c.BETA2_AT)
    lr = _number(group_ptr, c.LR, c.LR_AT)
    eps = tl.load(group_ptr + c.EPS).to(tl.float64, bitcast=True)
    weight_decay = tl.load(group_ptr + c.WEIGHT_DECAY).to(tl.float64, bitcast=True)
    sign = tl.load(group_ptr + c.SIGN).to(tl.float64, bitcast=True)
    times = step.to(tl.float64)
    correction1 = 1.0 - tl.exp(times * tl.log(beta1))
    root2 = tl.sqrt(1.0 - tl.exp(times * tl.log(beta2)))
    return (
        factor * sign.to(tl.float32),
        (1.0 - lr * weight_decay).to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        (lr / correction1).to(tl.float32),
        root2.to(tl.float32),
        eps.to(tl.float32),
    )


@triton.jit
def _tiles(row, grad_address, group_ptr, block, stop, factor, KIND: tl.constexpr):
    """Tiles `block` to `stop` of one tensor."""
    step = tl.load(tl.load(row + c.STEP).to(tl.pointer_type(tl.float32))) + 1.0
    numbers = _numbers(group_ptr, step, factor)
    key = mix(tl.load(row + c.KEY).to(tl.uint32) ^ mix(step.to(tl.int32).to(tl.uint32)))
    numel = tl.load(row + c.NUMEL)
    shape = (numel, tl.load(row + c.COLS), tl.load(row + c.BLOCKS_A_ROW))
    index = (tl.load(row + c.BASE), tl.load(row + c.INNER), tl.load(row + c.OUTER))
    addresses = (
        tl.load(row + c.PARAM),
        tl.load(row + c.EXP_AVG),
        tl.load(row + c.EXP_AVG_SQ),
        tl.load(row + c.MAX_SQ),
        tl.load(row + c.LOW),
        tl.load(row + c.SCALE),
        tl.load(row + c.SCALE_SQ),
    )
    for at in range(block, stop):
        at = tl.cast(at, tl.int64)
        if (c.INT8 & KIND) != 0 and (c.WHOLE_ROWS & KIND) == 0:
            _tile(addresses, grad_address, shape, index, numbers, key, at, KIND, True)
        elif (at + 1) * c.TILE <= numel:
            _tile(addresses, grad_address, shape, index, numbers, key, at, KIND, False)
        else:
            _tile(addresses, grad_address, shape, index, numbers, key, at, KIND, True)


@kernel
def update(
    rows_ptr,
    live_ptr,
    done_ptr,
    scale_ptr,
    found_inf_ptr,
    sums_ptr,
    norm_ptr,
    KINDS: tl.constexpr,
    N_KINDS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    CLIP: tl.constexpr,
):
    """The step. The program that is done last counts it up, when all others have read it."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    n_tensors, n_blocks = tl.load(live_ptr + c.N_TENSORS), tl.load(live_ptr + c.N_BLOCKS)
    factor = tl.cast(1.0, tl.float32)
    if HAS_SCALE:
        factor = tl.div_rn(factor, tl.load(scale_ptr))
    if CLIP:
        factor = clipped(live_ptr, sums_ptr, norm_ptr, factor, False)
    block, end = n_blocks * program // programs, n_blocks * (program + 1) // programs
    skip = False
    if HAS_FOUND_INF:
        skip = tl.load(found_inf_ptr) != 0.0
        if skip:
            block = end
    tensor = tl.load(rows_ptr + (n_tensors + 1) * c.ROW + program)
    while block < end:
        row = rows_ptr + tensor * c.ROW
        first = tl.load(row + c.FIRST_BLOCK)
        stop = tl.minimum(end, tl.load(row + c.ROW + c.FIRST_BLOCK))
        kind = tl.load(row + c.KIND_AT)
        grad_address = tl.load(live_ptr + c.HEAD + tensor)
        group_ptr = live_ptr + c.HEAD + n_tensors + tl.load(row + c.GROUP_AT) * c.GROUP_ROW
        for place in tl.static_range(N_KINDS):
            if kind == place:
                _tiles(row, grad_address, group_ptr, block - first, stop - first, factor, KINDS[place])
        block = stop
        tensor += 1
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1) == programs - 1:
        tl.store(done_ptr, 0)
        if skip:
            n_tensors = n_tensors * 0
        for start in range(0, n_tensors, 1024):
            at = start + tl.arange(0, 1024)
            there = at < n_tensors
            step_ptr = tl.load(rows_ptr + at * c.ROW + c.STEP, mask=there, other=0).to(
                tl.pointer_type(tl.float32)
            )
            tl.store(step_ptr, tl.load(step_ptr, mask=there, other=0.0) + 1.0, mask=there)
