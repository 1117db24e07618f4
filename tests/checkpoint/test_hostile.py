"""Manifests and parts that somebody else has made, with all checksums right: refused before anything is done.

Each is read in a forked child that may open nothing outside of the checkpoint, and has half a GiB of memory
to spare. What is not refused must be what was saved: of the values that are checked, none is another one.
"""

import copy
import json
import os
import random
import resource
import shutil
import sys
import traceback

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapkit.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpoint,
    describe,
    diff,
    export,
    list_checkpoints,
    verify,
)
from overlapkit.checkpoint.hashing import ALGORITHM, checksum
from overlapkit.checkpoint.manifest import FORMAT, MANIFEST, VERSION, _checksum
from tests.checkpoint.faults import in_child
from tests.ranks import run_ranks

SPARE = 512 << 20
GIANT = 1 << 62
NUMBERS = (-1, 0, 1, 7, 1 << 31, GIANT, 10**30, -GIANT, 1.0, 0.5, 1e300, True, None, "0", [], {})
NAMES = (
    "../../secret",
    "/etc/passwd",
    "manifest.json",
    "rank-00001.json",
    "",
    ".",
    "a\0b",
    "\ud800",
    "x" * 999,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks: shards, replicas, each one's own, an optimizer, values of many types."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    plain_state()  # which makes torch import what no child need import again

    def save(rank):
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state_of(rank), metrics={"loss": 0.5}, block=True)

    run_ranks(2, save)
    return folder / "step-1"


def state_of(rank, value=3.0):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2, 3), value)
    state = plain_state(value)
    state["sharded"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def plain_state(value=3.0):
    """What one rank restores into."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    own, tied = torch.full((5,), value), torch.full((4,), value)
    state = {"model": model, "optimizer": optimizer, "own": own, "sharded": torch.full((4, 3), value)}
    state |= {"pair": (tied, {1: tied, "b": b"x"}), "n": [value, 2, None]}
    with torch.no_grad():
        for tensor in tensors_of(state):
            tensor.fill_(value)
    return state


def tensors_of(state):
    moments = [tensor for values in state["optimizer"].state.values() for tensor in values.values()]
    return fixed_tensors(state) + [tensor for tensor in moments if isinstance(tensor, torch.Tensor)]


def fixed_tensors(state):
    """Without those in whose place a number will do, too."""
    return [*state["model"].parameters(), state["own"], state["sharded"]]


def spare_memory():
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, size + SPARE))


def in_sandbox(folder, work):
    """Run `work(readers)` in a child that is short of memory; fails with its traceback."""

    def child():
        try:
            spare_memory()
            with Checkpointer(folder.parent) as checkpointer:
                work(Readers(folder, checkpointer))
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    assert in_child(child, limit=100) == 0, "see the child's traceback"


def write(folder, files, world=2, step=1, metrics=None, **other):
    """A manifest with a right checksum; `files` may be text: JSON that json.dumps would not write."""
    inner = {"step": step, "world": world, "files": files, "metrics": metrics or {}}
    document = {"format": FORMAT, "version": VERSION, "hash": ALGORITHM, "checkpoint": inner, **other}
    (folder / MANIFEST).write_text(json.dumps({"crc32": _checksum(document), **document}))


def files_of(folder):
    return json.loads((folder / MANIFEST).read_text())["checkpoint"]["files"]


def put_part(folder, text, rank=0):
    """Another part, and the manifest to go with it."""
    name, data = f"rank-{rank:05d}.json", text.encode(errors="surrogateescape")
    (folder / name).write_bytes(data)
    write(folder, files_of(folder) | {name: {"bytes": len(data), ALGORITHM: checksum(data)}})


class Readers:
    """Everything that reads a checkpoint, beside an audit of all that this process opens meanwhile."""

    def __init__(self, folder, checkpointer):
        self.folder, self._checkpointer = folder, checkpointer
        self._opened = None
        sys.addaudithook(self._note)

    def _note(self, event, args):
        if event == "open" and self._opened is not None and not isinstance(args[0], int):
            self._opened.append(os.fsdecode(args[0]))

    def all_read(self, restore_only=False):
        """Whether every reader gives what was saved; each of the others refuses."""
        state = plain_state(-1.0)
        self._opened = []
        sound = self._restored(state)
        for read in () if restore_only else (verify, describe, self._compare, self._list):
            try:
                read(self.folder)
            except (CheckpointError, FileNotFoundError):
                sound = False
        opened, self._opened = self._opened, None
        outside = [path for path in opened if not path.startswith((str(self.folder.parent), "/proc/"))]
        assert not outside, outside
        return sound

    def _restored(self, state):
        generators = torch.get_rng_state()
        try:
            self._checkpointer.restore(state, 1)
        except (CheckpointError, FileNotFoundError):
            assert {n for t in tensors_of(state) for n in t.flatten().tolist()} == {-1.0}
            assert torch.equal(torch.get_rng_state(), generators)
            return False
        except Exception as error:
            if "restored in part" not in str(getattr(error, "__notes__", "")):
                raise
            frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
            assert "load_state_dict" in frames  # torch.optim's own, of values without sense
            return False
        assert {n for t in fixed_tensors(state) for n in t.flatten().tolist()} == {3.0}
        return True

    def _compare(self, path):
        diff(path, path)

    def _list(self, path):
        list_checkpoints(path.parent)
        self._checkpointer.steps()


def places(value, path=()):
    """The paths of everything inside a JSON value."""
    yield path
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, item in members:
        yield from places(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def replaced(value, path, new):
    if not path:
        return new
    value = copy.deepcopy(value)
    at(value, path[:-1])[path[-1]] = new
    return value


def removed(value, path):
    value = copy.deepcopy(value)
    del at(value, path[:-1])[path[-1]]
    return value


def test_the_sound_one_is_read(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "step-1")

    def work(readers):
        assert readers.all_read()

    in_sandbox(tmp_path / "step-1", work)


def test_every_field_of_a_part_replaced_by_anything(saved, tmp_path):
    """Every field but for the long lists of the generators' states, of which some."""
    folder = shutil.copytree(saved, tmp_path / "step-1")
    part = json.loads((folder / "rank-00000.json").read_text())
    rng = random.Random(3)
    paths = [
        path for path in places(part) if path and (path[0] != "rng" or len(path) < 6 or rng.random() < 0.01)
    ]

    def work(readers):
        refused = 0
        for place, path in enumerate(paths):
            news = [replaced(part, path, new) for new in (*rng.sample(NUMBERS, 2), rng.choice(NAMES))]
            for changed in (*news, removed(part, path)):
                put_part(folder, json.dumps(changed))
                refused += not readers.all_read(restore_only=place % 3 > 0)
        assert refused > len(paths)

    in_sandbox(folder, work)


def test_every_field_of_the_manifest_replaced_by_anything(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    manifest = json.loads((folder / MANIFEST).read_text())
    document = {key: value for key, value in manifest.items() if key != "crc32"}
    rng = random.Random(5)

    def work(readers):
        for path in places(document):
            values = [removed(document, path)] if path else []
            values += [
                replaced(document, path, new) for new in (*rng.sample(NUMBERS, 6), *rng.sample(NAMES, 3))
            ]
            for changed in values:
                full = {"crc32": _checksum(changed), **changed} if isinstance(changed, dict) else changed
                (folder / MANIFEST).write_text(json.dumps(full))
                readers.all_read()

    in_sandbox(folder, work)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.just("$"), inner),
    max_leaves=8,
)


def test_arbitrary_json_anywhere(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    part = json.loads((folder / "rank-00000.json").read_text())
    paths = [path for path in places(part) if path and path[0] != "rng"]

    def work(readers):
        @settings(
            max_examples=150,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(paths), JSON)
        def check(path, new):
            put_part(folder, json.dumps(replaced(part, path, new)))
            readers.all_read()

        check()

    in_sandbox(folder, work)


def shard(part, **fields):
    part["tensors"]["sharded"].update(fields)


def both(first, second):
    """Changes to the shards of ranks 0 and 1, each (2, 3) of (4, 3)."""
    return {0: lambda part: shard(part, **first), 1: lambda part: shard(part, **second)}


BOXES = {
    "the same rows twice, and a hole": both({}, {"offset": [0, 0]}),
    "rows that overlap": both({}, {"offset": [1, 0]}),
    "rows that are in no part": both({"shape": [5, 3]}, {"shape": [5, 3], "offset": [3, 0]}),
    "rows and columns": both(
        {"shape": [3, 4], "local": [3, 2]}, {"shape": [3, 4], "local": [2, 3], "offset": [1, 1]}
    ),
    "two shapes": both({"shape": [4, 3]}, {"shape": [3, 4], "offset": [0, 0]}),
    "two dtypes": both({"dtype": "F32"}, {"dtype": "I32"}),
    "fractions": both({"local": [2.0, 3.0]}, {}),
    "nothing, of a giant": both(
        {"shape": [0, GIANT], "local": [0, GIANT]},
        {"shape": [0, GIANT], "local": [0, GIANT], "offset": [0, 0]},
    ),
    "two tensors in one place": {
        0: lambda part: part["tensors"]["own"].update(at=part["tensors"]["pair/0"]["at"])
    },
    "a file outside, of no tensor": {
        1: lambda part: part.update(tensors={}, file=part["file"] | {"name": "/etc/passwd"})
    },
    "a giant header": {0: lambda part: part["file"].update(header=1 << 50)},
    "a header of nothing": {0: lambda part: part["file"].update(header=0)},
}


@pytest.mark.parametrize("case", BOXES)
def test_boxes_that_overlap_or_leave_holes(saved, tmp_path, case):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    for rank, change in BOXES[case].items():
        part = json.loads((folder / f"rank-{rank:05d}.json").read_text())
        change(part)
        put_part(folder, json.dumps(part), rank)

    def work(readers):
        assert not readers.all_read()
        with pytest.raises(DamagedCheckpoint):
            verify(folder)
        with pytest.raises(DamagedCheckpoint):
            export(folder, tmp_path / "out")

    in_sandbox(folder, work)


def deep(text, depth):
    return "[" * depth + text + "]" * depth


TEXTS = {
    "deep nesting": lambda text: text.replace('"rng":', f'"deep":{deep("", 100_000)},"rng":', 1),
    "a deep value": lambda text: text.replace("[3.0,2,null]", f"[{deep('3', 990)},2,null]", 1),
    "a deep state": lambda text: text.replace(
        '"state":{', f'"state":{{"q":{{"kind":"value","value":{deep("", 960)}}},', 1
    ),
    "a giant number": lambda text: text.replace('"at":0', f'"at":{"9" * 100_000}', 1),
    "not a number": lambda text: text.replace('"at":0', '"at":NaN', 1),
    "infinity": lambda text: text.replace('"at":0', '"at":Infinity', 1),
    "a key twice": lambda text: text.replace('"block":', '"block":8,"block":', 1),
    "a tensor twice": lambda text: text.replace('"own":{"dtype"', '"own":{"alias":"x"},"own":{"dtype"', 1),
    "half": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "a list": lambda text: "[]",
    "bytes that are no text": lambda text: "\udcff",
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_part_that_is_hostile_text(saved, tmp_path, case):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    text = (folder / "rank-00000.json").read_text()
    changed = TEXTS[case](text)
    assert changed != text
    put_part(folder, changed)
    refused_by_all(folder)


@pytest.mark.parametrize("case", ["deep nesting", "half", "nothing", "a list", "bytes that are no text"])
def test_a_manifest_that_is_hostile_text(saved, tmp_path, case):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    text = (folder / MANIFEST).read_text().replace('"metrics"', '"rng":0,"metrics"')
    changed = TEXTS[case](text)
    assert changed != text
    (folder / MANIFEST).write_bytes(changed.encode(errors="surrogateescape"))
    refused_by_all(folder)


@pytest.mark.parametrize(
    "more", ['"step":1,', '"step":2,', '"x":NaN,', '"x":-Infinity,', '"x":%s,' % ("9" * 9999)]
)
def test_a_manifest_of_numbers_that_are_none_and_keys_twice(saved, tmp_path, more):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"step"', f'{more}"step"', 1))
    refused_by_all(folder)


def refused_by_all(folder):
    def work(readers):
        assert not readers.all_read()
        with pytest.raises(DamagedCheckpoint):
            verify(folder)

    in_sandbox(folder, work)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "giant", "endless"])
def test_files_that_are_none(saved, tmp_path, name, kind):
    """Not followed, not waited for, not taken into memory."""
    folder = shutil.copytree(saved, tmp_path / "step-1")
    path, size = folder / name, (folder / name).stat().st_size
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a hole: it takes no room on the disk
        size = 1 << 40
    if name != MANIFEST:
        files = files_of(folder)
        files[name]["bytes"] = size
        write(folder, files)

    def work(readers):
        if (kind, name) == ("giant", "rank-00001.safetensors"):  # its tensors are at its beginning: zeros
            with pytest.raises(DamagedCheckpoint, match="checksum"):
                verify(folder)
            return
        assert not readers.all_read()

    in_sandbox(folder, work)
