"""Exports, imports and DCP's saves into a store: whole, and with a fault at every single request."""

import contextlib
import json
import tempfile
import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile
from safetensors.torch import load
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

from overlapkit.checkpoint import (
    Checkpointer,
    DamagedCheckpoint,
    SafetensorsReader,
    SafetensorsWriter,
    StoreError,
    describe,
    diff,
    export,
    import_checkpoint,
    verify,
)
from overlapkit.cli import app
from tests.checkpoint.remote.injected import URL, Fault, Injected, faulty, names, objects, put_back
from tests.checkpoint.remote.test_crash import points

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SWEEP = pytest.mark.filterwarnings("ignore:what dead saves left in .* cannot be removed")
OUT = "inject://bucket/out"
STEP = f"{URL}/step-3"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


@pytest.fixture
def run(tmp_path, model):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
    return tmp_path / "run"


def exported():
    """All tensors that a reader of the export finds, by its index where there is one."""
    there = {name.removeprefix("/bucket/out/"): data for name, data in objects().items() if "/out/" in name}
    index = there.get("model.safetensors.index.json")
    if index is None:
        return load(there["model.safetensors"]) if "model.safetensors" in there else None
    where = json.loads(index)["weight_map"]
    return {name: load(there[file])[name] for name, file in where.items()}


def same(tensors, model):
    state = model.state_dict()
    assert sorted(tensors) == sorted(state)
    assert all(torch.equal(value, state[name]) for name, value in tensors.items())


@pytest.mark.parametrize("limit", ["5GB", 40])
def test_an_export_into_a_store_is_the_model(run, model, limit):
    told = []
    done = export(run, OUT, shard_size=limit, progress=lambda *seen: told.append(seen))
    assert [str(path) for path in done.files] == [f"{OUT}/{path.name}" for path in done.files]
    same(exported(), model)
    assert told[-1] == (done.nbytes, done.nbytes)
    with pytest.raises(FileExistsError, match="has weights already: model"):
        export(run, OUT)
    result = CliRunner().invoke(app, ["checkpoint", "export", str(run), "inject://bucket/other"])
    assert result.exit_code == 0, result.output
    assert "/bucket/other/model.safetensors" in objects()


def test_an_export_that_fails_anywhere_leaves_nothing_that_looks_whole(run, model):
    def attempt(fault):
        put_back({})
        with faulty(fault):
            export(run, OUT, shard_size=40)

    counted = Fault()
    attempt(counted)
    assert len(counted.calls) > 5
    for at, how in points(counted):
        try:
            attempt(Fault(at, how))
        except StoreError:
            found = exported()
            assert found is None or how == "after" or sorted(found) == sorted(model.state_dict())
            continue
        same(exported(), model)
    told = []
    put_back({})
    at = [call for call, _ in counted.calls].index("open")
    with faulty(Fault(at, "half", once=True)):
        done = export(run, OUT, shard_size=40, progress=lambda *seen: told.append(seen))
    same(exported(), model)
    assert told[-1] == (done.nbytes, done.nbytes)  # what was written twice counts once


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A torch.save file that becomes several parts."""
    monkeypatch.setattr("overlapkit.checkpoint.exchange.importing.SHARE", 64)
    torch.save({"model": {f"w{n}": torch.arange(12.0) + n for n in range(4)}, "epoch": 7}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def imported(url=URL):
    state = {"model": nn.ParameterDict({f"w{n}": torch.zeros(12) for n in range(4)}), "epoch": 0}
    with Checkpointer(url) as checkpointer:
        checkpointer.restore(state, only=("model", "epoch"))
    assert state["epoch"] == 7
    assert all(state["model"][f"w{n}"].tolist() == [n + float(i) for i in range(12)] for n in range(4))


def test_an_import_into_a_store_restores(source, tmp_path):
    path = import_checkpoint(source, URL, step=3)
    assert str(path) == STEP
    assert describe(URL).world == 4
    verify(URL)
    imported()
    with pytest.raises(FileExistsError, match="has that one already"):
        import_checkpoint(source, URL, step=3)
    words = ["checkpoint", "import", f"disk://{source}", f"disk://{tmp_path}/run", "--step", "3"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    imported(f"disk://{tmp_path}/run")


def upload(path, url):
    store = fsspec.filesystem("inject")
    for file in path.iterdir() if path.is_dir() else [path]:
        store.pipe_file(url + str(file).removeprefix(str(path)), file.read_bytes())


@pytest.mark.parametrize("kind", ["torch.save", "torch.save before 1.6", "DCP"])
def test_an_import_from_a_store_is_that_of_a_copy(source, tmp_path, monkeypatch, kind):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("overlapkit.checkpoint.exchange.whole_file._AT_ONCE", 1000)
    here, there = tmp_path / "from", "inject://bucket/from"
    state = torch.load(source)
    if kind == "DCP":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(state, checkpoint_id=here)
        monkeypatch.setattr("overlapkit.checkpoint.exchange.importing.SHARE", 20)  # a third of a tensor
    else:
        torch.save(state, here, _use_new_zipfile_serialization=kind == "torch.save")
    upload(here, there)
    with faulty(Fault()) as fault:
        import_checkpoint(there, tmp_path / "a", step=3)
    import_checkpoint(here, tmp_path / "b", step=3)
    assert diff(tmp_path / "a", tmp_path / "b").same
    imported(tmp_path / "a")
    assert not list(temporary.iterdir())
    for at in range(len(fault.calls)):
        with faulty(Fault(at)), pytest.raises((StoreError, FileNotFoundError)):
            import_checkpoint(there, tmp_path / "c", step=3)
        assert not list(temporary.iterdir())
    if kind == "DCP":
        names = [path for call, path in fault.calls if call == "get"]
        assert len(names) == 1 + 5  # the metadata, and each item alone, and once
    for name in [name for name in Injected.store if "from" in name]:
        data = Injected.store[name].getvalue()
        Injected.store[name] = MemoryFile(fsspec.filesystem("inject"), name, data[: len(data) // 2])
        with pytest.raises(DamagedCheckpoint, match="inject://bucket/from"):
            import_checkpoint(there, tmp_path / "c", step=3)
    with pytest.raises(FileNotFoundError, match="source='inject://bucket/nothing' does not exist"):
        import_checkpoint("inject://bucket/nothing", tmp_path / "c", step=3)
    with pytest.raises(ValueError, match="is a folder without DCP's .metadata"):
        import_checkpoint("inject://bucket", tmp_path / "c", step=3)
    assert not list(tmp_path.glob("c/*"))
    assert not list(tmp_path.glob("c/.*"))


@SWEEP
def test_an_import_that_fails_anywhere_commits_nothing_or_all(source):
    def attempt(fault):
        put_back({})
        with faulty(fault):
            import_checkpoint(source, URL, step=3)

    counted = Fault()
    attempt(counted)
    assert len(counted.calls) > 10
    whole = names()
    for at, how in points(counted):
        for once in (True, False):
            try:
                attempt(Fault(at, how, once=once))
            except (StoreError, PermissionError):
                assert not once
            else:
                assert names() == whole
            if "step-3/manifest.json" in names():
                imported()


@ALONE
def test_dcp_saves_to_a_url_and_loads_from_it():
    for value in (1.0, 2.0):  # the second replaces the first
        saved = {"model": {"w": torch.full((3, 2), value)}, "n": torch.tensor(5)}
        dcp.save(saved, storage_writer=SafetensorsWriter(STEP))
    state = {"model": {"w": torch.zeros(3, 2)}, "n": torch.tensor(0)}
    dcp.load(state, checkpoint_id=STEP, storage_reader=SafetensorsReader())
    assert torch.equal(state["model"]["w"], saved["model"]["w"])
    assert state["n"] == 5
    assert names() == ["step-3/manifest.json", "step-3/rank-00000.json", "step-3/rank-00000.safetensors"]
    verify(URL)
    reader = SafetensorsReader(f"{URL}/step-4")
    with pytest.raises(CheckpointException, match="there is no checkpoint .*step-4, but step-3"):
        dcp.load(state, storage_reader=reader)


@ALONE
@SWEEP
def test_a_dcp_save_that_fails_anywhere_leaves_the_old_or_the_new():
    dcp.save({"w": torch.tensor(1.0)}, storage_writer=SafetensorsWriter(STEP))
    before = objects()

    def attempt(fault):
        put_back(before)
        with faulty(fault):
            dcp.save({"w": torch.tensor(2.0)}, storage_writer=SafetensorsWriter(STEP))

    counted = Fault()
    attempt(counted)
    seen = set()
    for at, how in points(counted):
        with contextlib.suppress(CheckpointException):
            attempt(Fault(at, how))
        state = {"w": torch.tensor(0.0)}
        dcp.load(state, storage_reader=SafetensorsReader(STEP))
        seen.add(state["w"].item())
    assert seen == {1.0, 2.0}
    assert Injected.store
