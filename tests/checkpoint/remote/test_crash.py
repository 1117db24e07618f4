"""A fault at every single request to a store leaves the old checkpoints there or the new one."""

import os
import shutil
import signal

import pytest

from overlapkit.checkpoint import Checkpointer, CheckpointError, list_checkpoints
from overlapkit.checkpoint.remote import folder as folder_module
from tests.checkpoint.faults import in_child, kill, read_value, value_state
from tests.checkpoint.remote.injected import URL, Fault, Injected, faulty, names, objects, put_back

SCENARIOS = {
    # name: (options, steps there, step saved, what may be found afterwards: (step, value))
    "a new step": ({}, [1], 2, {(1, 1), (2, 99)}),
    "the first step": ({}, [], 2, {(0, -1), (2, 99)}),
    "the same step again": ({}, [1, 2], 2, {(2, 2), (2, 99)}),
    "with retention": ({"keep": 1}, [1, 2], 3, {(2, 2), (3, 99)}),
}


def fill(url, steps):
    with Checkpointer(url) as checkpointer:
        for step in steps:
            checkpointer.save(step, value_state(step), block=True)


def save(url, step, value=99, **options):
    with Checkpointer(url, **options) as checkpointer:
        checkpointer.save(step, value_state(value))


def points(counted):
    """Where a fault can come: which request, and how far it has got."""
    for at, (call, _) in enumerate(counted.calls):
        writes = call in ("put", "put_file", "open", "delete")
        yield from ((at, how) for how in (("before", "half", "after") if writes else ("before",)))


@pytest.mark.filterwarnings("ignore:what dead saves left in .* cannot be removed")
@pytest.mark.parametrize("tier", ["direct", "local"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_store_that_goes_away_at_any_request(tmp_path, scenario, tier):
    options, there, step, allowed = SCENARIOS[scenario]
    fill(URL, there)
    before = objects()
    local = tmp_path / "local"

    def attempt(fault):
        put_back(before)
        shutil.rmtree(local, ignore_errors=True)
        with faulty(fault):
            save(URL, step, **options, **({"local": local} if tier == "local" else {}))

    counted = Fault()
    attempt(counted)
    assert read_value(URL) == (step, 99)
    whole = names()
    seen = set()
    for at, how in points(counted):
        try:
            attempt(Fault(at, how))
        except (CheckpointError, PermissionError) as error:
            assert "the store is away" in str(error)  # noqa: PT017
        else:  # what was deleted was not there any more at the second try
            assert (how, counted.calls[at][0]) == ("after", "delete")
            assert read_value(URL) == (step, 99)
        found = read_value(URL)
        assert found in allowed, (how, counted.calls[at])
        if found[0]:
            assert all(one.state == "committed" for one in list_checkpoints(URL)), "a half is visible"
        seen.add(found)
        if tier == "local" and (local / f"step-{step}").exists():
            with Checkpointer(URL, local=local) as checkpointer:
                assert checkpointer.latest() == step
        save(URL, step, **options)
        assert read_value(URL) == (step, 99)
        assert set(whole) <= set(names())
    assert seen == allowed  # both outcomes occur: the requests lie on either side of the commit


@pytest.mark.parametrize("tier", ["direct", "local"])
def test_a_request_that_fails_once_is_made_again(tmp_path, tier):
    fill(URL, [1, 2])
    before = objects()
    local = {"local": tmp_path} if tier == "local" else {}
    with faulty(Fault()) as counted:
        save(URL, 3, keep=1, **local)
    for at, how in points(counted):
        put_back(before)
        with faulty(Fault(at, how, once=True)):
            save(URL, 3, keep=1, **local)
        assert read_value(URL) == (3, 99)
        assert names() == ["step-3/manifest.json", "step-3/rank-00000.json", "step-3/rank-00000.safetensors"]


def changes(monkeypatch, at=None):
    """Kill this process at the change number `at` that an upload makes to a folder; the list of changes."""
    made = []

    def hook(module, name, half=None):
        real = getattr(module, name)

        def changed(*args, **options):
            if "far" not in "".join(map(str, args)):
                return real(*args, **options)
            made.append((name, str(args[-1])))
            if len(made) - 1 == at:
                if half is not None:
                    half(*args)
                kill()
            return real(*args, **options)

        monkeypatch.setattr(module, name, changed)

    def half(source, target):
        with open(source, "rb") as file, open(target, "wb") as torn:
            torn.write(file.read(100))

    hook(folder_module.shutil, "copyfile", half)
    hook(folder_module.os, "replace")
    hook(folder_module, "_sync")
    hook(folder_module, "sync_parent")
    hook(folder_module.Path, "unlink")
    return made


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_change_to_a_folder_behind_a_local_one(tmp_path, monkeypatch, scenario):
    options, there, step, allowed = SCENARIOS[scenario]
    fill(tmp_path / "from", there)
    far, local = tmp_path / "far", tmp_path / "local"

    def attempt():
        save(f"file://{far}", step, local=local, **options)

    def prepare():
        for path in (far, local):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "from", far)

    prepare()
    with monkeypatch.context() as patch:
        made = changes(patch)
        attempt()
    assert {name for name, _ in made} >= {"copyfile", "replace", "_sync", "sync_parent"}
    seen = set()
    for at in range(len(made)):
        prepare()
        with monkeypatch.context() as patch:
            changes(patch, at)
            assert in_child(attempt) == -signal.SIGKILL, made[at]
        found = read_value(far)
        assert found in allowed, made[at]
        seen.add(found)
        assert read_value(local) == (step, 99)
        save(far, step, local=tmp_path / "other", **options)
        assert read_value(far) == (step, 99)
        shutil.rmtree(tmp_path / "other")
        assert not [name for name in os.listdir(far) if not name.startswith("step-")]
    assert seen == allowed


@pytest.mark.parametrize("tier", ["direct", "local"])
def test_an_object_that_arrives_short_without_a_word_is_no_checkpoint(tmp_path, monkeypatch, tier):
    fill(URL, [1])
    local = {"local": tmp_path} if tier == "local" else {}
    real = Injected.find

    def short(self, path, **kwargs):
        found = real(self, path, **kwargs)
        for name, info in found.items():
            if "step-2" in name and name.endswith("safetensors"):
                info["size"] -= 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Injected, "find", short)
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: \d+ bytes, where \d+ were"):
            save(URL, 2, **local)
    assert read_value(URL) == (1, 1)
    assert not [name for name in Injected.store if name.endswith("step-2/manifest.json")]
