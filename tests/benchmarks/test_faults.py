"""The sweep over planted faults: what counts as found, missed and false."""

import argparse
from collections import Counter

import pytest

import faults
from fault_lab import FAULTS, HEALTHY, Fault

BY_NAME = {fault.name: fault for fault in FAULTS}
RIGHT = ("optimizer", "the loop", "step less often: a larger batch", 150.0)
OTHER = ("communication", "replicate", "try a smaller bucket_cap_mb=", 20.0)


@pytest.mark.parametrize(
    ("fault", "findings", "expected"),
    [
        (BY_NAME["slow optimizer"], [RIGHT], ["runs", "found"]),
        (BY_NAME["slow optimizer"], [RIGHT, OTHER], ["runs", "false"]),
        (BY_NAME["slow optimizer"], [OTHER], ["runs", "false", "missed"]),
        (BY_NAME["slow optimizer"], [], ["runs", "missed"]),
        (BY_NAME["slow optimizer"], [(*RIGHT[:3], 300.0)], ["runs", "off"]),
        (HEALTHY, [], ["runs", "found"]),
        (HEALTHY, [OTHER], ["runs", "false"]),
    ],
)
def test_outcomes(fault: Fault, findings: list, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "run_ranks", lambda *_: [{"findings": findings, "answers": []}] * 2)
    assert faults.outcome(fault, 2, 0.15) == expected


def test_figures_count_runs() -> None:
    counted = {"a": Counter(runs=3, found=2, false=1), "b": Counter(runs=1, found=1), "c": Counter()}
    rows = {figure.name: figure for figure in faults.figures(counted, argparse.Namespace())}
    assert (rows["a: found"].value, rows["a: found"].peer_value) == (2, 3)
    assert "c: found" not in rows
    assert rows["all: found"].ratio == 0.75
    assert rows["all: found"].ratio_limit == 0.95
