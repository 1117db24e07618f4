"""Hostile and broken sets of shards are refused, by name, before a token of them is read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from overlapkit.input.mixture import Mixture
from overlapkit.input.shards import find_shards
from overlapkit.input.tokens import TokenShards
from tests.input.token_sets import entry, raw_shard, write_set

U16 = entry("U16", [4], 0, 8)
BODY = bytes(8)


def open_set(folder: Path, **options: Any) -> TokenShards:
    return TokenShards(folder, 2, 1, rank=0, world_size=1, **options)


def test_a_sound_file_of_the_same_making_is_opened(tmp_path: Path) -> None:
    """What is refused below is refused for what is wrong with it."""
    raw_shard(tmp_path / "x.safetensors", {"tokens": U16}, BODY)
    (shard,) = find_shards(tmp_path)
    header = len((tmp_path / "x.safetensors").read_bytes()) - 8
    assert (shard.tokens, shard.tokens_at, shard.dtype, shard.documents) == (4, header, np.uint16, None)


HEADERS: dict[str, tuple[Any, bytes, int | None, str]] = {
    "header longer than the file": ({"tokens": U16}, BODY, 9000, "ends after .* within its header"),
    "header of gigabytes": ({"tokens": U16}, BODY, 1 << 33, "its header has 8589934592 bytes"),
    "header of all ones": ({"tokens": U16}, BODY, 2**64 - 1, "its header has 18446744073709551615 bytes"),
    "header shorter than it is": ({"tokens": U16}, BODY, 20, "no safetensors file"),
    "no header": (b"", b"", None, "no safetensors file"),
    "truncated": ({"tokens": U16}, BODY[:-1], None, "not fully covered"),
    "trailing garbage": ({"tokens": U16}, BODY + b"x", None, "not fully covered"),
    "gap at the start": ({"tokens": entry("U16", [4], 2, 10)}, bytes(10), None, "invalid offset"),
    "end before start": ({"tokens": entry("U16", [4], 8, 0)}, BODY, None, "no sound safetensors"),
    "beyond the end": ({"tokens": entry("U16", [4], 0, 2**40)}, BODY, None, "no sound safetensors"),
    "negative start": ({"tokens": entry("U16", [4], -8, 0)}, BODY, None, "invalid value"),
    "shape longer than the data": ({"tokens": entry("U16", [5], 0, 8)}, BODY, None, "invalid shape"),
    "shape that overflows": ({"tokens": entry("U16", [2**63], 0, 0)}, b"", None, "overflow"),
    "negative shape": ({"tokens": entry("U16", [-4], 0, 8)}, BODY, None, "invalid value"),
    "shape of text": ({"tokens": entry("U16", ["4"], 0, 8)}, BODY, None, "invalid type"),
    "overlap": ({"tokens": U16, "offsets": entry("I64", [1], 0, 8)}, BODY, None, "invalid offset"),
    "unknown dtype": ({"tokens": entry("U24", [4], 0, 8)}, BODY, None, "unknown variant"),
    "no table": (b'["tokens"]', b"", None, "its header is no table"),
    "an array that is none": ({"tokens": 3}, b"", None, "no sound safetensors"),
    "no tensors": ({}, b"", None, "no tensor named 'tokens' .it holds nothing"),
    "other tensors": ({"input_ids": U16}, BODY, None, "no tensor named 'tokens' .it holds input_ids"),
    "int64 tokens": ({"tokens": entry("I64", [1], 0, 8)}, BODY, None, "tokens is I64 .*; it must be U16 or"),
    "float tokens": ({"tokens": entry("F16", [4], 0, 8)}, BODY, None, "tokens is F16"),
    "two dimensions": ({"tokens": entry("U16", [2, 2], 0, 8)}, BODY, None, r"of shape \[2, 2\]"),
    "a scalar": ({"tokens": entry("U16", [], 0, 2)}, BODY[:2], None, r"of shape \[\]"),
    "utf-16": ('{"tokens": {}}'.encode("utf-16"), b"", None, "no s.* safetensors file"),
    "invalid utf-8": (b"\xff\xfe\xfd", b"", None, "no safetensors file"),
    "deep nesting": (b"[" * 100_000, b"", None, "no safetensors file"),
    "the tokens twice": (
        b'{"tokens":{"dtype":"U16","shape":[2],"data_offsets":[0,4]},'
        b'"tokens":{"dtype":"U16","shape":[4],"data_offsets":[0,8]}}',
        BODY,
        None,
        "stands there twice",
    ),
    "a shape twice": (
        b'{"tokens":{"dtype":"U16","shape":[2],"shape":[4],"data_offsets":[0,8]}}',
        BODY,
        None,
        "stands there twice",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "tokens": U16}, BODY, None, "invalid type"),
    "a later format": (
        {"__metadata__": {"overlapkit.tokens": "2"}, "tokens": U16},
        BODY,
        None,
        "its format is '2', read here is '1'; update overlapkit",
    ),
    "unaligned tokens": (
        {"a": entry("U8", [1], 0, 1), "tokens": entry("U16", [4], 1, 9)},
        bytes(9),
        None,
        "no multiple of its 2 bytes",
    ),
    "int32 offsets": (
        {"offsets": entry("I32", [2], 0, 8), "tokens": entry("U16", [4], 8, 16)},
        bytes(16),
        None,
        "offsets is I32",
    ),
    "empty offsets": ({"offsets": entry("I64", [0], 0, 0), "tokens": U16}, BODY, None, "offsets are empty"),
}  # fmt: skip


@pytest.mark.parametrize(("header", "body", "length", "message"), HEADERS.values(), ids=HEADERS.keys())
@pytest.mark.parametrize("pack", ["windows", "documents"])
def test_lying_headers(
    tmp_path: Path, header: Any, body: bytes, length: int | None, message: str, pack: Any
) -> None:
    raw_shard(tmp_path / "bad.safetensors", header, body, length)
    if pack == "windows" and "offsets" in message and "tokens" in header:  # which nobody needs
        assert open_set(tmp_path)
        return
    with pytest.raises(ValueError, match=rf"bad\.safetensors cannot be used: .*{message}"):
        open_set(tmp_path, pack=pack)


def test_the_longest_header(tmp_path: Path) -> None:
    """As long as safetensors allows, filled with what somebody had to say."""
    say = {"__metadata__": {"said": "x" * 5_000_000}, "tokens": U16}
    raw_shard(tmp_path / "a.safetensors", say, BODY)
    assert find_shards(tmp_path)[0].tokens == 4
    raw_shard(tmp_path / "a.safetensors", {"tokens": U16}, BODY, 100_000_001)
    with pytest.raises(ValueError, match="its header has 100000001 bytes; the limit is 100000000"):
        find_shards(tmp_path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def rewrite(path: Path) -> None:
    content, before = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before, before + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"it has \d+ bytes, and had \d+ when it was opened"),
        (rewrite, "it was written to since it was opened"),
        (Path.unlink, "it was there when it was opened .No such file"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_file_that_changes_is_named_when_the_next_pass_begins(
    tmp_path: Path, change: Callable[[Path], None], message: str, begun: bool
) -> None:
    folder = write_set(tmp_path / "x", [5, 5], 5)
    shards, mixture = open_set(folder), Mixture({"a": open_set(folder)}, {"a": 1})
    if begun:
        assert len(list(shards)) == 4
    change(folder / "tokens-00001-of-00002.safetensors")
    for source in (shards, mixture):
        state = source.state_dict()
        with pytest.raises(ValueError, match=rf"tokens-00001-of-00002.safetensors cannot be used: {message}"):
            iter(source)
        assert source.state_dict() == state


def test_a_relative_directory_is_found_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path / "x", [5])
    monkeypatch.chdir(tmp_path)
    shards = open_set(Path("x"))
    monkeypatch.chdir("/")
    assert len(list(shards)) == 2


def test_lengths_are_read_as_they_are_in_memory(tmp_path: Path) -> None:
    """The two headers whose length depends on where data begins: an odd one is refused, an even one not."""
    padded = b'{"tokens":{"dtype":"U16","shape":[4],"data_offsets":[0,8]}}'
    raw_shard(tmp_path / "a.safetensors", padded + b" " * (len(padded) % 2), BODY)
    assert find_shards(tmp_path)[0].tokens == 4
    raw_shard(tmp_path / "a.safetensors", padded + b" " * (1 - len(padded) % 2), BODY)
    with pytest.raises(ValueError, match="no multiple of its 2 bytes an item"):
        find_shards(tmp_path)


def with_offsets(path: Path, offsets: list[int], dtype: type = np.int64) -> None:
    save_file({"tokens": np.arange(9, dtype=np.uint16), "offsets": np.array(offsets, dtype=dtype)}, path)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 9], "its offsets go from 1 to 9 over 9 tokens"),
        ([-1, 9], "from -1 to 9"),
        ([0, 8], "from 0 to 8 over 9 tokens"),
        ([0, 10], "from 0 to 10 over 9 tokens"),
        ([0], "from 0 to 0 over 9 tokens"),
        ([0, 2**62, 9], "offset 2 is 9, after 4611686018427387904"),
        ([0, 5, 4, 9], "offset 2 is 4, after 5"),
        ([0, -5, 9], "offset 1 is -5, after 0"),
    ],
    ids=str,
)
def test_offsets_that_lead_nowhere(tmp_path: Path, offsets: list[int], message: str) -> None:
    with_offsets(tmp_path / "bad.safetensors", offsets)
    with pytest.raises(ValueError, match=rf"bad\.safetensors cannot be used: .*{message}"):
        open_set(tmp_path, pack="documents")
    assert len(list(open_set(tmp_path))) == 4, "windows need none"


def test_uint64_offsets(tmp_path: Path) -> None:
    with_offsets(tmp_path / "a.safetensors", [0, 3, 9], np.uint64)
    assert len(open_set(tmp_path, pack="documents")) == 4
    with_offsets(tmp_path / "a.safetensors", [0, 2**64 - 1, 9], np.uint64)
    with pytest.raises(ValueError, match="offset 1 is -1, after 0"):
        open_set(tmp_path, pack="documents")


def lose_one(folder: Path) -> None:
    (folder / "tokens-00001-of-00003.safetensors").unlink()


def lose_the_last(folder: Path) -> None:
    (folder / "tokens-00002-of-00003.safetensors").unlink()


def lose_the_first(folder: Path) -> None:
    (folder / "tokens-00000-of-00003.safetensors").unlink()


def one_too_many(folder: Path) -> None:
    shutil.copy(folder / "tokens-00000-of-00003.safetensors", folder / "tokens-00003-of-00003.safetensors")


def another_set(folder: Path) -> None:
    shutil.copy(folder / "tokens-00000-of-00003.safetensors", folder / "tokens-00000-of-00001.safetensors")


def a_stray(folder: Path) -> None:
    shutil.copy(folder / "tokens-00000-of-00003.safetensors", folder / "model.safetensors")


def a_folder(folder: Path) -> None:
    lose_one(folder)
    (folder / "tokens-00001-of-00003.safetensors").mkdir()


def a_pipe(folder: Path) -> None:
    lose_one(folder)
    os.mkfifo(folder / "tokens-00001-of-00003.safetensors")


def a_link_to_nothing(folder: Path) -> None:
    lose_one(folder)
    (folder / "tokens-00001-of-00003.safetensors").symlink_to("nowhere")


def an_empty_file(folder: Path) -> None:
    (folder / "tokens-00001-of-00003.safetensors").write_bytes(b"")


def a_pickle(folder: Path) -> None:
    (folder / "tokens-00001-of-00003.safetensors").write_bytes(b"\x80\x05\x95" + bytes(100))


def cut_short(folder: Path) -> None:
    os.truncate(folder / "tokens-00001-of-00003.safetensors", 200)


def another_dtype(folder: Path) -> None:
    path = folder / "tokens-00001-of-00003.safetensors"
    save_file({"tokens": np.zeros(5, dtype=np.uint32)}, path)


def nothing_left(folder: Path) -> None:
    for path in folder.iterdir():
        path.rename(path.with_suffix(".bin"))


def hidden_ones(folder: Path) -> None:
    for path in folder.iterdir():
        path.rename(path.with_name("." + path.name))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_one, "lacks 1 of the 3 shards tokens-.-of-3, the first of them number 1"),
        (lose_the_last, "lacks 1 of the 3 shards .* number 2"),
        (lose_the_first, "lacks 1 of the 3 shards .* number 0"),
        (one_too_many, "holds 4 shards tokens-.-of-3: remove"),
        (another_set, r"more than one set of shards \(tokens-.-of-1, tokens-.-of-3\)"),
        (a_stray, r"more than one set of shards \(tokens-.-of-3, model.safetensors\)"),
        (a_folder, "tokens-00001-of-00003.safetensors cannot be used: it is no regular file"),
        (a_pipe, "tokens-00001-of-00003.safetensors cannot be used: it is no regular file"),
        (a_link_to_nothing, "tokens-00001-of-00003.safetensors cannot be used: it cannot be read"),
        (an_empty_file, "tokens-00001-of-00003.safetensors cannot be used: it ends after 0 bytes"),
        (a_pickle, "tokens-00001-of-00003.safetensors cannot be used: it ends after 103 bytes, within its"),
        (cut_short, "tokens-00001-of-00003.safetensors cannot be used"),
        (another_dtype, "its tokens are uint32, those of tokens-00000-of-00003.safetensors are uint16"),
        (nothing_left, "holds no .*safetensors file"),
        (hidden_ones, "holds no .*safetensors file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_sets(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = write_set(tmp_path / "x", [5, 5, 5], 5)
    assert len(find_shards(folder)) == 3
    damage(folder)
    with pytest.raises(ValueError, match=message):
        open_set(folder)


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ValueError, match="is no directory"):
            open_set(path)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "blobs", [5, 5], 5)
    (tmp_path / "x").mkdir()
    for path in folder.iterdir():
        (tmp_path / "x" / path.name).symlink_to(path)
    assert [shard.tokens for shard in find_shards(tmp_path / "x")] == [5, 5]


def test_sets_of_others(tmp_path: Path) -> None:
    """Without offsets, without numbers or numbered from 1, and beside other files."""
    save_file({"tokens": np.arange(7, dtype=np.uint32)}, tmp_path / "b.safetensors")
    save_file(
        {"tokens": np.arange(9, dtype=np.uint32), "mask": np.zeros((2, 2), bool)}, tmp_path / "a.safetensors"
    )
    (tmp_path / "README.md").write_text("tokens")
    assert [(shard.path.name, shard.tokens) for shard in find_shards(tmp_path)] == [
        ("a.safetensors", 9),
        ("b.safetensors", 7),
    ]
    (tmp_path / "a.safetensors").rename(tmp_path / "text-2-of-2.safetensors")
    (tmp_path / "b.safetensors").rename(tmp_path / "text-1-of-2.safetensors")
    assert [shard.tokens for shard in find_shards(tmp_path)] == [7, 9]
    with pytest.raises(
        ValueError, match="text-1-of-2.safetensors has no tensor 'offsets', which pack='documents'"
    ):
        open_set(tmp_path, pack="documents")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_change_of_any_byte_reads_out_of_bounds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped header or offset is refused, or means another sound set; never a crash or another error."""
    folder = write_set(tmp_path_factory.mktemp("set") / "x", [4, 0, 3, 5], 100)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    tokens_at = find_shards(folder)[0].tokens_at
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, tokens_at - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path.write_bytes(content)
    shards: TokenShards | None = None
    refused = ""
    try:
        shards = open_set(folder, pack="documents")
    except ValueError as error:
        refused = str(error)
    assert shards is not None or path.name in refused or "makes no batch" in refused
    for batch in shards or ():
        assert set(batch.tokens.flatten().tolist()) <= set(range(12))
