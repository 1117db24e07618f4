"""import_checkpoint(): what torch.save and DCP have written is restored bit for bit; nothing hostile runs."""

import os
import pickle
import shutil
from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

from overlapkit.checkpoint import Checkpointer, DamagedCheckpoint, describe, import_checkpoint, verify
from overlapkit.checkpoint.disk import Disk
from tests.checkpoint.loop import build, snapshot, train_step
from tests.checkpoint.test_distributed import full, same, sharded, step
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def trained(steps=3):
    state = build()
    for _ in range(steps):
        train_step(state)
    return state


def saved_by_torch(state, path, **more):
    parts = {key: part.state_dict() for key, part in state.items()}
    torch.save({**parts, **more}, path)
    return path


def names(state):
    return {"optimizer": [name for name, _ in state["model"].named_parameters()]}


def restored(directory, state, only=None):
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore(state, only=only)


def assert_equal(one, other, parts=("tensors", "groups", "scheduler", "loader")):
    """Two snapshots, except for the random generators, which no import has."""
    for part in parts:
        if part == "tensors":
            same(one[part], other[part])
        else:
            assert one[part] == other[part], part


@pytest.mark.parametrize("legacy", [False, True])
def test_a_training_state_of_torch_save_goes_on(tmp_path, legacy):
    state = trained()
    parts = {key: part.state_dict() for key, part in state.items()}
    torch.save({**parts, "epoch": 4}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    path = import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=3, parameters=names(state))
    assert path == tmp_path / "run" / "step-3"
    verify(path)
    assert describe(path).kinds == {
        "model": "module",
        "optimizer": "optimizer",
        "scheduler": "object",
        "loader": "object",
        "epoch": "value",
    }
    fresh = build(seed=8)
    fresh["epoch"] = 0
    assert restored(tmp_path / "run", fresh) == 3
    assert fresh.pop("epoch") == 4
    assert_equal(snapshot(fresh), snapshot(state))
    for _ in range(2):
        train_step(fresh)
    assert fresh["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.25)  # milestones 2 and 4


def test_a_state_dict_alone_becomes_the_model(tmp_path):
    state = trained()
    torch.save(state["model"].state_dict(), tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=0)
    fresh = build(seed=8)
    restored(tmp_path / "run", fresh, only=("model",))
    same(fresh["model"].state_dict(), state["model"].state_dict())


def test_wrappers_leave_no_prefix_and_ties_are_kept(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": wrapped}, tmp_path / "a.pt")
    found = describe(import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1)).tensors
    assert {name: entry.shares for name, entry in found.items()} == {
        "model/0.weight": None,
        "model/1.weight": "model/0.weight",
    }
    fresh = {"model": nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))}
    restored(tmp_path / "run", fresh)
    same(fresh["model"].state_dict(), model.state_dict())


def test_keys_select_and_rename_and_kinds_decide(tmp_path):
    state = trained()
    content = {"state_dict": state["model"].state_dict(), "args": {"lr": 1}, "rest": object}
    content["rest"] = OrderedDict(a=torch.ones(2, requires_grad=True), n=3)
    torch.save(content, tmp_path / "a.pt")
    kept = {"state_dict": "model", "args": "args", "rest": "rest"}
    path = import_checkpoint(tmp_path / "a.pt", tmp_path / "x", step=1, keys=kept, kinds={"args": "value"})
    assert describe(path).kinds == {"model": "module", "args": "value", "rest": "object"}
    fresh = {"model": build(seed=8)["model"], "args": {"lr": 0}}
    restored(tmp_path / "x", fresh, only=("model", "args"))
    assert fresh["args"] == {"lr": 1}
    for wrong, match in (
        ({"keys": {"nope": "model"}}, "no 'nope', but"),
        ({"keys": {"args": "a", "rest": "a"}}, "two keys get the same name"),
        ({"kinds": {"nope": "value"}}, "kinds= has 'nope'"),
        ({"kinds": {"args": "table"}}, "kinds= has 'table': give one of"),
        ({"kinds": {"args": "optimizer"}}, "no optimizer's state_dict"),
        ({"kinds": {"args": "tensor"}}, "'args' is a tensor, but it is a dict"),
        ({"parameters": {"nope": []}}, "parameters= has 'nope'"),
    ):
        with pytest.raises(ValueError, match=match):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "y", step=1, **wrong)
    assert not (tmp_path / "y").exists()


def test_an_optimizer_that_knows_only_numbers_needs_names(tmp_path):
    state = trained()
    path = saved_by_torch(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="'optimizer' has 6 parameters.* by number alone: give"):
        import_checkpoint(path, tmp_path / "run", step=1)
    for wrong, match in (
        (names(state)["optimizer"][1:], "and parameters= names 5"),
        ([*names(state)["optimizer"][1:], "9.weight"], "'9.weight' which is in none of the modules"),
    ):
        with pytest.raises(ValueError, match=match):
            import_checkpoint(path, tmp_path / "run", step=1, parameters={"optimizer": wrong})
    assert not (tmp_path / "run").exists()


def test_an_optimizer_that_knows_names_needs_none(tmp_path):
    state = trained()
    state["optimizer"] = torch.optim.AdamW(list(state["model"].named_parameters()), lr=1e-2)
    train_step(state)
    import_checkpoint(saved_by_torch(state, tmp_path / "a.pt"), tmp_path / "run", step=1)
    fresh = build(seed=8)
    fresh["optimizer"] = torch.optim.AdamW(list(fresh["model"].named_parameters()), lr=5.0)
    restored(tmp_path / "run", fresh, only=("model", "optimizer"))
    assert_equal(snapshot(fresh), snapshot(state), parts=("tensors", "groups"))


def test_every_dtype_and_layout_in_memory(tmp_path):
    tensors = {
        "strided": torch.arange(12.0).view(3, 4).t(),
        "slice": torch.arange(100)[10:20:3],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 2),
        "bf16": torch.randn(5).bfloat16(),
        "bool": torch.tensor([True, False]),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "f8": torch.randn(6).to(torch.float8_e4m3fn),
    }
    torch.save({"t": tensors}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, kinds={"t": "value"})
    fresh = {"t": {name: torch.zeros_like(value) for name, value in tensors.items()}}
    restored(tmp_path / "run", fresh)
    for name, value in tensors.items():
        assert torch.equal(exact(fresh["t"][name]), exact(value)), name


def exact(tensor):
    """float8 has no equality."""
    return tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor


def test_memory_is_bounded_by_parts(tmp_path, monkeypatch):
    """Many parts, large tensors in slices, none of them in memory together; any world size reads them."""
    monkeypatch.setattr("overlapkit.checkpoint.exchange.importing.SHARE", 1000)
    torch.manual_seed(0)
    model, other = (
        nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 3), nn.Linear(400, 1, bias=False)) for _ in range(2)
    )
    torch.save({"model": model.state_dict(), "n": 5}, tmp_path / "a.pt")
    written = []
    write = Disk.write

    def counting(self, fd, views):
        written.append(sum(view.nbytes for view in views))
        write(self, fd, views)

    monkeypatch.setattr(Disk, "write", counting)
    seen = []
    path = import_checkpoint(
        tmp_path / "a.pt", tmp_path / "run", step=1, progress=lambda *at: seen.append(at)
    )
    total = sum(value.nbytes for value in model.state_dict().values())
    assert seen[-1] == (total, total)
    found = describe(path)
    assert found.world == len(list(path.glob("rank-*.json"))) > 5
    assert len(found.tensors["model/0.weight"].files) == 4  # of 4,000 bytes, rows of 40
    assert (
        found.tensors["model/2.weight"].files == found.tensors["model/2.weight"].files[:1]
    )  # one row: 1,600
    assert found.values == {"n": 5}
    for file in path.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size - 8 - header <= 1600
    fresh = {"model": other, "n": 0}
    restored(tmp_path / "run", fresh)
    same(fresh["model"].state_dict(), model.state_dict())


# --- torch.distributed.checkpoint


def saved_by_dcp(rank, folder):
    """Returns the truth: every tensor whole."""
    state = sharded()
    for _ in range(2):
        step(state)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.save(
        {"model": model, "optimizer": optimizer, "epoch": 7, "seen": torch.arange(5)}, checkpoint_id=folder
    )
    return full(state)


def read_import(rank, folder):
    state = {**sharded(), "epoch": 0, "seen": torch.zeros(5, dtype=torch.int64)}
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore(state)
    extra = (state.pop("epoch"), state.pop("seen").tolist())
    return full(state), extra


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_a_dcp_folder_of_any_world_is_read_by_any_world(tmp_path, monkeypatch, writers):
    if writers == 1:
        truth = saved_by_dcp(0, tmp_path / "dcp")
    else:
        truth = run_ranks(writers, saved_by_dcp, tmp_path / "dcp")[0]
    monkeypatch.setattr("overlapkit.checkpoint.exchange.importing.SHARE", 60)
    path = import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=2)
    verify(path)
    for found, extra in [read_import(0, tmp_path / "run"), *run_ranks(2, read_import, tmp_path / "run")]:
        same(found, truth)
        assert extra == (7, [0, 1, 2, 3, 4])


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    path = tmp_path_factory.mktemp("dcp") / "dcp"
    run_ranks(2, save_two_shards, path)
    return path


@pytest.fixture
def folder(tmp_path, two_shards):
    """A small DCP folder of one tensor in two shards, and some values."""
    return shutil.copytree(two_shards, tmp_path / "dcp")


def save_two_shards(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.arange(40.0).view(8, 5), init_device_mesh("cpu", (2,)), [Shard(0)])
    dcp.save({"w": tensor, "n": 3, "pair": (1, [2.5, "x"])}, checkpoint_id=path)


def test_loose_tensors_beside_values(tmp_path, folder):
    found = describe(import_checkpoint(folder, tmp_path / "run", step=1))
    assert found.kinds == {"model": "module", "n": "value", "pair": "value"}
    assert found.values == {"n": 3, "pair": (1, [2.5, "x"])}
    fresh = {"model": nn.ParameterDict({"w": torch.zeros(8, 5)})}
    restored(tmp_path / "run", fresh, only=("model",))
    assert torch.equal(fresh["model"]["w"], torch.arange(40.0).view(8, 5))


def test_numbers_that_dcp_made_text_of_are_refused(tmp_path):
    dcp.save({"sched": {"milestones": Counter({2: 1})}, "n": 1}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(TypeError, match="'sched/milestones/2'.*may have been a number"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1)
    import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1, keys={"n": "n"})


def test_flattened_optimizers_are_refused(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    state = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ValueError, match="'optimizer'.*flatten"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1)


# --- hostile and damaged sources


class Runs:
    """Unpickled by a careless reader, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def metadata_of(folder):
    with (folder / ".metadata").open("rb") as file:
        return pickle.load(file)


def write_metadata(folder, metadata):
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def test_nothing_in_dcp_metadata_runs(tmp_path, folder):
    metadata = metadata_of(folder)
    metadata.planner_data["w"] = Runs(tmp_path / "ran")
    write_metadata(folder, metadata)
    assert b"system" in (folder / ".metadata").read_bytes()
    with pytest.raises(DamagedCheckpoint, match="posix.system"):
        import_checkpoint(folder, tmp_path / "run", step=1)
    metadata_of(folder)
    assert (tmp_path / "ran").exists()  # pickle.load does run it
    (tmp_path / "ran").unlink()
    with pytest.raises(DamagedCheckpoint):
        import_checkpoint(folder, tmp_path / "run", step=1)
    assert not (tmp_path / "ran").exists()


PICKLES = {
    "a builtin": b"cbuiltins\neval\n(S'1'\ntR.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x94\x8c\x0aSize.count\x94\x93\x94.",
    "torch's own": b"\x80\x04\x8c\x05torch\x94\x8c\x04load\x94\x93\x94.",
    "a module of torch": b"\x80\x04\x8c\x05torch\x94\x8c\x03hub\x94\x93\x94.",
    "a persistent id": b"P1\n.",
    "an extension": b"\x82\x01.",
    "nothing": b"",
    "half": b"\x80\x04\x95\xff",
    "a number": b"K\x01.",
    "text": b"hello",
}


@pytest.mark.parametrize("case", PICKLES)
def test_other_pickles_are_no_metadata(tmp_path, case):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(PICKLES[case])
    with pytest.raises(DamagedCheckpoint, match="not DCP's metadata"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1)
    assert not (tmp_path / "run").exists()


def storage(metadata, fqn="w"):
    return {index: info for index, info in metadata.storage_data.items() if index.fqn == fqn}


def set_storage(**fields):
    def change(metadata, folder):
        for info in storage(metadata).values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


def set_chunks(*chunks):
    def change(metadata, folder):
        metadata.state_dict_metadata["w"].chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
        ]
        info = next(iter(storage(metadata).values()))
        for offsets, _ in chunks:
            metadata.storage_data.setdefault(MetadataIndex("w", offsets), info)

    return change


def set_size(*size):
    def change(metadata, folder):
        metadata.state_dict_metadata["w"].size = size

    return change


def link(metadata, folder):
    for path in folder.glob("*.distcp"):
        path.rename(folder.parent / path.name)
        path.symlink_to(folder.parent / path.name)


DAMAGED = {
    "a path outside": set_storage(relative_path="../secret"),
    "an absolute path": set_storage(relative_path="/etc/passwd"),
    "no file": set_storage(relative_path="nowhere.distcp"),
    "a folder": set_storage(relative_path="."),
    "a number for a path": set_storage(relative_path=3),
    "a link": link,
    "a negative offset": set_storage(offset=-1),
    "beyond the file": set_storage(offset=10**6),
    "a giant length": set_storage(length=10**15),
    "nothing": set_storage(length=0),
    "transformed": set_storage(transform_descriptors=["zstd"]),
    "another item's bytes": set_storage(offset=0),
    "overlapping": set_chunks(([0, 0], [4, 5]), ([2, 0], [4, 5])),
    "a giant shard": lambda m, f: (set_size(10**16, 5)(m, f), set_chunks(([0, 0], [10**16, 5]))(m, f)),
    "a gap": set_chunks(([0, 0], [4, 5])),
    "outside": set_chunks(([0, 0], [4, 5]), ([6, 0], [4, 5])),
    "negative": set_chunks(([-4, 0], [4, 5]), ([4, 0], [4, 5])),
    "other dimensions": set_chunks(([0], [40])),
    "a giant tensor": set_size(10**12, 10**12),
    "a negative tensor": set_size(-8, -5),
    "no size": set_size("8", "5"),
    "no dtype": lambda m, f: setattr(m.state_dict_metadata["w"].properties, "dtype", "float32"),
    "no storage": lambda m, f: m.storage_data.clear(),
    "no metadata": lambda m, f: setattr(m, "state_dict_metadata", None),
    "a path of nothing": lambda m, f: m.planner_data.update(w=()),
    "a path through a leaf": lambda m, f: m.planner_data.update(w=("n", "w")),
    "a path to a leaf": lambda m, f: m.planner_data.update(w=("n",)),
    "a giant list": lambda m, f: m.planner_data.update(w=("x", 10**9)),
    "a path of tuples": lambda m, f: m.planner_data.update(w=("x", (1, 2))),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_and_hostile_metadata_is_refused(tmp_path, folder, case):
    (tmp_path / "secret").write_text("x" * 10**4)
    metadata = metadata_of(folder)
    DAMAGED[case](metadata, folder)
    write_metadata(folder, metadata)
    with pytest.raises(DamagedCheckpoint):
        import_checkpoint(folder, tmp_path / "run", step=1)
    assert list((tmp_path / "run").glob("*")) == []


def test_flipped_bits_in_dcp_data_are_found(tmp_path, folder):
    (path,) = folder.glob("__1_*.distcp")
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(20.0, 40.0).numpy().tobytes()) + 13
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp, bytes \d+ to \d+: the checksum of"):
        import_checkpoint(folder, tmp_path / "run", step=1)
    assert list((tmp_path / "run").glob("*")) == []


def test_values_of_dcp_that_would_be_unpickled_are_refused(tmp_path):
    dcp.save({"n": 1, "bad": Runs(tmp_path / "ran")}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(TypeError, match=r"distcp: 'bad' holds more than tensors.*posix\.system"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1)
    import_checkpoint(tmp_path / "dcp", tmp_path / "run", step=1, keys={"n": "n"})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_torch_save_file_runs(tmp_path, legacy):
    path = tmp_path / "a.pt"
    torch.save({"a": Runs(tmp_path / "ran")}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises((TypeError, DamagedCheckpoint)):
        import_checkpoint(path, tmp_path / "run", step=1)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_flipped_and_missing_bytes_of_a_torch_save_file_are_found(tmp_path):
    path = saved_by_torch(trained(), tmp_path / "a.pt")
    data = path.read_bytes()
    weight = trained()["model"][0].weight.detach().numpy().tobytes()
    at = data.index(weight) + 30
    path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    with pytest.raises(DamagedCheckpoint, match="the checksum of its record"):
        import_checkpoint(path, tmp_path / "run", step=1)
    for length in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpoint):
            import_checkpoint(path, tmp_path / "run", step=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11, on loading one
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # torch 2.14
def test_what_is_no_state_is_refused(tmp_path):
    for number, content in enumerate((torch.ones(2), [1], {1: 2}, {"a": torch.ones(2).to_sparse()})):
        torch.save(content, tmp_path / f"{number}.pt")
        with pytest.raises(TypeError, match="a dict with string keys|cannot be kept"):
            import_checkpoint(tmp_path / f"{number}.pt", tmp_path / "run", step=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="without DCP's .metadata"):
        import_checkpoint(tmp_path / "empty", tmp_path / "run", step=1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "run", step=1)
    torch.save({"a": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="step=-1"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=-1)
    assert not (tmp_path / "run").exists()


def test_an_existing_step_is_never_replaced(tmp_path):
    torch.save({"a": 1}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1)
    torch.save({"a": 2}, tmp_path / "a.pt")
    with pytest.raises(FileExistsError, match="step=1: .* has that one already"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1)
    assert describe(tmp_path / "run").values == {"a": 1}


@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_folder", "rename"])
def test_a_failure_leaves_the_directory_as_it_was(tmp_path, monkeypatch, call):
    path = saved_by_torch(trained(), tmp_path / "a.pt")
    torch.save({"a": 1}, tmp_path / "b.pt")
    import_checkpoint(tmp_path / "b.pt", tmp_path / "run", step=1)
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*"))
    with monkeypatch.context() as patch:

        def full_disk(self, *args):
            raise OSError(28, "No space left on device")

        patch.setattr(Disk, call, full_disk)
        with pytest.raises(OSError, match="No space"):
            import_checkpoint(path, tmp_path / "run", step=2, parameters=names(trained()))
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*")) == before
    shutil.rmtree(tmp_path / "run")


def test_two_keys_that_read_the_same_are_refused(tmp_path):
    torch.save({"x": {1: torch.zeros(2), "1": torch.ones(2), "n": 0}}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="'x/1' is there twice"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1)
