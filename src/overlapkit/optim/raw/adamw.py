# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""AdamW over every tensor of a table in one launch, and the sum of squares that clipping needs in another.

Programs get equally many tiles, one after the other through all tensors. Each reads what it must know of a
tensor once. Everything is computed in fp32, the few numbers that a whole tensor shares in fp64.
"""

import triton
import triton.language as tl

from overlapkit.launch import kernel
from overlapkit.optim import columns
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

LANES, TILE = tl.constexpr(columns.LANES), tl.constexpr(columns.TILE)
ROW, GROUP_ROW, HEAD = (tl.constexpr(n) for n in (columns.ROW, columns.GROUP_ROW, columns.HEAD))
PARAM, EXP_AVG, EXP_AVG_SQ, MAX_SQ, LOW, STEP, SCALE, SCALE_SQ = (tl.constexpr(n) for n in range(8))
NUMEL, FIRST_BLOCK, KIND_AT, GROUP_AT, MESH_AT, KEY = (tl.constexpr(n) for n in range(8, 14))
BASE, INNER, OUTER, COLS, BLOCKS_A_ROW = (tl.constexpr(n) for n in range(14, 19))
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, SIGN, LR_AT, BETA1_AT, BETA2_AT = (tl.constexpr(n) for n in range(9))
N_TENSORS, N_BLOCKS, N_SUMS, MAX_NORM = (tl.constexpr(n) for n in range(4))
HALF_PARAM, ROUNDED, KAHAN, MASTER = (tl.constexpr(1 << n) for n in range(4))
GRAD_BF16, GRAD_FP16, BF16, INT8 = (tl.constexpr(1 << n) for n in range(4, 8))
AMSGRAD, ALIGNED, SPLIT, WHOLE_ROWS = (tl.constexpr(1 << n) for n in range(8, 12))


@triton.jit
def _at(address, dtype: tl.constexpr, KIND: tl.constexpr):
    """A pointer. The table is built such that aligned kinds have aligned addresses only."""
    pointer = address.to(tl.pointer_type(dtype))
    if (ALIGNED & KIND) != 0:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    return tl.load(pointers)


@triton.jit
def _store(pointers, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


@triton.jit
def _gradient(address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    if (GRAD_BF16 & KIND) != 0:
        return widen(_load(_at(address, tl.int16, KIND) + offsets, mask, MASKED))
    if (GRAD_FP16 & KIND) != 0:
        return _load(_at(address, tl.float16, KIND) + offsets, mask, MASKED).to(tl.float32)
    return _load(_at(address, tl.float32, KIND) + offsets, mask, MASKED)


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
    if (HALF_PARAM & KIND) == 0:
        return _load(_at(addresses[0], tl.float32, KIND) + offsets, mask, MASKED)
    half = _load(_at(addresses[0], tl.int16, KIND) + offsets, mask, MASKED)
    if (MASTER & KIND) != 0:
        return join(half, _load(_at(addresses[4], tl.int16, KIND) + offsets, mask, MASKED))
    if (KAHAN & KIND) != 0:
        return widen(half) + widen(_load(_at(addresses[4], tl.int16, KIND) + offsets, mask, MASKED))
    return widen(half)


@triton.jit
def _write_weights(w, bits, addresses, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    if (HALF_PARAM & KIND) == 0:
        _store(_at(addresses[0], tl.float32, KIND) + offsets, w, mask, MASKED)
    else:
        if (ROUNDED & KIND) != 0:
            high, low = stochastic(w, bits & 0xFFFF), 0
        elif (MASTER & KIND) != 0:
            high, low = split(w)
        else:
            high = w.to(tl.bfloat16).to(tl.int16, bitcast=True)
            low = (w - widen(high)).to(tl.bfloat16).to(tl.int16, bitcast=True)
        _store(_at(addresses[0], tl.int16, KIND) + offsets, high, mask, MASKED)
        if (ROUNDED & KIND) == 0:
            _store(_at(addresses[4], tl.int16, KIND) + offsets, low, mask, MASKED)


@triton.jit
def _read_moment(address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    """One that is not int8, in fp32."""
    if (BF16 & KIND) != 0:
        return widen(_load(_at(address, tl.int16, KIND) + offsets, mask, MASKED))
    return _load(_at(address, tl.float32, KIND) + offsets, mask, MASKED)


@triton.jit
def _write_moment(x, random, address, offsets, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    if (BF16 & KIND) != 0:
        _store(_at(address, tl.int16, KIND) + offsets, stochastic(x, random), mask, MASKED)
    else:
        _store(_at(address, tl.float32, KIND) + offsets, x, mask, MASKED)


@triton.jit
def _read_int8(addresses, offsets, mask, groups, there, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Both moments from their codes and the scales of their blocks."""
    scale = tl.load(_at(addresses[5], tl.float32, KIND) + groups, mask=there, other=0.0)
    scale_sq = tl.load(_at(addresses[6], tl.float32, KIND) + groups, mask=there, other=0.0)
    m = signed_value(_load(_at(addresses[1], tl.int8, KIND) + offsets, mask, MASKED), scale)
    v = unsigned_value(_load(_at(addresses[2], tl.uint8, KIND) + offsets, mask, MASKED), scale_sq)
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
    _store(_at(addresses[1], tl.int8, KIND) + offsets, code, mask, MASKED)
    _store(_at(addresses[2], tl.uint8, KIND) + offsets, code_sq, mask, MASKED)
    tl.store(_at(addresses[5], tl.float32, KIND) + groups, scale, mask=there)
    tl.store(_at(addresses[6], tl.float32, KIND) + groups, scale_sq, mask=there)


@triton.jit
def _places(shape, block, KIND: tl.constexpr):
    """A tile's local offsets and whether they are there; its rows' int8 blocks, and whether those are."""
    numel, n_cols, n_groups = shape
    groups = block * 8 + tl.arange(0, 8)[:, None]
    if (INT8 & KIND) != 0 and (WHOLE_ROWS & KIND) == 0:
        cols = (groups % n_groups) * LANES + tl.arange(0, 128)[None, :]
        offsets = groups // n_groups * n_cols + cols
        mask = (offsets < numel) & (cols < n_cols)
    else:
        offsets = block * TILE + (tl.arange(0, 8)[:, None] * LANES + tl.arange(0, 128)[None, :])
        mask = offsets < numel
    return offsets, mask, groups, groups < n_groups * (numel // n_cols)


@triton.jit
def _random(key, index, offsets, block, KIND: tl.constexpr):
    """Random bits for the global indices of local offsets."""
    base, inner, outer = index
    within = tl.arange(0, 8)[:, None] * LANES + tl.arange(0, 128)[None, :]
    if (SPLIT & KIND) != 0 or ((INT8 & KIND) != 0 and (WHOLE_ROWS & KIND) == 0):
        return random_bits(key, base + offsets // inner * outer + offsets % inner, within * 0)
    return random_bits(key, base + block * TILE, within)


@triton.jit
def _tile(
    addresses, grad_address, shape, index, numbers, key, block, KIND: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of one tensor. Operations and their order are those of torch's own loop."""
    factor, decay, keep1, beta2, keep2, step_size, root2, eps = numbers
    offsets, mask, groups, there = _places(shape, block, KIND)
    w = _read_weights(addresses, offsets, mask, KIND, MASKED)
    g = _gradient(grad_address, offsets, mask, KIND, MASKED) * factor
    if (INT8 & KIND) != 0:
        m, v = _read_int8(addresses, offsets, mask, groups, there, KIND, MASKED)
    else:
        m = _read_moment(addresses[1], offsets, mask, KIND, MASKED)
        v = _read_moment(addresses[2], offsets, mask, KIND, MASKED)
    w = w * decay
    m = m + (g - m) * keep1
    v = v * beta2 + g * keep2 * g
    largest = v
    if (AMSGRAD & KIND) != 0:
        largest = tl.maximum(_read_moment(addresses[3], offsets, mask, KIND, MASKED), v)
    w = w - m / (tl.sqrt(largest) / root2 + eps) * step_size
    bits = tl.full((8, 128), 0, tl.uint32)
    if ((ROUNDED | BF16 | INT8) & KIND) != 0:
        bits = _random(key, index, offsets, block, KIND)
    _write_weights(w, bits, addresses, offsets, mask, KIND, MASKED)
    if (INT8 & KIND) != 0:
        _write_int8(m, v, bits, addresses, offsets, mask, groups, there, KIND, MASKED)
    else:
        other = mix(bits ^ 0x85EBCA6B)
        _write_moment(m, bits >> 16, addresses[1], offsets, mask, KIND, MASKED)
        _write_moment(v, other >> 16, addresses[2], offsets, mask, KIND, MASKED)
        if (AMSGRAD & KIND) != 0:
            _write_moment(largest, other & 0xFFFF, addresses[3], offsets, mask, KIND, MASKED)


@triton.jit
def _numbers(group_ptr, step, factor):
    """What all elements of a tensor share in a step, in fp32 but computed in fp64.

    In fp32 1 - beta2 ** step would lose four digits in the first steps.
    """
    beta1, beta2 = _number(group_ptr, BETA1, BETA1_AT), _number(group_ptr, BETA2, BETA2_AT)
    lr = _number(group_ptr, LR, LR_AT)
    eps = tl.load(group_ptr + EPS).to(tl.float64, bitcast=True)
    weight_decay = tl.load(group_ptr + WEIGHT_DECAY).to(tl.float64, bitcast=True)
    sign = tl.load(group_ptr + SIGN).to(tl.float64, bitcast=True)
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
    step = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))) + 1.0
    numbers = _numbers(group_ptr, step, factor)
    key = mix(tl.load(row + KEY).to(tl.uint32) ^ mix(step.to(tl.int32).to(tl.uint32)))
    numel = tl.load(row + NUMEL)
    shape = (numel, tl.load(row + COLS), tl.load(row + BLOCKS_A_ROW))
    index = (tl.load(row + BASE), tl.load(row + INNER), tl.load(row + OUTER))
    addresses = (
        tl.load(row + PARAM),
        tl.load(row + EXP_AVG),
        tl.load(row + EXP_AVG_SQ),
        tl.load(row + MAX_SQ),
        tl.load(row + LOW),
        tl.load(row + SCALE),
        tl.load(row + SCALE_SQ),
    )
    for at in range(block, stop):
        at = tl.cast(at, tl.int64)
        if (INT8 & KIND) != 0 and (WHOLE_ROWS & KIND) == 0:
            _tile(addresses, grad_address, shape, index, numbers, key, at, KIND, True)
        elif (at + 1) * TILE <= numel:
            _tile(addresses, grad_address, shape, index, numbers, key, at, KIND, False)
        else:
            _tile(addresses, grad_address, shape, index, numbers, key, at, KIND, True)


@triton.jit
def _clipped(live_ptr, sums_ptr, norm_ptr, unscale, LARGEST: tl.constexpr):
    """What the gradients are multiplied with. Each program adds the same sums in the same order."""
    n_sums = tl.load(live_ptr + N_SUMS)
    max_norm = tl.load(live_ptr + MAX_NORM).to(tl.float64, bitcast=True).to(tl.float32)
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
    if LARGEST:
        return tl.full(shape, 0, tl.int32)
    return tl.full(shape, 0.0, tl.float32)


@triton.jit
def _with(total, x, LARGEST: tl.constexpr):
    """Add fp32 numbers to sums; or to the largest, as bits: these order NaN above all numbers."""
    if LARGEST:
        return tl.maximum(total, tl.abs(x).to(tl.int32, bitcast=True))
    return total + x


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
    n_tensors, n_blocks = tl.load(live_ptr + N_TENSORS), tl.load(live_ptr + N_BLOCKS)
    factor = tl.cast(1.0, tl.float32)
    if HAS_SCALE:
        factor = tl.div_rn(factor, tl.load(scale_ptr))
    if CLIP:
        factor = _clipped(live_ptr, sums_ptr, norm_ptr, factor, False)
    block, end = n_blocks * program // programs, n_blocks * (program + 1) // programs
    skip = False
    if HAS_FOUND_INF:
        skip = tl.load(found_inf_ptr) != 0.0
        if skip:
            block = end
    tensor = tl.load(rows_ptr + (n_tensors + 1) * ROW + program)
    while block < end:
        row = rows_ptr + tensor * ROW
        first = tl.load(row + FIRST_BLOCK)
        stop = tl.minimum(end, tl.load(row + ROW + FIRST_BLOCK))
        kind = tl.load(row + KIND_AT)
        grad_address = tl.load(live_ptr + HEAD + tensor)
        group_ptr = live_ptr + HEAD + n_tensors + tl.load(row + GROUP_AT) * GROUP_ROW
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
            step_ptr = tl.load(rows_ptr + at * ROW + STEP, mask=there, other=0).to(
                tl.pointer_type(tl.float32)
            )
            tl.store(step_ptr, tl.load(step_ptr, mask=there, other=0.0) + 1.0, mask=there)


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
    n_tensors, n_blocks = tl.load(live_ptr + N_TENSORS), tl.load(live_ptr + N_BLOCKS)
    end = n_blocks * (program + 1) // programs
    for mesh in range(N_MESHES):
        total = _nothing((8, 128), LARGEST)
        block = n_blocks * program // programs
        tensor = tl.load(rows_ptr + (n_tensors + 1) * ROW + program)
        while block < end:
            row = rows_ptr + tensor * ROW
            first = tl.load(row + FIRST_BLOCK)
            stop = tl.minimum(end, tl.load(row + ROW + FIRST_BLOCK))
            kind, numel = tl.load(row + KIND_AT), tl.load(row + NUMEL)
            address = tl.load(live_ptr + HEAD + tensor)
            if tl.load(row + MESH_AT) == mesh:
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
    within = tl.arange(0, 8)[:, None] * LANES + tl.arange(0, 128)[None, :]
    for at in range(block, stop):
        at = tl.cast(at, tl.int64)
        if (at + 1) * TILE <= numel:
            g = _gradient(address, at * TILE + within, within >= 0, KIND, False)
        else:
            g = _gradient(address, at * TILE + within, at * TILE + within < numel, KIND, True)
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
    n_tensors, n_blocks = tl.load(live_ptr + N_TENSORS), tl.load(live_ptr + N_BLOCKS)
    factor = _clipped(live_ptr, sums_ptr, norm_ptr, tl.cast(1.0, tl.float32), LARGEST)
    block, end = n_blocks * program // programs, n_blocks * (program + 1) // programs
    tensor = tl.load(rows_ptr + (n_tensors + 1) * ROW + program)
    while block < end:
        row = rows_ptr + tensor * ROW
        first = tl.load(row + FIRST_BLOCK)
        stop = tl.minimum(end, tl.load(row + ROW + FIRST_BLOCK))
        kind, numel = tl.load(row + KIND_AT), tl.load(row + NUMEL)
        address = tl.load(live_ptr + HEAD + tensor)
        for place in tl.static_range(N_KINDS):
            if kind == place:
                for at in range(block - first, stop - first):
                    at = tl.cast(at, tl.int64)
                    if (at + 1) * TILE <= numel:
                        _times(address, factor, at, numel, KINDS[place], False)
                    else:
                        _times(address, factor, at, numel, KINDS[place], True)
        block = stop
        tensor += 1


@triton.jit
def _times(address, factor, block, numel, KIND: tl.constexpr, MASKED: tl.constexpr):
    """One tile of a gradient times the factor, in place."""
    offsets = block * TILE + (tl.arange(0, 8)[:, None] * LANES + tl.arange(0, 128)[None, :])
    mask = offsets < numel
    g = _gradient(address, offsets, mask, KIND, MASKED) * factor
    if (GRAD_BF16 & KIND) != 0:
        near = g.to(tl.bfloat16).to(tl.int16, bitcast=True)
        _store(_at(address, tl.int16, KIND) + offsets, near, mask, MASKED)
    elif (GRAD_FP16 & KIND) != 0:
        _store(_at(address, tl.float16, KIND) + offsets, g.to(tl.float16), mask, MASKED)
    else:
        _store(_at(address, tl.float32, KIND) + offsets, g, mask, MASKED)
