"""Files, archives and folders; what is damaged, or unpacks to too much, is one error that names it."""

import contextlib
import gzip
import io
import itertools
import tarfile

import pytest

from overlapkit.measure import TraceError, explain
from overlapkit.measure.traces import opening
from tests.measure.traces.hand import HandTrace


def trace(rank=0, world=2):
    made = HandTrace(rank, world)
    made.work("gemm", 10, 20 + rank)
    return made


def archive(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as file:
        for name, raw in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            file.addfile(entry, io.BytesIO(raw))
    return path


def computed(path):
    return {one.rank: one.lanes.compute for one in explain(path).trace.ranks}


def test_every_kind_of_file_gives_the_same(tmp_path):
    raw = [trace(rank).text().encode() for rank in (0, 1)]
    plain = [trace(rank).write(tmp_path / f"r{rank}.json") for rank in (0, 1)]
    packed = [trace(rank).write(tmp_path / f"r{rank}.json.gz") for rank in (0, 1)]
    members = [
        ("a/", b""),
        ("a/r0.json", raw[0]),
        ("a/notes.txt", b"hello"),
        ("a/r1.json.gz", gzip.compress(raw[1])),
    ]
    tars = [
        archive(tmp_path / "t.tar.gz", *members[1:]),
        archive(tmp_path / "t.tar", *members[1:], mode="w"),
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in (0, 1):
        trace(rank).write(folder / f"r{rank}.json")
    (folder / "expected.csv").write_text("1")
    for given in (plain, tuple(packed), *tars, folder, str(folder), [str(plain[0]), packed[1]]):
        assert computed(given) == {0: 10_000, 1: 11_000}


def test_ranks_come_from_the_trace_else_from_its_name_else_from_its_place(tmp_path):
    for name in ("host_rank-5.json", "worker12_step.json"):
        HandTrace(rank=None).write(tmp_path / name)
    files = [
        trace(rank=7).write(tmp_path / "rank3.json"),
        tmp_path / "host_rank-5.json",
        tmp_path / "worker12_step.json",
    ]
    for path in files[1:]:
        made = HandTrace(rank=None)
        made.work("gemm", 0, 1)
        made.write(path)
    made.write(tmp_path / "x.json")
    assert sorted(computed([*files, tmp_path / "x.json"])) == [3, 5, 7, 12]


def test_a_rank_twice_is_an_error_that_names_both(tmp_path):
    first, second = (trace().write(tmp_path / name) for name in ("a.json", "b.json"))
    with pytest.raises(TraceError, match=r"b\.json: rank 0 was read from .*a\.json: give one trace a rank"):
        explain([first, second])


def test_progress_ends_at_the_size_of_all_files(tmp_path):
    files = [trace(rank).write(tmp_path / f"{rank}.json.gz") for rank in (0, 1)]
    seen = []
    explain(files, progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in files)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {of for _, of in seen} == {total}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (5, TypeError, "trace=5: give a path"),
        ([], ValueError, r"trace=\[\]"),
        ([5], TypeError, "give a path, or a list of paths"),
        ("nowhere.json", FileNotFoundError, "nowhere.json: no such file"),
    ],
)
def test_what_is_no_path(given, error, words):
    with pytest.raises(error, match=words):
        explain(given)


def test_a_folder_without_traces(tmp_path):
    with pytest.raises(ValueError, match="no trace in this folder"):
        explain(tmp_path)
    with pytest.raises(TraceError, match=r"t\.tar: no trace in this archive"):
        explain(archive(tmp_path / "t.tar", ("readme.txt", b"x"), mode="w"))


@pytest.mark.parametrize("name", ["t.json.gz", "t.tar.gz"])
def test_a_packed_file_cut_or_flipped_anywhere_is_one_error(tmp_path, name):
    path = tmp_path / name
    raw = trace().text().encode()
    if name == "t.json.gz":
        path.write_bytes(gzip.compress(raw))
    else:
        archive(path, ("r.json", raw))
    whole = path.read_bytes()
    for place in range(10, len(whole) - 8, 7):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            if len(damaged) < len(whole):
                with pytest.raises(TraceError) as error:
                    explain(path)
                assert str(error.value).startswith(str(path))
                assert "\n" not in str(error.value)
            else:
                with contextlib.suppress(TraceError):  # or it is the time stamp that was flipped
                    explain(path)


def endless(head, tail):
    """A gzip of `head` and then of `tail`, again and again, as a stream; little of it is ever held."""
    packer = gzip.zlib.compressobj(9, gzip.zlib.DEFLATED, 31)
    yield packer.compress(head)
    for _ in itertools.repeat(None, 64):
        yield packer.compress(tail)
    yield packer.flush()


@pytest.mark.parametrize("tail", [b" " * (1 << 20), b'{"cat":"x"},' * (1 << 16)])
def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch, tail):
    monkeypatch.setattr(opening, "_SMALL", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(b"".join(endless(b'{"traceEvents": [', tail)))
    with pytest.raises(TraceError, match=r"bomb.json\.gz: unpacks to more than 100 times its size \(1?. MiB"):
        explain(path)


def test_a_bomb_within_an_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_SMALL", 1 << 20)
    inner = gzip.compress(b'{"traceEvents": [' + b" " * (4 << 20))
    path = archive(tmp_path / "t.tar", ("r.json.gz", inner), mode="w")
    with pytest.raises(TraceError, match=r"t\.tar/r\.json\.gz: unpacks to more than"):
        explain(path)


def test_packed_again_and_again(tmp_path):
    raw = trace().text().encode()
    for _ in range(4):
        raw = gzip.compress(raw)
    (tmp_path / "t.json.gz").write_bytes(raw)
    with pytest.raises(TraceError, match="packed more than three times"):
        explain(tmp_path / "t.json.gz")


def test_an_archive_whose_header_claims_too_much(tmp_path):
    path = archive(tmp_path / "t.tar", ("r.json", trace().text().encode()), mode="w")
    entry = tarfile.TarInfo("long")
    entry.type, entry.size = tarfile.XHDTYPE, 1 << 32
    path.write_bytes(entry.tobuf(tarfile.USTAR_FORMAT) + path.read_bytes())
    with pytest.raises(TraceError, match=r"t\.tar: a damaged archive"):
        explain(path)
