"""What AdamW is given, refused at construction with the argument's name."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import Tensor, bfloat16, float16, nn

from overlapkit.optim.columns import FP32, INT8, PLAIN
from overlapkit.optim.place import is_cut_within_rows
from overlapkit.optim.state import MODES, MOMENTS, Form, is_dense, local

_PRECISIONS = (None, *MODES)
_WHOLE = ("max_norm", "precision", "moments", "eager_state")


def as_list(params: Any) -> list[Any]:
    """Parameters or groups as a list; refuse what is neither, and nothing at all."""
    if isinstance(params, Tensor | nn.Module) or not isinstance(params, Iterable):
        raise TypeError(f"params is a {type(params).__name__}: give parameters, e.g. model.parameters()")
    listed: list[Any] = list(params)
    if all(isinstance(entry, dict) and _is_empty(entry.get("params")) for entry in listed):
        raise ValueError("params is empty: give model.parameters() of a model that has some")
    return listed


def _is_empty(params: Any) -> bool:
    """A group may hold a single tensor, which has a length and a truth of its own."""
    return isinstance(params, list | tuple | set) and not params


def check_options(
    max_norm: Any, precision: Any, moments: Any, foreach: Any, fused: Any, differentiable: Any
) -> None:
    """Refuse what no group could have."""
    if max_norm is not None:
        _check_above_zero("max_norm", max_norm, "or None not to clip")
    check_how(foreach, fused)
    if precision not in _PRECISIONS:
        raise ValueError(f"precision={precision!r}: choose one of {_PRECISIONS}")
    if moments not in MOMENTS:
        raise ValueError(f"moments={moments!r}: choose one of {tuple(MOMENTS)}")
    if differentiable:
        raise ValueError("differentiable=True: the update is a fused kernel; use torch.optim.AdamW for it")


def check_how(foreach: Any, fused: Any) -> None:
    """Refuse what does not say how to compute."""
    for name, value in (("foreach", foreach), ("fused", fused)):
        if value not in (None, True, False):
            raise TypeError(f"{name}={value!r}: give True, False or None")
    if foreach and fused:
        raise ValueError("foreach=True and fused=True exclude each other: leave both at None")


def check_clip(max_norm: Any, norm_type: Any) -> None:
    """Refuse what `clip_grad_norm_` cannot clip to."""
    _check_above_zero("max_norm", max_norm, "so that something is left")
    if float(norm_type) not in (2.0, float("inf")):
        raise ValueError(f"norm_type={norm_type!r}: allowed are 2 and inf; torch.nn.utils has the others")


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
    for name in ("eps", "weight_decay"):
        if isinstance(group[name], Tensor):
            raise TypeError(f"{name} is a tensor: give a number; only lr and betas may be tensors")
        _check_number(name, group[name])
    for index, beta in enumerate(betas):
        _check_number(f"betas[{index}]", beta, below=1.0)
    for name in ("amsgrad", "maximize", "capturable"):
        if not isinstance(group[name], bool):
            raise TypeError(f"{name}={group[name]!r}: give True or False")
    for param in group["params"]:
        _check_param(param)
        if group["capturable"] and param.device.type == "cpu":
            raise ValueError("capturable=True is for CUDA graphs, and params are on the CPU: leave it out")


def check_precision(params: list[Tensor], precision: str | None) -> None:
    """Refuse a precision that is not that of any parameter, or that some cannot have."""
    half = [param for param in params if param.dtype == bfloat16]
    if precision == "fp32" and half:
        raise ValueError(
            f"precision='fp32', and params holds a bf16 parameter of shape {tuple(half[0].shape)}: leave it "
            "out for an fp32 master kept in 16 bits beside it ('bf16_master'), or keep fp32 parameters"
        )
    if precision not in (None, "fp32") and params and not half:
        raise ValueError(
            f"precision={precision!r} is for bf16 parameters, and params holds none: leave it out"
        )


def check_form(param: Tensor, form: Form, foreach: bool | None, fused: bool | None) -> None:
    """Refuse ways of computing, and layouts, that a form of a parameter does not have."""
    if form.mode == PLAIN and form.moments == FP32:
        return
    if foreach or fused is False:
        how = f"foreach={foreach!r}" if foreach else f"fused={fused!r}"
        raise ValueError(
            f"{how}: torch's own implementations keep bf16 parameters and 16- or 8-bit moments in other "
            "ways; leave it at None"
        )
    if form.moments == INT8 and form.amsgrad:
        raise ValueError("amsgrad=True with moments='int8': the largest second moment needs 'bf16' or 'fp32'")
    if form.moments == INT8 and is_cut_within_rows(param):
        raise ValueError(
            f"moments='int8', and params holds one of shape {tuple(param.shape)} that is sharded along "
            "another dimension than the first: blocks that share a scale would depend on the shards; use "
            "moments='bf16'"
        )
    if not param.is_meta and not is_dense(local(param)):
        raise ValueError(
            f"params holds one of shape {tuple(param.shape)} and strides {tuple(param.stride())}, a part of "
            "another tensor: only fp32 and fp64 ones with fp32 moments may be that; pass it contiguous"
        )


def _check_param(param: Tensor) -> None:
    if param.dtype == float16:
        raise ValueError(
            f"params holds a {param.dtype} parameter of shape {tuple(param.shape)}: its range is too small "
            "for weights; use bf16 parameters, or keep fp32 ones and compute in fp16 through torch.autocast"
        )
    if not param.is_floating_point() or param.dtype.itemsize < 2:
        raise ValueError(
            f"params holds a {param.dtype} parameter of shape {tuple(param.shape)}: AdamW updates fp32, fp64 "
            "and bf16 parameters; view complex ones as real (torch.view_as_real)"
        )


def _check_above_zero(name: str, value: Any, why: str) -> None:
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor: give a number")
    _check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name}={value!r} must be above 0, {why}")


def _check_number(name: str, value: Any, below: float | None = None) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} elements: use a float or one element")
        if value.is_cuda or value.is_meta:
            return  # its value is not looked at: that would wait for the device
    elif not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give a number")
    if not value >= 0 or (below is not None and not value < below):
        raise ValueError(f"{name}={value!r} must be at least 0" + (f" and below {below:g}" if below else ""))
