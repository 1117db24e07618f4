"""Several ranks that save straight into one store."""

import os
import signal

import pytest
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401  here, so that the forked ranks need not

from overlapkit.checkpoint import Checkpointer, RankFailed
from tests.checkpoint.faults import kill
from tests.checkpoint.remote.injected import OnDisk
from tests.checkpoint.test_distributed import full, replicated, restore_some, same, save_some, sharded
from tests.ranks import run_ranks


@pytest.mark.parametrize(("made", "readers"), [(sharded, 1), (sharded, 2), (replicated, 3)])
def test_any_world_size_reads_what_two_ranks_wrote(tmp_path, made, readers):
    url = f"disk://{tmp_path}/run"
    saved = run_ranks(2, save_some, url, made)
    found = run_ranks(readers, restore_some, url, made) if readers > 1 else [restore_some(0, url, made)]
    for at, tensors in found:
        assert at == 3
        same(saved[0], tensors)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-3"]
    (save,) = (path for path in (tmp_path / "run" / "step-3").iterdir() if path.is_dir())
    assert {path.name[:10] for path in save.iterdir()} == {"rank-00000", "rank-00001"}


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path, victim):
    url = f"disk://{tmp_path}/run"

    def save(rank):
        state = sharded()
        with Checkpointer(url) as checkpointer:
            real = OnDisk.pipe_file
            if rank == victim:
                OnDisk.pipe_file = lambda *args: 1 / 0
            with pytest.raises(Exception, match="division by zero") as caught:
                checkpointer.save(1, state, block=True)
            assert rank == victim or isinstance(caught.value, RankFailed)
            OnDisk.pipe_file = real
            checkpointer.save(2, state, block=True)
            return checkpointer.steps(), full(state)

    for steps, _ in run_ranks(2, save):
        assert steps == [2]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_mid_save_leaves_the_old_checkpoint(tmp_path, victim):
    url = f"disk://{tmp_path}/run"

    def save(rank):
        with Checkpointer(url) as checkpointer:
            checkpointer.save(1, {"n": 1, "rank": rank}, block=True)
            if rank == victim:
                OnDisk.pipe_file = lambda *args: kill()
            else:
                checkpointer._quorum.timeout = 0.5
            checkpointer.save(1, {"n": 2, "rank": rank})
            with pytest.raises(RankFailed, match="report|verdict"):
                checkpointer.wait()

    results = run_ranks(2, save, may_die=(victim,))
    assert results[victim] == -signal.SIGKILL

    def restore(rank):
        state = {"n": 0, "rank": -1}
        with Checkpointer(url) as checkpointer:
            return checkpointer.restore(state), state["n"], state["rank"]

    assert run_ranks(2, restore) == [(1, 1, 0), (1, 1, 1)]
