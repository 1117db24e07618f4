"""torch.distributed.checkpoint through our writer and reader on several ranks: shards, replicas, failures."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overlapkit.checkpoint import (
    Checkpointer,
    SafetensorsLoadPlanner,
    SafetensorsReader,
    SafetensorsSavePlanner,
    SafetensorsWriter,
)
from overlapkit.checkpoint.dcp.place import Place
from overlapkit.checkpoint.dcp.saving import Saving
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.fileplan import BLOCK
from tests.checkpoint.faults import Faulty, full_disk
from tests.checkpoint.remote import injected  # noqa: F401  registers disk://
from tests.ranks import one_rank_group, run_ranks


class Half(nn.Linear):
    """A frozen layer in half precision."""

    def __init__(self):
        super().__init__(7, 5, bias=False, dtype=torch.bfloat16)
        self.requires_grad_(False)

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def build(seed, mesh=None):
    """A model whose shards are uneven (7, 5 and 1 rows), and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), Half(), nn.Linear(5, 1))
    if mesh is not None:
        fully_shard(model[2], mesh=mesh)  # a dtype of its own needs a unit of its own
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model, optimizer):
    for seed in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(state):
    """Whole tensors, by key."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": tensor for inner, tensor in full(value).items()}
        elif isinstance(value, torch.Tensor):
            found[key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def shards(world, model_of_mesh=None):
    if world == 1:
        return None
    if model_of_mesh == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def save_trained(rank, directory, kind=None):
    model, optimizer = build(1, shards(dist.get_world_size(), kind))
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, storage_writer=SafetensorsWriter(f"{directory}/step-3"), planner=SafetensorsSavePlanner())
    return full(state), moments["param_groups"]


def load_into_new(rank, directory, kind=None):
    model, optimizer = build(2, shards(dist.get_world_size(), kind))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=SafetensorsReader(f"{directory}/step-3"), planner=SafetensorsLoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    weights, moments = get_state_dict(model, optimizer)
    return full({"model": weights, "optimizer": moments}), moments["param_groups"]


def assert_equal(one, other):
    assert one[0].keys() == other[0].keys()
    for key, value in one[0].items():
        assert value.dtype == other[0][key].dtype, key
        assert torch.equal(value, other[0][key]), key
    assert one[1] == other[1]


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "kind", "where"),
    [
        (2, 2, None, ""),
        (2, 1, None, ""),
        (1, 2, None, ""),
        (3, 2, None, ""),
        (4, 2, "hsdp", ""),
        (2, 3, None, "disk://"),
    ],
)
def test_fsdp_and_its_optimizer_come_back_on_any_number_of_ranks(tmp_path, saved_on, loaded_on, kind, where):
    directory = f"{where}{tmp_path}"
    saved = run_ranks(saved_on, save_trained, directory, kind)
    loaded = run_ranks(loaded_on, load_into_new, directory, kind)
    assert len(saved[0][0]) == 10 + 6 * 3
    for result in [*saved[1:], *loaded]:
        assert_equal(saved[0], result)
    with Checkpointer(directory) as checkpointer:
        checkpointer.verify(3)


def test_replicas_are_written_once_and_by_all(tmp_path):
    """A tensor that all ranks have is in one file; they take turns."""

    def save(rank):
        mesh = init_device_mesh("cpu", (2,))
        state = {
            f"r{i}": distribute_tensor(torch.full((1000,), float(i)), mesh, [Replicate()]) for i in range(4)
        }
        dcp.save(state, storage_writer=SafetensorsWriter(tmp_path / "step-1"))

    run_ranks(2, save)
    sizes = [(tmp_path / "step-1" / f"rank-0000{rank}.safetensors").stat().st_size for rank in range(2)]
    header = 4096
    assert [size - header for size in sizes] == [8000, 8000]


SHAPES = [
    ((7, 4), [Shard(0)]),
    ((1, 4), [Shard(0)]),
    ((4, 5), [Shard(1)]),
    ((), [Replicate()]),
    ((0, 3), [Shard(0)]),
]


@pytest.mark.parametrize("loaded_on", [1, 2, 3])
def test_dtensors_of_every_shape(tmp_path, loaded_on):
    def value(i, shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)

    def place(i, shape, placements, fill):
        tensor = value(i, shape) if fill else torch.zeros(shape, dtype=torch.bfloat16)
        if dist.get_world_size() == 1:
            return tensor
        return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), placements)

    def save(rank):
        state = {f"t{i}": place(i, *case, True) for i, case in enumerate(SHAPES)}
        dcp.save(state, storage_writer=SafetensorsWriter(tmp_path / "step-1"))

    def load(rank):
        state = {f"t{i}": place(i, *case, False) for i, case in enumerate(SHAPES)}
        dcp.load(state, storage_reader=SafetensorsReader(tmp_path / "step-1"))
        for i, (shape, _) in enumerate(SHAPES):
            assert torch.equal(full({"t": state[f"t{i}"]})["t"], value(i, shape)), shape

    run_ranks(2, save)
    run_ranks(loaded_on, load)


def test_a_rank_reads_its_own_bytes_only(tmp_path):
    """Half of a tensor is damaged: only the rank whose half that is finds it."""
    big = 2 * BLOCK  # bytes of a rank's part

    def place(fill):
        mesh = init_device_mesh("cpu", (2,))
        return {"t": distribute_tensor(torch.full((2 * big,), fill, dtype=torch.uint8), mesh, [Shard(0)])}

    def save(rank):
        dcp.save(place(7), storage_writer=SafetensorsWriter(tmp_path / "step-1"))

    def load(rank):
        state = place(0)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(state, storage_reader=SafetensorsReader(tmp_path / "step-1"))
        return (
            list(caught.value.failures),
            str(caught.value.failures[1][0]),
            state["t"].to_local().unique().tolist(),
        )

    run_ranks(2, save)
    file = tmp_path / "step-1" / "rank-00001.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"\x06")
    results = run_ranks(2, load)
    size = file.stat().st_size
    for failed, error, _ in results:
        assert failed == [1]
        assert error == (f"{file}: tensor 't', bytes {size - BLOCK} to {size}: the checksum differs")
    assert results[0][2] == [7]


def test_each_rank_has_values_of_its_own_and_finds_those_of_others(tmp_path):
    def save(rank):
        state = {
            "loader": {f"rank_{rank}": {"at": 10 + rank}, "mine": rank},
            "common": {"t": torch.ones(2), "who": rank},
        }
        dcp.save(
            state, storage_writer=SafetensorsWriter(tmp_path / "step-1"), planner=SafetensorsSavePlanner()
        )

    def load(rank):
        state = {"loader": {}, "common": {"t": torch.zeros(2), "who": None}}
        dcp.load(
            state, storage_reader=SafetensorsReader(tmp_path / "step-1"), planner=SafetensorsLoadPlanner()
        )
        assert state["common"]["t"].tolist() == [1, 1]
        return state["loader"], state["common"]["who"]

    run_ranks(2, save)
    mine = [({f"rank_{rank}": {"at": 10 + rank}, "mine": rank}, rank) for rank in (0, 1)]
    assert run_ranks(2, load) == mine
    assert run_ranks(3, load) == [mine[0]] * 3
    assert run_ranks(1, load) == [mine[0]]


def test_tensors_that_only_one_rank_has(tmp_path):
    """Stages of a pipeline."""

    def save(rank):
        state = {
            "model": {f"stage{rank}.w": torch.full((3,), float(rank))},
            "dl": {"t": torch.ones(1), f"r{rank}": rank},
        }
        dcp.save(
            state, storage_writer=SafetensorsWriter(tmp_path / "step-1"), planner=SafetensorsSavePlanner()
        )

    def load(rank):
        state = {
            "model": {f"stage{i}.w": torch.zeros(3) for i in (0, 1)},
            "dl": {"t": torch.zeros(1), "r1": None},
        }
        dcp.load(
            state, storage_reader=SafetensorsReader(tmp_path / "step-1"), planner=SafetensorsLoadPlanner()
        )
        assert [state["model"][f"stage{i}.w"].tolist() for i in (0, 1)] == [[0.0] * 3, [1.0] * 3]
        assert state["dl"]["r1"] == 1

    run_ranks(2, save)
    run_ranks(1, load)
    run_ranks(2, load)


@pytest.mark.parametrize("planner", [SafetensorsSavePlanner, DefaultSavePlanner])
def test_plan_caching_on_two_ranks(tmp_path, planner):
    def save_and_load(rank):
        mesh = init_device_mesh("cpu", (2,))
        for step in range(4):
            state = {
                "w": distribute_tensor(torch.arange(5.0) + step, mesh, [Shard(0)]),
                "r": torch.tensor(step),
            }
            if planner is SafetensorsSavePlanner:
                state["v"] = {"step": step, "rank": rank}
            writer = SafetensorsWriter(tmp_path / f"step-{step}")
            dcp.save(state, storage_writer=writer, planner=planner(enable_plan_caching=True))
        for step in range(4):
            state = {"w": distribute_tensor(torch.zeros(5), mesh, [Shard(0)]), "r": torch.tensor(9)}
            if planner is SafetensorsSavePlanner:
                state["v"] = {}
            reader = SafetensorsReader(tmp_path / f"step-{step}")
            dcp.load(state, storage_reader=reader, planner=SafetensorsLoadPlanner())
            assert state["w"].full_tensor().tolist() == [i + step for i in range(5)]
            assert state["r"].item() == step
            assert state.get("v", {"step": step, "rank": rank}) == {"step": step, "rank": rank}

    run_ranks(2, save_and_load)


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_async_save(tmp_path, kind):
    def save(rank):
        mesh = init_device_mesh("cpu", (2,))
        writer, planner = SafetensorsWriter(), SafetensorsSavePlanner(enable_plan_caching=True)
        for step in (1, 2):
            tensor = distribute_tensor(torch.arange(5.0) * step, mesh, [Shard(0)])
            future = dcp.async_save(
                {"w": tensor, "n": {"step": step}},
                checkpoint_id=tmp_path / f"step-{step}",
                storage_writer=writer,
                planner=planner,
                async_checkpointer_type=kind,
            )
            tensor.to_local().fill_(-1)
            future.result(60)

    def load(rank):
        with Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.steps() == [1, 2]
            checkpointer.verify(2)
        for step in (1, 2):
            state = {"w": torch.zeros(5), "n": {}}
            dcp.load(
                state,
                storage_reader=SafetensorsReader(tmp_path / f"step-{step}"),
                planner=SafetensorsLoadPlanner(),
            )
            assert state["w"].tolist() == [0.0, step, 2.0 * step, 3.0 * step, 4.0 * step]
            assert state["n"] == {"step": step}

    run_ranks(2, save, timeout=100)
    run_ranks(1, load)


def some_state(rank):
    mesh = init_device_mesh("cpu", (2,))
    return {"w": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "t": torch.ones(3)}


@pytest.mark.parametrize("victim", [0, 1])
def test_one_ranks_full_disk_fails_the_save_on_all_and_the_next_one_is_clean(tmp_path, victim):
    def save(rank):
        writer = SafetensorsWriter(tmp_path / "step-1")
        state = some_state(rank)
        writer._disk = Faulty(2, full_disk) if rank == victim else Disk()
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state, storage_writer=writer)
        assert list(caught.value.failures) == [victim]
        error = caught.value.failures[victim][0]
        assert isinstance(error, OSError)
        assert error.errno == 28
        dist.barrier()
        assert not (tmp_path / "step-1").exists()
        dist.barrier()
        dcp.save(
            state, storage_writer=SafetensorsWriter(tmp_path / "step-1")
        )  # while `caught` holds the first
        del caught
        failed = writer._mine.__dict__.get("saving")
        writer._disk = Disk()
        dist.barrier()
        dcp.save(state, storage_writer=writer)  # again, with the one that failed
        assert failed is None or failed._save._lock is None
        dist.barrier()
        dcp.save(state, storage_writer=SafetensorsWriter(tmp_path / "step-2"))

    run_ranks(2, save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_ranks_that_do_not_share_the_folder_commit_nothing(tmp_path):
    def save(rank):
        folder = tmp_path / str(rank)
        folder.mkdir()
        os.chdir(folder)
        with pytest.raises(CheckpointException, match="must be on a file system that they share"):
            dcp.save(some_state(rank), storage_writer=SafetensorsWriter("run/step-1"))
        return [path.name for path in (folder / "run").iterdir() if path.name.startswith("step")]

    assert run_ranks(2, save) == [[], []]


def test_ranks_that_disagree_on_a_tensor_commit_nothing(tmp_path):
    def save(rank):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        if rank == 1:
            tensor = DTensor.from_local(tensor.to_local().double(), mesh, [Shard(0)], run_check=False)
        with pytest.raises(
            CheckpointException,
            match=r"'w' is torch.float64 \(4,\) on rank 1, but torch.float32 \(4,\) on rank 0",
        ):
            dcp.save({"w": tensor}, storage_writer=SafetensorsWriter(tmp_path / "step-1"))

    run_ranks(2, save)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_of_another_shape_than_its_placement_says_is_refused(tmp_path):
    def save(rank):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.ones(2 + rank), mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
        )
        with pytest.raises(
            CheckpointException, match=r"'w' has a local shape \(2,\), where its sharding says \(3,\)"
        ):
            dcp.save({"w": tensor}, storage_writer=SafetensorsWriter(tmp_path / "step-1"))

    run_ranks(2, save)


def test_other_paths_on_other_ranks_are_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("overlapkit.checkpoint.dcp.saving._PATIENCE_S", 0.2)

    def save(rank):
        with pytest.raises(CheckpointException, match="rank 0 announced no save to .*step-1 within 0.2 s"):
            dcp.save(some_state(rank), storage_writer=SafetensorsWriter(tmp_path / f"step-{rank}"))

    run_ranks(2, save)
    Checkpointer(tmp_path).close()  # sweeps up
    assert list(tmp_path.iterdir()) == []


def test_use_collectives_false_is_refused_on_several_ranks(tmp_path):
    def save(rank):
        with pytest.raises(ValueError, match="use_collectives=False: each rank would commit"):
            dcp.save(
                {"t": torch.ones(1)},
                storage_writer=SafetensorsWriter(tmp_path / "step-1"),
                use_collectives=False,
            )

    run_ranks(2, save)
    with one_rank_group():
        dcp.save(
            {"t": torch.ones(1)}, storage_writer=SafetensorsWriter(tmp_path / "step-1"), use_collectives=False
        )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.verify(1)


def test_ranks_may_save_for_themselves_with_no_dist(tmp_path):
    def save(rank):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                {"t": torch.tensor(rank)},
                storage_writer=SafetensorsWriter(tmp_path / f"{rank}" / "step-1"),
                no_dist=True,
            )
            state = {"t": torch.tensor(5)}
            dcp.load(state, storage_reader=SafetensorsReader(tmp_path / f"{rank}" / "step-1"), no_dist=True)
        assert state["t"].item() == rank

    run_ranks(2, save)


def test_a_group_of_some_of_the_ranks(tmp_path):
    def save(rank):
        group = dist.new_group([1, 2])
        if rank:
            dcp.save(
                {"t": torch.ones(2), f"r{rank}": torch.tensor(rank)},
                storage_writer=SafetensorsWriter(tmp_path / "step-1"),
                process_group=group,
            )
            state = {"t": torch.zeros(2), "r1": torch.tensor(0), "r2": torch.tensor(0)}
            dcp.load(state, storage_reader=SafetensorsReader(tmp_path / "step-1"), process_group=group)
            assert (state["r1"].item(), state["r2"].item()) == (1, 2)

    run_ranks(3, save)
    assert sorted(path.name for path in (tmp_path / "step-1").glob("*.json")) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00001.json",
    ]


def test_nothing_stays_in_the_store(tmp_path):
    def save(rank):
        counts = []
        for step in range(4):
            dcp.save(some_state(rank), storage_writer=SafetensorsWriter(tmp_path / f"step-{step}"))
            store = dist.distributed_c10d._get_default_store()
            counts.append(sum(store.check([Saving(Place(tmp_path, i), 0, Disk())._key]) for i in range(4)))
            dist.barrier()
        return counts

    assert run_ranks(2, save)[0] == [0] * 4


def async_save_of_our_optimizer(rank, directory):
    """Its moments are views of one allocation, each at an offset."""
    from overlapkit.optim import AdamW

    model, _ = build(1, shards(2))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.async_save(state, storage_writer=dcp.FileSystemWriter(directory / "theirs")).result()
    ours = {"storage_writer": SafetensorsWriter(directory / "step-3"), "planner": SafetensorsSavePlanner()}
    dcp.async_save(state, **ours).result()
    truth = full(state)
    for tensor in truth.values():
        assert tensor.float().abs().sum() > 0
    model, _ = build(2, shards(2))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    weights, moments = get_state_dict(model, optimizer)
    loading = {"model": weights, "optimizer": moments}
    ours = {"storage_reader": SafetensorsReader(directory / "step-3"), "planner": SafetensorsLoadPlanner()}
    for how in ({"checkpoint_id": directory / "theirs"}, ours):
        dcp.load(loading, **how)
        found = full(loading)
        assert found.keys() == truth.keys()
        assert [key for key in truth if not torch.equal(found[key], truth[key])] == []
        for tensor in (*weights.values(), *moments["state"]["0.weight"].values()):
            tensor.detach().zero_()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_async_save_of_our_sharded_optimizer_through_either_writer(tmp_path):
    run_ranks(2, async_save_of_our_optimizer, tmp_path)
