"""What holds for every test of checkpoints, and a folder for those that save hundreds of times."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_cached_plan() -> Iterator[None]:
    """No plan that torch.distributed.checkpoint has cached, in a class, gets from one test to the next."""
    yield
    if planner := sys.modules.get("torch.distributed.checkpoint.planner"):
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(planner.SavePlanner, f"_cached_{name}").clear()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is such a file system: hundreds of fsyncs would take their time."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)
