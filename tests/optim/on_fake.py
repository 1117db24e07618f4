"""The optimizer's kernels on the recorder of streams: launched as on a GPU, run in Triton's interpreter."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from overlapkit import launch
from overlapkit.optim.raw import launcher
from overlapkit.optim.table import Table
from tests.cuda_fake import CudaTensor, FakeCuda
from tests.interpreter import interpreter


@contextlib.contextmanager
def kernels_on(machine: FakeCuda) -> Iterator[list[str]]:
    """Run kernels for device tensors; yields the names of those launched.

    What a kernel is given counts as written, and of the update also all that its table names, since no torch
    operator tells of it.
    """
    names: list[str] = []
    update = launcher.update

    def run(self: launch.Kernel, grid: int, *args: Any, warps: int, resident: int, **constants: Any) -> None:
        names.append(self.__name__)
        note(arg for arg in args if isinstance(arg, CudaTensor))
        raw = [a.raw if isinstance(a, CudaTensor) else a for a in args]
        self.interpreted[(grid,)](*raw, **constants)

    def note(tensors: Iterable[Any]) -> None:
        clock = machine.stream.launch()
        for tensor in tensors:
            if isinstance(tensor, CudaTensor) and tensor.numel():
                machine.access(machine.stream.name, clock, machine.memory_of(tensor), write=True)

    def recorded(table: Table, *args: Any) -> None:
        note(table.tensors)
        update(table, *args)

    with (
        interpreter(),
        mock.patch.object(launch.Kernel, "launch", run),
        mock.patch.object(launcher, "update", recorded),
        mock.patch.object(launch, "processors", return_value=2),
    ):
        yield names
