"""What the compute lane wastes by shape and dtype, from the products of one counted step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from overlapkit.measure.device_peaks import peak_of
from overlapkit.measure.operators import Product
from overlapkit.measure.speed import tf32_allowed

_TILE = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}  # 16 bytes: what tensor cores load at once
_TILE_EIGHT = 16  # of the 8-bit dtypes, likewise
_PADDED = 64  # a multiple of which fills whole tiles: what a size is best raised to
_TF32_GAIN = 1 / 8  # of an A100's data sheet: the least that is left where the device is not known


@dataclass(frozen=True, slots=True)
class Waste:
    """Something about the arithmetic to mend.

    Attributes:
        share: Of the FLOPs of a step, that it is about.
        saved: Of their time, at most, 0 to 1.
        component: What to change.
        setting: How.
    """

    share: float
    saved: float
    component: str
    setting: str


def find_waste(products: Mapping[Product, int], device: str, capability: tuple[int, int]) -> Iterator[Waste]:
    """Products in full float32, and dimensions that tensor cores cannot take.

    Args:
        products: FLOPs of each shape, in one step.
        device: Name of the CUDA device.
        capability: Its compute capability.
    """
    whole = sum(products.values())
    on_device = {one: flops for one, flops in products.items() if one.device == "cuda"}
    full = sum(flops for one, flops in on_device.items() if one.dtype == torch.float32)
    tf32 = tf32_allowed()
    left = _left_by_tf32(device, capability)
    if full and left < 1 and not tf32:
        yield Waste(
            full / whole,
            1 - left,
            "torch.set_float32_matmul_precision",
            '"high": float32 products run without tensor cores while TF32 is off (or train in bfloat16)',
        )
    missed = {one: flops for one, flops in on_device.items() if odd_sizes(one, tf32=tf32)}
    if missed:
        worst = max(missed, key=lambda one: missed[one])
        yield Waste(sum(missed.values()) / whole, 1.0, "the model's sizes", _say(worst, tf32))


def odd_sizes(product: Product, *, tf32: bool) -> list[str]:
    """Its dimensions that are no multiple of what tensor cores take: "n=50257"."""
    if product.dtype == torch.float32 and not tf32:
        return []  # runs without them whatever its sizes are
    tile = _TILE.get(product.dtype, _TILE_EIGHT if product.dtype.itemsize == 1 else 1)
    return [f"{name}={size}" for name in "mkn" if (size := getattr(product, name)) % tile and size > tile]


def _say(worst: Product, tf32: bool) -> str:
    odd = odd_sizes(worst, tf32=tf32)
    raised = [
        f"{name}={-(-int(size) // _PADDED) * _PADDED}" for name, size in (one.split("=") for one in odd)
    ]
    shape = f"({worst.m}, {worst.k}) x ({worst.k}, {worst.n})"
    return (
        f"{worst.operator} {shape} in {str(worst.dtype).removeprefix('torch.')} misses the tiles of tensor "
        f"cores: raise {', '.join(odd)} to {', '.join(raised)} (a vocabulary is padded, its ids stay)"
    )


def _left_by_tf32(device: str, capability: tuple[int, int]) -> float:
    """Of the time of float32 products; 1 where there is no TF32 (AMD counts its capabilities from 9 on)."""
    peak = peak_of(device)
    if peak is not None:
        return 1.0 if peak.tf32 is None else peak.single / peak.tf32
    return _TF32_GAIN if capability >= (8, 0) else 1.0
