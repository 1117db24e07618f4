"""What each parameter keeps between steps: in which dtypes and layout, how many bytes, in few allocations."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlapkit.optim.columns import BF16, FP32, INT8, KAHAN, LANES, MASTER, PLAIN, ROUNDED

ALIGNMENT = 64
"""Bytes: each part of an allocation begins at a multiple of it."""

NARROWEST = 64
"""Shorter rows keep fp32 moments where others are int8: their scales would weigh too much."""

MODES = {"fp32": PLAIN, "bf16_sr": ROUNDED, "bf16_kahan": KAHAN, "bf16_master": MASTER}
MOMENTS = {"fp32": FP32, "bf16": BF16, "int8": INT8}


class Form(NamedTuple):
    """How a parameter and its moments are kept.

    Attributes:
        mode: One of `columns.PLAIN` and the three for bf16 parameters.
        moments: `columns.FP32` (or the parameter's own fp64), BF16 or INT8.
        amsgrad: Whether the largest second moment is kept, too.
    """

    mode: int
    moments: int
    amsgrad: bool


class Part(NamedTuple):
    """One tensor of a parameter's state. `shape` None: the parameter's, and its strides."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


def form_of(param: Tensor, precision: str | None, moments: str, amsgrad: bool) -> Form:
    """The form of a parameter. What depends on shapes depends on the global one: ranks must agree."""
    mode = PLAIN
    if param.dtype == torch.bfloat16:
        mode = MODES[precision or "bf16_master"]
    kept = FP32 if param.dtype == torch.float64 else MOMENTS[moments]
    if kept == INT8 and (param.dim() < 2 or row_of(param) < NARROWEST or not local(param).is_contiguous()):
        kept = FP32
    return Form(mode, kept, amsgrad)


def at_random(form: Form) -> bool:
    """Whether anything of it is rounded at random."""
    return form.mode == ROUNDED or form.moments != FP32


def row_of(param: Tensor) -> int:
    """Elements behind one index of the first dimension. Blocks of int8 moments end where it does."""
    return math.prod(param.shape[1:])


def parts(param: Tensor, form: Form) -> list[Part]:
    """The tensors that a parameter of this form keeps, without its step."""
    dtype = {FP32: torch.promote_types(param.dtype, torch.float32), BF16: torch.bfloat16, INT8: torch.int8}
    kept = [Part("exp_avg", dtype[form.moments])]
    kept.append(Part("exp_avg_sq", torch.uint8 if form.moments == INT8 else dtype[form.moments]))
    if form.amsgrad:
        kept.append(Part("max_exp_avg_sq", dtype[form.moments]))
    if form.mode == KAHAN:
        kept.append(Part("compensation", torch.bfloat16))
    if form.mode == MASTER:
        kept.append(Part("remainder", torch.float16))  # see rounding.split
    if form.moments == INT8:
        rows = (local(param).shape[0], -(-row_of(param) // LANES))
        kept += [Part("exp_avg_scale", torch.float32, rows), Part("exp_avg_sq_scale", torch.float32, rows)]
    return kept


def local(tensor: Tensor) -> Tensor:
    """What of a tensor this rank holds: the memory itself, not a copy."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def nbytes(params: Sequence[Tensor], forms: Sequence[Form]) -> int:
    """Bytes of the allocations that `make` would make."""
    return sum(_rooms(params, forms).values())


def make(params: Sequence[Tensor], forms: Sequence[Form], steps_on: str | None) -> list[dict[str, Any]]:
    """Zeroed states of parameters that are on one device, in one allocation for each dtype.

    In one for all, `torch.save` would refuse them: it takes no views of a memory in several dtypes.

    Args:
        params: Parameters, DTensors or plain.
        forms: For each its form.
        steps_on: The device of the steps, if not the parameters'.
    """
    device = local(params[0]).device
    free = {
        dtype: torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        for dtype, size in _rooms(params, forms).items()
    }

    def take(dtype: torch.dtype, numel: int) -> Tensor:
        found, free[dtype] = (
            free[dtype][:numel],
            free[dtype][_padded(numel * dtype.itemsize) // dtype.itemsize :],
        )
        return found

    steps = take(torch.float32, len(params))
    if steps_on is not None and steps_on != device.type:
        steps = torch.zeros(len(params), device=steps_on)
    made = []
    for index, (param, form) in enumerate(zip(params, forms, strict=True)):
        state: dict[str, Any] = {"step": steps[index]}
        here = local(param)
        for part in parts(param, form):
            flat = take(part.dtype, _numel(param, part))
            strides = dense_strides(here) if part.shape is None else None
            shape = tuple(here.shape) if part.shape is None else part.shape
            value = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
            state[part.name] = as_sharded(value, param, part)
        made.append(state)
    return made


def _rooms(params: Sequence[Tensor], forms: Sequence[Form]) -> dict[torch.dtype, int]:
    """Bytes of each dtype, the steps' among fp32."""
    rooms = {torch.float32: _padded(4 * len(params))}
    for param, form in zip(params, forms, strict=True):
        for part in parts(param, form):
            size = _padded(_numel(param, part) * part.dtype.itemsize)
            rooms[part.dtype] = rooms.get(part.dtype, 0) + size
    return rooms


def _numel(param: Tensor, part: Part) -> int:
    return local(param).numel() if part.shape is None else math.prod(part.shape)


def fits(state: dict[str, Any] | None, param: Tensor, form: Form) -> bool:
    """Whether a state is what `make` would make now; not so after a conversion."""
    if not state or not isinstance(state.get("step"), Tensor):
        return False
    here = local(param)
    for part in parts(param, form):
        value = state.get(part.name)
        if value is None or (value.dtype, local(value).device) != (part.dtype, here.device):
            return False
        if tuple(local(value).shape) != (tuple(here.shape) if part.shape is None else part.shape):
            return False
        if part.shape is None and not _lies_like(local(value), here):
            return False
    return True


def _lies_like(value: Tensor, param: Tensor) -> bool:
    """Whether each element lies where it would in a copy of the parameter; size 1 has no stride."""
    wanted = torch.empty_like(param, device="meta").stride()
    found = zip(value.stride(), wanted, value.shape, strict=True)
    return not value.numel() or all(stride == want for stride, want, size in found if size != 1)


def as_sharded(value: Tensor, param: Tensor, part: Part) -> Tensor:
    """A local tensor as a DTensor laid out as its parameter, where that is one."""
    if not hasattr(param, "_local_tensor"):
        return value
    from torch.distributed.tensor import DTensor

    shape = param.shape if part.shape is None else torch.Size((param.shape[0], part.shape[1]))
    stride = param.stride() if part.shape is None else (part.shape[1], 1)
    like: Any = param
    # A DTensor over a view takes over the view's offset, for an address, and torch's stager for async_save
    # then looks for a storage behind it: it is made over the allocation's beginning.
    first = value.as_strided(value.shape, value.stride(), 0)
    made: Any = DTensor.from_local(
        first, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    made._local_tensor = value
    return made  # type: ignore[no-any-return]


def dense_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """A tensor's strides if it fills its memory without gaps, in whatever order; None for row-major ones."""
    if tensor.is_contiguous():
        return None
    like = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return like.stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether it fills a stretch of memory, in whatever order, each element in a place of its own."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: (x[1], x[0])):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
