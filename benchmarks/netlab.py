"""A network of hosts on one machine: does communication hide when the wire is as slow as real ones?

    sudo python benchmarks/netlab.py --hosts 2 --mbit 1000 train.py --its-options

A host is a network namespace, joined to a switch (a bridge in a namespace of its own) by a veth pair whose
two ends send at most `mbit` each (tc tbf), so that a host sends and receives at that rate at the same time.
One rank runs on each, as torchrun would start it: RANK, WORLD_SIZE, MASTER_ADDR ... in the environment, gloo
told which interface to take. Nothing is changed outside these namespaces. They are gone when the block ends,
by an error, Ctrl-C or SIGTERM, too; what a killed run left is swept by the next one. Needs root and iproute2.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

PREFIX = "oklab"
INTERFACE = "eth0"
_PORT = 29500
_GRACE_S = 5.0
_PATHS = str(Path(__file__).parent), str(Path(__file__).parent.parent / "src")  # as a script finds them


class LabError(RuntimeError):
    """The lab could not be built, or a rank failed; the message says which command or rank, and its words."""


def missing() -> str | None:
    """What this machine lacks for a lab, and the remedy; None where it can have one."""
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} not found: install iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo, or in a container with CAP_NET_ADMIN"
    name = f"{PREFIX}-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine allows no network namespaces ({tried.stderr.strip()}): it needs CAP_SYS_ADMIN"
    _ip("netns", "del", name)
    return None


class Lab:
    """Hosts joined by a switch, for the length of a `with` block.

    Args:
        hosts: How many, 1 to 250; each runs one rank.
        mbit: What each may send, and receive, in Mbit/s.

    Attributes:
        hosts: The names of their network namespaces.

    Raises:
        ValueError: A number is out of range.
        LabError: Root, iproute2 or the kernel's tbf is missing, or a rank failed.
    """

    def __init__(self, hosts: int = 2, mbit: float = 1000.0) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts={hosts}: give 1 to 250")
        if not 1.0 <= mbit <= 100_000.0:
            raise ValueError(f"mbit={mbit}: give 1 to 100000 Mbit/s")
        self.mbit = mbit
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self.hosts = [f"{PREFIX}-{os.getpid()}-{host}" for host in range(hosts)]
        self._running: list[subprocess.Popen[str]] = []
        self._before: signal._HANDLER = None

    def __enter__(self) -> Self:
        if lacks := missing():
            raise LabError(lacks)
        sweep()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _leave)
        try:
            self._build()
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def set_rate(self, mbit: float) -> None:
        """Change what every host may send and receive, in Mbit/s."""
        self.mbit = mbit
        for number, host in enumerate(self.hosts):
            _shape(host, INTERFACE, mbit)
            _shape(self._switch, f"port{number}", mbit)

    def run(
        self,
        script: str | Path,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> list[str]:
        """Run a Python script as one rank on each host; return what each printed.

        Args:
            script: Its path.
            args: Its arguments.
            env: Added to the environment of each.
            timeout: Seconds until all must be done.

        Raises:
            LabError: A rank failed or was not done in time; the others are ended, and its words are there.
        """
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            files = [Path(folder, str(rank)) for rank in range(len(self.hosts))]
            try:
                for rank, file in enumerate(files):
                    self._running.append(self._start(rank, file, [str(script), *args], env or {}))
                self._wait(timeout, files)
            finally:
                self._stop()
            return [file.read_text() for file in files]

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "add", INTERFACE, "type", "veth", "peer", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host, "addr", "add", f"{address(number)}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", INTERFACE, "up")
        self.set_rate(self.mbit)

    def _start(
        self, rank: int, output: Path, command: list[str], env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        job = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (*_PATHS, os.environ.get("PYTHONPATH")))),
            **env,
        }
        with output.open("w") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.hosts[rank], sys.executable, "-u", *command],
                env=os.environ | job,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def _wait(self, timeout: float, files: list[Path]) -> None:
        deadline = time.monotonic() + timeout
        while (
            None in (codes := [process.poll() for process in self._running]) and time.monotonic() < deadline
        ):
            if any(codes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)  # for the others' own words
            time.sleep(0.02)
        wrong = [
            (rank, "not done in time" if code is None else f"exit code {code}")
            for rank, code in enumerate(codes)
            if code != 0
        ]
        if wrong:
            wrong.sort(key=lambda one: one[1] == "not done in time")
            said = "\n".join(f"--- rank {r}: {why} ---\n{files[r].read_text()[-4000:]}" for r, why in wrong)
            raise LabError(f"{len(wrong)} of {len(files)} ranks failed (limit {timeout:g} s)\n{said}")

    def _stop(self) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.wait()
        self._running.clear()

    def _clear(self) -> None:
        with _uninterrupted():
            self._stop()
            for name in (*self.hosts, self._switch):
                _remove(name)
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._before)
                self._before = None


def address(host: int) -> str:
    """The host's address inside the lab."""
    return f"10.77.0.{host + 1}"


def sweep() -> list[str]:
    """Remove the namespaces, and whatever runs in them, of labs whose process is gone; return their names."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")]
    left = [name for name in names if not Path("/proc", name.split("-")[1]).exists()]
    for name in left:
        _remove(name)
    return left


def _remove(name: str) -> None:
    """A namespace lives as long as a process in it: they go first."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _shape(namespace: str, interface: str, mbit: float) -> None:
    burst = max(64_000, round(mbit * 1e6 / 8 * 0.002))  # 2 ms: a timer that is late by less costs nothing
    command = ["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf"]
    _call([*command, "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "latency", "50ms"])


def _ip(*words: str) -> None:
    _call(["ip", *words])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the lab behind: it is heard when all is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--hosts", type=int, default=2, help="how many, with one rank each")
    options.add_argument(
        "--mbit", type=float, default=1000.0, help="what each may send and receive, in Mbit/s"
    )
    options.add_argument("--timeout", type=float, default=600.0, help="seconds until all ranks must be done")
    options.add_argument("--sweep", action="store_true", help="only remove what killed runs left")
    options.add_argument("script", nargs="?", help="a Python script")
    options.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    args = options.parse_args()
    if args.script is None and not args.sweep:
        options.error("name a script to run, or give --sweep")
    try:
        if args.sweep:
            if lacks := missing():
                raise LabError(lacks)
            print("\n".join(sweep()) or "nothing was left")
            return 0
        with Lab(args.hosts, args.mbit) as lab:
            for rank, text in enumerate(lab.run(args.script, args.args, timeout=args.timeout)):
                print(*(f"[{rank}] {line}" for line in text.splitlines()), sep="\n")
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
