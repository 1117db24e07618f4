# mypy: allow-untyped-defs, allow-incomplete-defs
"""How the kernel keeps fp32 values in 16 and 8 bits: the device half of `overlapkit.optim.rounding`.

bf16 travels as int16, its bits: they are the upper half of an fp32 number's.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """A bijection of uint32 in which every input bit moves every output bit (C. Wellons, lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def random_bits(key, start, lanes):
    """32 random bits for each global element index start + lanes (int64, int32), given a key (uint32)."""
    low = start.to(tl.uint32) + lanes.to(tl.uint32)
    high = (start >> 32).to(tl.uint32) + (low < lanes.to(tl.uint32)).to(tl.uint32)
    return mix(mix(low + key) ^ (high + mix(key ^ 0x9E3779B9)))


@triton.jit
def widen(half):
    """The fp32 number whose upper half these int16 bits are."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def stochastic(x, random):
    """fp32 to the bits of one of its two bf16 neighbours, the nearer the likelier; `random` has 16 bits."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return (tl.where(finite, bits + random.to(tl.int32), bits) >> 16).to(tl.int16)


@triton.jit
def split(x):
    """fp32 as bf16 bits, ties up, and the int16 that is left: `(high << 16) + low` are its bits again."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits, 0x7FC00000)  # other NaNs could round into a number
    high = ((bits + 0x8000) >> 16).to(tl.int16)
    return high, (bits - (high.to(tl.int32) << 16)).to(tl.int16)


@triton.jit
def join(high, low):
    """What `split` took apart."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def signed_value(code, scale):
    """The number of an int8 code: its square, with its sign, so that codes lie densest around zero."""
    number = code.to(tl.float32)
    return number * tl.abs(number) * (1.0 / 16129.0) * scale


@triton.jit
def signed_code(x, scale, random):
    """Round to a code at random, without bias. `scale` is the largest |x| of the block."""
    y = tl.abs(x) * (16129.0 / tl.where(scale > 1e-30, scale, 1.0))
    below = tl.minimum(tl.floor(tl.sqrt(y)), 126.0)
    share = (y - below * below) / (2.0 * below + 1.0)
    code = below + (random.to(tl.float32) * 1.52587890625e-05 < share).to(tl.float32)
    return tl.where(x < 0, -code, code).to(tl.int8)


@triton.jit
def unsigned_value(code, scale):
    """The number of a uint8 code: its fourth power, since it is the root of it that divides."""
    number = code.to(tl.float32)
    square = number * number
    return square * square * (1.0 / 4228250625.0) * scale


@triton.jit
def unsigned_code(x, scale, random):
    """Round to a code at random, without bias, but never to zero what is none: it divides."""
    y = x * (4228250625.0 / tl.where(scale > 1e-30, scale, 1.0))
    below = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(y))), 254.0)
    square, above = below * below, (below + 1.0) * (below + 1.0)
    share = (y - square * square) / (above * above - square * square)
    code = below + (random.to(tl.float32) * 1.52587890625e-05 < share).to(tl.float32)
    return tl.where(x > 0, tl.maximum(code, 1.0), 0.0).to(tl.uint8)
