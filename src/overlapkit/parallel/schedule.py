"""When the collectives of a sharded model run: prefetch, our own collectives, and what newer torch can do."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from overlapkit.parallel.forward_only import prefetch_in_forward
from overlapkit.parallel.units import Unit, prefetch_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from overlapkit.parallel.sharding import Sharding

_SINCE = {
    "set_reduce_scatter_max_input_buffers": "2.13",
    "set_separate_reduce_scatter_group": "2.13",
    "set_symm_mem_for_comm": "2.12",
}
_MEMORY = (None, "group", "symmetric")


@dataclass(frozen=True)
class Schedule:
    """The options of `shard` of the same names, checked.

    Raises:
        TypeError: An option is of a wrong type.
        ValueError: It has a value that is not allowed.
        RuntimeError: This torch does not have what it asks for; the message says which has.
    """

    reduce_scatter_buffers: int | None = None
    separate_reduce_scatter: bool = False
    comm_memory: str | None = None
    unshard_early: bool = False

    def __post_init__(self) -> None:
        for name in ("separate_reduce_scatter", "unshard_early"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r}: give True or False")
        buffers = self.reduce_scatter_buffers
        if buffers is not None and (isinstance(buffers, bool) or not isinstance(buffers, int) or buffers < 1):
            raise ValueError(f"reduce_scatter_buffers={buffers!r}: give a number, 1 or more, or None")
        if self.comm_memory not in _MEMORY:
            raise ValueError(f"comm_memory={self.comm_memory!r}: give None, 'group' or 'symmetric'")
        if self.comm_memory == "symmetric" and (buffers or 1) > 1:
            raise ValueError(
                f"reduce_scatter_buffers={buffers} with comm_memory='symmetric': symmetric memory has one "
                "buffer; leave one of the two out"
            )
        if self.separate_reduce_scatter:
            _need("set_separate_reduce_scatter_group", "separate_reduce_scatter=True")
        if self.comm_memory == "symmetric":
            _need("set_symm_mem_for_comm", "comm_memory='symmetric'")

    def check(self, mesh: "DeviceMesh | None") -> None:
        """Refuse what this mesh cannot have, before anything is changed.

        Raises:
            ValueError: The mesh's device has no such memory.
            RuntimeError: This torch cannot do it on the mesh's device.
        """
        if mesh is None:
            return
        if mesh.device_type == "cpu" and self.comm_memory is not None:
            raise ValueError(
                f"comm_memory={self.comm_memory!r} is NCCL's memory, and the mesh is on 'cpu': leave it out"
            )
        if mesh.device_type != "cpu" and (self.reduce_scatter_buffers or 1) > 1:
            buffers = self.reduce_scatter_buffers
            _need("set_reduce_scatter_max_input_buffers", f"reduce_scatter_buffers={buffers} on a GPU")

    def apply(self, sharding: "Sharding") -> None:
        """Put it into a model that is sharded, and give the model its `timings`."""
        from overlapkit.parallel.traffic import Traffic

        assert sharding.mesh is not None
        _set_prefetch(sharding)
        traffic = Traffic(self.reduce_scatter_buffers or 2)
        for place, unit in enumerate(sharding.units):
            self._set_collectives(sharding, place, unit, traffic)
        root: Any = sharding.model
        if self.separate_reduce_scatter:
            root.set_separate_reduce_scatter_group()
        if self.reduce_scatter_buffers is not None and sharding.mesh.device_type != "cpu":
            root.set_reduce_scatter_max_input_buffers(self.reduce_scatter_buffers)
        if self.unshard_early:
            self._unshard_early(sharding)
        root.__dict__["timings"] = traffic.log.take  # no parameter, buffer or module: nn.Module need not know

    def _set_collectives(self, sharding: "Sharding", place: int, unit: Unit, traffic: Any) -> None:
        from overlapkit.parallel.collectives import AllGather, ReduceScatter

        mesh: Any = sharding.mesh
        module: Any = first(unit)  # torch's interface of these is private; it is used by its methods
        if self.comm_memory == "symmetric":
            module.set_symm_mem_for_comm()
        elif self.comm_memory == "group":
            module.set_allocate_memory_from_process_group_for_comm(True)
        else:
            all_gather = AllGather(unit.name, tuple(unit.parameters), place, traffic)
            module.set_custom_all_gather(all_gather)
            if mesh.device_type == "cuda":
                all_gather.waits.surround(unit.modules)
        if self.comm_memory == "group":
            return  # the reduce-scatter's buffers, too, are its own
        reduce_scatter = ReduceScatter(unit.name, _finders(sharding.model, unit), place, traffic, mesh)
        module.set_custom_reduce_scatter(reduce_scatter)
        if mesh.ndim == 2:
            module.set_all_reduce_hook(reduce_scatter.all_reduced)

    def _unshard_early(self, sharding: "Sharding") -> None:
        from overlapkit.parallel.early import EarlyUnshard

        mesh: Any = sharding.mesh
        root = sharding.units[-1]
        unit = root if root.parameters else sharding.units[0]
        finders = _finders(sharding.model, unit)
        EarlyUnshard(unit.modules, list(finders.values()), mesh.get_group(mesh.ndim - 1), mesh.device_type)


def first(unit: Unit) -> "FSDPModule":
    """The modules of a unit share one state: any of them stands for it."""
    module: Any = unit.modules[0]
    return module  # type: ignore[no-any-return]


def _set_prefetch(sharding: "Sharding") -> None:
    order = prefetch_order(sharding.units, sharding.forward_prefetch, sharding.backward_prefetch)
    units = [first(unit) for unit in sharding.units]
    prefetch_in_forward(
        sharding.model,
        [(units[place], [units[n] for n in ahead]) for place, (ahead, _) in enumerate(order) if ahead],
    )
    for unit, (_, behind) in zip(units, order, strict=True):
        # An empty list would mean FSDP2's own choice; a unit that prefetches itself does nothing.
        unit.set_modules_to_backward_prefetch([units[place] for place in behind] or [unit])


def _finders(model: nn.Module, unit: Unit) -> dict[str, Callable[[], torch.Tensor]]:
    """For each parameter a call that returns what its module has in its place: FSDP2 changes it."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name in unit.parameters:
        path, _, attribute = name.rpartition(".")
        found[name] = partial(getattr, model.get_submodule(path), attribute)
    return found


def _need(method: str, option: str) -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, method):
        raise RuntimeError(
            f"{option} needs torch {_SINCE[method]} or newer, and this is {torch.__version__}: leave it out"
        )
