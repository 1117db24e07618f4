"""Starts the ranks of one life of a job, sees how they end, and reads what they write down."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

import torch

import chaos_rank
import netlab

RANK = Path(chaos_rank.__file__)
ORPHAN_S = 8.0
"""How long a process may outlive the launcher of its job: torchrun's workers end by themselves."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_SUBREAPER, _NEW_NET = 36, 0x40000000

Records = list[dict[str, Any]]


def adopt_orphans() -> None:
    """Let every process whose parent is gone become this one's child, to be seen."""
    if _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Descendants:
    """The processes below this one; it must have no others than a job's.

    Attributes:
        codes: How those that have ended did.
    """

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}

    def reap(self) -> None:
        """Note how children have ended: one's own, and those that were left to us."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def kill(self) -> None:
        """End all of it at once, as when the power goes."""
        while left := descendants():
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)
            self.reap()

    def orphans(self, patience_s: float = ORPHAN_S) -> list[str]:
        """What has outlived the launcher, by command; it is ended then."""
        deadline = time.monotonic() + patience_s
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(0.02)
            self.reap()
        named = [f"{pid}: {_command(pid)}" for pid in left]
        self.kill()
        return named


class Job(Descendants):
    """The processes of one life.

    Args:
        spec: The file that every rank reads.
        life: Its number.
        world: Ranks.
        launcher: One of chaos_plan.LAUNCHERS.
        lab: The hosts, for that launcher.
        output: What ranks and launcher print goes here.
        restarts: How often torchrun may start the ranks again.
    """

    def __init__(
        self,
        spec: Path,
        life: int,
        world: int,
        launcher: str,
        lab: netlab.Lab | None,
        output: Path,
        restarts: int,
    ) -> None:
        super().__init__()
        self.world = world
        self._output = output
        if launcher == "torchrun":
            self._mine = [self._start(0, lambda: _torchrun(spec, world, restarts))]
        else:
            port = 29500 + life % 1000 if lab else _free_port()
            self._mine = [
                self._start(rank, lambda rank=rank: _forked(spec, rank, world, port, lab))
                for rank in range(world)
            ]

    def over(self) -> bool:
        """Whether those that were started here have ended."""
        self.reap()
        return all(pid in self.codes for pid in self._mine)

    def signal(self, number: int) -> None:
        """Send a signal as a scheduler does: to what was started here, which passes it on."""
        for pid in self._mine:
            if pid not in self.codes:
                send(pid, number)

    def _start(self, rank: int, work: Any) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            with open(f"{self._output}-{rank}.txt", "ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            work()
        finally:
            os._exit(70)  # `work` ends the process itself


def _torchrun(spec: Path, world: int, restarts: int) -> NoReturn:
    options = ["--standalone", "--nproc-per-node", str(world), "--max-restarts", str(restarts)]
    more = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": _paths()}
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval", "0.1"]
    os.execve(sys.executable, [*command, str(RANK), str(spec)], os.environ | more)


def _paths() -> str:
    own = str(RANK.parent), str(RANK.parent.parent / "src"), os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, own))


def _forked(spec: Path, rank: int, world: int, port: int, lab: netlab.Lab | None) -> NoReturn:
    """The life of a forked rank; it ends as an interpreter does."""
    gc.freeze()  # what the parent left to collect is the parent's
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    address = "127.0.0.1"
    if lab is not None:
        enter(lab.hosts[rank])
        address = netlab.address(0)
        os.environ["GLOO_SOCKET_IFNAME"] = netlab.INTERFACE
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    code = 0
    try:
        chaos_rank.main(str(spec))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # what `sys.exit` comes to, without this process's stack in between
    raise AssertionError


def enter(host: str) -> None:
    """Go into a network namespace."""
    with open(f"/run/netns/{host}") as file:
        if _LIBC.setns(file.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"setns: {host}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def send(pid: int, number: int) -> bool:
    """Send a signal; False where the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def descendants() -> list[int]:
    """The processes below this one that have not ended."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
                children[int(parent)].append(int(entry) * (state not in "ZX"))
    found, front = [], [os.getpid()]
    while front:
        front = [child for parent in front for child in children[parent] if child]
        found += front
    return found


def _command(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "gone"


class Logs:
    """The records of a run, read as they are written.

    Attributes:
        records: By (life, restart) and rank.
        news: When the last one was read, of `time.monotonic`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[tuple[int, int], dict[int, Records]] = {}
        self.news = time.monotonic()
        self._read: dict[Path, int] = {}

    def poll(self, life: int) -> None:
        """Read what is new of a life."""
        for path in self.folder.glob(f"{life:04d}.*.jsonl"):
            at = self._read.get(path, 0)
            if path.stat().st_size <= at:
                continue
            with open(path, "rb") as file:
                file.seek(at)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] = at + len(whole) + 1
                start, rank = path.stem.rsplit("-", 1)
                key = tuple(int(part) for part in start.split("."))
                ranks = self.records.setdefault((key[0], key[1]), {})
                ranks.setdefault(int(rank), []).extend(json.loads(line) for line in whole.splitlines())
                self.news = time.monotonic()

    def latest(self, life: int) -> tuple[tuple[int, int], dict[int, Records]] | None:
        """The newest start of a life, and its records by rank."""
        keys = [key for key in self.records if key[0] == life]
        return (max(keys), self.records[max(keys)]) if keys else None


def first(records: Records, kind: str) -> dict[str, Any] | None:
    """The first record of a kind."""
    return next((record for record in records if record["kind"] == kind), None)
