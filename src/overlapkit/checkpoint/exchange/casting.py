"""Changing a tensor's dtype when that was asked for, and never its meaning."""

import torch

NAMES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""What a command line calls the dtypes that weights are cast to and from; float8 has scales beside it."""


def check_cast(dtype: object) -> None:
    """Raise ValueError unless weights can be cast to it."""
    if dtype not in NAMES.values():
        words = ", ".join(str(one) for one in NAMES.values())
        raise ValueError(f"dtype={dtype!r}: give one of {words}, or None to leave them as they are")


def castable(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype are cast; integers, bools, complex and float8 tensors stay what they are."""
    return dtype in NAMES.values()


def cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The values in another floating-point dtype, rounded to the nearest.

    Raises:
        ValueError: A finite value would become infinite; the message names the tensor.
    """
    if values.dtype == dtype:
        return values
    made = values.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        lost = torch.isinf(made) & torch.isfinite(values)
        if bool(lost.any()):
            worst = float(values[lost].abs().max())
            raise ValueError(
                f"tensor {name!r} has the value {worst:g}, too large for {dtype}: use torch.bfloat16, or a "
                "wider dtype"
            )
    return made
