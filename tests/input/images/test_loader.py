"""Passes, states and ends of an image loader: what follows a stop is as if there had been none."""

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from overlapkit.input import DeviceLoader, images
from overlapkit.input.images import loader as loader_module
from overlapkit.input.images.engine import Engine
from tests.input.images.photos import write_photos

pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def make(photos: Any) -> Any:
    """Makes small loaders, and closes them."""
    made = []

    def build(
        batch_size: int = 6, kind: Callable[..., images.ImageLoader] = images.train_loader, **options: Any
    ):
        made.append(kind(photos, None, batch_size, **{"size": 16, "threads": 1, **options}))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def same(batches: list[Batch], others: list[Batch]) -> bool:
    return len(batches) == len(others) and all(
        torch.equal(x, other_x) and torch.equal(y, other_y)
        for (x, y), (other_x, other_y) in zip(batches, others, strict=True)
    )


def epochs(loader: Any, count: int) -> list[list[Batch]]:
    return [list(loader) for _ in range(count)]


def test_epochs_have_other_crops_and_another_order(make):
    loader = make(drop_last=False)
    first, second = epochs(loader, 2)
    assert [len(x) for x, _ in first] == [6, 6, 6, 6, 6, 6, 4]
    assert not any(torch.equal(x, other) for x, _ in first for other, _ in second)
    assert [loader.epoch, loader.state_dict()["position"]] == [1, 40]
    assert same(first, list(make(drop_last=False)))
    assert not same(first, list(make(drop_last=False, seed=1)))
    loader.set_epoch(0)
    assert same(first, list(loader))


@pytest.mark.parametrize(("prefetch", "threads"), [(1, 1), (1, 3), (3, 2), (9, 1)])
def test_how_far_ahead_and_in_how_many_threads_makes_no_difference(make, prefetch, threads):
    expected = epochs(make(drop_last=False), 3)
    ahead = epochs(make(drop_last=False, prefetch=prefetch, threads=threads), 3)
    assert all(same(one, other) for one, other in zip(ahead, expected, strict=True))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_stop_after_any_batch_is_as_if_there_had_been_none(make, drop_last):
    whole = make(drop_last=drop_last)
    first, second = epochs(whole, 2)
    for stop in range(len(first) + 1):
        stopped, resumed = make(drop_last=drop_last), make(drop_last=drop_last)
        before = list(islice(stopped, stop))
        resumed.load_state_dict(stopped.state_dict())
        after = list(resumed)
        following = second if stop == len(first) else first[stop:]
        assert same(before, first[:stop])
        assert same(after, following)
        assert same(list(resumed), second) or stop == len(first)


def test_a_second_resume_in_one_epoch_and_a_state_loaded_twice(make):
    unbroken = make()
    whole = list(unbroken)
    assert unbroken.state_dict()["position"] == 40  # 4 images that fill no batch are done with, too
    one = make()
    assert same(list(islice(one, 2)), whole[:2])
    state = one.state_dict()
    one.load_state_dict(state)
    assert same(list(islice(one, 2)), whole[2:4])
    other = make()
    other.load_state_dict(one.state_dict())
    other.load_state_dict(one.state_dict())
    assert same(list(other), whole[4:])


def test_other_numbers_of_ranks_go_on_with_the_same_images(make):
    """4, then 3, then 8 ranks: together they see the epoch of one, each image with the crop it has there."""
    whole = list(make(1, drop_last=False))
    seen, state = [], None
    for world, batches in ((4, 2), (3, 1), (8, 9)):
        ranks = [make(2, rank=rank, world_size=world, drop_last=False) for rank in range(world)]
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        dealt = [list(islice(rank, batches)) for rank in ranks]
        for step in zip(*dealt, strict=True):
            for row in range(max(len(x) for x, _ in step)):
                seen += [(x[row : row + 1], y[row : row + 1]) for x, y in step]
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert same(seen[:40], whole)
    assert len(seen) < 48


def test_where_no_batch_is_left_for_so_many_ranks_the_next_epoch_follows(make):
    second = torch.cat([y for _, y in epochs(make(1), 2)[1]])
    two = make(2, rank=0, world_size=2)
    list(islice(two, 9))
    assert two.state_dict()["position"] == 36
    for rank in range(3):
        one = make(2, rank=rank, world_size=3)
        one.load_state_dict(two.state_dict())
        assert torch.equal(torch.cat([y for _, y in one]), second[:36][rank::3])
        assert one.epoch == 1


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_a_device_loader_resumes_it(make, depth, stop):
    whole = make()
    first, second = epochs(whole, 2)
    reader = DeviceLoader(make(), "cpu", depth=depth)
    assert same(list(islice(reader, stop)), first[:stop])
    again = DeviceLoader(make(), "cpu", depth=depth)
    again.load_state_dict(reader.state_dict())
    assert same(list(again), first[stop:] or second)
    reader.close()
    again.close()


def test_a_device_loader_goes_on_at_another_number_of_ranks(make):
    """4, then 3 ranks: together they see the epoch of one."""
    whole = list(make(1, drop_last=False))
    seen, state = [], None
    for world, batches in ((4, 2), (3, 4)):
        ranks = [
            DeviceLoader(make(2, rank=rank, world_size=world, drop_last=False), "cpu")
            for rank in range(world)
        ]
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        dealt = [list(islice(rank, batches)) for rank in ranks]
        for step in zip(*dealt, strict=True):
            seen += [(x[row : row + 1], y[row : row + 1]) for row in range(2) for x, y in step]
        state = ranks[0].state_dict()
        for rank in ranks:
            rank.close()
    assert same(seen, whole)


def test_torchdata_nodes_resume_it(make):
    nodes = pytest.importorskip("torchdata.nodes", reason="needs torchdata (extra data)")

    def chain() -> Any:
        return nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(make()), prefetch_factor=2))

    first, second = epochs(make(), 2)
    stopped = chain()
    assert same(list(islice(stopped, 4)), first[:4])
    resumed = chain()
    resumed.load_state_dict(stopped.state_dict())
    assert same(list(resumed), first[4:])
    assert same(list(resumed), second)


def test_an_evaluation_has_every_image_once_at_any_number_of_ranks(make):
    whole = list(make(7, images.eval_loader))
    assert [len(x) for x, _ in whole] == [7, 7, 7, 7, 7, 5]
    ranks = [make(7, images.eval_loader, rank=rank, world_size=3) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [2, 2, 2]
    parts = [[torch.cat(part) for part in zip(*rank, strict=True)] for rank in ranks]
    x = torch.stack([part[0] for part in parts], 1).flatten(0, 1)
    y = torch.stack([part[1] for part in parts], 1).flatten()
    assert y.tolist()[40:] == [-100, -100]
    assert torch.equal(x[:40], torch.cat([x for x, _ in whole]))
    assert torch.equal(y[:40], torch.cat([y for _, y in whole]))


def test_a_state_over_other_files_is_refused(make, photos):
    state = make().state_dict()
    files = sorted(photos.rglob("*.jpg"), reverse=True)
    other = images.train_loader(files, [0] * 40, 6, size=16)
    with pytest.raises(ValueError, match="state has files=.*means another sample"):
        other.load_state_dict(state)
    with pytest.raises(TypeError, match="state is a int"):
        other.load_state_dict(3)  # type: ignore[arg-type]
    other.close()


def test_there_is_one_iterator_at_a_time(make):
    loader = make()
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match="useless when a newer one was made"):
        next(older)
    next(newer)
    loader.close()
    with pytest.raises(RuntimeError, match="or the loader was closed"):
        next(newer)
    assert len(list(loader)) == 6  # and it can be used again


def test_the_start_runs_in_the_background_and_its_error_comes_out_whole(make, monkeypatch):
    began, go = threading.Event(), threading.Event()

    def fail(*args: Any) -> None:
        began.set()
        assert go.wait(20)
        raise OSError("no threads left")

    monkeypatch.setattr(Engine, "__init__", fail)
    loader = make()
    assert began.wait(20)  # before anybody has asked for a batch
    go.set()
    with pytest.raises(OSError, match="no threads left") as caught:
        iter(loader)
    assert any(entry.name == "fail" for entry in caught.traceback)
    monkeypatch.undo()
    assert len(list(loader)) == 6


def test_a_start_that_takes_too_long_says_so(make, monkeypatch):
    go = threading.Event()
    build = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda *args: go.wait(20) and build(*args))
    monkeypatch.setattr(loader_module, "PATIENCE_S", 0.01)
    loader = make()
    with pytest.raises(TimeoutError, match="lane 'images': the work was not done after"):
        iter(loader)
    go.set()
    monkeypatch.setattr(loader_module, "PATIENCE_S", 20.0)
    assert len(list(loader)) == 6


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["_to_torch", "_decode_next", "push"])
def test_an_interrupt_never_gives_images_the_labels_of_others(make, monkeypatch, step):
    whole = list(make())
    loader = make()
    batches = iter(loader)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            deque(batches)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert same(list(loader), whole[state["position"] // 6 :])


def test_a_forgotten_loader_ends_its_threads(make, photos):
    list(make())  # DALI's own lasting threads
    before = len(os.listdir("/proc/self/task"))
    loader = images.train_loader(photos, None, 6, size=16, threads=2)
    next(iter(loader))
    assert len(os.listdir("/proc/self/task")) > before
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/task")) <= before


def open_things() -> list[int]:
    gc.collect()  # cycles, and what earlier tests left
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]


def fall_back_to(before: list[int]) -> bool:
    """Whether no more is open than before, in the end: a joined thread is listed for a moment more."""
    end = time.monotonic() + 20
    while open_things() != before and time.monotonic() < end:
        time.sleep(0.01)
    return open_things() == before


@pytest.mark.parametrize("through", [nullcontext, lambda loader: closing(DeviceLoader(loader, "cpu"))])
def test_early_breaks_leave_no_thread_and_no_descriptor(make, through):
    loader = make()

    def leave_early(times: int) -> None:
        with through(loader) as batches:
            for _ in range(times):
                assert len(list(islice(batches, 2))) == 2

    leave_early(3)
    time.sleep(0.2)
    before = open_things()
    leave_early(20)
    assert fall_back_to(before)


@pytest.mark.parametrize("body", ["pass", "batches = iter(loader); next(batches)"])
def test_a_script_that_ends_in_the_middle_ends_well(photos, body):
    script = f"""if True:
        import sys
        from overlapkit.input import images
        loader = images.train_loader(sys.argv[1], None, 6, size=16, threads=2)
        {body}
    """
    command = [sys.executable, "-W", "error", "-c", script, str(photos)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_told_to_make_its_own(make):
    """None of DALI's threads are in it: it would wait for them for ever."""
    loader = make()
    batches = iter(loader)
    next(batches)

    def child(results: Any) -> None:
        for use in (lambda: next(iter(loader)), lambda: next(batches)):
            try:
                use()
            except RuntimeError as error:
                results.put(str(error))
        loader.close()
        results.put("closed")

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(results,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is the question
        process.start()
    process.join(30)
    hung = process.is_alive()
    process.kill()
    assert not hung
    said = [results.get() for _ in range(3)]
    assert said[2] == "closed"
    assert all(f"made in process {os.getpid()}, before the fork" in text for text in said[:2])
    assert len(list(make())) == 6


def test_the_first_damaged_files_are_named_and_more_of_them_counted(tmp_path, make, monkeypatch, caplog):
    monkeypatch.setattr(loader_module, "_NAMED", 2)
    paths = write_photos(tmp_path, 20)
    for path in paths[:5]:
        Path(path).write_bytes(b"")
    loader = images.eval_loader(paths, [0] * 20, 4, size=16, on_error="skip")
    with caplog.at_level(logging.WARNING, "overlapkit"):
        epochs(loader, 2)
    loader.close()
    assert [record.message for record in caplog.records] == [
        f"cannot decode {paths[0]!r} (empty): another file takes its place",
        f"cannot decode {paths[1]!r} (empty): another file takes its place",
        "cannot decode 4 files so far: `skipped` names them",
    ]
    assert loader.skipped == dict.fromkeys(paths[:5], 2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [images.train_loader, images.eval_loader])
def test_a_gpu_decodes_what_the_cpu_does(make, kind):
    """Its decoder and its resizing round differently: by a few levels of 255, here and there."""
    there, here = make(8, kind, device="cuda", size=64), make(8, kind, device="cpu", size=64)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for (x, y), (expected, labels) in zip(there, here, strict=True):
            assert x.is_cuda
            assert y.is_cuda
            difference = (x.cpu() - expected).abs()
            assert difference.mean() < 0.02
            assert torch.equal(y.cpu(), labels)


@pytest.mark.gpu
def test_a_gpus_batches_go_through_a_device_loader_and_resume(make):
    whole = list(make(device="cuda"))
    stopped, resumed = (DeviceLoader(make(device="cuda"), "cuda") for _ in range(2))
    first = list(islice(stopped, 3))
    resumed.load_state_dict(stopped.state_dict())
    for (x, y), (expected, labels) in zip([*first, *resumed], whole, strict=True):
        assert x.is_cuda
        assert (x - expected).abs().mean() < 0.02
        assert torch.equal(y, labels)
    stopped.close()
    resumed.close()
