"""Batches at addresses that never change, as CUDA graphs need them: copied there at the hand-over."""

from typing import Any

import torch

from overlapkit.input.nesting import map_leaves
from overlapkit.input.packing import Packing, is_plain
from overlapkit.span import SpanLog

MAX_LAYOUTS = 16
"""Each keeps its memory for good: more than these is a source whose shapes never settle."""


class FixedMemory:
    """Memory of its own for each layout of batches: dtypes, shapes, strides, and what overlaps what.

    Invariants:
        * It is written at hand-overs only, on the stream that is current there, after all that the stream
          of the hand-over before was given until then.
        * Autograd sees the writes: a backward pass that comes too late for its batch is an error.

    Args:
        device: Where the batches are.
        log: Takes a span "reuse" of lane "transfer" for each copy; the consumer's stream stands still for it.
    """

    def __init__(self, device: torch.device, log: SpanLog) -> None:
        self._device = device
        self._log = log
        self._memory: dict[Any, tuple[torch.Tensor, torch.cuda.Stream | None]] = {}
        self._latest: torch.cuda.Stream | None = None

    def place(self, batch: Any) -> Any:
        """The same batch at its fixed addresses, until the next call. Tensors elsewhere are left as they are.

        Raises:
            TypeError: It holds what is more than its bytes, dtype, shape and strides.
            RuntimeError: It has a layout too many.
        """
        found: dict[int, torch.Tensor] = {}
        kind = type(torch.empty(0, device=self._device))  # of an ordinary tensor there

        def collect(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.device != self._device:
                return leaf
            if not isinstance(leaf, torch.Tensor) or not is_plain(leaf, kind):
                raise TypeError(
                    f"reuse_buffers=True: a batch holds a {_describe(leaf)}, which has no address that could "
                    "be kept: turn it into plain tensors in the source or in transform=, or use "
                    "reuse_buffers=False"
                )
            found[id(leaf)] = leaf
            return leaf

        map_leaves(batch, collect)
        if not found:
            return batch
        packing = Packing(list(found.values()))
        block = self._on_cuda(packing) if self._device.type == "cuda" else self._on_cpu(packing)
        there = dict(zip(found, packing.views(block), strict=True))
        return map_leaves(batch, lambda leaf: there.get(id(leaf), leaf))

    def _on_cpu(self, packing: Packing) -> torch.Tensor:
        block, _ = self._of_layout(packing, None)
        with self._log.host("transfer", "reuse", bytes=packing.copied, exposed=True):
            packing.fill_there(block)
        return block

    def _on_cuda(self, packing: Packing) -> torch.Tensor:
        current = torch.cuda.current_stream(self._device)
        if self._latest is not None and self._latest != current:
            current.wait_stream(self._latest)
        self._latest = current
        block, home = self._of_layout(packing, current)
        if home != current:
            block.record_stream(current)
        with self._log.stream("transfer", "reuse", current, bytes=packing.copied, exposed=True):
            packing.fill_there(block)
        return block

    def _of_layout(
        self, packing: Packing, stream: torch.cuda.Stream | None
    ) -> tuple[torch.Tensor, torch.cuda.Stream | None]:
        """The memory of a layout, and the stream that it was allocated for: `stream` where it is new."""
        layout = packing.layout
        if layout not in self._memory:
            if len(self._memory) == MAX_LAYOUTS:
                shapes = [shape for _, shape, _, _ in layout]
                raise RuntimeError(
                    f"reuse_buffers=True: this batch, with shapes {shapes}, has another layout than the "
                    f"{MAX_LAYOUTS} before it, each of which keeps its own memory: pad batches to a few "
                    "shapes, use drop_last=True, or reuse_buffers=False"
                )
            with torch.inference_mode(False):  # passes to come, outside of it, must be able to write there
                block = torch.empty(packing.nbytes, dtype=torch.uint8, device=self._device)
            self._memory[layout] = block, stream
        return self._memory[layout]


def _describe(leaf: Any) -> str:
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if not isinstance(leaf, torch.Tensor):
        return f"{kind} that moves itself"
    if leaf.requires_grad:
        return f"{kind} that requires grad"
    return f"{kind} of layout {leaf.layout}"
