"""Every address that an interpreted kernel touches must lie in a tensor that it was given.

Checked for each element that a mask lets through: loads, stores and atomics. What a kernel was given are the
tensors of its launch (the bytes that each spans, not the storage around it) and, where one of them may hold
pointers (int64), all tensors whose `data_ptr()` was asked for since the guard is up, while they live.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


class OutOfBounds(AssertionError):
    """A kernel touched memory that it was not given."""


@dataclass(frozen=True)
class Span:
    """The bytes of one tensor, first and one past the last, and what to call them."""

    start: int
    end: int
    name: str

    def distance(self, address: int) -> int:
        return max(self.start - address, address - self.end + 1, 0)


def span(tensor: Tensor, name: str, start: int) -> Span:
    """The bytes between a tensor's first element and its last; none for an empty one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    nbytes = reach * tensor.element_size() if tensor.numel() else 0
    return Span(start, start + nbytes, f"{name} {tuple(tensor.shape)} {tensor.dtype}")


@dataclass
class Reach:
    """What one launch may touch: its tensors' spans, and they again as sorted intervals without overlap."""

    kernel: str
    spans: list[Span]
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for one in sorted(self.spans, key=lambda s: s.start):
            if self.ends and one.start < self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], one.end)
            elif one.end > one.start:
                self.starts.append(one.start)
                self.ends.append(one.end)

    def holds(self, first: int, last: int, width: int) -> bool:
        """Whether one interval holds all from the first element to the last."""
        at = bisect_right(self.starts, first) - 1
        return at >= 0 and last + width <= self.ends[at]

    def check(self, what: str, pointers: Any, mask: Any, program: Any) -> None:
        """Raise where a pointer that the mask lets through leaves all intervals."""
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data
        if self.holds(int(addresses.min()), int(addresses.max()), width):
            return
        live = np.broadcast_to(True if mask is None else mask.data, addresses.shape)
        touched = addresses[live]
        if touched.size == 0 or self.holds(int(touched.min()), int(touched.max()), width):
            return
        at = np.searchsorted(np.array(self.starts, np.uint64), touched, side="right")
        room = np.array([0, *(end - width for end in self.ends)], np.uint64)  # of the interval before it
        bad = touched > room[at]
        if bad.any():
            lane = tuple(int(i) for i in np.argwhere(live)[np.argmax(bad)])
            address, count = int(touched[bad][0]), f"{int(bad.sum())} of {touched.size} elements"
            raise OutOfBounds(
                f"{self.kernel}, program {program}: {what} of {width} bytes at {address:#x}, "
                f"{self._where(address)} (first at lane {lane}; {count})"
            )

    def _where(self, address: int) -> str:
        if not self.spans:
            return "and the launch was given no tensor"
        near = min(self.spans, key=lambda s: s.distance(address))
        if near.start <= address < near.end:
            return f"{address - near.start} bytes into {near.name}, over its end"
        if address < near.start:
            return f"{near.start - address} bytes before {near.name}"
        return f"{address - near.end} bytes past the end of {near.name}"


class Guard:
    """Watches launches. `reach` is that of the launch that runs; None between launches."""

    def __init__(self) -> None:
        self.reach: Reach | None = None
        self.launches = 0
        self._asked: dict[tuple[int, int], tuple[Any, Span]] = {}

    def ask(self, tensor: Tensor, address: int) -> None:
        """Take note that somebody asked for a tensor's address, perhaps for a table of pointers."""
        if self.reach is None and tensor.device.type == "cpu":
            from torch.multiprocessing.reductions import StorageWeakRef

            one = span(tensor, "a tensor behind a pointer", address)
            self._asked[one.start, one.end] = (StorageWeakRef(tensor.untyped_storage()), one)

    def open(self, kernel: str, tensors: dict[str, Tensor], address: Any) -> None:
        """A launch begins."""
        self.launches += 1
        spans = [span(tensor, name, address(tensor)) for name, tensor in tensors.items()]
        if any(tensor.dtype in (torch.int64, torch.uint64) for tensor in tensors.values()):
            self._asked = {k: (ref, one) for k, (ref, one) in self._asked.items() if not ref.expired()}
            spans += [one for _, one in self._asked.values()]
        self.reach = Reach(kernel, spans)


@contextlib.contextmanager
def guarded() -> Iterator[Guard]:
    """Put up the guard over all launches in Triton's interpreter inside the block."""
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import interpreter_builder as builder

    guard, kind, data_ptr, launch = Guard(), type(builder), Tensor.data_ptr, GridExecutor.__call__

    def asked(self: Tensor) -> int:
        address = data_ptr(self)
        guard.ask(self, address)
        return address

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        guard.open(self.fn.__name__, tensors, data_ptr)
        try:
            launch(self, *args, **kwargs)
        except InterpreterError as error:
            if isinstance(error.__cause__, OutOfBounds):
                raise error.__cause__ from None
            raise
        finally:
            guard.reach = None

    def checking(method: Any, what: str, pointers_at: int, mask_at: int | None) -> Any:
        def checked(self: Any, *args: Any) -> Any:
            if guard.reach is not None:
                mask = None if mask_at is None else args[mask_at]
                guard.reach.check(what, args[pointers_at], mask, self.grid_idx)
            return method(self, *args)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for name, what, pointers_at, mask_at in (
            ("create_masked_load", "load", 0, 1),
            ("create_masked_store", "store", 0, 2),
            ("create_atomic_rmw", "atomic", 1, 3),
            ("create_atomic_cas", "atomic", 0, None),
        ):
            patch.setattr(kind, name, checking(getattr(kind, name), what, pointers_at, mask_at))
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setattr(Tensor, "data_ptr", asked)
        yield guard
