"""What is written is what safetensors itself reads, whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file as load_torch

from overlapkit.input.shard_writer import write_token_shards
from tests.input.token_sets import documents, load_set, write_set


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=20).filter(any),
    shard_tokens=st.integers(1, 40),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_any_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_tokens: int, dtype: Any
) -> None:
    limit: Any = np.int64(shard_tokens)  # as good as an int
    folder = write_set(tmp_path_factory.mktemp("set") / "x", lengths, limit, dtype=dtype)
    found = []
    shards = load_set(folder)
    for shard in shards:
        tokens, offsets = shard["tokens"], shard["offsets"]
        assert (tokens.dtype, offsets.dtype) == (np.dtype(dtype), np.int64)
        assert (offsets[0], offsets[-1]) == (0, len(tokens))
        pieces = [tokens[start:end].tolist() for start, end in zip(offsets, offsets[1:], strict=False)]
        assert len(tokens) <= shard_tokens or sum(map(bool, pieces)) == 1
        found += pieces
    assert found == [document.tolist() for document in documents(lengths)]
    assert [path.name for path in sorted(folder.iterdir())] == [
        f"tokens-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))
    ]


@pytest.mark.parametrize(
    "document",
    [
        [1, 2, 65535],
        np.array([1, 2, 65535], dtype=np.uint16),
        np.array([1, 2, 65535], dtype=">u2"),
        np.array([1, 0, 2, 0, 65535], dtype=np.int64)[::2],
        np.array([1, 2, 65535], dtype=np.uint64),
        torch.tensor([1, 2, 65535]),
        torch.tensor([1, 2, 65535], dtype=torch.uint16),
        (1, 2, 65535),
    ],
    ids=lambda document: type(document).__name__ + str(getattr(document, "dtype", "")),
)
def test_documents_of_every_kind(tmp_path: Path, document: Any) -> None:
    write_token_shards([document, []], tmp_path / "x")
    (shard,) = load_set(tmp_path / "x")
    assert shard["tokens"].tolist() == [1, 2, 65535]
    assert shard["offsets"].tolist() == [0, 3, 3]


def test_readers_of_torch_and_the_metadata(tmp_path: Path) -> None:
    (path,) = write_set(tmp_path / "x", [3, 4], dtype="uint32").iterdir()
    read = load_torch(path)
    assert (read["tokens"].dtype, read["offsets"].dtype) == (torch.uint32, torch.int64)
    assert read["tokens"].tolist() == list(range(7))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"overlapkit.tokens": "1"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            [5, 65536, 1],
            r"document 1 has the token 65536 at 1, which uint16 does not hold: use dtype='uint32'",
        ),
        ([5, 6, -1], r"document 1 has the token -1 at 2, which uint16 .* not negative"),
        ([2**40], r"document 1 has the token 1099511627776 at 0, .* below 2\*\*32"),
        ([1.0, 2.0], r"document 1 is float64 of shape \(2,\): give integers of one dimension"),
        ([[1, 2]], r"document 1 is int64 of shape \(1, 2\)"),
        ([True], r"document 1 is bool"),
        ("text", r"document 1 is <U4 of shape \(\)"),
        ([[1], [2, 3]], r"document 1 is no array of tokens"),
        (torch.ones(2, requires_grad=True), r"document 1 is no array of tokens"),
        (torch.ones(2, device="meta"), r"document 1 is on meta: give it as document.cpu\(\)"),
        (None, r"document 1 is object of shape"),
    ],
    ids=str,
)
def test_a_document_that_cannot_be_stored_is_named(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_token_shards([[1], document], tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int64"}, ValueError, "dtype='int64'"),
        ({"dtype": np.uint16}, ValueError, "dtype="),
        ({"shard_tokens": 0}, ValueError, "shard_tokens=0"),
        ({"shard_tokens": True}, ValueError, "shard_tokens=True"),
        ({"shard_tokens": 5.0}, ValueError, "shard_tokens=5.0"),
        ({"progress": "yes"}, ValueError, "progress='yes'"),
        ({"token_arrays": 3}, TypeError, "token_arrays=3"),
        ({"token_arrays": "text"}, TypeError, "token_arrays='text'"),
        ({"token_arrays": []}, ValueError, "token_arrays has no tokens"),
        ({"token_arrays": [[], []]}, ValueError, "token_arrays has no tokens"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_token_shards(**{"token_arrays": [[1]], "directory": tmp_path / "x", **options})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_anything_in_it_is_refused_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes").write_text("mine")
    for target in (used, used / "notes"):
        with pytest.raises(ValueError, match="is there and not empty"):
            write_token_shards([[1]], target)
    assert (used / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    write_token_shards([[1]], tmp_path / "link")
    assert len(load_set(tmp_path / "empty")) == 1
    write_token_shards([[1]], tmp_path / "new" / "deep")
    assert len(load_set(tmp_path / "new" / "deep")) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_call_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def broken() -> Iterator[list[int]]:
        yield from [[1, 2], [3, 4], [5, 6]]
        raise error("tokenizer")

    with pytest.raises(error, match="tokenizer"):
        write_token_shards(broken(), tmp_path / "x", shard_tokens=2)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from overlapkit.input.shard_writer import write_token_shards

def documents():
    for number in range(10):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield [number] * 4

write_token_shards(documents(), sys.argv[1], shard_tokens=4)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "x"], timeout=60)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert leftover.name == ".x.writing"
    assert len(list(leftover.iterdir())) == 4
    write_set(tmp_path / "x", [3])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert load_set(tmp_path / "x")[0]["tokens"].tolist() == [0, 1, 2]


def test_two_at_once_are_told_of_each_other(tmp_path: Path) -> None:
    def with_a_second_writer() -> Iterator[list[int]]:
        yield [1]
        with pytest.raises(ValueError, match="another process is writing"):
            write_token_shards([[2]], tmp_path / "x")
        yield [3]

    write_token_shards(with_a_second_writer(), tmp_path / "x")
    assert load_set(tmp_path / "x")[0]["tokens"].tolist() == [1, 3]


@pytest.mark.parametrize("name", ["notes.txt", "tokens-1-of-2.safetensors", "0.bak"])
def test_what_is_not_ours_is_refused_and_kept(tmp_path: Path, name: str) -> None:
    leftovers = tmp_path / ".x.writing"
    leftovers.mkdir()
    for kept in ("0", name):
        (leftovers / kept).write_text("mine")
    with pytest.raises(ValueError, match=rf"/\.x\.writing/{name} is no file that write_token_shards"):
        write_token_shards([[1]], tmp_path / "x")
    assert {path.name: path.read_text() for path in leftovers.iterdir()} == {"0": "mine", name: "mine"}
    assert [path.name for path in tmp_path.iterdir()] == [".x.writing"]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("..")], ids=["folder", "link"])
def test_a_name_of_ours_on_no_file_is_refused(tmp_path: Path, make: Any) -> None:
    (tmp_path / ".x.writing").mkdir()
    make(tmp_path / ".x.writing" / "0")
    with pytest.raises(ValueError, match="/0 is no file that"):
        write_token_shards([[1]], tmp_path / "x")
    assert os.path.lexists(tmp_path / ".x.writing" / "0")


def test_a_link_or_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "0").write_text("mine")
    (tmp_path / ".x.writing").symlink_to(mine)
    (tmp_path / ".y.writing").write_text("mine")
    (tmp_path / ".z.writing").symlink_to("nowhere")
    for name in "xyz":
        with pytest.raises(ValueError, match=rf"\.{name}\.writing, .* is no folder"):
            write_token_shards([[1]], tmp_path / name)
    assert (mine / "0").read_text() == "mine"


def test_what_turns_up_while_writing_is_kept(tmp_path: Path) -> None:
    def broken() -> Iterator[list[int]]:
        yield [1]
        (tmp_path / ".x.writing" / "notes").write_text("mine")
        raise RuntimeError("tokenizer")

    with pytest.raises(RuntimeError, match="tokenizer"):
        write_token_shards(broken(), tmp_path / "x")
    assert (tmp_path / ".x.writing" / "notes").read_text() == "mine"


@pytest.mark.parametrize("taken", [Path.touch, lambda path: (path / "deep").mkdir(parents=True)])
def test_finished_shards_are_kept_where_the_name_was_taken(tmp_path: Path, taken: Any) -> None:
    def slow() -> Iterator[list[int]]:
        yield [1, 2]
        taken(tmp_path / "new" / "x")

    with pytest.raises(ValueError, match=r"All shards are finished, in .*/new/\.x\.writing: rename"):
        write_token_shards(slow(), tmp_path / "new" / "x")
    assert load_set(tmp_path / "new" / ".x.writing")[0]["tokens"].tolist() == [1, 2]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=rf"file system without locks \({os.strerror(code)}\)"):
        write_token_shards([[1]], tmp_path / "new" / "x")
    assert list(tmp_path.iterdir()) == []


def test_parents_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "x", tmp_path / "file" / "deep" / "x"):
        with pytest.raises(ValueError, match=r"\.x\.writing, .* cannot be made \(.*/file"):
            write_token_shards([[1]], target)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_call_leaves_no_parents_it_made(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match="no tokens"):
        write_token_shards([], tmp_path / "old" / "a" / "b" / "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_the_current_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the current directory.*: give a name within it"):
        write_token_shards([[1]], ".")
    assert os.path.samefile(".", tmp_path)
    write_token_shards([[1]], "x")


def test_documents_are_streamed_and_one_shard_is_held(tmp_path: Path) -> None:
    seen = []

    def stream() -> Iterator[np.ndarray]:
        for number in range(40):
            seen.append(len(list((tmp_path / ".x.writing").iterdir())))
            yield np.full(100_000, number, dtype=np.uint16)

    tracemalloc.start()
    try:
        write_token_shards(stream(), tmp_path / "x", shard_tokens=400_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == [0, 0, 0, 0, 0, *(number // 4 for number in range(4, 39))]
    assert peak < 2 * 800_000


def test_files_are_on_disk_before_the_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def sync(fd: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def moved(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", moved)
    write_set(tmp_path / "new" / "deep" / "x", [2, 2], 2)
    assert events == [
        "sync 0",
        "sync 1",
        "rename 0 tokens-00000-of-00002.safetensors",
        "rename 1 tokens-00001-of-00002.safetensors",
        "sync .x.writing",
        "rename .x.writing x",
        "sync deep",
        "sync new",
        f"sync {tmp_path.name}",
    ]


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (path,) = write_set(tmp_path / "x", [1]).iterdir()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_bar_is_shown_on_demand_and_not_where_nobody_looks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_set(tmp_path / "a", [1, 2])
    write_set(tmp_path / "b", [1, 2], progress=False)
    assert capfd.readouterr() == ("", "")
    write_set(tmp_path / "c", [1, 2], progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "documents to c" in shown.err
    assert "2/2" in shown.err
