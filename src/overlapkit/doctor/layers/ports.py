"""The RDMA adapters and network interfaces of a machine as sysfs shows them, and their counters by name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from overlapkit.doctor.machine import Machine, Unreadable

_RDMA, _NET = "/sys/class/infiniband", "/sys/class/net"
# Names of the kernel's RDMA and netdev counters: what each rise of one means
ERRORS = {
    "symbol_error": "symbol errors",
    "link_error_recovery": "link retrainings",
    "link_downed": "links lost",
    "port_rcv_errors": "damaged packets",
    "port_rcv_remote_physical_errors": "packets that a switch marked as damaged",
    "local_link_integrity_errors": "link integrity errors",
    "excessive_buffer_overrun_errors": "buffer overruns",
    "port_xmit_discards": "discarded packets",
    "packet_seq_err": "packets that the other side missed",
    "local_ack_timeout_err": "timeouts of acknowledgements",
    "roce_slow_restart": "restarts after loss",
    "rx_crc_errors": "CRC errors",
    "rx_errors": "receive errors",
    "tx_errors": "send errors",
    "rx_missed_errors": "packets without a buffer",
    "carrier_down_count": "links lost",
}
TOLERATED = {"symbol_error": 120 / 3600}
"""Of errors a second: at the bit error rate that InfiniBand allows a cable (1e-12) there are 120 an hour."""
_PAUSE = re.compile(r"pause|xoff|pfc")
_NO_FRAMES = re.compile(r"duration|transition|storm|xon")


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA adapter.

    Attributes:
        where: Its folder.
        active: Whether it carries traffic.
        disabled: Whether somebody switched it off.
        state: As the kernel says it.
        gbits: Its rate, or None.
        kind: "InfiniBand" or "Ethernet" (RoCE).
    """

    where: str
    active: bool
    disabled: bool
    state: str
    gbits: float | None
    kind: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """An RDMA adapter.

    Attributes:
        name: mlx5_0.
        address: Its PCI address, or None.
        interfaces: Its network interfaces.
        driver: Its driver's name, or empty.
        ports: Its ports.
    """

    name: str
    address: str | None
    interfaces: tuple[str, ...]
    driver: str
    ports: tuple[Port, ...]


def adapters(machine: Machine) -> list[Adapter]:
    """All RDMA adapters."""
    found = []
    for name in machine.names(_RDMA):
        folder = f"{_RDMA}/{name}"
        ports = tuple(_port(machine, f"{folder}/ports/{port}") for port in machine.names(f"{folder}/ports"))
        found.append(
            Adapter(
                name,
                _leads_to(machine, f"{folder}/device"),
                tuple(machine.names(f"{folder}/device/net")),
                _leads_to(machine, f"{folder}/device/driver") or "",
                ports,
            )
        )
    return found


def interfaces(machine: Machine) -> dict[str, bool]:
    """The network interfaces but the loopback, and whether each is up."""
    up = {}
    for name in machine.names(_NET):
        if name != "lo" and machine.has(f"{_NET}/{name}/operstate"):
            state = machine.maybe(f"{_NET}/{name}/operstate")
            up[name] = state == "up" or (
                state == "unknown" and machine.maybe(f"{_NET}/{name}/carrier") == "1"
            )
    return up


def hardware(machine: Machine) -> list[str]:
    """The interfaces that a device stands behind: no bridges, tunnels or ends of containers."""
    return [name for name in interfaces(machine) if machine.has(f"{_NET}/{name}/device")]


def megabits(machine: Machine, interface: str) -> int | None:
    """An interface's rate; None where it has none to say, as in a virtual machine."""
    rate = machine.count(f"{_NET}/{interface}/speed")
    return rate if rate and rate > 0 else None


def counters(machine: Machine) -> dict[tuple[str, str], int]:
    """Every counter of errors and of pause frames, by port or interface and by name."""
    found: dict[tuple[str, str], int] = {}
    for adapter in adapters(machine):
        for port in adapter.ports:
            for folder in ("counters", "hw_counters"):
                names = set(machine.names(f"{port.where}/{folder}")) & ERRORS.keys()
                found |= dict(_read(machine, adapter.name, f"{port.where}/{folder}", names))
    for name in hardware(machine):
        found |= dict(_read(machine, name, f"{_NET}/{name}/statistics", ERRORS))
        found |= dict(_read(machine, name, f"{_NET}/{name}", ("carrier_down_count",)))
        found |= {(name, one): value for one, value in machine.ethtool(name).items() if pause_way(one)}
    return found


def pause_way(name: str) -> str:
    """Where a driver's counter counts pause frames (802.3x or per priority): "rx" or "tx"; else empty."""
    words = re.split(r"[._]", name.lower())
    counts = _PAUSE.search(name.lower()) and not _NO_FRAMES.search(name.lower())
    return next((way for way in ("rx", "tx") if counts and way in words), "")


def _read(
    machine: Machine, whose: str, folder: str, names: "dict[str, str] | set[str] | tuple[str, ...]"
) -> Iterator[tuple[tuple[str, str], int]]:
    for name in sorted(names):
        value = machine.count(f"{folder}/{name}")
        if value is not None:
            yield (whose, name), value


def _port(machine: Machine, where: str) -> Port:
    state = machine.maybe(f"{where}/state") or "?"  # "4: ACTIVE"
    physical = machine.maybe(f"{where}/phys_state") or ""  # "3: Disabled"
    rate = (machine.maybe(f"{where}/rate") or "").split()  # "400 Gb/sec (4X NDR)"
    try:
        gbits = float(rate[0]) if rate else None
    except ValueError:
        gbits = None
    return Port(
        where,
        state.startswith("4"),
        physical.startswith("3"),
        state.partition(":")[2].strip() or state,
        gbits,
        machine.maybe(f"{where}/link_layer") or "?",
    )


def _leads_to(machine: Machine, link: str) -> str | None:
    try:
        return machine.resolve(link).name
    except Unreadable:
        return None
