"""What torch.distributed.checkpoint's own storage loses or loads in silence, against ours: one test each."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from overlapkit.checkpoint import (
    Checkpointer,
    DamagedCheckpoint,
    MismatchError,
    SafetensorsLoadPlanner,
    SafetensorsReader,
    SafetensorsSavePlanner,
    SafetensorsWriter,
)
from overlapkit.checkpoint.disk import Disk
from tests.checkpoint.faults import Faulty, full_disk, in_child, kill, value_state
from tests.checkpoint.test_damage import HOSTILE, rewrite
from tests.ranks import one_rank_group, run_ranks

FILES = ("manifest.json", "rank-00000.json", "rank-00000.safetensors")


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def state(value):
    """A state all of whose parts say `value`."""
    return {
        "model": {"w": torch.full((40, 30), float(value)), "b": torch.full((7,), value, dtype=torch.int16)},
        "scalar": torch.tensor(value),
        "config": {"value": value},
    }


def value_of(found):
    numbers = {number.item() for key in ("w", "b") for number in found["model"][key].unique()}
    numbers |= {found["scalar"].item(), found["config"]["value"]}
    assert len(numbers) == 1, f"a mixture: {numbers}"
    return int(numbers.pop())


def save(directory, step, value, disk=None):
    writer = SafetensorsWriter(directory / f"step-{step}")
    writer._disk = disk or Disk()
    dcp.save(state(value), storage_writer=writer, planner=SafetensorsSavePlanner(), no_dist=True)


def load(directory, step):
    found = state(-1)
    reader = SafetensorsReader(directory / f"step-{step}")
    dcp.load(found, storage_reader=reader, planner=SafetensorsLoadPlanner(), no_dist=True)
    return value_of(found)


def failure(caught):
    (pair,) = caught.value.failures.values()
    return pair[0]


def found_in(directory):
    """{step: value} of all that can be loaded once leftovers are swept; nothing else may be there."""
    with Checkpointer(directory) as checkpointer:
        steps = checkpointer.steps()
    assert sorted(path.name for path in directory.iterdir()) == sorted(f"step-{step}" for step in steps)
    return {step: load(directory, step) for step in steps}


SCENARIOS = {
    # name: (steps there, step saved, what may be found afterwards)
    "a new step": ([1], 2, [{1: 1}, {1: 1, 2: 99}]),
    "the first step": ([], 2, [{}, {2: 99}]),
    "the same step again": ([1, 2], 2, [{1: 1, 2: 2}, {1: 1, 2: 99}]),
}


@pytest.fixture
def prepared(tmp_path):
    def prepare(steps):
        source, target = tmp_path / "-".join(map(str, ["from", *steps])), tmp_path / "run"
        if not source.exists():
            source.mkdir()
            for step in steps:
                save(source, step, step)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return target

    return prepare


def count_calls(directory, step):
    disk = Faulty()
    save(directory, step, 99, disk)
    return disk.calls


def loaded_or_why(directory, step):
    try:
        return str(load(directory, step))
    except CheckpointException as error:
        return re.search("was being replaced when the save was killed", str(error))[0]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_point(prepared, scenario, after):
    """DCP: half of each tensor is old, half new, and it loads."""
    there, step, allowed = SCENARIOS[scenario]
    calls = count_calls(prepared(there), step)
    assert len(calls) >= 12
    seen = []
    for at in range(len(calls)):
        directory = prepared(there)
        disk = Faulty(at, kill, after=after)
        assert in_child(lambda: save(directory, step, 99, disk)) == -signal.SIGKILL  # noqa: B023
        if step in there:  # before anything is swept: the old one, the new one, or an error that says why
            assert loaded_or_why(directory, step) in (
                str(step),
                "99",
                "was being replaced when the save was killed",
            )
        found = found_in(directory)
        assert found in allowed, calls[at]
        if found not in seen:
            seen.append(found)
        save(directory, step + 1, 100)
        assert found_in(directory) == {**found, step + 1: 100}
    assert len(seen) == 2  # the points lie on either side of the commit


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_any_point_fails_the_save_and_changes_nothing(prepared, scenario, after):
    """DCP: where a helper thread fails, the save succeeds."""
    there, step, allowed = SCENARIOS[scenario]
    calls = count_calls(prepared(there), step)
    removes = [at for at, (call, _) in enumerate(calls) if call == "remove"]
    for at in range(len(calls)):
        directory = prepared(there)
        if at in removes:  # of what was replaced, after the commit
            with pytest.warns(UserWarning, match="is committed; what it replaced stays until the next save"):
                save(directory, step, 99, Faulty(at, full_disk, after=after))
        else:
            with pytest.raises(CheckpointException) as caught:
                save(directory, step, 99, Faulty(at, full_disk, after=after))
            assert isinstance(failure(caught), OSError)
            assert failure(caught).errno == errno.ENOSPC
            del caught
            if not after:
                assert all(path.name.startswith(("step-", ".old-")) for path in directory.iterdir()), calls[
                    at
                ]
        found = found_in(directory)
        assert found in allowed, calls[at]
        save(directory, step + 1, 100)
        assert found_in(directory) == {**found, step + 1: 100}


def test_killed_at_random_instants(prepared):
    rng = random.Random(4)
    there, step, allowed = SCENARIOS["the same step again"]
    for _ in range(25):
        directory, delay = prepared(there), rng.uniform(0, 0.03)

        def save_and_die(directory=directory, delay=delay):
            future = dcp.async_save(
                state(99),
                storage_writer=SafetensorsWriter(directory / f"step-{step}"),
                planner=SafetensorsSavePlanner(),
                no_dist=True,
            )
            time.sleep(delay)
            kill()
            future.result()

        assert in_child(save_and_die) == -signal.SIGKILL
        assert found_in(directory) in allowed


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed_at_any_point(tmp_path, victim):
    """The other one gets an error from DCP's collectives; nothing is committed before both have written."""

    def save_two(rank, directory, at):
        writer = SafetensorsWriter(directory / "step-2")
        writer._disk = disk = Faulty(at if rank == victim else None, kill)
        try:
            dcp.save({"t": torch.full((5,), 2.0), f"r{rank}": torch.tensor(2.0)}, storage_writer=writer)
        except (RuntimeError, CheckpointException) as error:  # gloo's: connection closed by peer
            return str(error)
        return len(disk.calls)

    start = tmp_path / "start"
    save(start, 1, 1)
    shutil.copytree(start, tmp_path / "count")
    points = run_ranks(2, save_two, tmp_path / "count", None)[victim]
    outcomes = set()
    for at in (0, 2, 5, points - 2, points - 1):  # gloo takes up to 10 s to notice
        directory = tmp_path / str(at)
        shutil.copytree(start, directory)
        assert run_ranks(2, save_two, directory, at, may_die=(victim,))[victim] == -signal.SIGKILL
        with Checkpointer(directory) as checkpointer:
            steps = checkpointer.steps()
        assert sorted(path.name for path in directory.iterdir()) == [f"step-{step}" for step in steps]
        assert load(directory, 1) == 1
        if steps == [1, 2]:
            found = {"t": torch.zeros(5), "r0": torch.tensor(0.0), "r1": torch.tensor(0.0)}
            dcp.load(found, storage_reader=SafetensorsReader(directory / "step-2"), no_dist=True)
            assert [found["t"].tolist(), found["r0"].item(), found["r1"].item()] == [[2.0] * 5, 2.0, 2.0]
        outcomes.add(tuple(steps))
    assert outcomes == ({(1,), (1, 2)} if victim == 0 else {(1,)})


def refused(directory, match):
    """The checkpoint does not load, and the error, whole, says why."""
    with pytest.raises(CheckpointException) as caught:
        load(directory, 2)
    error = failure(caught)
    assert isinstance(error, DamagedCheckpoint), error
    assert re.search(match, str(error)), error


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (1, 2):
            save(directory, step, step)
    return directory


@pytest.fixture
def run(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def test_a_flipped_byte_in_any_tensor_is_named(run):
    """DCP: not detected."""
    path = run / "step-2" / FILES[2]
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    seen = set()
    for at in [*range(header, len(data), 97), len(data) - 1]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointException) as caught:
            load(run, 2)
        found = re.fullmatch(
            rf"{path}: tensor '(.*)', bytes (\d+) to (\d+): the checksum differs", str(failure(caught))
        )
        assert found, failure(caught)
        assert int(found[2]) <= at < int(found[3])
        seen.add(found[1])
    assert seen == {"model/w", "model/b", "scalar"}
    path.write_bytes(data)
    assert load(run, 2) == 2


@pytest.mark.parametrize("file", FILES[:2])
def test_a_flipped_byte_in_a_table_is_found(run, file):
    path = run / "step-2" / file
    data = path.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 40)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        if file == "manifest.json" and chr(data[at]).isspace() and chr(flipped[at]).isspace():
            continue
        refused(run, file)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [None, 0, 100, -1])
def test_a_missing_or_truncated_file_is_found(run, file, left):
    """DCP with a Hugging Face layout: half of each tensor is left as it was."""
    path = run / "step-2" / file
    data = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(data[:left])
    refused(run, file)
    assert load(run, 1) == 1


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_step_is_found(run, file):
    shutil.copy(run / "step-1" / file, run / "step-2" / file)
    refused(run, "step-2")


MORE_HOSTILE = {
    "no kind": lambda part, files: part["state"]["n"].pop("kind"),
    "no value": lambda part, files: part["state"]["n"].pop("value"),
    "an optimizer without groups": lambda part, files: part["state"]["optimizer"]["value"]["rest"].clear(),
    "an optimizer that is a list": lambda part, files: part["state"]["optimizer"].update(value=[1]),
    "a list of entries": lambda part, files: part.update(state=[1]),
}


@pytest.mark.parametrize("case", [*HOSTILE, *MORE_HOSTILE])
def test_a_hostile_part_is_refused(tmp_path, case):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, value_state(1), block=True)
    rewrite(tmp_path, {**HOSTILE, **MORE_HOSTILE}[case])
    found = {"t": torch.full((9,), 5.0)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=SafetensorsReader(tmp_path / "step-2"), no_dist=True)
    assert isinstance(failure(caught), DamagedCheckpoint)
    assert "checksum differs" not in str(failure(caught))  # which would have stood in for what is tested
    assert (found["t"] == 5).all()


def test_a_tree_that_refers_to_no_tensor_does_not_fit(run):
    def change(part, files):
        part["state"]["model"]["value"]["w"]["v"] = "nowhere"

    rewrite(run, change)
    refused(run, "not a state .*nowhere")
    with Checkpointer(run) as checkpointer, pytest.raises(MismatchError, match="missing: tensor 'nowhere'"):
        checkpointer.restore(state(5), 2)


def test_a_checkpoint_that_is_not_there(run):
    with pytest.raises(CheckpointException) as caught:
        load(run, 5)
    assert isinstance(failure(caught), FileNotFoundError)
    assert str(failure(caught)) == f"there is no checkpoint {run / 'step-5'}, but step-1, step-2"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root (mount)")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True
    ).returncode:
        pytest.skip("this root may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_an_error_that_says_so_at_every_save(small_disk):
    """DCP: ENOSPC hides behind "unexpected pos", and what was there is gone."""
    small, big = {"t": torch.ones(1000)}, {"t": torch.ones(1_000_000)}
    with one_rank_group():
        dcp.save(small, storage_writer=SafetensorsWriter(small_disk / "step-1"))
        for _ in range(3):
            future = dcp.async_save(big, storage_writer=SafetensorsWriter(small_disk / "step-1"))
            with pytest.raises(CheckpointException) as caught:
                future.result(30)
            assert isinstance(failure(caught), OSError)
            assert failure(caught).errno == errno.ENOSPC
            assert [path.name for path in small_disk.iterdir()] == ["step-1"]
            found = {"t": torch.zeros(1000)}
            dcp.load(found, storage_reader=SafetensorsReader(small_disk / "step-1"))
            assert (found["t"] == 1).all()
        dcp.save(small, storage_writer=SafetensorsWriter(small_disk / "step-2"))
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-1", "step-2"]


def test_a_save_under_way_is_not_swept_by_others(tmp_path):
    """An evaluation opens the folder while the training run saves into it."""
    opened = []

    def open_and_close():
        Checkpointer(tmp_path).close()
        save(tmp_path, 9, 9)
        opened.append(sorted(path.name[:4] for path in tmp_path.iterdir()))

    for at in range(3, 8):
        save(tmp_path, 2, 2, Faulty(at, open_and_close, after=True))
        assert load(tmp_path, 2) == 2
    assert len(opened) == 5
    assert all(".tmp" in names for names in opened)


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "file" / "run", 1, 1)
    assert isinstance(failure(caught), ValueError)
    assert "it, or a part of it, is a file" in str(failure(caught))
