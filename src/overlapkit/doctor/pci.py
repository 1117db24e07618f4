"""The PCI tree as sysfs shows it: how wide a device's link is, and how far two devices are from each other.

Distances have the names of `nvidia-smi topo -m`: PIX, PXB, PHB, NODE and SYS, from near to far.
"""

from typing import NamedTuple

from overlapkit.doctor.machine import Machine, Unreadable

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
FAR = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the CPU's PCIe root",
    "NODE": "between PCIe roots of one NUMA node",
    "SYS": "across sockets",
}
NVIDIA, AMD = 0x10DE, 0x1002
_DEVICES = "/sys/bus/pci/devices"
_INTEGRATED = 4 << 30  # bytes: graphics inside a processor, on which torch does not run, set less aside
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # base classes; data-centre GPUs are one or the other


class Link(NamedTuple):
    """A PCIe link: lanes and gigatransfers a second, now and at most."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    def __str__(self) -> str:
        return f"x{self.width} at {self.speed:g} GT/s, can do x{self.max_width} at {self.max_speed:g}"

    @property
    def best(self) -> float:
        """What it carries at most each way, in bytes per second, packet headers not subtracted."""
        return _carried(self.max_speed, self.max_width)

    @property
    def now(self) -> float:
        """What it carries as it is now."""
        return _carried(self.speed, self.width)


def gpus(machine: Machine, vendors: tuple[int, ...] = (NVIDIA, AMD)) -> dict[str, int]:
    """The vendor of each GPU by its PCI address."""
    found = {}
    for address in machine.names(_DEVICES):
        vendor, kind = (machine.count(f"{_DEVICES}/{address}/{name}") for name in ("vendor", "class"))
        own = machine.count(f"{_DEVICES}/{address}/mem_info_vram_total")  # amdgpu's
        if own is not None and own < _INTEGRATED:
            continue
        if vendor in vendors and kind is not None and kind >> 16 in (_DISPLAY, _ACCELERATOR):
            found[address] = vendor
    return found


def link(machine: Machine, address: str) -> Link:
    """A device's link.

    Raises:
        Unreadable: The device has none, or the firmware does not show it.
    """
    folder = f"{_DEVICES}/{address}"
    speed, most = (
        _speed(machine.text(f"{folder}/{name}_link_speed"), address) for name in ("current", "max")
    )
    width, widest = (machine.number(f"{folder}/{name}_link_width") for name in ("current", "max"))
    if not (0 < width <= 64 and 0 < widest < 255):
        raise Unreadable(f"{address}: the link has {width} of {widest} lanes, which says nothing")
    return Link(speed, width, most, widest)


def numa_node(machine: Machine, address: str) -> int | None:
    """The NUMA node that a device hangs on; None where the firmware does not say."""
    node = machine.count(f"{_DEVICES}/{address}/numa_node")
    return None if node is None or node < 0 else node


def nodes(machine: Machine) -> list[int]:
    """The NUMA nodes of the machine."""
    names = machine.names("/sys/devices/system/node")
    return sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit())


def chain(machine: Machine, address: str) -> tuple[str, ...]:
    """The root complex, the bridges and the device itself, from the CPU outwards.

    Raises:
        Unreadable: There is no such device.
    """
    parts = machine.resolve(f"{_DEVICES}/{address}").parts
    start = next((at for at, part in enumerate(parts) if part.startswith("pci")), None)
    if start is None:
        raise Unreadable(f"{address} hangs on no PCI root")
    return parts[start:]


def distance(machine: Machine, one: str, other: str) -> str | None:
    """How far two devices are from each other; None where that cannot be said.

    Raises:
        Unreadable: One of them is not there.
    """
    first, second = chain(machine, one), chain(machine, other)
    if first[0] == second[0]:
        common = next(
            (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        if common == 1:
            return "PHB"
        bridges = len(first) + len(second) - 2 * common - 2  # below the bridge that both share
        return "PIX" if bridges <= 2 else "PXB"
    here, there = numa_node(machine, one), numa_node(machine, other)
    if len(nodes(machine)) == 1:
        return "NODE"
    if here is None or there is None:
        return None
    return "NODE" if here == there else "SYS"


def _carried(speed: float, width: int) -> float:
    coding = 0.8 if speed < 8 else 128 / 130  # 8b/10b up to the second generation
    return speed * 1e9 / 8 * coding * width


def _speed(text: str, address: str) -> float:
    """Of "16.0 GT/s PCIe"."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        raise Unreadable(f"{address}: the link's speed is {text[:40]!r}") from None
