"""Bytes that interpreted kernels load and store, counted where their masks let them through."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Ledger:
    """Bytes since the block began."""

    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Count every masked load and store (unmasked ones arrive as such). Atomics on floats are refused."""
    from triton.runtime.interpreter import interpreter_builder as builder

    count = Ledger()
    kind = type(builder)
    load, store = kind.create_masked_load, kind.create_masked_store
    atomic = kind.create_atomic_rmw

    def width(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count.loaded += int(mask.data.sum()) * width(pointers)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count.stored += int(mask.data.sum()) * width(pointers)
        return store(self, pointers, value, mask, *rest)

    def refuse(self: Any, operation: Any, pointers: Any, *rest: Any) -> Any:
        if not pointers.get_element_ty().is_int():
            raise AssertionError("an atomic: float sums would depend on the order of programs")
        return atomic(self, operation, pointers, *rest)

    def refuse_all(self: Any, *rest: Any) -> Any:
        raise AssertionError("an atomic that compares: its outcome would depend on the order of programs")

    changed = {
        "create_masked_load": counted_load,
        "create_masked_store": counted_store,
        "create_atomic_rmw": refuse,
        "create_atomic_cas": refuse_all,
    }
    before = {name: getattr(kind, name) for name in changed}
    for name, function in changed.items():
        setattr(kind, name, function)
    try:
        yield count
    finally:
        for name, function in before.items():
            setattr(kind, name, function)
