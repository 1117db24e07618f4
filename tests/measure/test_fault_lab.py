"""One fault is planted in a real run; the report names it: lane, rank, fix, and its cost within 15 %."""

import pytest
import torch._dynamo  # noqa: F401 # DDP and optimizers import it; here once, and not in each rank

from fault_lab import FAULTS, HEALTHY, Fault, mistakes, train
from tests.ranks import run_ranks

SECONDS = 0.15
ATTEMPTS = 6  # others use these cores, too; what is wrong in itself is wrong every time

CASES = [(HEALTHY, 2), *((fault, 2) for fault in FAULTS), (HEALTHY, 4)]
CASES += [(fault, 4) for fault in FAULTS if fault.name in ("slow rank, backward", "rotating rank")]


@pytest.mark.parametrize(("fault", "world"), CASES, ids=[f"{fault.name}-{world}" for fault, world in CASES])
def test_the_planted_fault_is_found_and_nothing_else(fault: Fault, world: int) -> None:
    tried = []
    for _ in range(ATTEMPTS):
        answers = run_ranks(world, lambda rank: train(rank, world, fault, SECONDS))
        if not (wrong := mistakes(fault, SECONDS, world, answers)):
            return
        tried.append("\n".join(wrong))
    pytest.fail("\n\n".join(tried))


def test_what_was_not_planted_is_a_mistake() -> None:
    """The judge itself can fail."""
    by_name = {fault.name: fault for fault in FAULTS}
    slow = by_name["slow optimizer"]
    found = [("optimizer", "the loop", "step less often: a larger batch", 150.0)]
    answers = [{"findings": found, "answers": []}] * 2
    assert mistakes(slow, 0.15, 2, answers) == []
    assert len(mistakes(HEALTHY, 0.15, 2, answers)) == 2
    assert "optimizer" in mistakes(by_name["host work"], 0.15, 2, answers)[0]
    assert mistakes(slow, 0.10, 2, answers)[0] == "rank 0: 150.0 ms found, 100.0 planted"
    twice = [{"findings": found * 2, "answers": []}]
    assert "2 findings, 1 planted" in mistakes(slow, 0.15, 2, twice)[0]
    peak = [{"findings": [], "answers": [(1.0, "no", "+150.0 MiB")] * 7}]
    assert "answer 7" in mistakes(by_name["optimizer peak"], 0.15, 1, peak)[0]
