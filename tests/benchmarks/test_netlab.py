"""The network lab: what runs in it, what it limits, and that nothing is left of it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import netlab

HOSTS = """
import os, sys, torch.distributed as dist, torch
from pathlib import Path
assert sys.argv[1:] == ["one", "two words"], sys.argv
dist.init_process_group("gloo")
everyone = [None] * dist.get_world_size()
names = sorted(os.listdir("/sys/class/net"))
dist.all_gather_object(everyone, (dist.get_rank(), os.environ["LOCAL_RANK"], names, os.environ["EXTRA"]))
print(everyone)
dist.barrier()
dist.destroy_process_group()
"""
PROBE = """
import os, socket, threading, time
import netlab
rank, n = int(os.environ["RANK"]), 2_500_000

def send():
    while True:
        try:
            with socket.create_connection((netlab.address(1 - rank), 5000)) as peer:
                return peer.sendall(bytes(n))
        except ConnectionRefusedError:
            time.sleep(0.01)

with socket.create_server((netlab.address(rank), 5000)) as server:
    sender = threading.Thread(target=send)
    sender.start()
    with server.accept()[0] as peer:
        left, start = n - len(peer.recv(1)), time.perf_counter()
        while left:
            left -= len(peer.recv(left))
    print(n * 8 / 1e6 / (time.perf_counter() - start))
    sender.join()
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1 has no data")
time.sleep(60)
"""


def ours() -> list[str]:
    """The lab's namespaces of this machine that are not another lab's, alive."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [
        line.split()[0] for line in listed.splitlines() if line.startswith(f"{netlab.PREFIX}-{os.getpid()}-")
    ]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "script.py"
    assert ours() == []


@pytest.mark.netns
def test_ranks_of_a_lab_know_each_other_and_only_their_own_interface(script: Path):
    script.write_text(HOSTS)
    with netlab.Lab(hosts=3, mbit=500) as lab:
        assert len(ours()) == 4  # and the switch
        said = lab.run(script, ["one", "two words"], env={"EXTRA": "more"}, timeout=60)
        assert ours()
    expected = [(rank, "0", ["eth0", "lo"], "more") for rank in range(3)]
    assert [text.splitlines()[-1] for text in said] == [str(expected)] * 3


@pytest.mark.netns
def test_no_host_sends_or_receives_more_than_its_rate(script: Path):
    """Never more, whatever else the machine does; that it can reach it is the benchmark's to show."""
    script.write_text(PROBE)
    rates = []
    with netlab.Lab(hosts=2, mbit=100) as lab:
        rates += [(100, float(text.split()[-1])) for text in lab.run(script, timeout=60)]
        lab.set_rate(20)
        rates += [(20, float(text.split()[-1])) for text in lab.run(script, timeout=60)]
    for allowed, rate in rates:
        assert 0 < rate < 1.1 * allowed  # a burst of 2 ms more


@pytest.mark.netns
def test_a_rank_that_fails_ends_the_others_and_is_named_first(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(netlab, "_GRACE_S", 0.2)
    script.write_text(FAILS)
    with netlab.Lab(hosts=3) as lab, pytest.raises(netlab.LabError) as caught:
        lab.run(script, timeout=60)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 of 3 ranks failed (limit 60 s)"
    assert lines[1:3] == ["--- rank 1: exit code 1 ---", "rank 1 has no data"]


@pytest.mark.netns
def test_a_run_that_hangs_is_ended(script: Path):
    script.write_text("import time; time.sleep(60)")
    with netlab.Lab(hosts=1) as lab, pytest.raises(netlab.LabError, match="rank 0: not done in time"):
        lab.run(script, timeout=0.5)


def _started(script: Path) -> subprocess.Popen[str]:
    """The command, once its rank runs."""
    began = script.with_suffix(".began")
    script.write_text(f"import pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(60)")
    command = [sys.executable, netlab.__file__, "--hosts", "2", str(script)]
    process = subprocess.Popen(command, text=True)
    deadline = time.monotonic() + 60
    while not began.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def _names_of(process: subprocess.Popen[str]) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [word for word in listed.split() if word.startswith(f"{netlab.PREFIX}-{process.pid}-")]


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_an_interrupted_run_leaves_nothing(script: Path, number: signal.Signals):
    process = _started(script)
    assert len(_names_of(process)) == 3
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    assert _names_of(process) == []


@pytest.mark.netns
def test_what_a_killed_run_left_is_swept_with_what_runs_in_it(script: Path):
    process = _started(script)
    left = _names_of(process)
    process.kill()
    process.wait()
    ranks = [
        pid
        for name in left
        for pid in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True
        ).stdout.split()
    ]
    assert len(ranks) == 2
    assert set(left) <= set(netlab.sweep())
    assert _names_of(process) == []
    deadline = time.monotonic() + 10
    while any(Path("/proc", pid).exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path("/proc", pid).exists() for pid in ranks)


@pytest.mark.netns
def test_a_sweep_leaves_a_living_lab_alone(script: Path):
    with netlab.Lab(hosts=1):
        before = ours()
        netlab.sweep()
        assert ours() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": 0}, "hosts=0: give 1 to 250"),
        ({"hosts": 251}, "hosts=251"),
        ({"mbit": 0}, "mbit=0: give 1 to 100000"),
        ({"mbit": float("nan")}, "mbit=nan"),
    ],
    ids=str,
)
def test_wrong_numbers_are_refused(options: dict[str, float], text: str):
    with pytest.raises(ValueError, match=text):
        netlab.Lab(**options)


def test_without_root_or_iproute2_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(netlab.LabError, match="need root: run it with sudo"):
        netlab.Lab().__enter__()
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert netlab.missing() == "tc not found: install iproute2 (apt-get install iproute2)"
