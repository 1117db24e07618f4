"""What one rank alone refuses: the others hear of it at once, with its reason, and the next call is clean.

Every timeout is ten minutes, and the ranks have one: who waits for it fails the test.
"""

import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from overlapkit.checkpoint import Checkpointer, RankFailed, SafetensorsReader, SafetensorsWriter
from tests.checkpoint.faults import value_state
from tests.ranks import run_ranks


class Picky:
    """An object that may not like what it gets."""

    def __init__(self, refuses):
        self.refuses = refuses

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        if self.refuses:
            raise RuntimeError("not this one")


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def victim(request):
    return request.param


def refused(rank, victim, error, text):
    """What each rank gets: the victim its own error, the other one what is wrong there."""
    if rank == victim:
        return pytest.raises(error, match=text)
    return pytest.raises(RankFailed, match=f"rank {victim}: {error.__name__}: .*{text}")


def test_what_one_rank_refuses(tmp_path, victim):
    def run(rank):
        mine = rank == victim

        for option, error in (
            ({"keep": 0}, ValueError),
            ({"best": 3}, TypeError),
            ({"timeout": -1}, ValueError),
            ({"local": "s3://bucket/run"}, NotImplementedError),
        ):
            with refused(rank, victim, error, next(iter(option))):
                Checkpointer(tmp_path / "a", **(option if mine else {}))
        with refused(rank, victim, TypeError, "directory=None"):
            Checkpointer(None if mine else tmp_path / "a")

        state = {**value_state(1), "picky": Picky(mine)}
        no_hooks = {"optimizer": torch.optim.SGD.__new__(torch.optim.SGD)}
        with Checkpointer(tmp_path / "a", every=2) as checkpointer:
            for call, (step, metrics, more, error, text) in enumerate(
                (
                    (2.5, None, {}, TypeError, "step=2.5"),
                    (2, {"loss": "low"}, {}, TypeError, "metrics"),
                    (2, None, {3: 4}, TypeError, "3"),
                    (2, None, {"odd": object()}, TypeError, "odd"),
                    (2, None, no_hooks, TypeError, "no hooks"),
                )
            ):
                if mine:
                    with pytest.raises(error, match=text):
                        checkpointer.save(step, state | more, metrics=metrics)
                else:
                    with pytest.raises(RankFailed, match=f"rank {victim}: {error.__name__}: .*{text}"):
                        checkpointer.save(2, state).wait()
                if call == 1 and mine:  # where no save is due, nobody waits
                    with pytest.raises(TypeError, match="keys"):
                        checkpointer.save(3, state | {3: 4})
                elif call == 1:
                    assert not checkpointer.save(3, state).due
            checkpointer.save(2, state).wait()
            assert checkpointer.steps() == [2]

            for options, text in (({"only": ("nothing",)}, "only"), ({"step": "best"}, "best")):
                with refused(rank, victim, ValueError, text):
                    checkpointer.restore(state, **(options if mine else {}))
            with refused(rank, victim, TypeError, "no hooks"):
                checkpointer.restore(state | no_hooks if mine else state)
            with refused(rank, victim, RuntimeError, "not this one") as caught:
                checkpointer.restore(state)
            assert "step-2 is in place, there in part" in caught.value.__notes__[0] or mine
            state["picky"].refuses = False
            assert checkpointer.restore(state) == 2
            checkpointer.save(4, state).wait()
            assert checkpointer.steps() == [2, 4]

    run_ranks(2, run)


def test_arguments_that_differ_between_ranks(tmp_path):
    def run(rank):
        for name, values in (
            ("directory", [tmp_path / "a", tmp_path / "b"]),
            ("every", [2, 3]),
        ):
            directory = values[rank] if name == "directory" else tmp_path
            options = {"every": values[rank]} if name == "every" else {}
            error = (ValueError, RankFailed)[rank]
            with pytest.raises(error, match=f"{name}=.* on rank 1, .* on rank 0: give all ranks the same"):
                Checkpointer(directory, **options)
        Checkpointer(tmp_path).close()

    run_ranks(2, run)


def test_what_one_rank_refuses_in_dcp(tmp_path, victim):
    state = {"w": torch.arange(6.0)}

    def run(rank):
        good = tmp_path / "step-1"
        dcp.save(state, checkpoint_id=good, storage_writer=SafetensorsWriter())
        for bad in (tmp_path / "no-step", random, "s3:/bucket/step-1"):
            at = bad if rank == victim else good
            for move in (
                lambda at: dcp.save(state, checkpoint_id=at, storage_writer=SafetensorsWriter()),
                lambda at: dcp.save(state, storage_writer=SafetensorsWriter(at)),
                lambda at: dcp.load(state, checkpoint_id=at, storage_reader=SafetensorsReader()),
                lambda at: dcp.load(state, storage_reader=SafetensorsReader(at)),
            ):
                with pytest.raises(CheckpointException, match="checkpoint_id") as caught:
                    move(at)
                assert list(caught.value.failures) == [victim]
        dcp.save(state, checkpoint_id=good, storage_writer=SafetensorsWriter())
        dcp.load(state, checkpoint_id=good, storage_reader=SafetensorsReader())

    run_ranks(2, run)
