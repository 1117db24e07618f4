"""fp32 values in 16 and 8 bits, in plain torch: bit for bit what the kernel does.

Random bits are a function of (parameter, step, global element index), so that replicas, and runs that
were sharded anew, round alike.
"""

import torch
from torch import Tensor

_SIGN = 0x80000000
_LEAST = 1e-30  # what a scale must be above: a GPU's fast division takes far smaller numbers for zero


def _signed(x: int) -> int:
    return (x & 0xFFFFFFFF) - ((x & _SIGN) << 1)


def mix(x: int) -> int:
    """A bijection of 32 bits in which every input bit moves every output bit (C. Wellons, lowbias32)."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _shifted(x: Tensor, by: int) -> Tensor:
    """int32 bits to the right, zeros from the left."""
    return (x >> by).bitwise_and_((1 << 32 - by) - 1)


def mix_bits(x: Tensor) -> Tensor:
    """`mix` of int32 elements, in place."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_(_shifted(x, 16))


def step_key(key: int, step: int) -> int:
    """A parameter's key in one of its steps."""
    return mix(key ^ mix(step & 0xFFFFFFFF))


def random_bits(key: int, index: Tensor) -> Tensor:
    """32 random bits, as int32, for each global element index (int64)."""
    low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
    return mix_bits(mix_bits(low.add_(_signed(key))).bitwise_xor_(high.add_(_signed(mix(key ^ 0x9E3779B9)))))


def random_bits_from(key: int, start: int, size: int) -> Tensor:
    """The same for indices `start` and on, none of which ends a stretch of 2^32."""
    low = torch.arange(size, dtype=torch.int32, device="cpu").add_(_signed(start + key))
    return mix_bits(mix_bits(low).bitwise_xor_(_signed((start >> 32) + mix(key ^ 0x9E3779B9))))


def high_half(bits: Tensor) -> Tensor:
    """The upper 16 random bits, 0 to 65,535."""
    return _shifted(bits, 16)


def low_half(bits: Tensor) -> Tensor:
    """The lower 16 random bits."""
    return bits & 0xFFFF


def other_bits(bits: Tensor) -> Tensor:
    """32 more."""
    return mix_bits(bits ^ _signed(0x85EBCA6B))


def stochastic(x: Tensor, random: Tensor) -> Tensor:
    """fp32 to one of its two bf16 neighbours, the nearer the likelier; `random` is 0 to 65,535 (int32)."""
    bits = x.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = bits + torch.where(finite, random, 0)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as bf16, ties up, and the 16 bits that are left over: `join` gives the same fp32 again.

    The rest is an int16 in the guise of an fp16: NCCL and gloo know no int16, and what torch's
    `load_state_dict` has cast to bf16 is told from it.

    To the nearest even, two numbers would share bf16 and remainder: 0x3f7f8000 and 0x3f808000.
    """
    bits = torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32))  # other NaNs could round into a number
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
    return high.view(torch.bfloat16), low.view(torch.float16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 that `split` took apart."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.view(torch.int16).to(torch.int32)
    return bits.view(torch.float32)


def scale_of(x: Tensor) -> Tensor:
    """The largest |x| of each block (..., LANES), kept as a dimension; not finite where one of it is not."""
    return x.abs().amax(-1, keepdim=True) + (x * 0.0).sum(-1, keepdim=True)


def signed_value(code: Tensor, scale: Tensor) -> Tensor:
    """The numbers of int8 codes: their squares, with their signs, so that codes lie densest around zero."""
    number = code.to(torch.float32)
    return number * number.abs() * (1.0 / 16129.0) * scale


def signed_code(x: Tensor, scale: Tensor, random: Tensor | None) -> Tensor:
    """Round to a code: at random, without bias, given 16 random bits; else to the nearest."""
    y = x.abs() * (16129.0 / torch.where(scale > _LEAST, scale, 1.0))
    below = y.sqrt().floor_().clamp_(max=126.0)
    share = (y - below * below) / (2.0 * below + 1.0)
    code = below + _rounds_up(share, random)
    return torch.where(x < 0, -code, code).to(torch.int8)


def unsigned_value(code: Tensor, scale: Tensor) -> Tensor:
    """The numbers of uint8 codes: their fourth powers, since it is the root of the moment that divides."""
    number = code.to(torch.float32)
    square = number * number
    return square * square * (1.0 / 4228250625.0) * scale


def unsigned_code(x: Tensor, scale: Tensor, random: Tensor | None) -> Tensor:
    """Round to a code as `signed_code` does, but never to zero what is none: it divides."""
    y = x * (4228250625.0 / torch.where(scale > _LEAST, scale, 1.0))
    below = y.sqrt().sqrt().floor_().clamp_(max=254.0)
    square, above = below * below, (below + 1.0) * (below + 1.0)
    share = (y - square * square) / (above * above - square * square)
    code = below + _rounds_up(share, random)
    return torch.where(x > 0, code.clamp(min=1.0), 0.0).to(torch.uint8)


def _rounds_up(share: Tensor, random: Tensor | None) -> Tensor:
    if random is None:
        return (share > 0.5).to(torch.float32)
    return (random.to(torch.float32) * 2.0**-16 < share).to(torch.float32)
