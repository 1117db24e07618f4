"""A plugin of pytest for benchmarks/gpu.py: deals tests out among processes, and ends in time with a report.

From a moment on tests are skipped.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

UNTIL = "OVERLAPKIT_TESTS_UNTIL"
"""The environment's variable that holds that moment, of time.time()."""

NO_TIME = "no time left in the budget of benchmarks/gpu.py"

GRACE_S = 4.0
"""Of the test that runs at that moment: then it is skipped, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deal", default="0/1", metavar="I/N", help="every N-th of the tests, from the I-th on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After -m has left out what is not asked for."""
    first, count = map(int, config.getoption("deal").split("/"))
    mine = items[first::count]
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % count != first])
    items[:] = mine


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ[UNTIL]):
        pytest.skip(NO_TIME)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """By a signal of our own: SIGALRM is pytest-timeout's, and only the main thread can be interrupted."""
    if (here := threading.current_thread()) is not threading.main_thread():
        return (yield)
    before = signal.signal(signal.SIGUSR1, _give_up)
    left = float(os.environ[UNTIL]) + GRACE_S - time.time()
    timer = threading.Timer(max(0.0, left), signal.pthread_kill, (here.ident, signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def _give_up(signum: int, frame: object) -> None:
    pytest.skip(NO_TIME)
