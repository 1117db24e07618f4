"""Whole machines: each fault alone is named, and nothing else is; a healthy node has no weak line."""

import dataclasses

import pytest

from overlapkit.doctor import pci
from overlapkit.doctor.machine import Machine, Unreadable
from overlapkit.doctor.subject import Place
from tests.doctor.looking import look, named, weak
from tests.doctor.trees import GIB, Driver, Node, Tree, h100, healthy, torch_on


@pytest.fixture
def node(tmp_path):
    return healthy(tmp_path)


def test_a_healthy_node_has_no_weak_and_no_unknown_line(node):
    lines = look(node)
    assert weak(lines) == []
    assert [line for line in lines if line.state == "unknown" and line.layer != "storage"] == []
    assert named(lines, "gpu", "devices").saw == "8 x NVIDIA H100 80GB HBM3; torch sees 8"
    assert named(lines, "path", "nvlink").saw == "18 links a GPU, all up"
    assert named(lines, "path", "numa").saw == "GPU 0-3 on node 0, GPU 4-7 on node 1"
    assert "PIX" in named(lines, "path", "nics").saw
    assert named(lines, "fabric", "ports").saw == "8 active: InfiniBand 400 Gb/s"
    assert named(lines, "nccl", "transport").saw == (
        "on this machine NVLink; between machines RDMA over InfiniBand (8 adapters)"
    )
    assert named(lines, "loop", "cores").saw.startswith("16 cores a rank")
    assert {line.layer for line in lines} >= {"gpu", "path", "fabric", "nccl", "kernels", "framework", "loop"}


# `nvidia-smi topo -m` of an HGX H100 machine: GPUs by adapters, of the first and of the last of each socket
TOPOLOGY = """
        NIC0  NIC1  NIC2  NIC3  NIC4  NIC5  NIC6  NIC7  NUMA
GPU0    PIX   NODE  NODE  NODE  SYS   SYS   SYS   SYS   0
GPU3    NODE  NODE  NODE  PIX   SYS   SYS   SYS   SYS   0
GPU4    SYS   SYS   SYS   SYS   PIX   NODE  NODE  NODE  1
GPU7    SYS   SYS   SYS   SYS   NODE  NODE  NODE  PIX   1
"""


def test_the_tree_is_read_as_nvidia_smi_reads_it(node):
    machine = node.tree.machine()
    for row in TOPOLOGY.strip().splitlines()[1:]:
        name, *ways, home = row.split()
        gpu = node.driver.gpus[int(name[3:])].address
        nics = [f"0000:{at + 1}4:00.0" for at in range(8)]
        assert [pci.distance(machine, gpu, nic) for nic in nics] == ways, name
        assert pci.numa_node(machine, gpu) == int(home)
    told = "(GPU 0 mlx5_0, 1 mlx5_1, 2 mlx5_2, 3 mlx5_3, 4 mlx5_4, 5 mlx5_5, 6 mlx5_6, 7 mlx5_7)"
    assert named(look(node), "path", "nics").saw.endswith(told)


def test_a_nic_on_the_wrong_socket(tmp_path):
    tree = Tree(tmp_path).linux(cpus=32, sockets=2)
    near = tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0)
    far = tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    tree.nic("pci0000:20/0000:20:01.0/0000:21:00.0", "mlx5_0", 0)
    node = Node(tree, "no driver", torch_on(2))
    lines = look(node)
    (found,) = [one for one in weak(lines) if one[:2] == ("path", "nics")]
    assert found[2] == "GPU 1 on NUMA node 1: the nearest NIC that is up, mlx5_0, is on another socket (SYS)"
    assert near < far  # GPU 1 is the far one
    assert named(lines, "gpu", "devices").state == "ok"
    tree.nic("pci0000:90/0000:90:01.0/0000:91:00.0", "mlx5_1", 1)
    assert named(look(node), "path", "nics").saw.startswith("each GPU's nearest NIC is NODE or nearer")


def test_adapters_that_no_gpu_needs_may_be_down_or_slow(node):
    """As on most large nodes: a second port without a cable, a slower adapter for storage."""
    node.tree.nic("pci0000:f0/0000:f0:01.0/0000:f1:00.0", "mlx5_8", 1, state="1: DOWN")
    node.tree.nic("pci0000:f0/0000:f0:02.0/0000:f2:00.0", "mlx5_9", 1, rate="200 Gb/sec", lanes=8)
    lines = look(node)
    assert weak(lines) == []
    assert named(lines, "fabric", "ports").saw == (
        "9 active: InfiniBand 200 Gb/s, InfiniBand 400 Gb/s; down, and no GPU needs it: mlx5_8"
    )


def test_in_a_virtual_machine_all_adapters_are_equally_near(tmp_path):
    tree = Tree(tmp_path).linux()
    gpus = [tree.gpu(f"pci0000:00/0000:00:{at:02x}.0", -1) for at in range(16, 18)]
    for at in range(2):
        tree.nic(
            f"pci0000:00/0000:00:{at + 4:02x}.0", f"mlx5_{at}", -1, state="4: ACTIVE" if at else "1: DOWN"
        )
    two = Node(tree, Driver([h100(gpu) for gpu in gpus]), torch_on(2))
    assert ("fabric", "ports", "mlx5_0: DOWN, not active") in weak(look(two))
    tree.nic("pci0000:00/0000:00:06.0", "mlx5_2", -1)  # one for each GPU is up now
    assert named(look(two), "fabric", "ports").state == "ok"


def test_a_machine_without_gpus_needs_one_adapter(tmp_path):
    tree = Tree(tmp_path).linux()
    tree.nic("pci0000:00/0000:00:04.0", "mlx5_0", state="1: DOWN")
    node = Node(tree, "none", torch_on(0))
    assert ("fabric", "ports", "mlx5_0: DOWN, not active") in weak(look(node))
    tree.nic("pci0000:00/0000:00:05.0", "mlx5_1")
    assert named(look(node), "fabric", "ports").state == "ok"


def set_files(files):
    return lambda node: node.tree.write(files)


def change(at, **fields):
    return lambda node: node.driver.change(at, **fields)


def environ(**names):
    return lambda node: node.tree.environ.update(names)


def remove_peermem(node):
    (node.tree.root / "sys/module/nvidia_peermem/version").unlink()
    (node.tree.root / "sys/module/nvidia_peermem").rmdir()
    node.tree.write(
        {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05"}
    )


def add_roce(node):
    way = "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:01.0/0000:85:00.0"  # beside GPU 7
    node.tree.nic(way, "roce0", 1, kind="Ethernet", interface="enp241")
    node.tree.write({f"/sys/devices/{way}/net/enp241/mtu": 1500})


def torch_is(**changes):
    return lambda node: setattr(node, "torch", torch_on(8, **changes))


GPU3 = "/sys/bus/pci/devices/0000:43:00.0"
NIC3 = "/sys/bus/pci/devices/0000:44:00.0"
PORT3 = "/sys/class/infiniband/mlx5_3/ports/1"
FAULTS = [
    # layer, name, what the line must say, what is done to the healthy node
    (
        "gpu",
        "memory",
        "GPU 2: 9.0 GiB of 80.0 GiB in use by 1 process(es)",
        change(2, used=9 * GIB, others=1),
    ),
    ("gpu", "faults", "GPU 5: 3 uncorrectable memory errors", change(5, uncorrected=3)),
    ("gpu", "faults", "GPU 5: rows of memory are faulty (remap pending)", change(5, remap_pending=True)),
    ("gpu", "faults", "GPU 5: rows of memory are faulty (remap failed)", change(5, remap_failed=True)),
    ("gpu", "clocks", "GPU 1: clocks are lowered (too hot)", change(1, slow=("too hot",))),
    ("gpu", "settings", "driver 580.95.05: GPU 7 without persistence mode", change(7, persistent=False)),
    ("gpu", "settings", "GPU 4: cut into instances (MIG)", change(4, mig=True)),
    ("gpu", "devices", "torch sees 7", lambda node: sees_seven(node)),
    (
        "path",
        "pcie",
        "GPU 3 (0000:43:00.0): x4 at 32 GT/s, can do x16",
        set_files({f"{GPU3}/current_link_width": 4}),
    ),
    (
        "path",
        "pcie",
        "GPU 3 (0000:43:00.0): x16 at 8 GT/s, can do x16 at 32",
        set_files({f"{GPU3}/current_link_speed": "8.0 GT/s PCIe"}),
    ),
    ("path", "nvlink", "GPU 6: 17 of 18 links are up", change(6, links=(True,) * 17 + (False,))),
    ("path", "nvlink", "GPU 6: links were trained anew", change(6, link_errors=40)),
    (
        "path",
        "peers",
        "no direct access between GPUs 0-1: the chipset does not",
        lambda node: node.driver.refused.update({(0, 1): "the chipset does not support it"}),
    ),
    (
        "path",
        "iommu",
        "GPU 3: the IOMMU translates",
        lambda node: node.tree.write({f"{GPU3}/iommu_group/type": "DMA-FQ"}),
    ),
    ("fabric", "ports", "mlx5_3: DOWN, not active", set_files({f"{PORT3}/state": "1: DOWN"})),
    (
        "fabric",
        "ports",
        "mlx5_3: 200 Gb/s, the fastest here has 400",
        set_files({f"{PORT3}/rate": "200 Gb/sec"}),
    ),
    (
        "fabric",
        "nic links",
        "mlx5_3: x8 at 32 GT/s, can do x16",
        set_files({f"{NIC3}/current_link_width": 8}),
    ),
    ("fabric", "nic links", "roce0 (enp241): MTU 1500", add_roce),
    ("fabric", "gpudirect", "neither nvidia_peermem nor", remove_peermem),
    ("nccl", "variables", "NCCL_P2P_DISABLE=1", environ(NCCL_P2P_DISABLE="1")),
    ("nccl", "names", "NCCL_SOKET_IFNAME is read by nothing", environ(NCCL_SOKET_IFNAME="eth0")),
    ("kernels", "left on", "TRITON_INTERPRET=1", environ(TRITON_INTERPRET="1")),
    ("kernels", "compiler", "Triton is not installed", torch_is(triton=None)),
    ("kernels", "C compiler", "CC=icx is not there", environ(CC="icx")),
    ("kernels", "ptxas", "TRITON_PTXAS_PATH=/nowhere is no program", environ(TRITON_PTXAS_PATH="/nowhere")),
    ("framework", "versions", "torch 2.10.0", torch_is(version="2.10.0+cu126")),
    ("framework", "driver", "the driver runs CUDA 12.8", lambda node: setattr(node.driver, "cuda", (12, 8))),
    (
        "framework",
        "driver",
        "torch has no kernels for capability 9.0",
        torch_is(architectures=("sm_80", "sm_100")),
    ),
    ("framework", "extras", "nvidia-ml-py is not installed", torch_is(extras={"gpu": False, "data": True})),
    (
        "loop",
        "affinity",
        "its GPU is on node 0",
        set_files({"/proc/self/status": "Cpus_allowed_list: 64-127"}),
    ),
    (
        "loop",
        "affinity",
        "on NUMA node 0-1: it moves",
        set_files({"/proc/self/status": "Cpus_allowed_list: 0-127"}),
    ),
    ("loop", "threads", "OMP_NUM_THREADS=64, and 16 cores a rank", environ(OMP_NUM_THREADS="64")),
    ("loop", "threads", "OMP_NUM_THREADS='many'", environ(OMP_NUM_THREADS="many")),
    ("loop", "swap", "100.0 GiB of memory is on disk", lambda node: swap(node, 100 * GIB)),
    (
        "loop",
        "huge pages",
        "transparent huge pages: never",
        set_files({"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}),
    ),
    (
        "loop",
        "governor",
        "powersave acpi-cpufreq",
        set_files(
            {
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
            }
        ),
    ),
    ("loop", "open files", "512 (at most 4096)", lambda node: limit(node, "Max open files", 512, 4096)),
    ("loop", "locked memory", "8 MiB", lambda node: limit(node, "Max locked memory", 8 << 20, 8 << 20)),
    (
        "job",
        "ranks",
        "16 ranks on this machine, and 8 GPU(s)",
        lambda node: setattr(node, "place", Place(0, 32, 0, 16)),
    ),
]


def sees_seven(node):
    node.torch, node.place = torch_on(7), Place(0, 14, 0, 7)


def swap(node, nbytes):
    path = node.tree.root / "proc/meminfo"
    text = path.read_text().replace(
        "SwapTotal: 0 kB\nSwapFree: 0", f"SwapTotal: {nbytes >> 10} kB\nSwapFree: 0"
    )
    path.write_text(text.replace(f"MemAvailable: {1024 * GIB >> 10}", f"MemAvailable: {256 * GIB >> 10}"))


def limit(node, name, soft, hard):
    path = node.tree.root / "proc/self/limits"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(name)]
    path.write_text("\n".join([*lines, f"{name}   {soft}   {hard}   units"]))


@pytest.mark.parametrize(
    ("layer", "name", "saw", "fault"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_fault_alone_is_named_and_nothing_else(node, layer, name, saw, fault):
    fault(node)
    found = weak(look(node))
    assert [one[:2] for one in found] == [(layer, name)]
    assert saw in found[0][2]


def test_a_slow_copy_is_measured_where_the_link_looks_well(node):
    found = weak(look(node, rates=lambda index: 12e9 if index == 2 else 50e9))
    saw = "cuda:2 (0000:33:00.0): 12.0 GB/s from pinned memory, its link carries 63.0"
    assert found == [("path", "copies", saw)]


def test_a_gpu_at_rest_may_lower_its_link(node):
    node.tree.write({f"{GPU3}/current_link_speed": "2.5 GT/s PCIe"})
    node.driver.change(3, idle=True)
    lines = look(node)
    assert weak(lines) == []
    assert named(lines, "path", "pcie").state == "unknown"


RISES = [
    ("symbol errors (symbol_error) 50/s", f"{PORT3}/counters/symbol_error", 112),
    ("links lost (link_downed) 0.5/s", f"{PORT3}/counters/link_downed", 2),
]


@pytest.mark.parametrize(("saw", "file", "value"), RISES)
def test_counters_that_rise_while_they_are_watched(node, saw, file, value):
    found = weak(look(node, between=lambda: node.tree.write({file: value})))
    assert found == [("fabric", "counters", f"mlx5_3: {saw}")]


def test_counters_that_do_not_answer_are_one_line(node):
    def refuse(name):
        raise Unreadable(f"{name} does not answer")

    node.tree.machine = lambda: Machine(node.tree.root, node.tree.environ, ethtool=refuse)
    assert named(look(node), "fabric", "counters").saw == "eth0 does not answer"


@pytest.mark.parametrize(("way", "says"), [("rx", "received"), ("tx", "sent")])
def test_pause_frames_of_roce(node, way, says):
    node.tree.nic("pci0000:f0/0000:f0:01.0/0000:f1:00.0", "roce0", 1, kind="Ethernet", interface="enp241")
    counts = {f"{way}_prio3_pause": 7, f"{way}_prio3_pause_duration": 0, f"{way}_packets": 5}
    node.tree.ethtool["enp241"] = dict(counts)

    def rise():
        node.tree.ethtool["enp241"] = {name: value + 300 for name, value in counts.items()}

    assert weak(look(node, between=rise)) == [("fabric", "counters", f"enp241: 150 pause frames/s {says}")]
    node.tree.ethtool["enp241"] = dict(counts)
    assert weak(look(node)) == []


def test_a_container_with_small_shared_memory_and_a_quota(tmp_path):
    tree = Tree(tmp_path).linux(cpus=64)
    tree.write(
        {
            "/proc/self/mountinfo": "1 0 0:1 / / rw - overlay overlay rw\n"
            "2 1 0:2 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k",
            "/proc/self/cgroup": "0::/",
            "/sys/fs/cgroup/cpu.max": "400000 100000",
            "/sys/fs/cgroup/memory.max": 8 * GIB,
            "/sys/fs/cgroup/memory.current": 7.9 * GIB // 1,
        }
    )
    tree.write({"/sys/fs/cgroup/memory.current": int(7.9 * GIB)})
    lines = look(Node(tree, "no driver", torch_on(0)), workers=8)
    assert [one for one in weak(lines) if one[0] == "loop"] == [
        ("loop", "cores", "4 cores a rank (1 on this machine), and 8 workers beside the loop"),
        ("loop", "cpu quota", "the control group grants 4 of 64 CPUs"),
        ("loop", "memory", "8.0 GiB granted by the control group, 7.9 GiB of it in use"),
        ("loop", "/dev/shm", "64 MiB"),
    ]
    assert named(lines, "loop", "cpu quota").remedy.startswith("OMP_NUM_THREADS=4")


def test_a_laptop_without_a_gpu_has_nothing_weak(tmp_path):
    tree = Tree(tmp_path).linux(cpus=8, locked="8388608")
    tree.net("wlan0", device="/sys/devices/wifi", speed=-1)
    tree.environ["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    lines = look(Node(tree, "nvidia-ml-py is not installed", torch_on(0)))
    assert weak(lines) == []
    assert named(lines, "gpu", "devices").state == "absent"
    assert [line for line in lines if line.layer == "path"] == []
    assert named(lines, "nccl", "transport").saw == "gloo: TCP between ranks, on one machine as well"
    assert (
        named(lines, "loop", "cores").saw == "8 cores a rank (1 on this machine): room for 7 workers a rank"
    )


def test_an_amd_gpu_is_read_from_sysfs(tmp_path):
    tree = Tree(tmp_path).linux()
    address = tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", vendor=0x1002)
    folder = f"/sys/bus/pci/devices/{address}"
    tree.write(
        {
            f"{folder}/mem_info_vram_total": 192 * GIB,
            f"{folder}/mem_info_vram_used": 20 * GIB,
            f"{folder}/ras/umc_err_count": "ue: 2\nce: 7",
            f"{folder}/product_name": "MI300X",
        }
    )
    torch = torch_on(1, cuda=None, hip="7.1", architectures=("gfx942",))
    lines = look(Node(tree, "no NVML", torch))
    assert named(lines, "gpu", "devices").saw == "1 x MI300X; torch sees 1"
    found = {one[:2]: one[2] for one in weak(lines)}
    assert found["gpu", "memory"] == "GPU 0: 20.0 GiB of 192.0 GiB in use"
    assert found["gpu", "faults"] == "GPU 0: 2 uncorrectable memory errors"
    assert named(lines, "nccl", "version").saw == "RCCL 2.28.9"


def test_a_gpu_beside_a_torch_for_cpus(tmp_path):
    tree = Tree(tmp_path).linux()
    address = tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    tree.write({f"/proc/driver/nvidia/gpus/{address}/information": "Model: \t\t NVIDIA L4\nIRQ: 5"})
    lines = look(Node(tree, "nvidia-ml-py is not installed: pip install 'overlapkit[gpu]'", torch_on(0)))
    line = named(lines, "gpu", "devices")
    assert (line.state, line.saw) == ("weak", "1 x NVIDIA L4; torch sees 0")
    assert "is built for CPUs" in line.remedy
    assert named(lines, "gpu", "memory").saw == "nvidia-ml-py is not installed: pip install 'overlapkit[gpu]'"


def test_a_mac_has_no_proc_and_no_sys(tmp_path):
    tree = Tree(tmp_path / "empty")
    tree.environ["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    lines = look(Node(tree, "no NVML", torch_on(0, mps=True, triton=None)))
    assert weak(lines) == []
    assert {line.state for line in lines if line.layer != "storage"} == {"ok", "absent"}
    assert "Apple GPU" in named(lines, "gpu", "devices").saw
    assert named(lines, "loop", "/dev/shm").saw == "this system has no /proc to read it from"


def test_nodes_without_rdma_fall_back_on_tcp(tmp_path):
    node = healthy(tmp_path / "a")
    node.tree.environ["NCCL_IB_DISABLE"] = "1"
    found = {one[:2]: one[2] for one in weak(look(node))}
    assert "between machines TCP sockets: NCCL_IB_DISABLE is set" in found["nccl", "transport"]
    tree = Tree(tmp_path / "b").linux(cpus=16)
    tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    two = Node(tree, Driver([]), torch_on(1), Place(0, 2, 0, 1))
    assert "no RDMA adapter is up" in named(look(two), "nccl", "transport").saw
    tree.nic("pci0000:10/0000:10:02.0/0000:12:00.0", "rdmap0", driver="efa")
    assert "rdmap0 needs the plugin" in named(look(two), "nccl", "transport").saw
    tree.write({"/opt/amazon/ofi-nccl/lib/libnccl-net.so": ""})
    assert named(look(two), "nccl", "transport").state == "ok"


def test_a_gpu_whose_driver_does_not_answer(node):
    node.driver = "NVML: Driver/library version mismatch"
    node.torch = dataclasses.replace(node.torch, devices=())
    line = named(look(node), "gpu", "devices")
    assert line.state == "weak"
    assert "nvidia-smi must work" in line.remedy
    node.torch = dataclasses.replace(node.torch, trouble="CUDA unknown error")
    assert named(look(node), "gpu", "devices").remedy == "torch says: CUDA unknown error"
