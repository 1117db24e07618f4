"""Variables of NCCL: harmful, contradicting, about what is not here, and names that nothing reads."""

import pytest

from overlapkit.doctor.layers import nccl, nccl_names
from overlapkit.doctor.layers.configured import settings
from tests.doctor.trees import Tree, healthy

ALONE = [  # what is set, and how what is weak begins
    ({"NCCL_P2P_DISABLE": "1"}, ["NCCL_P2P_DISABLE=1"]),
    ({"NCCL_P2P_DISABLE": "0"}, []),
    (
        {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"},
        ["NCCL_IB_DISABLE=1", "NCCL_IB_DISABLE=1 and NCCL_IB_HCA"],
    ),
    ({"NCCL_SHM_DISABLE": "1"}, ["NCCL_SHM_DISABLE=1"]),
    ({"NCCL_NET": "Socket"}, ["NCCL_NET=Socket"]),
    ({"NCCL_NET_GDR_LEVEL": "LOC"}, ["NCCL_NET_GDR_LEVEL=LOC"]),
    ({"NCCL_NET_GDR_LEVEL": "SYS"}, []),
    ({"NCCL_ALGO": "Ring"}, ["NCCL_ALGO=Ring"]),
    ({"NCCL_PROTO": "LL"}, ["NCCL_PROTO=LL"]),
    ({"NCCL_DEBUG": "TRACE"}, ["NCCL_DEBUG=TRACE"]),
    ({"NCCL_DEBUG": "WARN"}, []),
    ({"NCCL_MAX_NCHANNELS": "2"}, ["NCCL_MAX_NCHANNELS=2"]),
    ({"NCCL_MIN_NCHANNELS": "32", "NCCL_MAX_NCHANNELS": "16"}, ["NCCL_MIN_NCHANNELS=32 is more"]),
    ({"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}, ["NCCL_CUMEM_ENABLE=0", "NCCL_CUMEM_ENABLE=0 and"]),
    ({"NCCL_SOCKET_IFNAME": "eth"}, []),
    ({"NCCL_SOCKET_IFNAME": "=eth"}, ["NCCL_SOCKET_IFNAME==eth, and here are eth0, lo"]),
    ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, []),
    ({"GLOO_SOCKET_IFNAME": "ib0"}, ["GLOO_SOCKET_IFNAME=ib0, and here are eth0, lo"]),
    ({"NCCL_IB_HCA": "mlx5_9,mlx4"}, ["NCCL_IB_HCA=mlx5_9,mlx4"]),
    ({"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}, []),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, ["TORCH_NCCL_BLOCKING_WAIT=1"]),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["CUDA_DEVICE_MAX_CONNECTIONS=1"]),
    ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ["TORCH_DISTRIBUTED_DEBUG=DETAIL"]),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, []),  # torchrun sets it
]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return healthy(tmp_path_factory.mktemp("node"))


@pytest.fixture
def environ(node):
    kept = dict(node.tree.environ)
    yield node.tree.environ
    node.tree.environ.clear()
    node.tree.environ.update(kept)


@pytest.mark.parametrize(
    ("names", "begins"), ALONE, ids=lambda value: " ".join(value) if isinstance(value, dict) else ""
)
def test_values(node, environ, names, begins):
    environ.update(names)
    found = [line for line in nccl.variables(node.subject()) if line.state == "weak"]
    assert len(found) == len(begins), found
    assert all(line.saw.startswith(begin) for line, begin in zip(found, begins, strict=True)), found
    assert [line.state for line in nccl.names(node.subject())] == ["ok"]


NAMES = [
    ("NCCL_IB_DISABLED", "weak", "NCCL_IB_DISABLE"),
    ("NCCL_SOCKET_IFNAMES", "weak", "NCCL_SOCKET_IFNAME"),
    ("NCCL_P2P_LEVLE", "weak", "NCCL_P2P_LEVEL"),
    ("nccl_debug", "weak", "NCCL_DEBUG"),
    ("NCCL_ASYNC_ERROR_HANDLING", "weak", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("NCCL_IB_GDR_LEVEL", "weak", "NCCL_NET_GDR_LEVEL"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT", "weak", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    ("NCCL_OF_MY_OWN_MAKING", "unknown", ""),
]


@pytest.mark.parametrize(("name", "state", "meant"), NAMES)
def test_names_that_nothing_reads(node, environ, name, state, meant):
    environ[name] = "x"
    (line,) = nccl.names(node.subject())
    assert line.state == state
    assert line.saw.startswith(name)
    assert meant in line.remedy.split() or not meant


def test_no_known_name_is_taken_for_a_typo():
    assert [name for name in nccl_names.KNOWN if nccl_names.meant(name)] == []
    assert {rule.name for rule in nccl.RULES if nccl_names.is_one(rule.name)} <= nccl_names.KNOWN | {
        "NCCL_BLOCKING_WAIT"
    }


def test_configuration_files_are_read_and_the_environment_goes_before_them(tmp_path):
    tree = Tree(tmp_path).write({"/etc/nccl.conf": "NCCL_DEBUG=TRACE\n# NCCL_ALGO=Ring\nNCCL_IB_DISABLE=1"})
    tree.write({"/home/me/.nccl.conf": "NCCL_PROTO = LL"})
    tree.environ = {"HOME": "/home/me", "NCCL_IB_DISABLE": "0"}
    node = healthy(tmp_path / "other")
    node.tree = tree
    found = settings(node.subject())
    assert (found["NCCL_DEBUG"], found["NCCL_IB_DISABLE"], found["NCCL_PROTO"]) == ("TRACE", "0", "LL")
    assert "NCCL_ALGO" not in found
    assert "# NCCL_ALGO" not in found
