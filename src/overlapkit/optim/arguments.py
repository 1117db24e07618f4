"""What AdamW is given, refused at construction with the argument's name."""

from typing import Any

from torch import Tensor, bfloat16, float16

_PRECISIONS = (None, "fp32", "bf16_sr", "bf16_kahan", "bf16_master")
_MOMENTS = ("fp32", "bf16", "int8")
_WHOLE = ("max_norm", "precision", "moments", "eager_state")


def check_options(
    max_norm: Any, precision: Any, moments: Any, foreach: Any, fused: Any, differentiable: Any
) -> None:
    """Refuse what is not there yet, and what no group could have."""
    if max_norm is not None:
        _check_number("max_norm", max_norm)
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r} must be above 0, or None not to clip")
    for name, value in (("foreach", foreach), ("fused", fused)):
        if value not in (None, True, False):
            raise TypeError(f"{name}={value!r}: give True, False or None")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision={precision!r}: choose one of {_PRECISIONS}")
    if moments not in _MOMENTS:
        raise ValueError(f"moments={moments!r}: choose one of {_MOMENTS}")
    if precision not in (None, "fp32"):
        raise NotImplementedError(f"precision={precision!r} is not available yet; use None or 'fp32'")
    if moments != "fp32":
        raise NotImplementedError(f"moments={moments!r} is not available yet; use 'fp32'")
    if differentiable:
        raise ValueError("differentiable=True: the update is a fused kernel; use torch.optim.AdamW for it")
    if foreach and fused:
        raise ValueError("foreach=True and fused=True exclude each other: leave both at None")


def check_group(group: dict[str, Any]) -> None:
    """Refuse what torch would only trip over in a step, or ignore."""
    for name in _WHOLE:
        if name in group:
            raise ValueError(
                f"params has a group with {name}={group[name]!r}: {name} is for all groups together"
            )
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: give the two decay rates, e.g. (0.9, 0.999)")
    _check_number("lr", group["lr"])
    _check_number("eps", group["eps"])
    _check_number("weight_decay", group["weight_decay"])
    for index, beta in enumerate(betas):
        _check_number(f"betas[{index}]", beta, below=1.0)
    for name in ("amsgrad", "maximize", "capturable"):
        if not isinstance(group[name], bool):
            raise TypeError(f"{name}={group[name]!r}: give True or False")
    for param in group["params"]:
        _check_param(param)
        if group["capturable"] and param.device.type == "cpu":
            raise ValueError("capturable=True is for CUDA graphs, and params are on the CPU: leave it out")


def _check_param(param: Tensor) -> None:
    if param.dtype in (bfloat16, float16):
        raise NotImplementedError(
            f"params holds a {param.dtype} parameter of shape {tuple(param.shape)}: half precision needs "
            "an fp32 master copy, which is not available yet; keep fp32 parameters and compute in bf16 "
            "through shard(mp_policy='bf16') or torch.autocast"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"params holds a {param.dtype} parameter of shape {tuple(param.shape)}: AdamW updates real "
            "floating point parameters; view complex ones as real (torch.view_as_real)"
        )


def _check_number(name: str, value: Any, below: float | None = None) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} elements: use a float or one element")
        if value.is_cuda or value.is_meta:
            return  # its value is not looked at: that would wait for the device
    elif not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give a number")
    if not value >= 0 or (below is not None and not value < below):
        raise ValueError(f"{name}={value!r} must be at least 0" + (f" and below {below:g}" if below else ""))
