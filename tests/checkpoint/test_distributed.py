"""Several ranks: FSDP2, HSDP and DDP, other world sizes, and one rank's failure is everyone's."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor  # here, so that the forked ranks need not
from torch import nn

from overlapkit.checkpoint import Checkpointer, DamagedCheckpoint, MismatchError, RankFailed
from overlapkit.checkpoint.disk import Disk
from overlapkit.lane import Lane
from tests.checkpoint.loop import assert_same, build, snapshot, train_step
from tests.ranks import run_ranks

INPUT = torch.randn(4, 7, generator=torch.Generator().manual_seed(2))


def sharded(mesh_shape=None, names=None):
    """A model of odd sizes, so that shards are uneven and some are empty; sharded where there are ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1), nn.BatchNorm1d(1))
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),), mesh_dim_names=names)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return with_optimizer(model)


def replicated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1), nn.BatchNorm1d(1))
    return with_optimizer(nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model)


def with_optimizer(model):
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}


def step(state):
    loss = state["model"](INPUT).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.item()


def full(state):
    """Every tensor of model and optimizer, whole, by name: the independent truth across world sizes."""
    moments = state["optimizer"].state_dict()["state"]
    tensors = {name.removeprefix("module."): value for name, value in state["model"].state_dict().items()}
    for index, values in moments.items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in tensors.items()
    }


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def save_some(rank, folder, made, steps=3):
    state = made()
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.restore(state) == 0
        for _ in range(steps):
            step(state)
        saved = full(state)
        checkpointer.save(steps, state)
        step(state)
    return saved


def restore_some(rank, folder, made):
    state = made()
    step(state)  # so that everything differs from what was saved, BatchNorm's buffers too
    with Checkpointer(folder) as checkpointer:
        at = checkpointer.restore(state)
    return at, full(state)


WORLDS = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("made", "worlds"), [(sharded, pair) for pair in WORLDS] + [(replicated, (2, 1)), (replicated, (1, 2))]
)
def test_any_world_size_reads_any_other(tmp_path, made, worlds):
    writers, readers = worlds
    saved = run_ranks(writers, save_some, tmp_path, made) if writers > 1 else [save_some(0, tmp_path, made)]
    found = (
        run_ranks(readers, restore_some, tmp_path, made) if readers > 1 else [restore_some(0, tmp_path, made)]
    )
    for at, tensors in found:
        assert at == 3
        same(saved[0], tensors)


def test_sharded_is_read_by_replicated_and_back(tmp_path):
    saved = run_ranks(2, save_some, tmp_path / "a", sharded)
    same(saved[0], run_ranks(2, restore_some, tmp_path / "a", replicated)[1][1])
    saved = run_ranks(2, save_some, tmp_path / "b", replicated)
    same(saved[0], run_ranks(2, restore_some, tmp_path / "b", sharded)[1][1])


def restored_before_the_first_step(rank, folder):
    state = sharded()
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore(state)
    return full(state), [step(state) for _ in range(3)]


def test_fsdp2s_own_hooks_cost_no_second_copy_of_the_model(tmp_path):
    def run(rank):
        state = sharded()
        whole = full(state)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state, block=True)
            with torch.no_grad():
                state["model"][0].weight.mul_(2)
            loads = []
            state["model"].load_state_dict = loads.append
            checkpointer.restore(state)
        same(whole, full(state))
        return len(loads)

    assert run_ranks(2, run) == [0, 0]


def test_an_optimizer_without_state_yet_is_restored_sharded(tmp_path):
    def run(rank):
        state = sharded()
        [step(state) for _ in range(2)]
        saved = full(state)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(2, state)
            return saved, [step(state) for _ in range(3)]

    before = run_ranks(2, run)
    after = run_ranks(2, restored_before_the_first_step, tmp_path)
    for (saved, losses), (found, again) in zip(before, after, strict=True):
        same(saved, found)
        assert losses == again


def test_each_byte_is_written_once(tmp_path):
    """HSDP on 2 x 2 ranks: the replicas write nothing, the shards their own part."""

    def run(rank):
        state = sharded((2, 2), ("replicate", "shard"))
        step(state)
        saved = full(state)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state)
            other = sharded((2, 2), ("replicate", "shard"))
            checkpointer.restore(other)
            same(saved, full(other))
            return sum(value.numel() * value.element_size() for value in saved.values())

    whole = run_ranks(4, run)[0]
    from safetensors.torch import load_file

    files = sorted((tmp_path / "step-1").glob("*.safetensors"))
    assert [file.name for file in files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert sum(t.numel() * t.element_size() for file in files for t in load_file(file).values()) == whole


def sharded_evenly(mesh_shape):
    """No shard is empty, on up to four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")))
    return with_optimizer(model)


def read_parts(folder, mesh_shape):
    """Restore, and note which ranks' parts each rank reads."""

    def run(rank):
        from overlapkit.checkpoint.manifest import Manifest

        state, read, real = sharded_evenly(mesh_shape), [], Manifest.part
        step(state)
        Manifest.part = lambda manifest, number: (read.append(number), real(manifest, number))[1]
        with Checkpointer(folder) as checkpointer:
            checkpointer.restore(state)
        return sorted(set(read)), full(state)

    return run


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_at_the_same_layout_each_rank_reads_only_the_parts_that_it_needs(tmp_path, shape):
    """Its own, rank 0's for plain tensors, and those of the first replica; so it is with 4,096 ranks, too."""

    def write(rank):
        state = sharded_evenly(shape)
        step(state)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state, block=True)
        return full(state)

    saved = run_ranks(4, write)
    found = run_ranks(4, read_parts(tmp_path, shape))
    needed = {(2, 2): [[0], [0, 1], [0, 2], [0, 1, 3]], (1, 4): [[0], [0, 1], [0, 2], [0, 3]]}
    assert [parts for parts, _ in found] == needed[shape]
    other = run_ranks(4, read_parts(tmp_path, (4, 1) if shape == (1, 4) else (1, 4)))
    assert any(parts == [0, 1, 2, 3] for parts, _ in other)  # another layout of as many ranks
    for _, tensors in found + other:
        same(saved[0], tensors)


def ddp_state(rank, seed=0):
    state = build(seed=seed)
    state["model"] = nn.parallel.DistributedDataParallel(state["model"])
    torch.manual_seed(100 * seed + rank)  # dropout differs by rank
    state["loader"].at = 4 * rank
    return state


def test_ddp_resumes_bitwise_with_each_ranks_own_generators_and_loader(tmp_path):
    def first(rank):
        state = ddp_state(rank)
        with Checkpointer(tmp_path) as checkpointer:
            for _ in range(3):
                train_step(state)
            checkpointer.save(3, state)
            return [train_step(state) for _ in range(3)], snapshot(state)

    def second(rank):
        state = ddp_state(rank, seed=5)
        with Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state) == 3
        return [train_step(state) for _ in range(3)], snapshot(state)

    before, after = run_ranks(2, first), run_ranks(2, second)
    assert before[0][0] != before[1][0]
    for (losses, state), (again, restored) in zip(before, after, strict=True):
        assert losses == again
        assert_same(state, restored)


def test_late_staging_of_shards_keeps_the_values_at_the_save(tmp_path):
    def run(rank):
        Lane.delay_s = 0.05
        state = sharded()
        step(state)
        with Checkpointer(tmp_path) as checkpointer:
            saved = full(state)
            save = checkpointer.save(1, state)
            assert not save.staged.done()
            step(state)
            step(state)
            save.wait()
            checkpointer.restore(state)
            same(saved, full(state))

    run_ranks(2, run)


@pytest.mark.parametrize("changed", ["parameter", "local part of a moment"])
def test_a_shard_changed_by_hand_fails_the_save(tmp_path, changed):
    """A DTensor counts its changes itself: the counter of its local part stays where it is."""

    def run(rank):
        Lane.delay_s = 0.2
        state = sharded()
        step(state)
        with Checkpointer(tmp_path) as checkpointer:
            save = checkpointer.save(1, state)
            with torch.no_grad():
                weight = state["model"][0].weight
                moment = state["optimizer"].state[weight]["exp_avg"]
                (weight if changed == "parameter" else moment.to_local()).mul_(2)
            with pytest.raises(RuntimeError, match="changed outside of optimizer.step"):
                save.wait()

    run_ranks(2, run)


class Full(Disk):
    """A disk that is full on one rank, once."""

    def __init__(self, rank):
        self.failing = dist.get_rank() == rank

    def write(self, fd, views):
        if self.failing:
            self.failing = False
            raise OSError(28, "No space left on device")
        super().write(fd, views)


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_ranks_failure_fails_the_save_on_all_and_the_next_is_clean(tmp_path, culprit):
    def run(rank):
        Checkpointer._disk = Full(culprit)
        state = sharded()
        with Checkpointer(tmp_path, keep=5) as checkpointer:
            save = checkpointer.save(1, state)
            step(state)  # training goes on
            with pytest.raises(OSError if rank == culprit else RankFailed, match="No space left") as caught:
                save.wait()
            assert checkpointer.steps() == []
            step(state)
            checkpointer.save(2, state, block=True)
            assert checkpointer.steps() == [2]
        return str(caught.value)

    messages = run_ranks(2, run)
    assert f"rank {culprit}: OSError" in messages[1 - culprit]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_state_that_only_one_rank_cannot_save(tmp_path):
    def run(rank):
        state = {"model": nn.Linear(2, 2)}
        with Checkpointer(tmp_path) as checkpointer:
            bad = {**state, "x": object() if rank == 1 else 1}
            if rank == 1:
                with pytest.raises(TypeError, match="'x'"):
                    checkpointer.save(1, bad)
            else:
                save = checkpointer.save(1, bad)
                with pytest.raises(RankFailed, match="rank 1: TypeError: state 'x'"):
                    save.wait()
            checkpointer.save(2, state, block=True)
            return checkpointer.steps()

    assert run_ranks(2, run) == [[2], [2]]


def test_an_unseen_error_reaches_every_rank_once_at_the_next_save(tmp_path):
    def run(rank):
        Checkpointer._disk = Full(1)
        state = {"model": nn.Linear(2, 2)}
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state)
            with pytest.raises(OSError if rank else RankFailed, match="No space"):
                checkpointer.save(2, state)
            checkpointer.save(3, state)
            checkpointer.wait()
            return checkpointer.steps()

    assert run_ranks(2, run) == [[2, 3], [2, 3]]  # the save that raised has begun nevertheless


def test_a_rank_that_does_not_save_is_named(tmp_path):
    def run(rank):
        with Checkpointer(tmp_path, timeout=3.0) as checkpointer:
            if rank == 0:
                save = checkpointer.save(1, {"x": 1})
                with pytest.raises(RankFailed, match=r"rank\(s\) 1 did not report within 3.0 s"):
                    save.wait()

    run_ranks(2, run)
    assert list(tmp_path.iterdir()) == []


def test_a_late_rank_finds_that_the_save_is_over_and_the_next_one_is_clean(tmp_path):
    def run(rank):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer._quorum.timeout = 0.5
            time.sleep(1.0 * rank)
            save = checkpointer.save(1, {"x": rank})
            with pytest.raises(RankFailed, match="did not report within 0.5 s"):
                save.wait()
            dist.barrier()
            checkpointer._quorum.timeout = 20
            checkpointer.save(2, {"x": rank}, block=True)
            return checkpointer.steps()

    assert run_ranks(2, run) == [[2], [2]]


def test_a_late_rank_leaves_neither_files_nor_keys(tmp_path):
    def run(rank):
        store = dist.distributed_c10d._get_default_store()
        with Checkpointer(tmp_path) as checkpointer:
            sizes = []
            for at in range(0, 6, 2):
                checkpointer._quorum.timeout = 0.5
                time.sleep(1.0 * rank)
                with pytest.raises(RankFailed, match="did not report within 0.5 s"):
                    checkpointer.save(at, {"x": torch.ones(3)}).wait()
                dist.barrier()
                left = [path.name for path in tmp_path.glob(".tmp-*")]
                dist.barrier()
                checkpointer._quorum.timeout = 20
                checkpointer.save(at + 1, {"x": torch.ones(3)}, block=True)
                dist.barrier()
                sizes.append(store.num_keys())
                dist.barrier()
        return sizes, left

    (sizes, left), (_, left_there) = run_ranks(2, run)
    assert left == left_there == []
    assert sizes[0] == sizes[-1]


def test_files_that_rank_0_may_yet_commit_stay(tmp_path):
    class SlowCommit(Disk):
        def rename(self, old, new):
            time.sleep(1.0)
            super().rename(old, new)

    def run(rank):
        Checkpointer._disk = SlowCommit()
        with Checkpointer(tmp_path, timeout=20) as checkpointer:
            checkpointer._quorum.timeout = 20 if rank == 0 else 0.5
            save = checkpointer.save(1, {"x": torch.full((3,), float(rank))})
            if rank == 0:
                save.wait()
            else:
                with pytest.raises(RankFailed, match="no verdict"):
                    save.wait()
            dist.barrier()
            checkpointer.verify(1)

    run_ranks(2, run)


def test_plain_tensors_that_only_one_rank_has_are_not_lost_in_silence(tmp_path):
    """Pipeline stages: plain tensors are written by rank 0, which does not have those of the others."""

    def run(rank):
        with Checkpointer(tmp_path) as checkpointer:
            save = checkpointer.save(1, {"model": nn.Linear(2 + rank, 2)})
            with pytest.raises(RankFailed, match="rank 1 has other plain"):
                save.wait()

    run_ranks(2, run)


def test_a_directory_that_one_rank_cannot_use_is_an_error_on_all(tmp_path):
    def run(rank):
        if rank == 1:
            os.access = lambda path, mode: False  # root may write everywhere
        with pytest.raises(PermissionError if rank else RankFailed, match="written to"):
            Checkpointer(tmp_path, timeout=20)

    run_ranks(2, run)
    assert list(tmp_path.iterdir()) == []


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_damage_seen_by_one_rank_makes_all_fall_back(tmp_path):
    def write(rank):
        state = sharded()
        with Checkpointer(tmp_path) as checkpointer:
            for at in (1, 2):
                step(state)
                saved = full(state)
                checkpointer.save(at, state, block=True)
                if at == 1:
                    first = saved
        return first

    def read(rank):
        state = sharded()
        step(state)
        before = full(state)
        with Checkpointer(tmp_path) as checkpointer:
            with pytest.raises(DamagedCheckpoint, match="rank-00001.safetensors: tensor"):
                checkpointer.restore(state, 2)
            same(before, full(state))  # nothing of it was loaded, on either rank
            with pytest.warns(UserWarning, match="step-2 is damaged and is skipped"):
                assert checkpointer.restore(state) == 1
        return full(state)

    first = run_ranks(2, write)
    file = tmp_path / "step-2" / "rank-00001.safetensors"
    flip(file, file.stat().st_size - 3)
    for found in run_ranks(2, read):
        same(first[0], found)


def test_a_mismatch_on_one_rank_stops_all(tmp_path):
    def run(rank):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"x": torch.ones(2)}, block=True)
            state = {"x": torch.zeros(2 + rank)}
            with pytest.raises(MismatchError if rank else RankFailed, match="'x' is torch.float32"):
                checkpointer.restore(state)
            return state["x"].sum().item()

    assert run_ranks(2, run) == [0.0, 0.0]


def test_at_another_world_size_each_rank_gets_rank_0s_plain_state(tmp_path):
    def write(rank):
        torch.manual_seed(rank)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"who": rank, "t": torch.full((2,), float(rank))}, block=True)
        return torch.rand(1)

    def read(rank):
        torch.manual_seed(50 + rank)
        state = {"who": None, "t": torch.zeros(2)}
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(state)
        return state["who"], state["t"].tolist(), torch.rand(1)

    drawn = run_ranks(2, write)
    assert [r[:2] for r in run_ranks(2, read)] == [(0, [0.0, 0.0]), (1, [1.0, 1.0])]
    three = run_ranks(3, read)
    assert [r[:2] for r in three] == [(0, [0.0, 0.0])] * 3
    assert [r[2] for r in three[:2]] == drawn  # generators: rank r's where there was one
    torch.manual_seed(52)
    assert three[2][2] == torch.rand(1)


def test_the_store_is_left_as_small_as_it_was(tmp_path):
    def run(rank):
        store = dist.distributed_c10d._get_default_store()
        with Checkpointer(tmp_path, keep=1) as checkpointer:
            sizes = []
            for at in range(6):
                checkpointer.save(at, {"x": rank}, block=True)
                dist.barrier()
                sizes.append(store.num_keys())
                dist.barrier()
        return sizes

    sizes = run_ranks(2, run)[0]
    assert sizes[1] == sizes[-1]


def test_a_pending_sum_cannot_be_saved(tmp_path):
    def run(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (2,))
        pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match="'x' has placements"):
            checkpointer.save(1, {"x": pending})

    run_ranks(2, run)


def test_sharded_tensors_of_other_objects_and_columns(tmp_path):
    """An object with DTensors in its state (an average of the weights), sharded by columns and unevenly."""

    class Average:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"shadow": {"w": self.value}, "n": 3}

        def load_state_dict(self, state):
            self.value = state["shadow"]["w"]

    whole = torch.arange(35.0).view(5, 7)

    def make(value):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return Average(distribute_tensor(value, mesh, [Shard(1)])), distribute_tensor(value, mesh, [Shard(1)])

    def write(rank):
        average, loose = make(whole)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"average": average, "loose": loose}, block=True)

    def read(rank):
        average, loose = make(torch.zeros(5, 7))
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore({"average": average, "loose": loose})
        return average.value.full_tensor(), loose.full_tensor()

    run_ranks(2, write)
    for world in (2, 3):
        for found in run_ranks(world, read):
            assert all(torch.equal(tensor, whole) for tensor in found)


def test_a_new_process_group_needs_a_new_checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path)

    def run(rank):
        with pytest.raises(RuntimeError, match="after init_process_group"):
            checkpointer.save(1, {"x": 1})

    run_ranks(2, run)
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []
