"""Control groups of both versions, also where a container does not see its own path."""

import pytest

from overlapkit.doctor import limits
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Place
from tests.doctor.looking import look, named, weak
from tests.doctor.trees import GIB, Driver, Node, Tree, h100, torch_on

V1 = "9:memory:/docker/abc\n3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/"
TOP = "/sys/fs/cgroup"
CASES = {
    "version 2": ("0::/job", {f"{TOP}/job/cpu.max": "150000 100000", f"{TOP}/job/memory.max": GIB}, 1.5, GIB),
    "a parent is narrower": (
        "0::/a/b",
        {
            f"{TOP}/a/cpu.max": "200000 100000",
            f"{TOP}/a/b/cpu.max": "max 100000",
            f"{TOP}/a/memory.max": 2 * GIB,
        },
        2.0,
        2 * GIB,
    ),
    "no limit": ("0::/", {f"{TOP}/cpu.max": "max 100000", f"{TOP}/memory.max": "max"}, None, None),
    "version 1": (
        V1,
        {
            f"{TOP}/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": 300000,
            f"{TOP}/cpu,cpuacct/docker/abc/cpu.cfs_period_us": 100000,
            f"{TOP}/memory/docker/abc/memory.limit_in_bytes": GIB,
        },
        3.0,
        GIB,
    ),
    "version 1, path not visible": (
        V1,
        {
            f"{TOP}/cpu/cpu.cfs_quota_us": 50000,
            f"{TOP}/cpu/cpu.cfs_period_us": 100000,
            f"{TOP}/memory/memory.limit_in_bytes": 9223372036854771712,
        },
        0.5,
        None,
    ),
    "version 1, no quota": (
        V1,
        {f"{TOP}/cpu/cpu.cfs_quota_us": -1, f"{TOP}/cpu/cpu.cfs_period_us": 100000},
        None,
        None,
    ),
    "nothing": ("", {}, None, None),
}


@pytest.mark.parametrize(("groups", "files", "quota", "memory"), CASES.values(), ids=CASES)
def test_control_groups(tmp_path, groups, files, quota, memory):
    machine = Tree(tmp_path).write({"/proc/self/cgroup": groups, **files}).machine()
    assert limits.cpu_quota(machine) == quota
    found = limits.memory_limit(machine)
    assert (found and found[0]) == memory


# CPUs allowed, of the control group's, with a quota, for so many ranks: cores each
SHARES = [
    ("0-127", "0-127", None, 8, 16.0),  # unbound: they share
    ("0-63", "0-127", None, 8, 16.0),  # bound to a socket that three others are bound to as well
    ("0-15", "0-127", None, 8, 16.0),  # bound to its own share
    ("0-7", "0-7", None, 8, 1.0),  # a container's CPUs, shared
    ("0-7", "0-7", "400000 100000", 2, 2.0),
    ("0-1", "0-7", None, 1, 2.0),
]


@pytest.mark.parametrize(("allowed", "pool", "quota", "ranks", "each"), SHARES)
def test_cores_of_each_rank(tmp_path, allowed, pool, quota, ranks, each):
    tree = Tree(tmp_path).write(
        {
            "/proc/self/status": f"Cpus_allowed_list: {allowed}",
            "/proc/self/cgroup": "0::/",
            f"{TOP}/cpuset.cpus.effective": pool,
            **({f"{TOP}/cpu.max": quota} if quota else {}),
        }
    )
    assert limits.cores(tree.machine(), ranks) == each


def test_limits_of_the_process(tmp_path):
    machine = Tree(tmp_path).linux(locked="8388608").machine()
    assert limits.limit(machine, "Max locked memory") == (8388608, float("inf"))
    with pytest.raises(Unreadable, match="'Max coffee'"):
        limits.limit(machine, "Max coffee")


def test_ranks_that_share_cores_need_omp_num_threads(tmp_path):
    node = Node(Tree(tmp_path).linux(cpus=8), "none", torch_on(0))
    node.place = Place(0, 4, 0, 4)
    line = named(look(node), "loop", "threads")
    assert (line.state, line.remedy) == ("weak", "OMP_NUM_THREADS=2")
    node.tree.environ["OMP_NUM_THREADS"] = "1"
    assert (
        named(look(node), "loop", "threads").saw
        == "OMP_NUM_THREADS=1 (torchrun's default), and 2 cores a rank"
    )
    node.tree.environ["OMP_NUM_THREADS"] = "2"
    assert named(look(node), "loop", "threads").state == "ok"


def test_a_rank_on_a_gpu_needs_cores(tmp_path):
    tree = Tree(tmp_path).linux(cpus=2)
    node = Node(tree, Driver([h100(tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0"))]), torch_on(1))
    assert ("loop", "cores", "2 cores a rank (1 on this machine)") in weak(look(node))


@pytest.mark.parametrize(
    ("governor", "driver", "preference", "state"),
    [
        ("performance", "acpi-cpufreq", "", "ok"),
        ("powersave", "intel_pstate", "balance_performance", "ok"),
        ("powersave", "intel_pstate", "power", "weak"),
        ("powersave", "amd-pstate-epp", "performance", "ok"),
        ("powersave", "acpi-cpufreq", "", "weak"),
    ],
)
def test_governors(tmp_path, governor, driver, preference, state):
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    tree = (
        Tree(tmp_path)
        .linux()
        .write(
            {
                f"{folder}/scaling_governor": governor,
                f"{folder}/scaling_driver": driver,
                f"{folder}/energy_performance_preference": preference,
            }
        )
    )
    assert named(look(Node(tree, "none", torch_on(0))), "loop", "governor").state == state
