"""Saves straight into a store, and what is read out of it."""

import json
import os
import shutil
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from fsspec.registry import known_implementations
from typer.testing import CliRunner

from overlapkit.checkpoint import (
    Checkpointer,
    DamagedCheckpoint,
    SafetensorsReader,
    StoreError,
    describe,
    diff,
    export,
    import_checkpoint,
    load_pretrained,
    verify,
)
from overlapkit.checkpoint.listing import list_checkpoints
from overlapkit.checkpoint.manifest import _checksum, manifest_bytes, read_manifest
from overlapkit.checkpoint.remote.store import Store
from overlapkit.cli import app
from tests.checkpoint.faults import read_value, value_state
from tests.checkpoint.loop import assert_same, build, snapshot, train_step
from tests.checkpoint.remote.injected import URL, Fault, Injected, faulty, objects, put_back


def save(url, *steps, **options):
    with Checkpointer(url, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, value_state(step))


def age(part, days=2):
    """Let objects whose names have this in them be older."""
    for name, file in Injected.store.items():
        if part in name:
            file.modified = datetime.now(UTC) - timedelta(days=days)


def test_a_run_goes_on_from_a_store_bit_for_bit():
    state = build()
    with Checkpointer(URL, every=2, keep=2) as checkpointer:
        for step in range(1, 6):
            train_step(state)
            checkpointer.save(step, state)
            if step == 4:
                saved = snapshot(state)
        losses = [train_step(state) for _ in range(2)]
        checkpointer.wait()
        assert checkpointer.steps() == [2, 4]
        assert checkpointer.latest() == 4
    state = build(seed=7)
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.restore(state) == 4
        assert_same(snapshot(state), saved)
        train_step(state)
        assert train_step(state) == losses[0]


def test_files_of_any_size_are_the_ones_a_disk_would_have(tmp_path):
    """Several groups of blocks, an empty tensor, one element, no tensor at all: the same bytes either way."""
    torch.manual_seed(3)
    states = [
        {"a": torch.randn(9 << 20), "b": torch.randn(3, 5, dtype=torch.float64), "c": torch.zeros(0), "n": 1},
        {"s": torch.tensor(2.5, dtype=torch.bfloat16)},
        {"n": 3},
    ]
    for number, state in enumerate(states):
        torch.manual_seed(3)
        for where in (tmp_path, URL):
            with Checkpointer(where) as checkpointer:
                checkpointer.save(number, state)
        for name in read_manifest(tmp_path / f"step-{number}").files:
            here = (tmp_path / f"step-{number}" / name).read_bytes()
            found = [data for path, data in objects().items() if f"step-{number}/" in path and name in path]
            assert found == [here], (number, name)
        again = {key: torch.zeros_like(v) if torch.is_tensor(v) else 0 for key, v in state.items()}
        with Checkpointer(URL) as checkpointer:
            assert checkpointer.restore(again, number) == number
        for key, value in state.items():
            assert torch.equal(again[key], value) if torch.is_tensor(value) else again[key] == value


def test_a_partial_read_fetches_only_its_ranges():
    rows = 3 << 20
    with Checkpointer(URL) as checkpointer:
        checkpointer.save(1, {"x": torch.arange(rows), "y": torch.arange(rows, dtype=torch.float64)})
    with faulty(Fault(only=lambda call, path: call == "get")) as fault, Checkpointer(URL) as checkpointer:
        state = {"x": torch.zeros(rows, dtype=torch.int64)}
        checkpointer.restore(state, only=("x",))
    assert torch.equal(state["x"], torch.arange(rows))
    ranges = [path for _, path in fault.calls if path.endswith(".safetensors")]
    assert len(ranges) == 2  # 24 MiB of x in reads of 16 MiB; y is left alone


def test_what_is_damaged_falls_back_to_the_one_before():
    save(URL, 1, 2)
    name = next(name for name in Injected.store if "step-2" in name and name.endswith("safetensors"))
    there = objects()
    for damaged in (there[name][:-3] + b"abc", there[name][:-1], None):
        put_back({**there, name: damaged} if damaged else {n: d for n, d in there.items() if n != name})
        state = value_state(-1)
        with Checkpointer(URL) as checkpointer:
            with pytest.warns(
                UserWarning, match=r"step-2 is damaged and is skipped: inject://bucket/run/step-2"
            ):
                assert checkpointer.restore(state) == 1
            with pytest.raises(DamagedCheckpoint, match=r"^inject:\S*/rank-00000.safetensors: "):
                checkpointer.verify(2)
        assert state["n"] == 1


def test_a_store_that_is_away_is_no_damage():
    """Else a short outage would send a run back to an older checkpoint."""
    save(URL, 1, 2)
    state = value_state(-1)
    with Checkpointer(URL) as checkpointer:
        for call in ("get", "find", "list"):
            only = lambda c, path, call=call: c == call and "step-1" not in path  # noqa: E731
            with faulty(Fault(0, only=only)), pytest.raises(StoreError, match="the store is away"):
                checkpointer.restore(state)
        with faulty(Fault(0, only=lambda c, path: c == "get")), pytest.raises(StoreError):
            checkpointer.steps()
        assert state["n"] == -1
        assert checkpointer.restore(state) == 2


def test_a_store_is_asked_again_where_one_answer_was_no_json():
    error = json.JSONDecodeError("a proxy's page", "<html>", 0)
    with faulty(Fault(0, once=True, error=error)) as fault:
        save(URL, 1)
    assert len(fault.calls) > 1
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == [1]


def test_leftovers_do_not_count_and_go_when_they_are_a_day_old():
    save(URL, 1, 2)
    there = objects()
    dead = {
        f"/bucket/run/step-{step}/0123456789ab-{step}/rank-00000.json": b"{}" for step in (1, 3)
    }  # beside a checkpoint, and where there is none
    foreign = {"/bucket/run/step-1/notes/rank-00000.json": b"x", "/bucket/run/other": b"y"}
    put_back({**there, **dead, **foreign})
    age("notes"), age("other"), age("step-1/")
    assert read_value(URL) == (2, 2)  # it sweeps, too: step-3's may yet be somebody's
    assert set(objects()) == {*there, *foreign, *(name for name in dead if "step-3" in name)}
    age("step-3/", days=2)
    assert read_value(URL) == (2, 2)
    assert objects() == {**there, **foreign}


def test_nothing_is_swept_beside_a_manifest_that_cannot_be_read():
    save(URL, 1)
    there = objects()
    put_back({**there, "/bucket/run/step-1/manifest.json": b"torn"})
    age("step-1")
    Checkpointer(URL).close()
    assert len(objects()) == len(there)


def test_two_runs_in_one_place_do_not_tear_each_other():
    gate = threading.Semaphore(0)
    fault = Fault(only=lambda call, path: call == "open" and path.endswith("safetensors"))
    with Checkpointer(URL) as one, Checkpointer(URL) as other:
        with faulty(fault):
            fault.gate = gate
            saves = [one.save(1, value_state(1)), other.save(1, value_state(2))]
            gate.release(100)
            for begun in saves:
                begun.wait()
        assert read_value(URL) in {(1, 1), (1, 2)}
        other.save(1, value_state(3), block=True)
    assert read_value(URL) == (1, 3)


def test_a_store_that_cannot_be_written_to_is_an_error_of_construction():
    for call in ("put", "delete", "info"):
        refused = Fault(0, only=lambda c, path, call=call: c == call, error=PermissionError("Access Denied"))
        with faulty(refused), pytest.raises(PermissionError, match=f"'{URL}' cannot be .*Access Denied"):
            Checkpointer(URL)
        assert len(refused.calls) == 1  # no use in asking again
    put_back({})


def test_wrong_urls(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="nowhere://x.*not known"):
        Checkpointer("nowhere://x")
    with pytest.raises(ValueError, match="give a plain URL"):
        Checkpointer("inject://bucket/run*")
    with pytest.raises(ValueError, match="give a plain URL"):
        Checkpointer("simplecache::inject://bucket/run")
    with pytest.raises(NotImplementedError, match="local='s3://x'"):
        Checkpointer(URL, local="s3://x")
    later = {"class": "not_there.Nothing", "err": "Install laterfs"}
    monkeypatch.setitem(known_implementations, "later", later)
    with pytest.raises(ImportError, match="'later://x': Install laterfs"):
        Checkpointer("later://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"pip install 'overlapkit\[remote\]'"):
        Checkpointer(URL)


def test_a_file_url_is_a_path(tmp_path):
    save(f"file://{tmp_path}/run", 1)
    assert read_value(tmp_path / "run") == (1, 1)
    assert sorted(os.listdir(tmp_path / "run" / "step-1"))[0] == "manifest.json"


def test_a_copy_of_the_objects_is_a_local_checkpoint_and_the_other_way_round(tmp_path):
    save(URL, 1, 2)
    for name, data in objects().items():
        path = tmp_path / name.removeprefix("/bucket/run/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert read_value(tmp_path) == (2, 2)
    save(tmp_path, 2, 3, keep=2)
    assert read_value(tmp_path) == (3, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]
    put_back(
        {
            f"/bucket/run/{path.relative_to(tmp_path)}": path.read_bytes()
            for path in tmp_path.rglob("*")
            if path.is_file()
        }
    )
    assert read_value(URL) == (3, 3)
    save(URL, 3, 4, keep=1)  # replaces and deletes what lies flat
    assert read_value(URL) == (4, 4)
    assert {name.split("/")[3] for name in Injected.store} == {"step-4"}


@pytest.mark.parametrize("name", ["../step-1", "/etc", "0123456789ab-1/..", "", 3, ["a"], "0123456789AB-1"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    save(tmp_path, 1)
    found = read_manifest(tmp_path / "step-1")
    data = manifest_bytes(1, found.files, 1, {}, save="x")
    document = json.loads(data)
    document.pop("crc32")
    document["checkpoint"]["save"] = name
    data = json.dumps({"crc32": _checksum(document), **document}).encode()
    (tmp_path / "step-1" / "manifest.json").write_bytes(data)
    if name == "":  # the flat layout
        assert read_value(tmp_path) == (1, 1)
        return
    with pytest.raises(DamagedCheckpoint, match="no folder of a save"):
        read_manifest(tmp_path / "step-1")
    put_back({"/bucket/run/step-1/manifest.json": data})
    with pytest.raises(DamagedCheckpoint, match="no folder of a save"):
        read_manifest(Store(URL).root / "step-1")


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    save(tmp_path / "far", 1, local=tmp_path / "local")
    folder = tmp_path / "far" / "step-1"
    save_folder = folder / read_manifest(folder).save
    shutil.move(save_folder, tmp_path / "elsewhere")
    save_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="no folder of a save"):
        read_manifest(folder)


def test_the_tools_read_urls(tmp_path, capsys):
    with Checkpointer(URL) as checkpointer:
        checkpointer.save(1, value_state(1), metrics={"loss": 0.5})
        checkpointer.save(2, value_state(2))
    found = list_checkpoints(URL, check=True)
    assert [(one.step, one.state, one.metrics) for one in found] == [
        (1, "verified", {"loss": 0.5}),
        (2, "verified", {}),
    ]
    assert found[0].nbytes == sum(len(data) for name, data in objects().items() if "step-1" in name)
    assert found[0].written is not None
    assert describe(URL).step == 2
    assert describe(f"{URL}/step-1").values["n"] == 1
    verify(URL)
    assert not diff(f"{URL}/step-1", f"{URL}/step-2").same
    assert export(URL, tmp_path / "out", only="model").tensors == 2
    run = CliRunner().invoke
    for words in ("ls --verify", "show", "verify --all"):
        result = run(app, ["checkpoint", *words.split(), URL])
        assert result.exit_code == 0, result.output
    assert run(app, ["checkpoint", "diff", f"{URL}/step-1", f"{URL}/step-1"]).exit_code == 0
    assert run(app, ["checkpoint", "ls", "inject://bucket/none"]).exit_code == 2
    assert run(app, ["checkpoint", "ls", "nowhere://bucket"]).exit_code == 2
    put_back({name: data for name, data in objects().items() if not name.endswith("safetensors")})
    result = run(app, ["checkpoint", "verify", URL])
    assert result.exit_code == 1
    assert f"{URL}/step-2" in result.output


def test_where_urls_are_not_taken_the_error_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lost = Path("inject://bucket/run")  # which is inject:/bucket/run
    for call in (
        lambda: Checkpointer(lost),
        lambda: import_checkpoint(lost, tmp_path / "x", step=1),
        lambda: import_checkpoint("a.pt", str(lost), step=1),
        lambda: export(lost, "out"),
        lambda: verify(lost),
        lambda: list_checkpoints(lost),
        lambda: SafetensorsReader(lost / "step-1"),
    ):
        with pytest.raises(NotImplementedError, match="inject:/bucket/run.* two slashes; give it as text"):
            call()
    with pytest.raises(NotImplementedError, match="local='inject://.* before the store, such as '/nvme/run'"):
        Checkpointer(URL, local="inject://bucket/other")
    with pytest.raises(NotImplementedError, match="source='inject://.* copy the weights here first"):
        load_pretrained(torch.nn.Linear(1, 1), URL)
    words = ["checkpoint", "import", str(lost), str(tmp_path / "x"), "--step", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "source='inject:/bucket/run'" in result.output
    assert os.listdir() == []


@pytest.mark.parametrize("fault", [DamagedCheckpoint, ValueError])
def test_what_is_no_fault_of_the_store_is_told_at_once_and_as_it_is(tmp_path, monkeypatch, fault):
    """Asking the store again would not help."""
    layer = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(layer.weight, 1e30)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": layer}, block=True)
    if fault is DamagedCheckpoint:
        path = tmp_path / "step-1" / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(Store, "pauses_s", (60.0,))
    with pytest.raises(fault, match="'.*weight'|'.*bias'"):
        export(tmp_path, "memory://exports/a", dtype=torch.float16 if fault is ValueError else None)
    assert Store("memory://exports").sizes("a") == {}


def test_a_url_that_names_no_folder_is_refused():
    with pytest.raises(ValueError, match=r"names no folder: give one, such as memory://run"):
        Checkpointer("memory://")
