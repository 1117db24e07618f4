"""swap: the modules of a model get their fused forward, each checked before, and give it back on request."""

from overlapkit.kernels.swap.swapping import Swap, swap

__all__ = ["Swap", "swap"]
