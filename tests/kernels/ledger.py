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
    """Count every masked load and store (unmasked ones arrive as such), and atomics of integers as both.

    Raises:
        AssertionError: In the block, an atomic of floats: their sum depends on the order of programs.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    count = Ledger()
    kind = type(builder)
    load, store, atomic = kind.create_masked_load, kind.create_masked_store, kind.create_atomic_rmw

    def width(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count.loaded += int(mask.data.sum()) * width(pointers)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count.stored += int(mask.data.sum()) * width(pointers)
        return store(self, pointers, value, mask, *rest)

    def counted_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        assert not pointers.get_element_ty().is_floating(), "an atomic of floats"
        moved = int(mask.data.sum()) * width(pointers)
        count.loaded, count.stored = count.loaded + moved, count.stored + moved
        return atomic(self, operation, pointers, value, mask, *rest)

    changed = {
        "create_masked_load": counted_load,
        "create_masked_store": counted_store,
        "create_atomic_rmw": counted_atomic,
    }
    before = {name: getattr(kind, name) for name in changed}
    for name, function in changed.items():
        setattr(kind, name, function)
    try:
        yield count
    finally:
        for name, function in before.items():
            setattr(kind, name, function)
