"""A plugin of pytest for benchmarks/gpu.py: from a moment on tests are skipped, so that there is a report."""

import os
import time

import pytest

UNTIL = "OVERLAPKIT_TESTS_UNTIL"
"""The environment's variable that holds that moment, of time.time()."""

NO_TIME = "no time left in the budget of benchmarks/gpu.py"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ[UNTIL]):
        pytest.skip(NO_TIME)
