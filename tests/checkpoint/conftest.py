"""No plan that torch.distributed.checkpoint has cached, in a class, gets from one test to the next."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_cached_plan() -> Iterator[None]:
    yield
    if planner := sys.modules.get("torch.distributed.checkpoint.planner"):
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(planner.SavePlanner, f"_cached_{name}").clear()
