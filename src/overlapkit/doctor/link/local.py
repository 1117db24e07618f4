"""Starts processes on this machine that measure the links between them; ends them, whatever happens."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from overlapkit.doctor.link.measure import Figures, Progress
from overlapkit.doctor.machine import Unreadable

_Line = tuple[int, str | None]


def measure_locally(
    world: int,
    timeout: float,
    environ: Mapping[str, str],
    progress: Progress | None = None,
    program: str = "overlapkit.doctor.link.local_rank",
) -> Figures:
    """The figures of `measure`, of ranks that are started for it.

    Args:
        world: How many, at least 2.
        timeout: Seconds without a word from any of them after which they are ended.
        environ: Their environment, but for the job's variables.
        progress: Told of each step.
        program: The module that they run.

    Raises:
        Unreadable: One failed, died or hung; the message names it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: SimpleQueue[_Line] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(_rank(r, world, store.port, timeout, environ, program, said))
            for r in range(world)
        ]
        while True:
            rank, line = _next(said, timeout, running)
            if line is None:
                code = running[rank].wait()
                raise Unreadable(f"rank {rank} ended with exit code {code}, before the links were measured")
            found = _parsed(line)
            if "error" in found:
                raise Unreadable(f"rank {rank}: {found['error']}")
            if "figures" in found:
                figures: Figures = found["figures"]
                for process in running:  # they leave by themselves
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5.0)
                return figures
            if "progress" in found and progress is not None:
                progress(*found["progress"])


@contextlib.contextmanager
def _rank(
    rank: int,
    world: int,
    port: int,
    timeout: float,
    environ: Mapping[str, str],
    program: str,
    said: "SimpleQueue[_Line]",
) -> Iterator["subprocess.Popen[str]"]:
    job = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    threads = max(1, (os.cpu_count() or 1) // world)
    env = {"OMP_NUM_THREADS": str(threads), **environ, **{name: str(value) for name, value in job.items()}}
    process = subprocess.Popen(
        [sys.executable, "-m", program, str(timeout)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    reader = threading.Thread(
        target=_listen, args=(rank, process, said), name=f"overlapkit-doctor rank {rank}"
    )
    reader.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        reader.join()


def _listen(rank: int, process: "subprocess.Popen[str]", said: "SimpleQueue[_Line]") -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            said.put((rank, line))
    said.put((rank, None))


def _next(said: "SimpleQueue[_Line]", timeout: float, running: list["subprocess.Popen[str]"]) -> _Line:
    try:
        return said.get(timeout=timeout)
    except Empty:
        alive = [str(rank) for rank, process in enumerate(running) if process.poll() is None]
        raise Unreadable(
            f"nothing within {timeout:g} s from the ranks that are measuring: {', '.join(alive)}"
        ) from None


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}  # something that a library printed
    return found if isinstance(found, dict) else {}
