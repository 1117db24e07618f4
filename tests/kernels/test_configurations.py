"""What launch code can choose is known whole, a part that has every choice compiles, and the page is right.

All of it takes hours to compile: `make ahead` does.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from packaging.version import Version

import compile_ahead
from compile_ahead import ARCHITECTURES, PAGE, RESULTS
from overlapkit.kernels import raw as kernels_raw
from overlapkit.optim import raw as optim_raw
from tests.kernels import configurations as kernels
from tests.kernels.ahead import SHARED_AT_MOST, Launch, needed
from tests.kernels.test_ahead_of_time import names
from tests.optim import configurations as optim

SPILLS_AT_MOST = 0 if Version(triton.__version__) >= Version("3.7") else 8
"""Bytes: Triton 3.6 cannot keep one configuration of AdamW within the 255 registers that there are."""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # as test_ahead_of_time's
    monkeypatch.setenv("TRITON_CACHE_DIR", str(base / "triton"))


def test_every_kernel_is_among_them() -> None:
    found = {one.name for one in compile_ahead.of_users()}
    assert found == {*names(kernels_raw), *names(optim_raw)}


def configurations(launcher: str) -> list[Launch]:
    if launcher == "the optimizer's":
        return optim.configurations()
    return kernels.configurations([case for case in kernels.CASES if case.call.__name__ == launcher])


LAUNCHERS = [*dict.fromkeys(case.call.__name__ for case in kernels.CASES), "the optimizer's"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_those_of_a_launcher_have_both_values_of_every_flag_and_some_with_every_choice_compile(
    launcher: str,
) -> None:
    found = configurations(launcher)
    values: dict[tuple[str, str], set[Any]] = {}
    for one in found:
        for name, value in one.constants.items():
            if isinstance(value, bool):
                values.setdefault((one.name, name), set()).add(value)
    assert {key: seen for key, seen in values.items() if seen != {False, True}} == {}
    for one in some_of(found):
        used = needed(one.compile(90))
        if one.by_rule:  # autotune drops a candidate that asks for too much, and measures what spills
            assert used.spills <= SPILLS_AT_MOST, (one.configuration, used)
            assert used.shared <= SHARED_AT_MOST[90], (one.configuration, used)


def features(one: Launch) -> Iterator[tuple[str, str, Any]]:
    """What is to be compiled once at the least: dtypes, warps, flags, words, the bits of kinds."""
    for name, value in one.configuration.items():
        if name == "KINDS":
            yield from ((one.name, "bit", bit) for kind in value for bit in range(12) if kind >> bit & 1)
        elif not name.startswith("BLOCK_"):
            yield one.name, name, value
    sizes = [value for name, value in one.constants.items() if name.startswith("BLOCK_")]
    yield one.name, "values of a thread", int(torch.tensor(sizes).prod()) // (32 * one.warps)


def some_of(found: list[Launch]) -> list[Launch]:
    """Few configurations that have each feature once, those with most of what is missing first."""
    chosen = []
    rest = list({frozenset(features(one)): one for one in found}.items())
    todo = set().union(*(these for these, _ in rest))
    while todo:
        rest = [(these & todo, one) for these, one in rest if these & todo]
        these, best = max(rest, key=lambda pair: len(pair[0]))
        chosen.append(best)
        todo -= these
    return chosen


def test_the_page_has_what_users_run_and_the_results_say(results: dict[str, Any]) -> None:
    rows = [compile_ahead.row_of(one) for one in compile_ahead.of_users()]
    recorded = [{k: v for k, v in row.items() if k not in ARCHITECTURES} for row in results["rows"]]
    assert recorded == rows, "make resources"
    assert PAGE.read_text() == compile_ahead.page(results)
    assert all(row[name][1] == 0 for row in results["rows"] for name in ARCHITECTURES)


def test_the_results_are_those_of_this_source(results: dict[str, Any]) -> None:
    """Of each kernel the first is compiled and compared, for one architecture of each maker."""
    if triton.__version__ != results["triton"]:
        pytest.skip(f"the results are of Triton {results['triton']}, this is {triton.__version__}")
    seen: set[str] = set()
    for one, row in zip(compile_ahead.of_users(), results["rows"], strict=True):
        for name in () if one.name in seen else ("sm_90", "gfx942"):
            used = list(needed(one.compile(ARCHITECTURES[name])))
            assert used == row[name], (name, one.configuration, "make resources")
        seen.add(one.name)


def test_a_program_has_no_more_threads_than_amd_allows() -> None:
    from overlapkit import launch

    assert launch.options(32, 1, amd=True) == {"num_warps": 16}
    assert launch.options(8, 1, amd=True) == {"num_warps": 8}
    assert launch.options(32, 1, amd=False) == {"num_warps": 32, "maxnreg": 64}
    assert launch.options(8, 3, amd=False) == {"num_warps": 8, "maxnreg": 80}


def test_a_spill_is_wrong_by_rule_and_a_candidate_s_is_its_own_affair() -> None:
    chosen = compile_ahead.of_users()[0]
    candidate = dataclasses.replace(chosen, by_rule=False)
    for needs, said in (
        ([40, 0, 1024], None),
        ([40, 8, 1024], "spills 8"),
        ([40, 0, 300_000], "needs 300000 bytes of shared memory"),
    ):
        assert compile_ahead.fault(chosen, "sm_90", needs) == said
        assert compile_ahead.fault(candidate, "sm_90", needs) is None
    assert "does not compile" in str(compile_ahead.fault(candidate, "sm_90", "CompilationError"))
