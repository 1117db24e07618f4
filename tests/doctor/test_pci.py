"""The PCI tree: distances as `nvidia-smi topo -m` names them, and links."""

import pytest

from overlapkit.doctor import pci
from overlapkit.doctor.machine import Unreadable
from tests.doctor.trees import Tree

GPU = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0"
# What another device's way is, on which node, and the distance: from the definitions in nvidia-smi's legend
WAYS = [
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 0, "PIX"),
    ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0/0000:15:00.0/0000:16:01.0/0000:17:00.0", 0, "PXB"),
    ("pci0000:10/0000:10:02.0/0000:20:00.0", 0, "PHB"),
    ("pci0000:30/0000:30:01.0/0000:31:00.0", 0, "NODE"),
    ("pci0000:40/0000:40:01.0/0000:41:00.0", 1, "SYS"),
    ("pci0000:50/0000:50:01.0/0000:51:00.0", -1, None),
]


@pytest.mark.parametrize(("way", "node", "distance"), WAYS)
def test_distances(tmp_path, way, node, distance):
    tree = Tree(tmp_path).linux(sockets=2)
    gpu, nic = tree.gpu(GPU, 0), tree.device(way, 0x15B3, 0x020700, node)
    assert pci.distance(tree.machine(), gpu, nic) == distance
    assert pci.distance(tree.machine(), nic, gpu) == distance
    assert pci.gpus(tree.machine()) == {gpu: pci.NVIDIA}


def test_one_socket_is_one_node(tmp_path):
    tree = Tree(tmp_path).linux()
    gpu = tree.gpu(GPU, -1)
    nic = tree.device("pci0000:30/0000:30:01.0/0000:31:00.0", 0x15B3, 0x020700, -1)
    assert pci.distance(tree.machine(), gpu, nic) == "NODE"
    assert pci.nodes(tree.machine()) == [0]


# Bytes per second each way: from the PCI-SIG's table of generations
RATES = [(2.5, 16, 4.0e9), (8.0, 16, 15.75e9), (16.0, 16, 31.5e9), (32.0, 8, 31.5e9)]


@pytest.mark.parametrize(("speed", "width", "rate"), RATES)
def test_rates(speed, width, rate):
    assert pci.Link(1.0, 1, speed, width).best == pytest.approx(rate, rel=0.001)


@pytest.mark.parametrize(
    "content", [{"current_link_speed": "Unknown"}, {"current_link_width": 0}, {"max_link_width": 255}]
)
def test_links_that_say_nothing(tmp_path, content):
    tree = Tree(tmp_path)
    gpu = tree.gpu(GPU)
    tree.write({f"/sys/devices/{GPU}/{name}": value for name, value in content.items()})
    with pytest.raises(Unreadable, match=gpu):
        pci.link(tree.machine(), gpu)


def test_other_devices_are_no_gpus(tmp_path):
    tree = Tree(tmp_path)
    tree.device("pci0000:00/0000:00:02.0", 0x8086, 0x030000)  # a graphics chip of Intel's
    tree.device("pci0000:00/0000:00:03.0", 0x10DE, 0x068000)  # an NVSwitch
    tree.device("pci0000:00/0000:00:04.0", 0x1002, 0x120000)  # an Instinct
    assert pci.gpus(tree.machine()) == {"0000:00:04.0": pci.AMD}
    with pytest.raises(Unreadable):
        pci.chain(tree.machine(), "0000:99:00.0")
