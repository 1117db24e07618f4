"""Files that are absent, garbage or hang are lines that say so, never tracebacks."""

import threading
import time

import pytest

from overlapkit.doctor.bounded import Late, bounded
from overlapkit.doctor.check import Check
from overlapkit.doctor.ethtool import statistics
from overlapkit.doctor.line import Layer, Line, gib, joined, merged, spans
from overlapkit.doctor.machine import Machine, Unreadable, numbers
from overlapkit.doctor.mounts import mount_of
from tests.doctor.looking import look
from tests.doctor.trees import Node, Tree, healthy, torch_on


def test_what_cannot_be_read_says_why(tmp_path):
    tree = Tree(tmp_path).write(
        {"/sys/a": "garbage", "/sys/b": "0x10de", "/proc/meminfo": "MemTotal: many kB"}
    )
    (tmp_path / "sys/folder").mkdir()
    (tmp_path / "sys/bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "sys/loop").symlink_to("loop")
    (tmp_path / "sys/out").symlink_to("/etc")
    machine = tree.machine()
    assert machine.number("/sys/b") == 0x10DE
    for call, why in (
        (lambda: machine.text("/sys/none"), "/sys/none: No such file or directory"),
        (lambda: machine.text("/sys/folder"), "/sys/folder: Is a directory"),
        (lambda: machine.text("/sys/loop"), "/sys/loop: Too many levels"),
        (lambda: machine.text("/sys/nul\0"), "null byte"),
        (lambda: machine.number("/sys/a"), "/sys/a holds 'garbage' where a number belongs"),
        (lambda: machine.memory("MemTotal"), "/proc/meminfo does not say MemTotal"),
        (lambda: machine.resolve("/sys/out"), "/sys/out: "),
        (lambda: numbers("0-x"), "'0-x' is no list of numbers"),
        (lambda: numbers("0-99999999999"), "'0-99999999999' is no list of numbers"),
    ):
        with pytest.raises(Unreadable) as raised:
            call()
        assert why in str(raised.value)
    assert machine.text("/sys/bytes") == "\ufffd\ufffd"
    assert (machine.maybe("/sys/none"), machine.count("/sys/a"), machine.names("/sys/a")) == (None, None, [])
    assert numbers("0-2,5") == {0, 1, 2, 5}
    assert numbers("") == set()


def test_a_file_without_permission_says_so(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(Unreadable, match="/sys/secret: Permission denied"):
        Machine(tmp_path, {}).text("/sys/secret")


GARBAGE = "\x00\xff garbage: - , -1 [ 99999999999999999999 \n 4: \n- -"


def test_a_machine_of_garbage_raises_nothing(tmp_path):
    node = healthy(tmp_path)
    for file in [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]:
        file.write_text(GARBAGE)
    lines = look(node)
    assert not [line for line in lines if "Error" in line.saw], "an exception that no check expected"
    assert {line.layer for line in lines} >= {"path", "fabric", "loop"}
    states = {(line.layer, line.name): line.state for line in lines}
    assert states["loop", "cores"] == states["loop", "huge pages"] == states["path", "pcie"] == "unknown"


def test_a_machine_of_empty_files_raises_nothing(tmp_path):
    node = healthy(tmp_path)
    for file in [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]:
        file.write_text("")
    assert not [line for line in look(node) if "Error" in line.saw]


def test_what_hangs_is_left_behind():
    held = threading.Event()
    try:
        with pytest.raises(Late, match=r"no answer within 0.05 s"):
            bounded(held.wait, 0.05, "server")
    finally:
        held.set()
    for thread in threading.enumerate():
        if thread.name == "overlapkit-doctor server":
            thread.join(5)
    assert bounded(lambda: 7, 5.0, "answer") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 5.0, "error")


def test_a_check_that_fails_keeps_what_it_saw_before(tmp_path):
    layer, subject = Layer("loop"), Node(Tree(tmp_path), "none", torch_on(0)).subject()

    def breaks(subject):
        yield layer.ok("first", "seen")
        raise RuntimeError("a bug")

    def stops(subject):
        yield layer.ok("first", "seen")
        subject.machine.text("/proc/none")

    def hangs(subject):
        time.sleep(0.2)
        yield layer.ok("never", "seen")

    lines = Check(layer, "broken", breaks).run(subject)
    assert [(line.name, line.state, line.saw) for line in lines] == [
        ("first", "ok", "seen"),
        ("broken", "unknown", "RuntimeError: a bug"),
    ]
    lines = Check(layer, "stopped", stops).run(subject)
    assert [(line.name, line.state) for line in lines] == [("first", "ok"), ("stopped", "unknown")]
    assert lines[1].saw == "/proc/none: No such file or directory"
    (line,) = Check(layer, "mount", hangs, seconds=0.02).run(subject)
    assert (line.state, line.saw) == ("unknown", "no answer within 0.02 s")
    for thread in threading.enumerate():
        if thread.name.startswith("overlapkit-doctor"):
            thread.join(5)
    assert Check(layer, "x", hangs, needs="/sys").run(subject)[0].state == "absent"


def test_mounts(tmp_path):
    mounts = """
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/nfs rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 22 0:41 / /mnt/with\\040blank ro - lustre fs rw
32 30 0:42 / /mnt/nfs/over rw - ext4 /dev/sdb rw
33 30 0:42 / /mnt/nfs/over rw - xfs /dev/sdc rw
nonsense
"""
    machine = Tree(tmp_path).write({"/proc/self/mountinfo": mounts}).machine()
    found = {
        path: mount_of(machine, path) for path in ("/", "/mnt/nfs/a/b", "/mnt/nfsx", "/mnt/with blank/x")
    }
    assert [mount.kind for mount in found.values()] == ["ext4", "nfs4", "ext4", "lustre"]
    assert [mount.is_network for mount in found.values()] == [False, True, False, True]
    assert mount_of(machine, "/mnt/nfs/over/x").source == "/dev/sdc"  # mounted over the other
    assert mount_of(machine, "/mnt/nfs/../nfs/over").kind == "xfs"
    assert str(found["/mnt/nfs/a/b"]) == "nfs4 (server:/export, at /mnt/nfs)"
    with pytest.raises(Unreadable, match="mountinfo"):
        mount_of(Tree(tmp_path / "none").machine(), "/")


def test_ethtool_of_what_is_not_there_is_empty():
    assert statistics("no-such-link") == {}
    assert statistics("a-name-that-is-longer-than-the-kernel-takes") == {}
    assert all(isinstance(value, int) for value in statistics("lo").values())


def test_lines_of_ranks_that_agree_are_one():
    def line(rank, state, saw):
        cost = {"cost": "c", "remedy": "r"} if state == "weak" else {}
        return Line("loop", "cores", state, saw, host="a", ranks=(rank,), **cost)

    lines = [
        line(1, "ok", "4"),
        line(0, "ok", "5"),
        line(2, "weak", "1"),
        line(3, "weak", "2"),
        line(4, "weak", "1"),
    ]
    assert [(one.state, one.saw, one.ranks) for one in merged(lines)] == [
        ("ok", "4", (0, 1)),
        ("weak", "1", (2, 4)),
        ("weak", "2", (3,)),
    ]
    assert Line.from_dict(lines[0].to_dict()) == lines[0]
    gpu_line = Line("gpu", "x", "ok", "")
    assert merged([lines[0], gpu_line])[0] is gpu_line
    swap = Line("loop", "swap", "ok", "none")
    assert [one.name for one in merged([lines[0], swap, *lines[1:]])] == ["cores", "cores", "cores", "swap"]


def test_words():
    assert spans([3, 1, 2, 7, 7]) == "1-3, 7"
    assert spans([]) == ""
    assert joined("abcdefgh") == "a, b, c, d, e, f and 2 more"
    assert [gib(n) for n in (64 << 20, 3 << 30)] == ["64 MiB", "3.0 GiB"]
