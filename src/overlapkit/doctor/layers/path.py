"""The way of a GPU's data: its PCIe link, NVLink, the other GPUs, the nearest NIC, and the socket."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from overlapkit.doctor import pci
from overlapkit.doctor.check import Check
from overlapkit.doctor.copying import host_to_device
from overlapkit.doctor.gpus import NO_PEERS
from overlapkit.doctor.layers.configured import adapters
from overlapkit.doctor.layers.gpu import known
from overlapkit.doctor.layers.nearest import located, nearest
from overlapkit.doctor.line import Layer, Line, joined, spans
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Subject

PATH = Layer("path")
_GOOD = 0.5  # of what a link carries: pinned copies reach 0.8 and more of it


def pcie(subject: Subject) -> Iterator[Line]:
    """Lanes and generation of each GPU's link."""
    links = {}
    for at, gpu in enumerate(located(subject)):
        try:
            links[at] = pci.link(subject.machine, gpu.address)
        except Unreadable as error:
            yield PATH.unknown("pcie", f"GPU {at}: {error}")
    gpus = located(subject)
    narrow: list[int] = []
    slow: list[int] = []
    resting: list[int] = []
    for at, link in links.items():
        if link.width < link.max_width:
            narrow.append(at)
        elif link.speed < link.max_speed:
            (slow if gpus[at].idle is False else resting).append(at)
    for bad, what in ((narrow, "lanes"), (slow, "speed")):
        for at in bad:
            link = links[at]
            share = link.width * link.speed / (link.max_width * link.max_speed)
            yield PATH.weak(
                "pcie",
                f"GPU {at} ({gpus[at].address}): {link}",
                f"copies and what goes over PCIe run at {share:.0%} of full {what}",
                "reseat the card or its riser, try another slot, look into the BIOS for a limit; "
                "dmesg names the link where it was trained down",
            )
    if resting:
        yield PATH.unknown(
            "pcie",
            f"GPU {spans(resting)}: {links[resting[0]]}; a GPU at rest may lower it",
            "look again while it computes",
        )
    if links and not (narrow or slow or resting):
        kinds = {f"x{link.width} at {link.speed:g} GT/s" for link in links.values()}
        yield PATH.ok("pcie", joined(sorted(kinds)))


def copies(subject: Subject, rate: Callable[[int], float] = host_to_device) -> Iterator[Line]:
    """What a copy from pinned memory reaches, beside what the link carries."""
    rates = {at: rate(at) for at in range(len(subject.torch.devices))}
    slow: list[int] = []
    compared = 0
    for at, address in enumerate(subject.torch.addresses):
        reached = rates[at]
        try:
            best = pci.link(subject.machine, address).best
        except Unreadable:
            continue
        compared += 1
        if reached < _GOOD * best:
            slow.append(at)
            yield PATH.weak(
                "copies",
                f"cuda:{at} ({address}): {reached / 1e9:.1f} GB/s from pinned memory, its link carries "
                f"{best / 1e9:.1f}",
                "batches, offloaded state and staged checkpoints take that much longer",
                "see path pcie; bind the process to the GPU's NUMA node: torchrun --numa-binding=node",
            )
    if rates and not slow:
        low, high = min(rates.values()) / 1e9, max(rates.values()) / 1e9
        saw = f"{low:.1f} to {high:.1f} GB/s from pinned memory"
        if compared:
            yield PATH.ok("copies", saw)
        else:
            yield PATH.unknown("copies", f"{saw}; what the links carry is not said")


def numa(subject: Subject) -> Iterator[Line]:
    """The NUMA node of each GPU."""
    homes: dict[int | None, list[int]] = defaultdict(list)
    for at, gpu in enumerate(located(subject)):
        homes[pci.numa_node(subject.machine, gpu.address)].append(at)
    several = len(pci.nodes(subject.machine)) > 1
    if None in homes and several:
        yield PATH.unknown("numa", f"GPU {spans(homes[None])}: the firmware does not say on which node")
    else:
        yield PATH.ok("numa", joined(f"GPU {spans(on)} on node {node or 0}" for node, on in homes.items()))


def nvlink(subject: Subject) -> Iterator[Line]:
    """Links that are down, or fewer than those of the GPUs beside."""
    gpus = known(subject)
    if all(gpu.links is None for gpu in gpus):
        yield PATH.unknown("nvlink", str(subject.gpus) if isinstance(subject.gpus, str) else "not said")
        return
    counts = [sum(gpu.links or ()) for gpu in gpus]
    if not any(gpu.links for gpu in gpus):
        yield PATH.absent("nvlink", "these GPUs have no NVLink: they talk over PCIe")
        return
    if len(gpus) < 2:
        yield PATH.absent("nvlink", "one GPU: nothing to talk to")
        return
    if not any(counts):  # cards that could be bridged have links as well
        remedy = "where they are bridged, or on one board: nvidia-smi nvlink -s, nvidia-fabricmanager"
        yield PATH.unknown("nvlink", "no link of any GPU is up: cards without a bridge, or a fault", remedy)
        return
    bad = [at for at, gpu in enumerate(gpus) if counts[at] < max(len(gpu.links or ()), max(counts))]
    for at in bad:
        yield PATH.weak(
            "nvlink",
            f"GPU {at}: {counts[at]} of {max(len(gpus[at].links or ()), max(counts))} links are up",
            "collectives run at the slowest GPU's rate, or over PCIe where none is left",
            "nvidia-smi nvlink -s -i N; check nvidia-fabricmanager, then reset the GPU or the machine",
        )
    errors = [at for at, gpu in enumerate(gpus) if gpu.link_errors]
    if errors:
        yield PATH.weak(
            "nvlink",
            f"GPU {spans(errors)}: links were trained anew since the driver was loaded",
            "collectives stand still meanwhile, and fail where it does not succeed",
            "nvidia-smi nvlink -e -i N; where the counts grow, have the GPU or the baseboard looked at",
        )
    if not bad and not errors:
        yield PATH.ok("nvlink", f"{max(counts)} links a GPU, all up")


def peers(subject: Subject) -> Iterator[Line]:
    """Whether GPUs of this machine reach each other's memory."""
    driver, count = subject.gpus, len(known(subject))
    if count < 2 or isinstance(driver, str):
        return
    refused: dict[str, list[str]] = defaultdict(list)
    unsaid = 0
    for one in range(count):
        for other in range(one + 1, count):
            reason = driver.peers(one, other)
            unsaid += reason is None
            if reason:
                refused[reason].append(f"{one}-{other}")
    if pairs := refused.pop(NO_PEERS, []):
        yield PATH.absent("peers", f"GPUs {joined(pairs)}: {NO_PEERS}, so NCCL passes data through memory")
    for reason, pairs in refused.items():
        yield PATH.weak(
            "peers",
            f"no direct access between GPUs {joined(pairs)}: {reason}",
            "NCCL passes their data through the host's memory: a fraction of the rate",
            "if the boards support it: disable ACS and the IOMMU in the BIOS (or boot with iommu=pt)",
        )
    if not refused and unsaid:
        yield PATH.unknown("peers", "the driver does not say which GPUs reach each other")
    elif not refused and not pairs:
        yield PATH.ok("peers", "every GPU reaches every other one's memory")


def nics(subject: Subject) -> Iterator[Line]:
    """The nearest NIC of each GPU."""
    up = [nic for nic in adapters(subject) if any(port.active for port in nic.ports)]
    if not up:
        yield PATH.absent("nics", "no RDMA NIC that is up: nothing to be near to")
        return
    gpus = located(subject)
    found = [nearest(subject.machine, gpu, up) for gpu in gpus]
    far: dict[int | None, list[int]] = defaultdict(list)
    for at, near in enumerate(found):
        if near.distance == "SYS":
            far[pci.numa_node(subject.machine, gpus[at].address)].append(at)
    for node, bad in far.items():
        yield PATH.weak(
            "nics",
            f"GPU {spans(bad)} on NUMA node {node}: the nearest NIC that is up, "
            f"{found[bad[0]].adapters[0].name}, is on another socket (SYS)",
            "what these GPUs send to other machines crosses the sockets, and NCCL leaves out GPUDirect",
            f"a NIC in a slot of socket {node}, or bring up the one that is there; else use the GPUs near it",
        )
    if unsaid := [at for at, near in enumerate(found) if near.distance is None]:
        yield PATH.unknown("nics", f"GPU {spans(unsaid)}: the firmware does not say on which node they are")
    said = [near.distance for near in found if near.distance]
    if said and not far:
        way = max(said, key=pci.DISTANCES.index)
        pairs = (f"{at} {near.adapters[0].name}" for at, near in enumerate(found) if near.adapters)
        saw = f"each GPU's nearest NIC is {way} or nearer: {pci.FAR[way]} (GPU {joined(pairs, 16)})"
        yield PATH.ok("nics", saw)


def translation(subject: Subject) -> Iterator[Line]:
    """Whether an IOMMU translates what GPUs send each other."""
    gpus, machine = located(subject), subject.machine
    kinds = {
        at: machine.maybe(f"/sys/bus/pci/devices/{gpu.address}/iommu_group/type")
        for at, gpu in enumerate(gpus)
    }
    bad = [at for at, kind in kinds.items() if kind and kind.startswith("DMA")]
    if bad and len(gpus) > 1:
        yield PATH.weak(
            "iommu",
            f"GPU {spans(bad)}: the IOMMU translates their accesses",
            "direct access between GPUs, and between GPU and NIC, is slow or hangs",
            "boot with iommu=pt (or switch the IOMMU off in the BIOS), where this is no virtual machine",
        )
    elif gpus:
        yield PATH.ok("iommu", "it translates no GPU's accesses" if any(kinds.values()) else "none at work")


def _with(look: Callable[[Subject], Iterator[Line]]) -> Callable[[Subject], Iterator[Line]]:
    """Nothing to say without GPUs."""

    def guarded(subject: Subject) -> Iterator[Line]:
        if located(subject):
            yield from look(subject)

    return guarded


CHECKS = (
    Check(PATH, "pcie", _with(pcie)),
    Check(PATH, "copies", copies, seconds=60.0),
    Check(PATH, "numa", _with(numa)),
    Check(PATH, "nvlink", _with(nvlink)),
    Check(PATH, "peers", _with(peers)),
    Check(PATH, "nics", _with(nics)),
    Check(PATH, "iommu", _with(translation)),
)
