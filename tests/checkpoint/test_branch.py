"""Who saves below a checkpoint that "latest" will take is told so, once, and nobody else is."""

import shutil
import warnings

import pytest
import torch

from overlapkit.checkpoint import Checkpointer
from tests.ranks import run_ranks


def state(value=0.0):
    return {"x": torch.full((4,), value)}


def saved(directory, *steps, **options):
    """The warnings of saving these steps one after the other, after "latest" was not restored."""
    with Checkpointer(directory, **options) as checkpointer, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in steps:
            checkpointer.save(step, state(float(step)), block=True)
    return [str(warning.message) for warning in seen]


@pytest.fixture
def directory(tmp_path):
    assert saved(tmp_path, 10, 20, 30) == []
    return tmp_path


def test_a_run_that_begins_anew_in_an_old_directory(directory):
    (said,) = saved(directory, 5, 6, 7)
    assert said.startswith("save(step=5): step-30 is above it")
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.restore(state()) == 30  # what the warning is about


def test_it_names_the_line_of_the_loop(directory):
    with Checkpointer(directory) as checkpointer, pytest.warns(UserWarning, match="step-30") as seen:
        checkpointer.save(5, state(), block=True)
    assert seen[0].filename == __file__


def test_who_goes_back(directory):
    with Checkpointer(directory) as checkpointer:
        checkpointer.restore(state(), step=20)
        with pytest.warns(UserWarning, match=r"save\(step=25\): step-30 is above it"):
            checkpointer.save(25, state(), block=True)
        checkpointer.save(26, state(), block=True)  # once


def test_as_an_error_it_is_one_of_a_save_that_has_begun(directory):
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(UserWarning, match="step-30"):  # as pytest is set here
            checkpointer.save(25, state(), block=True)
        assert checkpointer.steps() == [10, 20, 25, 30]


@pytest.mark.parametrize("where", ["memory", "local"])
def test_in_stores_too(tmp_path, where):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}-{where}"
    local = {"local": tmp_path / "local"} if where == "local" else {}
    assert saved(url, 10, 20, **local) == []
    if local:
        shutil.rmtree(local["local"])  # another machine: only the store has it
    assert [said[:16] for said in saved(url, 5, 6, **local)] == ["save(step=5): st"]


def test_of_several_ranks_one_says_it(directory):
    def job(rank):
        return saved(directory, 5)

    first, second = run_ranks(2, job)
    assert (len(first), second) == (1, [])


def test_nobody_else_is_told(directory):
    assert saved(directory, 30, 40) == []  # the same step anew, and later ones
    with Checkpointer(directory) as checkpointer:
        checkpointer.restore(state(), step=20)  # to look at it
        checkpointer.restore(state())
        checkpointer.save(50, state(), block=True)
    with Checkpointer(directory) as checkpointer:
        checkpointer.restore(state(), step=40)
        shutil.rmtree(directory / "step-50")  # it was deleted, as the warning says
        checkpointer.save(45, state(), block=True)


def test_nor_is_who_fell_back_behind_a_damaged_one(directory):
    file = directory / "step-30" / "rank-00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with Checkpointer(directory) as checkpointer:
        with pytest.warns(UserWarning, match="step-30 is damaged and is skipped"):
            assert checkpointer.restore(state()) == 20
        checkpointer.save(25, state(), block=True)
