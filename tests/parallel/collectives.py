"""Counts a step's collectives, over forwards and backwards; CommDebugMode follows one forward only."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
}


class Collectives(TorchDispatchMode):
    """Attributes: counts: of each kind, and of messages under torch's names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name
            self.counts[NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
