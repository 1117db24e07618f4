"""What holds for every test: marks skip with a reason, no lane's thread is left, locks have one order."""

import functools
import gc
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.lock_order import SEEN

GRACE_S = 2.0
"""How long the worker of a lane that was dropped without close() may take to notice."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """On a GPU machine pytest-timeout may be missing: its setting must not be an unknown one there."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "ignored: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    # a shell starts what it runs in the background with Ctrl-C ignored, which tests of Ctrl-C inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: ignored: pytest-timeout is not installed")


def pytest_collection_finish() -> None:
    """Tests that collect garbage, to see what is left, need not go through what all have in common."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("netns") and (reason := _why_no_netns()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_lane_left_behind() -> Iterator[None]:
    """A test that leaves a thread of ours running fails: it would run into the next test."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := _lane_threads(before)) and time.monotonic() < deadline:
        gc.collect()  # a lane in a reference cycle, which its last work may hold a moment longer
        left[0].join(0.05)
    if left:
        names = ", ".join(thread.name for thread in left)
        pytest.fail(f"left behind: {names}; close() what the test made")


@pytest.fixture(autouse=True)
def locks_in_one_order() -> Iterator[None]:
    """A test fails where it takes locks in an order that could deadlock with any test before it."""
    with SEEN.watching():
        yield
    if found := SEEN.news():
        pytest.fail("\n".join(found))


def _lane_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("overlapkit-") and thread not in before
    ]


@functools.cache
def _why_no_netns() -> str | None:
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    if shutil.which("ip") is None:
        return "needs the ip command (iproute2)"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        return "this root may not make network namespaces"
    return None
