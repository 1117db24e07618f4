"""Damaged files: named, or left out and counted, with everything around them as if nothing had happened."""

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from overlapkit.input import images
from overlapkit.input.images import one_by_one
from overlapkit.input.images.engine import Engine
from tests.input.images.photos import photograph, write_photos

pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("this is no image, whatever it is called")


def only_a_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:400])


def half_a_png(path: Path) -> None:
    photograph().crop((0, 0, 90, 90)).save(path, "PNG")
    path.write_bytes(path.read_bytes()[:4000])


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unknown(path: Path) -> None:
    photograph().crop((0, 0, 90, 90)).save(path, "GIF")


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (cut_short, "no image that DALI decodes, or a damaged one"),
    (missing, "No such file or directory"),
    (empty, "empty"),
    (text, "no image that DALI decodes, or a damaged one"),
    (only_a_header, "no image that DALI decodes, or a damaged one"),
    (half_a_png, "no image that DALI decodes, or a damaged one"),
    (folder, "Is a directory"),
    (unknown, "no image that DALI decodes, or a damaged one"),
]
WHOLE = {"scale": (1.0, 1.0), "ratio": (0.01, 100.0)}
"""A crop of everything: what is cut short is damaged only where a crop comes to its end."""


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """30 files, to be damaged."""
    return [Path(path) for path in write_photos(tmp_path, 30)]


@pytest.fixture
def make(paths: list[Path]) -> Iterator[Any]:
    """Makes small loaders over them, labelled by their number, and closes them."""
    made: list[images.ImageLoader] = []

    def build(
        batch_size: int = 4, kind: Callable[..., images.ImageLoader] = images.train_loader, **options: Any
    ) -> images.ImageLoader:
        whole = WHOLE if kind is images.train_loader else {}
        options = {"size": 16, "threads": 2, **whole, **options}
        made.append(kind(paths, list(range(30)), batch_size, **options))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_file_is_named_where_its_batch_would_be(paths, make, damage, reason):
    before = list(make(kind=images.eval_loader))
    damage(paths[22])
    loader = make(kind=images.eval_loader)
    seen = []
    with pytest.raises(RuntimeError, match="cannot decode") as caught:
        seen.extend(loader)
    assert f"{str(paths[22])!r} ({reason})" in str(caught.value)
    assert str(caught.value).count(".jpg") == 1
    assert caught.value.__cause__ is not None
    assert len(seen) == 22 // 4
    for (x, y), (expected, labels) in zip(seen, before, strict=False):
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)
    assert loader.state_dict()["position"] == 20


def test_all_of_a_batch_are_named_and_the_loader_can_go_on_elsewhere(paths, make):
    text(paths[9])
    missing(paths[11])
    loader = make(kind=images.eval_loader)
    with pytest.raises(RuntimeError) as caught:
        list(loader)
    assert str(paths[9]) in str(caught.value)
    assert str(paths[11]) in str(caught.value)
    loader.load_state_dict({**loader.state_dict(), "position": 12})
    assert torch.cat([y for _, y in loader]).tolist() == list(range(12, 30))


def test_a_file_that_is_mended_is_read_in_the_next_epoch(paths, make):
    whole = make(1)
    label = int(list(whole)[-1][1])
    expected = torch.cat([x for x, _ in whole])
    sound = paths[label].read_bytes()
    text(paths[label])
    loader = make(1)
    with pytest.raises(RuntimeError, match="cannot decode"):
        list(loader)  # in the last batch, when the next epoch's first ones are under way
    paths[label].write_bytes(sound)
    assert torch.equal(torch.cat([x for x, _ in loader]), expected)


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_skipping_puts_the_next_good_file_there_and_nothing_else_changes(paths, make, damage, reason):
    sound = list(make(drop_last=False))
    for index in (7, 8, 29):
        damage(paths[index])
    loader = make(drop_last=False, on_error="skip")
    batches = list(loader)
    instead = {7: 9, 8: 9, 29: 0}
    for (x, y), (expected, labels) in zip(batches, sound, strict=True):
        assert y.tolist() == [instead.get(label, label) for label in labels.tolist()]
        kept = torch.tensor([label not in instead for label in labels.tolist()])
        assert torch.equal(x[kept], expected[kept])
        assert not any(
            torch.equal(image, other) for image, other in zip(x[~kept], expected[~kept], strict=True)
        )
    assert loader.skipped == {str(paths[index]): 1 for index in instead}
    list(loader)
    assert set(loader.skipped.values()) == {2}


def test_a_pass_left_while_its_batches_are_looked_at_leaves_nothing_to_the_next(paths, make):
    text(paths[int(list(make())[3][1][0])])
    whole = make(on_error="skip")
    list(whole)
    expected = list(whole)
    for stop in range(1, 4):
        loader = make(on_error="skip")
        list(islice(loader, stop))
        for (x, y), (image, label) in zip(loader, expected, strict=True):
            assert torch.equal(x, image)
            assert torch.equal(y, label)


def test_what_is_skipped_is_the_same_after_a_resume_and_at_other_numbers_of_ranks(paths, make):
    for index in (3, 4, 17):
        text(paths[index])
    whole = list(make(1, on_error="skip"))
    stopped = make(1, on_error="skip")
    list(islice(stopped, 10))
    rest = []
    ranks = [make(1, on_error="skip", rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(stopped.state_dict())
    for step in zip(*ranks, strict=True):
        rest += step
    for (x, y), (expected, labels) in zip(rest, whole[10:], strict=True):
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_is_skipped_in_an_evaluation_is_not_counted(paths, make, layout):
    options = {"kind": images.eval_loader, "layout": layout, "dtype": torch.bfloat16}
    sound = list(make(**options))
    text(paths[5])
    loader = make(**options, on_error="skip")
    for _ in range(2):
        batches = list(loader)
        labels = torch.cat([y for _, y in batches]).tolist()
        assert labels == [label if label != 5 else -100 for label in range(30)]
        x, expected = (torch.cat([x for x, _ in some]) for some in (batches, sound))
        assert torch.equal(x[5], expected[6])
        assert torch.equal(x[:5], expected[:5])
        assert torch.equal(x[6:], expected[6:])
    assert loader.skipped == {str(paths[5]): 2}


def test_only_what_was_handed_over_is_counted(paths, make):
    text(paths[14])
    loader = make(1, kind=images.eval_loader, on_error="skip")
    list(islice(loader, 14))  # it has been found by now, being made ahead
    assert loader.skipped == {}
    list(islice(loader, 15))
    assert loader.skipped == {str(paths[14]): 1}


@pytest.mark.parametrize("kind", [images.train_loader, images.eval_loader])
def test_a_data_set_that_is_gone_is_no_endless_search(paths, make, monkeypatch, kind):
    monkeypatch.setattr(one_by_one, "PATIENCE", 5)
    loader = make(kind=kind, on_error="skip")
    before = next(iter(loader))[1]
    for path in paths:
        missing(path)
    with pytest.raises(
        RuntimeError, match=r"cannot decode 5 files in a row, from '.*No such file.*in its place"
    ):
        list(loader)
    assert (before >= 0).all()


def test_a_file_known_to_be_damaged_holds_up_no_other(paths, make, monkeypatch):
    """Of later epochs' batches none fails, and only what is suspected is decoded by itself."""
    for index in (3, 4, 17):
        text(paths[index])
    expected = make(on_error="skip", drop_last=False)
    first, second = list(expected), list(expected)
    made: list[int] = []
    build = Engine.__init__

    def note(engine: Engine, recipe: Any, batch_size: int, threads: int, ahead: int) -> None:
        made.append(batch_size)
        build(engine, recipe, batch_size, threads, ahead)

    loader = make(on_error="skip", drop_last=False)
    assert all(torch.equal(x, other) for (x, _), (other, _) in zip(loader, first, strict=True))
    monkeypatch.setattr(Engine, "__init__", note)
    for (x, y), (image, label) in zip(loader, second, strict=True):
        assert torch.equal(x, image)
        assert torch.equal(y, label)
    assert set(made) <= {1}
    assert len(made) <= 8  # 3 files, and 4 once more as what might take the place of 3, in two epochs at most


def test_any_number_of_damaged_batches_costs_no_stack():
    """In a thread of little stack, against iterators nested in each other."""
    script = """if True:
        import threading
        from collections import deque
        from itertools import count
        from overlapkit.input.images import supply

        class Broken:
            full = property(lambda self: len(self.jobs) == 4)
            def __init__(self, *args): self.jobs = deque()
            def push(self, job): self.jobs.append(job)
            def pull(self): raise RuntimeError("damaged")

        class OneByOne:
            def __init__(self, recipe): pass
            def mend(self, job): pass
            def close(self): pass
            def make(self, job): return f"images of {job}", ["damaged.jpg"]

        supply.Engine, supply.OneByOne = Broken, OneByOne
        def run():
            one = supply.Supply(None, 1, 1, 2, True)
            one.begin(count())
            for job in range(10_000):
                assert one.take() == (job, f"images of {job}")
            print("done")
        threading.stack_size(256 * 1024)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    """
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError("no more"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Error in pipeline: CUDA allocation failed. Can't allocate 99 bytes on device 0."),
        RuntimeError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_a_machine_that_is_short_of_memory_is_no_damaged_file(paths, make, monkeypatch, failure):
    text(paths[0])
    pull = Engine.pull

    def fail(engine: Engine) -> Any:
        if len(engine.jobs) == 1:
            raise failure
        return pull(engine)

    monkeypatch.setattr(Engine, "pull", fail)
    loader = make(kind=images.eval_loader, on_error="skip")
    with pytest.raises(type(failure), match=str(failure)) as caught:
        list(loader)
    assert f"while {str(paths[0])!r} was decoded" in str(caught.value.__notes__)
    assert loader.skipped == {}


def test_a_process_that_can_open_no_more_files_has_no_damaged_file(paths, make, monkeypatch):
    text(paths[0])

    def refuse(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(one_by_one, "open", refuse, raising=False)
    with pytest.raises(OSError, match="Too many open files"):
        list(make(kind=images.eval_loader, on_error="skip"))


def test_a_failure_that_is_no_files_fault_is_not_blamed_on_one(make, monkeypatch):
    """Each image can be decoded by itself, so what DALI said is what there is to say."""
    pull = Engine.pull

    def fail(engine: Engine) -> Any:
        if len(engine.jobs) > 2:
            raise RuntimeError("out of memory")
        return pull(engine)

    monkeypatch.setattr(Engine, "pull", fail)
    with pytest.raises(RuntimeError, match="DALI failed, though each image") as caught:
        list(make())
    assert "out of memory" in str(caught.value.__cause__)


def test_damage_leaves_no_thread_and_no_descriptor_behind(paths, make):
    for path in paths[::5]:
        cut_short(path)
    loader = make(on_error="skip")

    def count() -> list[int]:
        gc.collect()  # cycles, and what earlier tests left
        return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]

    list(loader)
    before = count()
    for _ in range(5):
        list(loader)
    assert count() == before
