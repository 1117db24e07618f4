"""The operators of a step, seen by a dispatch mode: their arithmetic, shapes, and what the host waits for.

It costs some microseconds an operator, so it looks at one early step, and at one in 1009 after it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_KEPT = 4096  # shapes and places: a model of ever new shapes must not fill memory
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_PRODUCTS = {  # operators that are one matrix product, and which of their arguments are multiplied
    "aten.mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.baddbmm": (1, 2),
    "aten._scaled_mm": (0, 1),
    "overlapkit.linear_cross_entropy": (0, 1),
    "overlapkit.linear_cross_entropy_rows": (0, 1),
}
_TRANSPOSED = "overlapkit."  # whose second argument is the weight as it is stored, (n, k)
_ANSWERS = {  # operators whose result the host must have before it can go on
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.bincount",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
}
_COPIES = {"aten._to_copy", "aten.copy_"}
_UNCOUNTED = {"paused", "recompute", "optimizer"}
_MASKED = {"aten.index", "aten.index_put", "aten.index_put_"}
_MAY_WAIT = _ANSWERS | _COPIES | _MASKED


@dataclass(frozen=True, slots=True)
class Product:
    """One shape of matrix product (m, k) x (k, n), or a batch of them.

    Attributes:
        operator: E.g. "aten.mm".
        batch: How many at once.
        m: Rows of the first.
        k: What is summed over.
        n: Columns of the second.
        dtype: Of the first.
        device: Type of the device.
    """

    operator: str
    batch: int
    m: int
    k: int
    n: int
    dtype: torch.dtype
    device: str


class Operators(TorchDispatchMode):
    """Counts while it is on.

    Args:
        phase: Which phase is on.

    Attributes:
        flops: Floating-point operations by dtype, recomputation and the optimizer left out.
        products: Floating-point operations of each shape of product, likewise.
        syncs: How often the host waited, by operator and place.
    """

    supports_higher_order_operators = True

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self._formulas: dict[Any, Any] = flop_registry
        self._known: dict[Any, tuple[str, Any, bool]] = {}
        self._phase = phase
        self.flops: dict[torch.dtype, int] = {}
        self.products: dict[Product, int] = {}
        self.syncs: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note it."""
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:  # a higher-order operator
            return func(*args, **kwargs)
        known = self._known.get(packet)
        if known is None:
            name = str(packet)
            known = self._known[packet] = name, self._formulas.get(packet), name in _MAY_WAIT
        name, formula, may_wait = known
        if may_wait and _waits(name, args, kwargs) and self._phase() != "paused":
            self._note_sync(name)
        kinds = {kind.__name__ for kind in types} if types else ()
        if "DTensor" in kinds:
            return NotImplemented  # it does it first: what it does with its local tensors comes here again
        out = func(*args, **kwargs)
        if formula is not None and "FakeTensor" not in kinds and self._phase() not in _UNCOUNTED:
            self._note_flops(name, args, formula(*args, **kwargs, out_val=out))
        return out

    def _note_flops(self, name: str, args: Sequence[Any], flops: int) -> None:
        first = next((argument for argument in args if isinstance(argument, Tensor)), None)
        if first is None:
            return
        self.flops[first.dtype] = self.flops.get(first.dtype, 0) + flops
        product = _product(name, args)
        if product is not None and (product in self.products or len(self.products) < _KEPT):
            self.products[product] = self.products.get(product, 0) + flops

    def _note_sync(self, name: str) -> None:
        key = name, _place(sys._getframe(2))
        if key in self.syncs or len(self.syncs) < _KEPT:
            self.syncs[key] = self.syncs.get(key, 0) + 1


def _product(name: str, args: Sequence[Any]) -> Product | None:
    if name not in _PRODUCTS:
        return None
    left, right = (args[place] for place in _PRODUCTS[name])
    batch = left.shape[0] if left.dim() == 3 else 1
    n = right.shape[0] if name.startswith(_TRANSPOSED) else right.shape[-1]
    return Product(name, batch, left.shape[-2], left.shape[-1], n, left.dtype, left.device.type)


def _waits(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for a CUDA device in this operator."""
    if name in _ANSWERS:
        return _on_cuda(args[0])
    if name in _MASKED:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return _on_cuda(args[0]) and bool(masks)
    if name not in _COPIES or kwargs.get("non_blocking"):
        return False
    if name == "aten.copy_":
        return not (len(args) > 2 and args[2]) and _on_cuda(args[0]) != _on_cuda(args[1])
    target = kwargs.get("device")
    return target is not None and _on_cuda(args[0]) != (torch.device(target).type == "cuda")


def _on_cuda(tensor: Any) -> bool:
    """A DTensor's operators come again for its local tensor, and are counted there."""
    return (
        isinstance(tensor, Tensor)
        and tensor.device.type == "cuda"
        and not is_traceable_wrapper_subclass(tensor)
    )


def _place(frame: FrameType | None) -> str:
    """File and line of the innermost frame outside of torch and of the meter."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OURS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"
