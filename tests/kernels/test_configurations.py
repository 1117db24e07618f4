"""What launch code can choose is known whole, a part that has every choice compiles, and the page is right.

All of it takes hours to compile: `make ahead` does.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

import compile_ahead
from compile_ahead import ARCHITECTURES, PAGE, RESULTS
from overlapkit.kernels import raw as kernels_raw
from overlapkit.optim import raw as optim_raw
from tests.kernels.ahead import SHARED_AT_MOST, Launch, needed
from tests.kernels.test_ahead_of_time import names


@pytest.fixture(scope="module")
def everything() -> list[Launch]:
    return compile_ahead.everything()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # as test_ahead_of_time's
    monkeypatch.setenv("TRITON_CACHE_DIR", str(base / "triton"))


def test_every_kernel_and_both_values_of_every_flag_are_among_them(everything: list[Launch]) -> None:
    assert {one.name for one in everything} == {*names(kernels_raw), *names(optim_raw)}
    values: dict[tuple[str, str], set[Any]] = {}
    for one in everything:
        for name, value in one.constants.items():
            values.setdefault((one.name, name), set()).add(value)
    flags = {key: found for key, found in values.items() if True in found or False in found}
    assert len(flags) > 40
    assert {key: found for key, found in flags.items() if found != {False, True}} == {}


def features(one: Launch) -> Iterator[tuple[str, str, Any]]:
    """What is to be compiled once at the least: dtypes, warps, flags, words, the bits of kinds."""
    for name, value in one.configuration.items():
        if name == "KINDS":
            yield from ((one.name, "bit", bit) for kind in value for bit in range(12) if kind >> bit & 1)
        elif not name.startswith("BLOCK_"):
            yield one.name, name, value
    sizes = [value for name, value in one.constants.items() if name.startswith("BLOCK_")]
    yield one.name, "values of a thread", int(torch.tensor(sizes).prod()) // (32 * one.warps)


def some_of(everything: list[Launch]) -> list[Launch]:
    """Few configurations that have each feature once, those with most of what is missing first."""
    found = []
    rest = list({frozenset(features(one)): one for one in everything}.items())
    todo = set().union(*(these for these, _ in rest))
    while todo:
        rest = [(these & todo, one) for these, one in rest if these & todo]
        these, best = max(rest, key=lambda pair: len(pair[0]))
        found.append(best)
        todo -= these
    return found


def test_configurations_that_have_every_choice_compile(everything: list[Launch]) -> None:
    chosen = some_of(everything)
    for one in chosen:
        used = needed(one.compile(90))
        if one.by_rule:  # autotune drops a candidate that asks for too much, and measures what spills
            assert used.spills == 0, (one.configuration, used)
            assert used.shared <= SHARED_AT_MOST[90], (one.configuration, used)


def test_the_page_has_what_users_run_and_the_results_say(results: dict[str, Any]) -> None:
    rows = [compile_ahead.row_of(one) for one in compile_ahead.of_users()]
    recorded = [{k: v for k, v in row.items() if k not in ARCHITECTURES} for row in results["rows"]]
    assert recorded == rows, "make resources"
    assert PAGE.read_text() == compile_ahead.page(results)
    assert all(row[name][1] == 0 for row in results["rows"] for name in ARCHITECTURES)


def test_the_results_are_those_of_this_source(results: dict[str, Any]) -> None:
    """Of each kernel the first: the others are only known to be the same by the source that made them."""
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

    assert launch.options(32, True, amd=True) == {"num_warps": 16}
    assert launch.options(8, True, amd=True) == {"num_warps": 8}
    assert launch.options(32, True, amd=False) == {"num_warps": 32, "maxnreg": 64}
