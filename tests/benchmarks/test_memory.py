"""Memory of a process tree: what a child holds counts, and what is shared counts once."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memory import PeakMemory, descendants, tree_memory

HELD = 2**26

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the kernel has no /proc/PID/smaps_rollup"
)


def _holding(nbytes: int) -> subprocess.Popen[str]:
    """A process that has written to so many bytes, until its input is closed."""
    code = f"held = b'1' * {nbytes}; print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_childs_memory_counts() -> None:
    before = tree_memory(os.getpid())
    child = _holding(HELD)
    try:
        assert child.pid in descendants(os.getpid())
        assert tree_memory(os.getpid()) - before > 0.9 * HELD
    finally:
        child.communicate("\n")
    assert child.pid not in descendants(os.getpid())


def test_the_peak_is_kept() -> None:
    before = tree_memory(os.getpid())
    with PeakMemory() as peak:
        child = _holding(HELD)
        deadline = time.monotonic() + 30
        while (peak.nbytes or 0) - before < 0.9 * HELD and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate("\n")
    assert peak.nbytes is not None
    assert peak.nbytes - before > 0.9 * HELD > 2 * (tree_memory(os.getpid()) - before)


def test_memory_that_a_fork_shares_counts_once() -> None:
    held = b"1" * HELD
    before = tree_memory(os.getpid())
    ready, done = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(ready,))
    child.start()
    try:
        assert done.poll(30)
        assert tree_memory(os.getpid()) - before < 0.5 * len(held)
    finally:
        done.send(None)
        child.join()


def _answer(connection: multiprocessing.connection.Connection) -> None:
    connection.send(None)
    connection.recv()
