"""Storage: what is measured, what is weak about it, and a server that does not answer."""

import os
import threading

import pytest

from overlapkit.doctor import disk_trial
from overlapkit.doctor.layers import storage
from overlapkit.doctor.layers.storage import Folders, Trials, compared
from tests.doctor.looking import trials
from tests.doctor.trees import Node, Tree, torch_on


def look(tmp_path, tools, mounts="1 0 0:1 / / rw - ext4 /dev/sda rw", seconds=10.0):
    tree = Tree(tmp_path / "tree").write({"/proc/self/mountinfo": mounts})
    subject = Node(tree, "none", torch_on(0)).subject()
    figures = {}
    folders = Folders(tmp_path, tmp_path)
    lines = [
        line
        for check in storage.checks(folders, tools, figures)
        for line in check._replace(seconds=seconds).run(subject)
    ]
    return {line.name: line for line in lines}, figures


def test_fast_storage_is_well(tmp_path):
    lines, figures = look(tmp_path, trials())
    assert {line.state for line in lines.values()} == {"ok"}
    assert figures == {"checkpoints": 2e9, "data": 1e9}
    assert f"{tmp_path} on ext4 (/dev/sda, at /): " in lines["checkpoints place"].saw


@pytest.mark.parametrize(
    ("tools", "name", "saw", "cost"),
    [
        (trials(write=50e6), "checkpoints", "writes 50 MB/s with fsync", "10 GiB a rank take 215 s"),
        (trials(sync=0.2), "checkpoints", "4 KiB are safe after 200.0 ms", "several files safe"),
        (trials(read=40e6), "data", "reads 40 MB/s a rank", "takes 82 ms to read"),
    ],
)
def test_slow_storage_and_what_it_costs(tmp_path, tools, name, saw, cost):
    lines, _ = look(tmp_path, tools)
    assert [line.name for line in lines.values() if line.state == "weak"] == [name]
    assert saw in lines[name].saw
    assert cost in lines[name].cost


def test_networks_and_memory_are_named(tmp_path):
    lines, _ = look(tmp_path, trials(), "1 0 0:1 / / rw - nfs4 server:/home rw")
    assert "nfs4 (server:/home, at /), a network" in lines["data place"].saw
    lines, _ = look(tmp_path, trials(), "1 0 0:1 / / rw - tmpfs tmpfs rw")
    assert lines["checkpoints place"].state == "weak"
    assert lines["data place"].state == "ok"


def test_what_is_not_there_or_refuses_or_hangs_is_a_line(tmp_path):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    lines, figures = look(tmp_path, trials()._replace(write=refuse))
    assert lines["checkpoints"].saw == f"{tmp_path} cannot be written: Permission denied"
    assert "checkpoints" not in figures
    held = threading.Event()
    lines, _ = look(tmp_path, trials()._replace(write=lambda folder: held.wait()), seconds=0.05)
    assert (lines["checkpoints"].state, lines["checkpoints"].saw) == ("unknown", "no answer within 0.05 s")
    assert lines["data"].state == "ok"
    held.set()
    lines, _ = look(tmp_path, Trials(read=lambda folder, share: disk_trial.Reading(100, 0.001)))
    assert lines["data"].state == "unknown"
    subject, seen = Node(Tree(tmp_path / "none"), "none", torch_on(0)).subject(), []
    for check in storage.checks(Folders(tmp_path / "gone", None), trials(), {}):
        (line,) = check.run(subject)
        seen.append((line.state, line.saw))
    assert seen == [
        ("weak", f"{tmp_path / 'gone'}: No such file or directory"),
        ("unknown", "not measured: no folder was given"),
    ]


def test_slow_machines_are_found_whatever_their_ranks():
    figures = [{"checkpoints": rate} for rate in (1e9, 9e8, 8e8, 1e9, 1e8, 2e8)]
    lines = list(compared([*figures, None], [*"aabbcc", ""]))
    assert [(line.state, line.saw) for line in lines] == [
        ("weak", "rank 4-5 on c writes 200 MB/s, the others 1,000 MB/s")
    ]
    assert [line.state for line in compared(figures[:4], list("aabb"))] == ["ok"]
    assert list(compared(figures[:2], list("aa"))) == []
    assert list(compared([{}, {}], list("ab"))) == []


def test_a_trial_writes_and_reads_for_real(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_trial, "_WRITTEN", 8 << 20)
    found = disk_trial.write(tmp_path)
    assert found.rate > 0
    assert 0 < found.sync_s < 10
    assert list(tmp_path.iterdir()) == []
    for at in range(3):
        (tmp_path / f"{at}.bin").write_bytes(os.urandom(1000 * (at + 1)))
    (tmp_path / "link").symlink_to("gone")
    assert disk_trial.read(tmp_path).nbytes == 6000
    parts = [disk_trial.read(tmp_path, (rank, 2)).nbytes for rank in range(2)]
    assert parts == [3000 + 1000, 2000]  # the largest first, every second
    parts = [disk_trial.read(tmp_path, (rank, 4)).nbytes for rank in range(4)]
    assert parts == [6000, 4500, 3000, 1500]  # fewer files than ranks: each begins elsewhere in them
    assert disk_trial.read(tmp_path / "none") == (0, 0.0)
