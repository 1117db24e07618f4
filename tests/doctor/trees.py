"""Machines that are not here: trees of /proc and /sys made file by file, and what their drivers say."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from overlapkit.doctor.gpus import Gpu
from overlapkit.doctor.machine import Machine
from overlapkit.doctor.subject import EXTRAS, FEATURES, Place, Subject, Torch

GIB = 1 << 30
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         {locked}            unlimited            bytes
"""


class Tree:
    """A root with /proc and /sys in it. Everything may be changed after it was made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {"HOME": str(root), "PATH": str(root / "bin")}
        self.ethtool: dict[str, dict[str, int]] = {}

    def write(self, files: Mapping[str, object]) -> "Tree":
        for path, content in files.items():
            at = self.root / path.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(f"{content}\n")
        return self

    def link(self, path: str, target: str) -> None:
        at = self.root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(self.root / target.lstrip("/"))

    def machine(self) -> Machine:
        return Machine(self.root, self.environ, ethtool=lambda name: self.ethtool.get(name, {}))

    def linux(
        self, cpus: int = 8, sockets: int = 1, memory: int = 64 * GIB, locked: str = "unlimited"
    ) -> "Tree":
        """A Linux without limits: cores, memory, one disk."""
        each = cpus // sockets
        self.write(
            {
                f"/sys/devices/system/node/node{n}/cpulist": f"{n * each}-{(n + 1) * each - 1}"
                for n in range(sockets)
            }
        )
        return self.write(
            {
                "/proc/meminfo": f"MemTotal: {memory >> 10} kB\nMemAvailable: {memory >> 11} kB\n"
                "SwapTotal: 0 kB\nSwapFree: 0 kB",
                "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t0-{cpus - 1}",
                "/proc/self/limits": LIMITS.format(locked=locked),
                "/proc/self/cgroup": "0::/user.slice",
                "/proc/self/mountinfo": "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
                "25 22 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw",
                "/proc/sys/kernel/osrelease": "6.8.0-45-generic",
                "/sys/devices/system/cpu/online": f"0-{cpus - 1}",
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
                "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            }
        )

    def device(
        self,
        way: str,
        vendor: int,
        kind: int,
        node: int = 0,
        lanes: int = 16,
        of: int = 16,
        speed: float = 32.0,
        at_most: float = 32.0,
    ) -> str:
        """A PCI device, at the end of a way such as pci0000:10/0000:10:01.0/0000:11:00.0; its address."""
        address = way.rsplit("/", 1)[1]
        folder = f"/sys/devices/{way}"
        self.write(
            {
                f"{folder}/vendor": f"{vendor:#06x}",
                f"{folder}/class": f"{kind:#08x}",
                f"{folder}/numa_node": node,
                f"{folder}/current_link_width": lanes,
                f"{folder}/max_link_width": of,
                f"{folder}/current_link_speed": f"{speed} GT/s PCIe",
                f"{folder}/max_link_speed": f"{at_most} GT/s PCIe",
            }
        )
        self.link(f"/sys/bus/pci/devices/{address}", folder)
        return address

    def gpu(self, way: str, node: int = 0, vendor: int = 0x10DE, **link: float) -> str:
        return self.device(way, vendor, 0x030200, node, **link)  # type: ignore[arg-type]

    def nic(
        self,
        way: str,
        name: str,
        node: int = 0,
        *,
        kind: str = "InfiniBand",
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        interface: str = "",
        driver: str = "mlx5_core",
        **link: float,
    ) -> str:
        address = self.device(way, 0x15B3, 0x020700, node, **link)  # type: ignore[arg-type]
        folder = f"/sys/devices/{way}"
        port = f"{folder}/infiniband/{name}/ports/1"
        self.write(
            {
                f"{port}/state": state,
                f"{port}/phys_state": "5: LinkUp" if state.startswith("4") else "2: Polling",
                f"{port}/rate": rate,
                f"{port}/link_layer": kind,
                f"{port}/counters/symbol_error": 12,
                f"{port}/counters/link_downed": 1,
                f"{port}/counters/port_xmit_data": 10**12,
                f"{port}/hw_counters/out_of_sequence": 0,
                f"/sys/bus/pci/drivers/{driver}/bind": "",
                "/dev/infiniband/uverbs0": "",
            }
        )
        self.link(f"{folder}/infiniband/{name}/device", folder)
        if not (self.root / f"sys/devices/{way}/driver").exists():
            self.link(f"{folder}/driver", f"/sys/bus/pci/drivers/{driver}")
        self.link(f"/sys/class/infiniband/{name}", f"{folder}/infiniband/{name}")
        if interface:
            self.net(interface, device=folder)
        return address

    def net(
        self, name: str, *, device: str = "", state: str = "up", speed: int = 100000, mtu: int = 9000
    ) -> None:
        where = f"{device or '/sys/devices/virtual'}/net/{name}"
        self.write(
            {
                f"{where}/operstate": state,
                f"{where}/carrier_down_count": 1,
                f"{where}/speed": speed,
                f"{where}/mtu": mtu,
                f"{where}/statistics/rx_errors": 0,
                f"{where}/statistics/rx_crc_errors": 3,
            }
        )
        if device:
            self.link(f"{where}/device", device)
        self.link(f"/sys/class/net/{name}", where)


class Driver:
    """NVML's answers."""

    driver = "580.95.05"
    cuda = 13, 0

    def __init__(self, gpus: list[Gpu], refused: Mapping[tuple[int, int], str] | None = None) -> None:
        self.gpus, self.refused = gpus, refused or {}

    def read(self) -> list[Gpu]:
        return self.gpus

    def peers(self, one: int, other: int) -> str | None:
        return self.refused.get((min(one, other), max(one, other)), "")

    def change(self, at: int, **fields: object) -> None:
        self.gpus[at] = dataclasses.replace(self.gpus[at], **fields)


def h100(address: str) -> Gpu:
    """One that is well."""
    return Gpu(
        address,
        "NVIDIA H100 80GB HBM3",
        memory=80 * GIB,
        used=GIB // 2,
        others=0,
        uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        slow=(),
        idle=False,
        persistent=True,
        mig=False,
        links=(True,) * 18,
        link_errors=0,
    )


def torch_on(gpus: int, **changes: object) -> Torch:
    """A CUDA build that sees so many GPUs, or a CPU build."""
    found = Torch(
        version="2.13.0+cu130" if gpus else "2.13.0+cpu",
        cuda="13.0" if gpus else None,
        nccl=(2, 28, 9) if gpus else None,
        devices=((9, 0),) * gpus,
        addresses=tuple(f"0000:{at + 1}3:00.0" for at in range(gpus)),
        architectures=("sm_80", "sm_90", "sm_100", "compute_120") if gpus else (),
        features=dict.fromkeys(FEATURES, True),
        extras=dict.fromkeys(EXTRAS, True),
        triton="3.7.1",
    )
    return dataclasses.replace(found, **changes)


@dataclasses.dataclass
class Node:
    """A tree with GPUs in it, and what examines it."""

    tree: Tree
    driver: Driver | str
    torch: Torch
    place: Place = Place()

    def subject(self) -> Subject:
        return Subject(self.tree.machine(), self.torch, self.place, self.driver)


def healthy(root: Path) -> Node:
    """One of two nodes: eight GPUs on two sockets, each behind a PCIe switch with an adapter of 400 Gb/s."""
    tree = Tree(root).linux(cpus=128, sockets=2, memory=2048 * GIB)
    gpus = []
    for at in range(8):
        bus, node = f"{at + 1}0", at // 4
        switch = f"pci0000:{bus}/0000:{bus}:01.0/0000:{at + 1}1:00.0"
        gpus.append(tree.gpu(f"{switch}/0000:{at + 1}2:00.0/0000:{at + 1}3:00.0", node))
        tree.nic(f"{switch}/0000:{at + 1}2:01.0/0000:{at + 1}4:00.0", f"mlx5_{at}", node)
    tree.device("pci0000:00/0000:00:1f.0", 0x8086, 0x020000)
    tree.net("eth0", device="/sys/devices/pci0000:00/0000:00:1f.0")
    tree.write(
        {
            "/sys/module/nvidia_peermem/version": "580.95.05",
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05",
            "/bin/gcc": "#!/bin/sh",
            # this rank is bound to the CPUs of its GPU's node
            "/proc/self/status": "Cpus_allowed_list:\t0-63",
        }
    )
    (root / "bin/gcc").chmod(0o755)
    tree.environ |= {"OMP_NUM_THREADS": "8", "TRITON_CACHE_DIR": str(root / "cache")}
    place = Place(rank=0, world=16, local_rank=0, local_world=8)
    return Node(tree, Driver([h100(address) for address in gpus]), torch_on(8), place)
