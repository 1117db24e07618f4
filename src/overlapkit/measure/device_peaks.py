"""The most arithmetic that known devices can do, dense, as their makers' data sheets say."""

from typing import NamedTuple

import torch


class DevicePeak(NamedTuple):
    """Floating-point operations a second, in units of 1e12, without sparsity.

    Attributes:
        half: float16 and bfloat16, accumulated in float32.
        tf32: float32 on tensor cores with TF32 allowed; None where there is none.
        single: float32 proper.
        eight: float8; None where there is none.
    """

    half: float
    tf32: float | None
    single: float
    eight: float | None = None


# Longer names before those that they contain.
_PEAKS = {
    "GB300": DevicePeak(2500, 1250, 80, 5000),
    "B300": DevicePeak(2250, 1125, 75, 4500),
    "GB200": DevicePeak(2500, 1250, 80, 5000),
    "B200": DevicePeak(2250, 1125, 75, 4500),
    "GH200": DevicePeak(989.4, 494.7, 66.9, 1978.9),
    "H200 NVL": DevicePeak(835.5, 417.5, 60, 1671),
    "H200": DevicePeak(989.4, 494.7, 66.9, 1978.9),
    "H100 PCIe": DevicePeak(756, 378, 51, 1513),
    "H100 NVL": DevicePeak(835.5, 417.5, 60, 1671),
    "H100": DevicePeak(989.4, 494.7, 66.9, 1978.9),
    "H800": DevicePeak(989.4, 494.7, 66.9, 1978.9),
    "H20": DevicePeak(148, 74, 44, 296),
    "A100": DevicePeak(312, 156, 19.5),
    "A800": DevicePeak(312, 156, 19.5),
    "A30": DevicePeak(165, 82, 10.3),
    "A40": DevicePeak(149.7, 74.8, 37.4),
    "A10G": DevicePeak(70, 35, 35),
    "A10": DevicePeak(125, 62.5, 31.2),
    "L40S": DevicePeak(362, 183, 91.6, 733),
    "L40": DevicePeak(181, 90.5, 90.5, 362),
    "L4": DevicePeak(121, 60, 30.3, 242.5),
    "V100": DevicePeak(125, None, 15.7),
    "T4": DevicePeak(65, None, 8.1),
    "MI355X": DevicePeak(2516.6, None, 157.3, 5033.2),
    "MI350X": DevicePeak(2306.9, None, 144.2, 4613.7),
    "MI325X": DevicePeak(1307.4, 653.7, 163.4, 2614.9),
    "MI300X": DevicePeak(1307.4, 653.7, 163.4, 2614.9),
    "MI250X": DevicePeak(191.5, None, 47.9),
}


def peak_of(name: str) -> DevicePeak | None:
    """The data sheet of a device, by the name that torch gives it; None where it is not known here."""
    words = name.replace("-", " ").split()
    for known, peak in _PEAKS.items():
        parts = known.split()
        if parts[0] in words and all(part in words for part in parts[1:]):
            return peak
    return None


def flops_per_s(peak: DevicePeak, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """The peak for one dtype.

    Args:
        peak: Of the device.
        dtype: Of what is multiplied.
        tf32: Whether TF32 is allowed for float32.
    """
    if dtype in (torch.float16, torch.bfloat16):
        value: float | None = peak.half
    elif dtype == torch.float32:
        value = peak.tf32 if tf32 and peak.tf32 is not None else peak.single
    else:
        value = peak.eight if dtype.itemsize == 1 and dtype.is_floating_point else None
    return None if value is None else value * 1e12
