"""How many bytes of results a forward keeps alive: a mode that follows each storage that is made."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        for each in tree_leaves(result):
            if _is_tensor(each) and (storage := each.untyped_storage())._cdata not in given:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def kept_bytes(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """What `forward` returns, and the bytes that it made and that are still there."""
    with _Storages() as mode:
        result = forward()
    return result, sum(nbytes for storage, nbytes in mode.made.values() if not storage.expired())
