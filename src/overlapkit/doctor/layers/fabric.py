"""The fabric: ports, what their counters do, GPUDirect, and the interface that sockets would use."""

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator

from overlapkit.doctor import pci
from overlapkit.doctor.check import Check
from overlapkit.doctor.layers import ports
from overlapkit.doctor.layers.configured import adapters, settings
from overlapkit.doctor.layers.nearest import in_use, located, nearest
from overlapkit.doctor.line import Layer, Line, joined
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Subject
from overlapkit.doctor.watch import Watch

FABRIC = Layer("fabric")
_NET = "/sys/class/net"
_PEER_MODULES = "nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"
_HEADERS = 0.9  # of what a PCIe link carries, beside the headers of its packets
_PAUSED_BITS = (
    65535 * 512
)  # 802.3x: a pause frame stops a port, or a priority of it, for so many bit times at most
_STILL = 0.01  # of the time: some pause frames are how a lossless network works
_REPLACE = "reseat or replace the cable or transceiver; look at the same port of the switch"


def rdma(subject: Subject) -> Iterator[Line]:
    """Ports that are down, or slower than the others, of adapters that GPUs need."""
    nics = adapters(subject)
    if not nics:
        yield FABRIC.absent("ports", "no RDMA adapter (InfiniBand, RoCE, EFA)")
        return
    needed = in_use(subject, nics)
    best = max((port.gbits or 0.0 for nic in needed for port in nic.ports if port.active), default=0.0)
    down, slow = _down(subject, needed), [(nic, _rate(nic)) for nic in needed if 0 < _rate(nic) < best]
    for nic in down:
        yield FABRIC.weak(
            "ports",
            f"{nic.name}: {joined(port.state for port in nic.ports)}, not active",
            "NCCL leaves it out: its GPUs share the other adapters, or TCP is left",
            f"{_REPLACE}; InfiniBand needs a subnet manager",
        )
    for nic, rate in slow:
        yield FABRIC.weak(
            "ports",
            f"{nic.name}: {rate:g} Gb/s, the fastest here has {best:g}",
            "NCCL's rings and trees run at the slowest adapter's rate",
            f"{_REPLACE}; or leave it out: NCCL_IB_HCA=^{nic.name}",
        )
    if not down and not slow:
        active = [port for nic in nics for port in nic.ports if port.active]
        kinds = joined(sorted({f"{port.kind} {port.gbits or 0:g} Gb/s" for port in active}))
        rest = [nic.name for nic in nics if not _rate(nic)]
        saw = f"{len(active)} active: {kinds}" if active else "none is active"
        yield FABRIC.ok("ports", f"{saw}{f'; down, and no GPU needs it: {joined(rest)}' if rest else ''}")


def _rate(nic: ports.Adapter) -> float:
    """Gb/s of the adapter's best port; 0 where none is active."""
    return max((port.gbits or 1.0 for port in nic.ports if port.active), default=0.0)


def _down(subject: Subject, needed: list[ports.Adapter]) -> list[ports.Adapter]:
    """Adapters without an active port: a GPU has no other that is as near, or there are too few."""
    down = [nic for nic in needed if not _rate(nic) and not all(port.disabled for port in nic.ports)]
    up, gpus = len(needed) - len(down), located(subject)
    if not gpus:
        return down if up == 0 else []
    if up < len(gpus) <= len(needed):
        return down
    own = [nearest(subject.machine, gpu, needed).adapters for gpu in gpus]
    alone = {nic.name for near in own if not any(map(_rate, near)) for nic in near}
    return [nic for nic in down if nic.name in alone]


def links(subject: Subject) -> Iterator[Line]:
    """The PCIe link of each adapter, and the MTU of those on Ethernet."""
    nics, bad = in_use(subject, adapters(subject)), False
    for nic in nics:
        try:
            link = pci.link(subject.machine, nic.address) if nic.address else None
        except Unreadable:  # an adapter of a virtual machine has none
            link = None
        if link and link.now < link.best and not _suffices(nic, link):
            bad = True
            yield FABRIC.weak(
                "nic links",
                f"{nic.name}: {link}",
                "the adapter cannot reach its port's rate",
                "reseat it, or move it to a slot with all lanes and the full generation",
            )
        for name in nic.interfaces:
            mtu = subject.machine.count(f"{_NET}/{name}/mtu")
            if mtu and mtu < 4200 and any(p.kind == "Ethernet" and p.active for p in nic.ports):
                bad = True
                yield FABRIC.weak(
                    "nic links",
                    f"{nic.name} ({name}): MTU {mtu}",
                    "RoCE sends packets of 1024 bytes: more of them, and less payload",
                    f"raise it on the host and on every switch: ip link set {name} mtu 9000",
                )
    if nics and not bad:
        yield FABRIC.ok("nic links", "the adapters' PCIe links carry what their ports do")


def _suffices(nic: ports.Adapter, link: pci.Link) -> bool:
    """Whether a link below its best, as in an older slot, still carries what the adapter's ports do."""
    needed = sum(port.gbits or 0.0 for port in nic.ports if port.active)
    return 0 < needed <= _HEADERS * link.now * 8e-9


def counting(watch: Watch, seconds: float) -> Callable[[Subject], Iterator[Line]]:
    """The check of counters that a watch was set on."""

    def counters(subject: Subject) -> Iterator[Line]:
        if watch.first is None:
            return  # they did not answer, which was said then
        if not watch.first:
            yield FABRIC.absent("counters", "no port or interface that counts errors")
            return
        rates = watch.rates(seconds)
        bad: dict[str, list[str]] = defaultdict(list)
        pauses: dict[tuple[str, str], float] = defaultdict(float)
        for (whose, name), rate in rates.items():
            if way := ports.pause_way(name):  # drivers count a frame by port and by priority
                pauses[whose, way] = max(rate, pauses[whose, way])
            elif rate > ports.TOLERATED.get(name, 0.0):
                bad[whose].append(f"{ports.ERRORS[name]} ({name}) {rate:.3g}/s")
        for whose, risen in bad.items():
            yield FABRIC.weak(
                "counters",
                f"{whose}: {'; '.join(risen)}",
                "what is damaged or lost is sent again: collectives stall for milliseconds",
                _REPLACE,
            )
        still = {key: _still(subject, key[0], rate) for key, rate in pauses.items()}
        long = {key: share for key, share in still.items() if share > _STILL}
        for (whose, way), share in long.items():
            yield _paused(whose, way, pauses[whose, way], share)
        if not bad and not long:
            saw = (
                f"pause frames for {max(still.values()):.1%} of the time at most"
                if still
                else "no pause frame"
            )
            total = sum(watch.first.values())
            yield FABRIC.ok("counters", f"no error, {saw} in {watch.passed:.3g} s ({total} since boot)")

    return counters


def gpudirect(subject: Subject) -> Iterator[Line]:
    """Whether adapters reach GPU memory."""
    machine, vendors = subject.machine, set(pci.gpus(subject.machine).values())
    if not vendors or not any(port.active for nic in adapters(subject) for port in nic.ports):
        yield FABRIC.absent("gpudirect", "no GPU beside an RDMA adapter that is up")
        return
    if pci.AMD in vendors:
        there = machine.has("/sys/kernel/mm/memory_peers/amdkfd/version") or machine.has(
            "/sys/module/ib_peer_mem"
        )
        if there:
            yield FABRIC.ok("gpudirect", "amdgpu offers GPU memory to adapters")
        else:
            yield FABRIC.unknown(
                "gpudirect", "amdgpu may offer it through dmabuf: NCCL_DEBUG=INFO shows GDRDMA"
            )
        return
    modules = [name for name in _PEER_MODULES if machine.has(f"/sys/module/{name}")]
    driver = machine.maybe("/proc/driver/nvidia/version") or ""
    if modules:
        yield FABRIC.ok("gpudirect", f"{modules[0]} is loaded")
    elif "Open Kernel Module" in driver and _kernel(subject) >= (5, 12):
        yield FABRIC.ok("gpudirect", "through dmabuf: NVIDIA's open kernel modules")
    elif not driver:
        saw = "no module is seen here, and neither /proc/driver/nvidia/version: NCCL_DEBUG=INFO shows GDRDMA"
        yield FABRIC.unknown("gpudirect", saw)
    else:
        yield FABRIC.weak(
            "gpudirect",
            "neither nvidia_peermem nor NVIDIA's open kernel modules (dmabuf)",
            "what goes to other machines is copied through the host's memory: half of the rate, and CPU time",
            "as root: modprobe nvidia-peermem, at every boot; or install the driver's open kernel modules",
        )


def sockets(subject: Subject) -> Iterator[Line]:
    """The interface that gloo, NCCL's start and its sockets use."""
    machine, several = subject.machine, subject.place.nodes > 1
    up = [name for name, is_up in ports.interfaces(machine).items() if is_up]
    real = [name for name in up if name in ports.hardware(machine)] or up
    env = settings(subject)
    named = env.get("NCCL_SOCKET_IFNAME") or env.get("GLOO_SOCKET_IFNAME")
    by_rdma = subject.on_gpus and any(port.active for nic in adapters(subject) for port in nic.ports)
    if not up:
        if several:
            yield FABRIC.weak(
                "sockets",
                "no network interface is up",
                "ranks of other machines cannot be reached",
                "bring one up; a container needs --network=host",
            )
        else:
            yield FABRIC.absent("sockets", "no interface but the loopback: enough for one machine")
        return
    rates = {name: ports.megabits(machine, name) for name in real}
    saw = joined(
        f"{name} ({rate / 1000:g} Gb/s)" if rate else f"{name} (rate not said)"
        for name, rate in rates.items()
    )
    slowest = min((rate for rate in rates.values() if rate), default=None)
    fastest = max((rate for rate in rates.values() if rate), default=None)
    if several and not named and not by_rdma and slowest and fastest and slowest < fastest:
        best = next(name for name, rate in rates.items() if rate == fastest)
        yield FABRIC.weak(
            "sockets",
            saw,
            "where NCCL or gloo takes the slow one, everything that goes over TCP is slow",
            f"name the fast one: NCCL_SOCKET_IFNAME={best} GLOO_SOCKET_IFNAME={best}",
        )
    else:
        yield FABRIC.ok("sockets", saw)


def hostname(subject: Subject) -> Iterator[Line]:
    """Whether the host's name leads to an address that other machines reach."""
    if subject.place.nodes < 2:
        return
    name, named = socket.gethostname(), settings(subject).get("GLOO_SOCKET_IFNAME")
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = str(error)
    if named:
        yield FABRIC.ok("hostname", f"gloo takes the address of GLOO_SOCKET_IFNAME={named}")
    elif address.startswith("127.") or not address[:1].isdigit():
        yield FABRIC.weak(
            "hostname",
            f"{name} leads to {address}",
            "gloo tells the other machines an address where nobody answers: a hang at the start",
            "correct /etc/hosts or DNS, or name the interface: GLOO_SOCKET_IFNAME=eth0",
        )
    else:
        yield FABRIC.ok("hostname", f"{name} leads to {address}")


def _still(subject: Subject, whose: str, rate: float) -> float:
    """The share of time that pause frames can have stopped a port for; 1 where its rate is not said."""
    megabits = ports.megabits(subject.machine, whose)
    return min(1.0, rate * _PAUSED_BITS / (megabits * 1e6)) if megabits else 1.0


def _paused(whose: str, way: str, rate: float, share: float) -> Line:
    still = f"for up to {share:.0%} of the time"
    if way == "rx":
        return FABRIC.weak(
            "counters",
            f"{whose}: {rate:.3g} pause frames/s received",
            f"the switch holds this port back {still}: its way is congested, and all that shares it waits",
            "tune ECN and PFC on switches and adapters, spread the traffic (adaptive routing, rails)",
        )
    return FABRIC.weak(
        "counters",
        f"{whose}: {rate:.3g} pause frames/s sent",
        f"this host takes in more slowly than its port receives, and holds up every sender {still}",
        "look at the adapter's PCIe link, NUMA node and GPUDirect (path nics, fabric nic links, gpudirect)",
    )


def _kernel(subject: Subject) -> tuple[int, ...]:
    release = (subject.machine.maybe("/proc/sys/kernel/osrelease") or "").split(".")
    return tuple(int(part) for part in release[:2] if part.isdigit())


def begin(watch: Watch) -> Check:
    """Sets the watch, first of all: what other checks take is time in which counters rise."""

    def look(subject: Subject) -> Iterator[Line]:
        watch.begin()
        yield from ()

    return Check(FABRIC, "counters", look)


def checks(watch: Watch, seconds: float) -> tuple[Check, ...]:
    """All checks of this layer; the watch has been set."""
    return (
        Check(FABRIC, "ports", rdma, needs="/sys"),
        Check(FABRIC, "nic links", links),
        Check(FABRIC, "gpudirect", gpudirect),
        Check(FABRIC, "sockets", sockets, needs="/sys"),
        Check(FABRIC, "hostname", hostname),
        Check(FABRIC, "counters", counting(watch, seconds), seconds=seconds + 15.0, needs="/sys"),
    )
