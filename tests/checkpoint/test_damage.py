"""Flipped bits, truncated, missing, swapped and hostile files: found, named, and never loaded."""

import itertools
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, CheckpointError, DamagedCheckpoint, verify
from overlapkit.checkpoint.hashing import ALGORITHM, checksum
from overlapkit.checkpoint.manifest import manifest_bytes, read_manifest
from overlapkit.checkpoint.writer import VERSION
from tests.checkpoint.faults import read_value, value_state
from tests.ranks import run_ranks

FILES = ("manifest.json", "rank-00000.json", "rank-00000.safetensors")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound") / "run"
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, value_state(step), block=True)
    return directory


VERSION_1 = Path(__file__).parent / "version_1" / "step-1"
"""Written by the first version of the format, with crc32 checksums: `value_state(3)`."""


def test_version_1_is_read(tmp_path):
    shutil.copytree(VERSION_1, tmp_path / "step-1")
    assert json.loads((VERSION_1 / FILES[0]).read_text())["version"] == 1
    assert read_value(tmp_path) == (1, 3)  # restores and verifies
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, value_state(4), block=True)
    assert json.loads((tmp_path / "step-2" / FILES[0]).read_text())["hash"] == ALGORITHM
    assert read_value(tmp_path) == (2, 4)
    assert read_value(tmp_path, 1) == (1, 3)


@pytest.mark.parametrize("file", FILES)
def test_damage_of_version_1_is_found(tmp_path, file):
    shutil.copytree(VERSION_1, tmp_path / "step-1")
    data = (tmp_path / "step-1" / file).read_bytes()
    for at in range(0, len(data), max(1, len(data) // 40)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        (tmp_path / "step-1" / file).write_bytes(flipped)
        if file == "manifest.json" and same_json(flipped, data):
            continue
        with Checkpointer(tmp_path) as checkpointer, pytest.raises(DamagedCheckpoint, match=file):
            checkpointer.verify(1)


@pytest.fixture
def run(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def falls_back(run, match=None):
    """Step 2 is refused, and "latest" gives step 1, with a warning."""
    with Checkpointer(run) as checkpointer:
        with pytest.raises(DamagedCheckpoint, match=match):
            checkpointer.verify(2)
        with pytest.raises(DamagedCheckpoint, match=match):
            checkpointer.restore(value_state(-1), 2)
        state = value_state(-1)
        with pytest.warns(UserWarning, match="step-2 is damaged and is skipped"):
            assert checkpointer.restore(state) == 1
    assert state["n"] == 1
    assert (state["model"].weight == 1).all()


def same_json(one, other):
    try:
        return json.loads(bytes(one)) == json.loads(bytes(other))
    except ValueError:
        return False


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_is_found(run, file):
    path = run / "step-2" / file
    data = path.read_bytes()
    places = sorted({*range(0, len(data), max(1, len(data) // 60)), *range(20), len(data) - 1})
    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        with Checkpointer(run) as checkpointer:
            if file == "manifest.json" and same_json(flipped, data):
                continue  # a blank that became another blank
            with pytest.raises(DamagedCheckpoint, match=file):
                checkpointer.verify(2)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """The same in two runs whose values differ, written by two ranks in blocks of 64 bytes."""
    folder = tmp_path_factory.mktemp("two")

    def save(rank):
        for run, shift in (("run", 0), ("other", 10)):
            with Checkpointer(folder / run) as checkpointer:
                for step in (1, 2):
                    state = value_state(step + shift)
                    state["own"] = torch.full((50,), step + shift + rank / 2)
                    checkpointer.save(step, state, block=True)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("fileplan", "writer"):
            patch.setattr(f"overlapkit.checkpoint.{module}.BLOCK", 64)
        run_ranks(2, save)
    return folder


@pytest.fixture
def two(of_two_ranks, tmp_path):
    return shutil.copytree(of_two_ranks, tmp_path / "two")


ALL_FILES = (
    "manifest.json",
    *(f"rank-0000{rank}.{suffix}" for rank in (0, 1) for suffix in ("json", "safetensors")),
)


OF_THE_OTHER = dict(zip(ALL_FILES[1:], ALL_FILES[3:] + ALL_FILES[1:3], strict=True))


def regions(name, data):
    """A byte of every region: each token of JSON, the header's length and padding, both ends of a block."""
    length = 8 + int.from_bytes(data[:8], "little") if name.endswith("safetensors") else len(data)
    text = data[:length].decode("latin1")
    tokens = [match.start() for match in re.finditer(r'"[^"]*"|-?[\d.e+-]+|[\[\]{}:,]|\w+| +', text)]
    found = set(tokens[:400]) | set(tokens[400::29])  # a generator's state is thousands of numbers
    for block in range(length, len(data), 64):
        found |= {block, min(block + 63, len(data) - 1)}
    return sorted(found | set(range(min(8, len(data)))) | {length - 1, len(data) - 1})


def loads_nothing_but_step_1(run):
    """Step 2 is refused, or no byte of it that a restore takes was touched."""
    state = value_state(-1)
    with Checkpointer(run) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at = checkpointer.restore(state, only=tuple(state))
    assert state["n"] == at
    assert {n for p in state["model"].parameters() for n in p.flatten().tolist()} == {at}
    assert set(state["t"].tolist()) == {at}
    return at == 1


@pytest.mark.parametrize("file", ALL_FILES)
def test_a_flipped_bit_in_every_region_of_every_file(two, file):
    run = two / "run"
    path = run / "step-2" / file
    data = path.read_bytes()
    refused = 0
    for at in regions(file, data):
        for bit in range(8) if at < 8 else (at % 8,):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(DamagedCheckpoint, match=file):
                verify(run, 2)
            if at % 7 == 0:
                refused += loads_nothing_but_step_1(run)
    assert refused > 5 or "safetensors" in file


@pytest.mark.parametrize("file", ALL_FILES)
def test_every_length_but_its_own(two, file):
    run = two / "run"
    path = run / "step-2" / file
    data = path.read_bytes()
    lengths = {*range(0, len(data), max(1, len(data) // 50)), len(data) - 1, len(data) + 1, 2 * len(data)}
    for length in sorted(lengths - {len(data)}):
        path.write_bytes((2 * data)[:length])
        with pytest.raises(DamagedCheckpoint, match=file):
            verify(run, 2)
        assert loads_nothing_but_step_1(run)


def test_every_file_swapped_for_every_other(two):
    """Those of another step, another rank and another run with the same names and sizes; one, or a pair."""
    run = two / "run"
    sources = [run / "step-1", run / "step-2", two / "other" / "step-2"]
    sound = shutil.copytree(run / "step-2", two / "sound")
    kinds = [(name,) for name in ALL_FILES] + [
        (f"rank-0000{r}.json", f"rank-0000{r}.safetensors") for r in (0, 1)
    ]
    swaps = 0
    for source, names, of in itertools.product(sources, kinds, ("the same", "the other rank")):
        taken = names if of == "the same" else [OF_THE_OTHER.get(name, name) for name in names]
        pairs = [(source / theirs, run / "step-2" / ours) for theirs, ours in zip(taken, names, strict=True)]
        if all(theirs.read_bytes() == (sound / ours.name).read_bytes() for theirs, ours in pairs):
            continue
        for theirs, ours in pairs:
            ours.write_bytes(theirs.read_bytes())
        with pytest.raises(DamagedCheckpoint):
            verify(run, 2)
        loads_nothing_but_step_1(run)  # or step 2, where only what is rank 1's own was swapped
        swaps += 1
        for name in ALL_FILES:
            shutil.copy(sound / name, run / "step-2" / name)
    assert swaps >= 25
    assert not loads_nothing_but_step_1(run)


def test_a_flipped_bit_in_a_tensor_is_named_and_never_loaded(run):
    path = run / "step-2" / FILES[2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    falls_back(run, match=r"rank-00000.safetensors: tensor 't', bytes \d+ to \d+: the checksum differs")


def test_a_failed_restore_changes_nothing(run):
    path = run / "step-2" / FILES[2]
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    state = value_state(5)
    with Checkpointer(run) as checkpointer, pytest.raises(DamagedCheckpoint):
        checkpointer.restore(state, 2)
    assert state["n"] == 5
    assert (state["model"].weight == 5).all()
    assert (state["t"] == 5).all()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [0, 1, 0.5, -1])
def test_a_truncated_file_is_found(run, file, left):
    path = run / "step-2" / file
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left) if isinstance(left, float) else left])
    falls_back(run, match=file)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_found(run, file):
    (run / "step-2" / file).unlink()
    falls_back(run, match=file)
    with Checkpointer(run) as checkpointer:
        assert checkpointer.steps() == [1]
        assert checkpointer.latest() == 1


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_step_is_found(run, file):
    shutil.copy(run / "step-1" / file, run / "step-2" / file)
    falls_back(run)


def test_a_renamed_checkpoint_is_found(run):
    (run / "step-2").rename(run / "step-3")
    with Checkpointer(run) as checkpointer, pytest.raises(DamagedCheckpoint, match="its step"):
        checkpointer.restore(value_state(0), 3)


def test_a_symbolic_link_is_not_followed(run):
    path = run / "step-2" / FILES[2]
    path.rename(run / "elsewhere")
    path.symlink_to(run / "elsewhere")
    falls_back(run, match="safetensors: missing")


def test_where_nothing_is_sound_nothing_is_restored_in_silence(run):
    for step in (1, 2):
        (run / f"step-{step}" / FILES[2]).unlink()
    with (
        Checkpointer(run) as checkpointer,
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(DamagedCheckpoint, match=r"step-2.*step-1"),
    ):
        checkpointer.restore(value_state(0))


def test_damaged_checkpoints_do_not_count_for_retention(run):
    (run / "step-2" / FILES[2]).unlink()
    with Checkpointer(run, keep=2) as checkpointer:
        checkpointer.save(3, value_state(3), block=True)
        assert checkpointer.steps() == [1, 3]
    assert read_value(run) == (3, 3)


def rewrite(run, change, **about):
    """Change step 2's part as a hostile writer would: with all checksums made right again."""
    folder = run / "step-2"
    part = json.loads((folder / FILES[1]).read_text())
    manifest = read_manifest(folder)
    files = {name: dict(file) for name, file in manifest.files.items()}
    change(part, files)
    data = json.dumps(part).encode()
    (folder / FILES[1]).write_bytes(data)
    files[FILES[1]] = {"bytes": len(data), ALGORITHM: checksum(data)}
    (folder / FILES[0]).write_bytes(manifest_bytes(2, files, 1, {}, **about))


def entry(name, **fields):
    return lambda part, files: part["tensors"][name].update(fields)


HOSTILE = {
    "a file outside": lambda part, files: part["file"].update(name="../../secret"),
    "another file": lambda part, files: part["file"].update(name="manifest.json"),
    "a negative offset": entry("t", offset=[-1]),
    "an offset beyond": entry("t", offset=[1]),
    "a giant shape": entry("t", shape=[1 << 50]),
    "a giant box": entry("t", shape=[1 << 50], local=[1 << 50]),
    "a negative size": entry("t", local=[-9]),
    "before the data": entry("t", at=-4096),
    "beyond the file": entry("t", at=1 << 40),
    "other dimensions": entry("t", shape=[3, 3]),
    "an unknown dtype": entry("t", dtype="F1024"),
    "no checksums": lambda part, files: part["file"].update(sums=""),
    "checksums of nothing": entry("t", sum=1 << 40),
    "checksums before the first": entry("t", sum=-1),
    "a list of checksums too short": entry("t", crc32=[]),
    "a block of odd size": lambda part, files: part.update(block=4801),
    "a block of nothing": lambda part, files: part.update(block=0),
    "text for a number": entry("t", at="0"),
    "an alias of nothing": lambda part, files: part["tensors"].update(t={"alias": "nowhere"}),
    "an alias of itself": lambda part, files: part["tensors"].update(t={"alias": "t"}),
    "no tensors": lambda part, files: part.pop("tensors"),
    "a list of tensors": lambda part, files: part.update(tensors=[1]),
    "an unknown tag": lambda part, files: part["state"]["n"].update(value={"$": "os.system", "v": "ls"}),
    "a tag without a value": lambda part, files: part["state"]["n"].update(value={"$": "tuple"}),
    "a listed path": lambda part, files: files.update({"../x": {"bytes": 1}}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_part_is_refused(run, case):
    rewrite(run, HOSTILE[case])
    state = value_state(5)
    with Checkpointer(run) as checkpointer, pytest.raises(DamagedCheckpoint) as caught:
        checkpointer.restore(state, 2)
    assert "checksum differs" not in str(caught.value)  # it is refused for what it says
    assert state["n"] == 5
    assert (state["model"].weight == 5).all()


def test_generators_that_cannot_be_set_are_told_before_anything_is_restored(run):
    """Nor are they in the way of the rest: another version of torch may have another generator."""
    rewrite(run, lambda part, files: part["rng"].update(torch="AAAA"))
    state = value_state(5)
    with Checkpointer(run) as checkpointer:
        with pytest.raises(
            DamagedCheckpoint, match="not states of random generators that can be set: use only="
        ):
            checkpointer.restore(state, 2)
        assert (state["model"].weight == 5).all()
        checkpointer.verify(2)
        assert checkpointer.restore(state, 2, only=tuple(state)) == 2
    assert (state["model"].weight == 2).all()


def test_an_unknown_hash_is_refused(run):
    rewrite(run, lambda part, files: None, hash="md5")
    falls_back(run, match="manifest.json: not a manifest")


def test_a_later_format_is_an_error_and_no_damage(run, monkeypatch):
    monkeypatch.setattr("overlapkit.checkpoint.manifest.VERSION", VERSION + 1)
    rewrite(run, lambda part, files: None)
    monkeypatch.undo()
    with (
        Checkpointer(run) as checkpointer,
        pytest.raises(CheckpointError, match=f"version {VERSION + 1}.*upgrade") as caught,
    ):
        checkpointer.restore(value_state(0))
    assert not isinstance(caught.value, DamagedCheckpoint)
