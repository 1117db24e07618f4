"""Machines that look odd and are well: each oddity alone is on a healthy node, and nothing is called weak."""

import dataclasses
import errno

import pytest

from overlapkit.doctor import pci
from overlapkit.doctor.disk_trial import Reading
from overlapkit.doctor.examine import Instruments, examine
from overlapkit.doctor.gpus import NO_PEERS
from overlapkit.doctor.layers import fabric, job, ports, storage
from overlapkit.doctor.layers.configured import adapters
from overlapkit.doctor.limits import memory_limit
from overlapkit.doctor.subject import Place
from overlapkit.doctor.watch import Watch
from tests.doctor.looking import look, named, trials, weak
from tests.doctor.trees import GIB, Driver, Node, Tree, h100, healthy, torch_on

PORT = "/sys/class/infiniband/mlx5_{}/ports/1"
STATUS = "Cpus_allowed_list:\t{}\nCapEff:\t{}"


@pytest.fixture
def node(tmp_path):
    return healthy(tmp_path)


def limit(node, name, soft):
    path = node.tree.root / "proc/self/limits"
    rest = [line for line in path.read_text().splitlines() if not line.startswith(name)]
    path.write_text("\n".join([*rest, f"{name}   {soft}   1048576   units"]))


def pod_with_rdma(node):
    """As Kubernetes is told to run one: no ulimit, but the capability IPC_LOCK."""
    limit(node, "Max locked memory", 8 << 20)
    node.tree.write({"/proc/self/status": STATUS.format("0-63", "00000000a80465fb")})


def enough_locked(node):
    limit(node, "Max locked memory", 4096 * GIB)


def page_cache(node):
    """Reading a data set fills the control group up to its limit."""
    stat = f"anon {100 * GIB}\ninactive_file {500 * GIB}\nactive_file {390 * GIB}\nshmem 0"
    group = "/sys/fs/cgroup/user.slice/memory"
    node.tree.write(
        {f"{group}.max": 1000 * GIB, f"{group}.current": 1000 * GIB - 4096, f"{group}.stat": stat}
    )


def slow_adapter_left_out(node):
    node.tree.write({f"{PORT.format(3)}/rate": "100 Gb/sec"})
    node.tree.environ["NCCL_IB_HCA"] = "^mlx5_3"


def former_generation(node):
    """Adapters that could do PCIe 5, in slots of PCIe 4, which carry their 200 Gb/s."""
    for at in range(8):
        device = f"/sys/bus/pci/devices/0000:{at + 1}4:00.0"
        node.tree.write(
            {f"{device}/current_link_speed": "16.0 GT/s PCIe", f"{PORT.format(at)}/rate": "200 Gb/sec"}
        )


def no_bridge(node):
    """PCIe cards have links for a bridge, also where there is none."""
    for at in range(8):
        node.driver.change(at, links=(False,) * 12)


def amazons(node):
    (node.tree.root / "sys/module/nvidia_peermem/version").unlink()
    (node.tree.root / "sys/module/nvidia_peermem").rmdir()
    node.tree.write(
        {"/proc/driver/nvidia/version": "NVRM version: x86_64", "/sys/module/efa_nv_peermem/version": "1"}
    )


def management(node):
    node.tree.device("pci0000:00/0000:00:1e.0", 0x8086, 0x020000)
    node.tree.net("eno1", device="/sys/devices/pci0000:00/0000:00:1e.0", speed=1000)


def image(node):
    names = ("NV_LIBNCCL_PACKAGE", "NV_LIBNCCL_DEV_PACKAGE_VERSION", "NCCL_VERSION", "NCCL_ROOT", "USE_NCCL")
    node.tree.environ.update(dict.fromkeys(names, "2.28.9"))


def old_swap(node):
    memory = node.tree.root / "proc/meminfo"
    memory.write_text(memory.read_text().replace("SwapTotal: 0 kB", f"SwapTotal: {100 * GIB >> 10} kB"))


def unbound(node):
    node.tree.write({"/proc/self/status": STATUS.format("0-127", 0)})
    node.place = Place()


def other_users(node):
    """GPUs 0 and 1 are ours; the others are busy, hot, and one is for the screen."""
    node.torch = torch_on(2)
    node.tree.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    node.place = Place(0, 4, 0, 2)
    for at in range(2, 8):
        node.driver.change(at, used=70 * GIB, others=3, slow=("too hot",))
    node.driver.change(7, name="NVIDIA DGX Display")


def its_own_gpu(node):
    """As srun --gpus-per-task=1 has it."""
    node.torch = torch_on(1)
    node.tree.environ["CUDA_VISIBLE_DEVICES"] = "0"


def no_peers(node):
    node.driver.refused |= {(a, b): NO_PEERS for a in range(8) for b in range(a + 1, 8)}


ODDITIES = {
    "GPUs of other users": other_users,
    "each rank sees its own GPU": its_own_gpu,
    "GPUs that know no direct access": no_peers,
    "a pod that may lock memory": pod_with_rdma,
    "a limit above all memory": enough_locked,
    "page cache up to the limit": page_cache,
    "a slow adapter that NCCL leaves out": slow_adapter_left_out,
    "adapters in slots that carry their ports": former_generation,
    "GPUs without a bridge": no_bridge,
    "GPUDirect of EFA": amazons,
    "a slow interface beside RDMA": management,
    "an image's variables": image,
    "swap of long ago": old_swap,
    "the usual limit of files": lambda node: limit(node, "Max open files", 1024),
    "a shell that is bound to no node": unbound,
}


@pytest.mark.parametrize("make", ODDITIES.values(), ids=ODDITIES)
def test_nothing_is_weak(node, make):
    make(node)
    lines = look(node)
    assert weak(lines) == []
    assert [line for line in lines if "Error" in line.saw] == []


def test_what_is_not_known_is_said_to_be_so(node):
    no_bridge(node)
    assert "cards without a bridge, or a fault" in named(look(node), "path", "nvlink").saw
    unbound(node)
    line = named(look(node), "loop", "affinity")
    assert (line.state, line.remedy.endswith("torchrun --numa-binding=node")) == ("unknown", True)
    image(node)
    assert named(look(node), "nccl", "names").state == "ok"
    node.tree.environ |= {"NCCL_IB_HCA": "none_of_these", "NCCL_NET_PLUGIN": "fastrak"}
    node.place = Place(0, 16, 0, 8)
    line = named(look(node), "nccl", "transport")
    assert (line.state, "between machines plugin fastrak, and no RDMA" in line.saw) == ("unknown", True)


def test_ranks_that_take_the_same_gpu():
    (line,) = job.one_each(["a", "a", "a", "b", None], ["0:1", "0:2", "0:1", "0:1", ""])
    assert line.saw == "ranks 0, 2 on a take the same GPU 0:1"
    assert list(job.one_each(["a", "a"], ["", ""])) == []


def test_the_gpu_of_a_rank(node):
    node.place = Place(3, 16, 3, 8)
    assert job.gpu_of(node.subject()) == "0000:43:00.0"
    its_own_gpu(node)
    assert job.gpu_of(node.subject()) == "0000:13:00.0"
    del node.tree.environ["CUDA_VISIBLE_DEVICES"]
    assert job.gpu_of(node.subject()) == ""
    assert named(look(node), "job", "ranks").state == "weak"


def test_one_gpu_has_nobody_to_link_to(tmp_path):
    tree = Tree(tmp_path).linux()
    gpu = dataclasses.replace(h100(tree.gpu("pci0000:10/0000:10:01.0/0000:13:00.0")), links=(False,) * 18)
    tree.environ["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    tree.write({"/bin/gcc": "#!/bin/sh"})
    (tmp_path / "bin/gcc").chmod(0o755)
    lines = look(Node(tree, Driver([gpu]), torch_on(1)))
    assert weak(lines) == []
    assert named(lines, "path", "nvlink").state == "absent"


def test_a_processor_with_graphics_inside_is_no_gpu(tmp_path):
    tree = Tree(tmp_path).linux()
    address = tree.device("pci0000:00/0000:00:08.1/0000:0c:00.0", pci.AMD, 0x030000)
    tree.write({f"/sys/bus/pci/devices/{address}/mem_info_vram_total": 512 << 20})
    assert named(look(Node(tree, "no NVML", torch_on(0))), "gpu", "devices").state == "absent"
    tree.write({f"/sys/bus/pci/devices/{address}/mem_info_vram_total": 24 * GIB})
    assert named(look(Node(tree, "no NVML", torch_on(0))), "gpu", "devices").state == "weak"


@pytest.mark.parametrize(
    ("hca", "left"),
    [
        ("mlx5", range(8)),
        ("mlx5_1,mlx5_2:1", [1, 2]),
        ("=mlx5_1", [1]),
        ("^mlx5_1", [0, *range(2, 8)]),
        ("^=mlx5_1,mlx5_0", range(2, 8)),
        ("^", range(8)),
        ("", range(8)),
    ],
)
def test_adapters_that_nccl_is_left(node, hca, left):
    node.tree.environ["NCCL_IB_HCA"] = hca
    assert [nic.name for nic in adapters(node.subject())] == [f"mlx5_{at}" for at in left]


def test_packets_out_of_order_are_what_adaptive_routing_makes(node):
    file = f"{PORT.format(3)}/hw_counters/out_of_sequence"
    assert weak(look(node, between=lambda: node.tree.write({file: 10**6}))) == []


@pytest.mark.parametrize(("seconds", "states"), [(60.0, ["ok"]), (2.0, ["weak"])])
def test_a_symbol_error_now_and_then_is_within_the_standard(node, seconds, states):
    now = [0.0]

    def sleep(for_s):
        now[0] += for_s
        node.tree.write({f"{PORT.format(3)}/counters/symbol_error": 13})

    watch = Watch(node.tree.machine(), lambda: now[0], sleep)
    watch.begin()
    assert [line.state for line in fabric.counting(watch, seconds)(node.subject())] == states


def test_pause_frames_by_the_time_that_they_can_stop_a_port(node):
    """100 Gb/s: a frame stops it for 65535 x 512 bit times, a third of a millisecond."""
    names = "rx_prio3_pause", "rx_prio4_pause", "rx_pause_ctrl_phy", "rx_prio3_pause_duration"

    def lines(frames):
        node.tree.ethtool["eth0"] = dict.fromkeys(names, 0)
        return look(node, between=lambda: node.tree.ethtool.update(eth0=dict.fromkeys(names, frames)))

    few = lines(20)  # 10 a second, in 2 s
    assert weak(few) == []
    assert "pause frames for 0.3% of the time at most" in named(few, "fabric", "counters").saw
    (line,) = [line for line in lines(600) if line.state == "weak"]
    assert line.saw == "eth0: 300 pause frames/s received"  # by port and by priority they are the same ones
    assert "for up to 10% of the time" in line.cost


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("rx_prio3_pause", "rx"),
        ("tx_global_pause", "tx"),
        ("rx_pause_ctrl_phy", "rx"),
        ("rx_pfc_ena_frames_pri3", "rx"),
        ("link_xoff_tx.nic", "tx"),
        ("port.rx_priority_3_xoff", "rx"),
        ("rx_prio3_pause_transition", ""),
        ("tx_pause_storm_warning_events", ""),
        ("rx_pfc_xon2xoff_frames_pri3", ""),
        ("link_xon_rx.nic", ""),
        ("rx_packets", ""),
    ],
)
def test_names_of_pause_counters(name, way):
    assert ports.pause_way(name) == way


def test_memory_of_version_1_without_cached_files(tmp_path):
    top = "/sys/fs/cgroup/memory/memory"
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    files = {f"{top}.limit_in_bytes": 4 * GIB, f"{top}.usage_in_bytes": 3 * GIB, f"{top}.stat": stat}
    machine = Tree(tmp_path).write({"/proc/self/cgroup": "9:memory:/x", **files}).machine()
    assert memory_limit(machine) == (4 * GIB, GIB)


@pytest.mark.parametrize(("workers", "state"), [(None, "ok"), (16, "ok"), (17, "weak")])
def test_open_files_for_the_workers_that_were_named(tmp_path, workers, state):
    node = Node(Tree(tmp_path).linux(cpus=64), "none", torch_on(0))
    limit(node, "Max open files", 1024)
    assert named(look(node, workers=workers), "loop", "open files").state == state


def test_hosts_whose_name_leads_nowhere_but_gloo_has_an_interface(node, monkeypatch):
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    (line,) = fabric.hostname(node.subject())
    assert line.state == "weak"
    node.tree.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # as the remedy says
    (line,) = fabric.hostname(node.subject())
    assert line.state == "ok"


def test_gpudirect_that_cannot_be_seen_is_unknown(node):
    (node.tree.root / "sys/module/nvidia_peermem/version").unlink()
    (node.tree.root / "sys/module/nvidia_peermem").rmdir()
    (node.tree.root / "proc/driver/nvidia/version").unlink()
    assert named(look(node), "fabric", "gpudirect").state == "unknown"


def test_a_folder_that_takes_long_and_holds_nothing(tmp_path):
    tools = trials()._replace(read=lambda folder, share: Reading(0, 3.0))
    subject = Node(Tree(tmp_path / "tree").linux(), "none", torch_on(0)).subject()
    _, data = storage.checks(storage.Folders(None, tmp_path), tools, {})
    assert [line.state for line in data.run(subject)] == ["ok", "unknown"]
    assert "too little to measure" in data.run(subject)[1].saw


def test_a_folder_that_cannot_even_be_looked_at_is_a_line(tmp_path, monkeypatch):
    subject = Node(Tree(tmp_path).linux(), "none", torch_on(0)).subject

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("pathlib.Path.is_dir", stale)
    monkeypatch.setattr("os.statvfs", stale)
    tools = Instruments(
        subject=subject, checks=lambda checks: tuple(one for one in checks if one.layer.name == "storage")
    )
    (line,) = examine(checkpoints="/mnt/dead", instruments=tools).weak
    assert line.saw == "/mnt/dead: Stale file handle"
