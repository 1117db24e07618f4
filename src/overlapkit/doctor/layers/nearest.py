"""Which RDMA adapters are each GPU's own: those that no other one is nearer than."""

from collections.abc import Sequence
from typing import NamedTuple

from overlapkit.doctor import pci
from overlapkit.doctor.gpus import Gpu
from overlapkit.doctor.layers.gpu import known
from overlapkit.doctor.layers.ports import Adapter
from overlapkit.doctor.machine import Machine, Unreadable
from overlapkit.doctor.subject import Subject


class Nearest(NamedTuple):
    """The distance, None where it cannot be said, and the adapters at that distance."""

    distance: str | None
    adapters: tuple[Adapter, ...]


def located(subject: Subject) -> list[Gpu]:
    """The GPUs by PCI address, also without the driver's help."""
    try:
        return list(known(subject))
    except Unreadable:
        return [Gpu(address, "GPU") for address in pci.gpus(subject.machine)]


def nearest(machine: Machine, gpu: Gpu, adapters: Sequence[Adapter]) -> Nearest:
    """The nearest of some adapters.

    Raises:
        Unreadable: There is no such GPU on the bus.
    """
    ways = [(pci.distance(machine, gpu.address, nic.address), nic) for nic in adapters if nic.address]
    best = min((pci.DISTANCES.index(way) for way, _ in ways if way), default=None)
    if best is None:
        return Nearest(None, ())
    return Nearest(pci.DISTANCES[best], tuple(nic for way, nic in ways if way == pci.DISTANCES[best]))


def in_use(subject: Subject, adapters: Sequence[Adapter]) -> list[Adapter]:
    """The adapters that are some GPU's own; all of them where there is no GPU, or nothing is known.

    Others are for storage and management: nobody waits for those in a collective.
    """
    try:
        own = {
            nic.name for gpu in located(subject) for nic in nearest(subject.machine, gpu, adapters).adapters
        }
    except Unreadable:
        own = set()
    return [nic for nic in adapters if nic.name in own or not own]
