"""Whatever lane is late at a hand-over, every batch has its values: nested, lent, reused, transformed.

And images on their way through DALI, and batches of which ranks agree first that all have them.
"""

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.input import DeviceLoader
from overlapkit.input.images import engine, train_loader
from overlapkit.input.landing import Empty
from overlapkit.lane import Lane
from tests.cuda_fake import fake_cuda
from tests.input.images.photos import write_photos
from tests.ranks import run_ranks

BATCHES = 6
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.int64]


class Pair(NamedTuple):
    x: Any
    y: Any


LEAVES = st.tuples(
    st.sampled_from(["own", "lent", "view", "name"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(DTYPES),
)
SHAPES = st.recursive(
    LEAVES.map(lambda leaf: ("leaf", leaf)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: ("list", items)),
        st.tuples(inner, inner).map(lambda items: ("pair", list(items))),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda items: ("dict", items)),
    ),
    max_leaves=6,
)


def make(shape: Any, k: int, empty: Empty) -> Any:
    """Batch number `k` of a shape: its tensors hold k."""
    kind, content = shape
    if kind == "list":
        return [make(item, k, empty) for item in content]
    if kind == "pair":
        return Pair(*(make(item, k, empty) for item in content))
    if kind == "dict":
        return {key: make(item, k, empty) for key, item in content.items()}
    where, size, dtype = content
    if where == "name":
        return f"batch {k}"
    if where == "lent":
        return empty(tuple(size), dtype).fill_(k)
    whole = torch.full((*size, 2), k, dtype=dtype)
    return whole[..., 0] if where == "view" else whole


class Source:
    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __iter__(self) -> Iterator[Any]:
        return self.iter_into(lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def iter_into(self, empty: Empty) -> Iterator[Any]:
        for k in range(BATCHES):
            yield make(self.shape, k, empty)


def values(batch: Any, factor: int = 1) -> Any:
    """A batch as plain values, each tensor read on the current stream and multiplied."""
    if isinstance(batch, dict):
        return {key: values(item, factor) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return [type(batch).__name__, *(values(item, factor) for item in batch)]
    if isinstance(batch, torch.Tensor):
        read = batch * factor
        return read.raw.tolist() if read.is_cuda else read.tolist()
    return batch


def doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: doubled(item) for key, item in batch.items()}
    if isinstance(batch, list):
        return [doubled(item) for item in batch]
    if isinstance(batch, Pair):
        return Pair(*map(doubled, batch))
    return batch * 2 if isinstance(batch, torch.Tensor) else batch


def lanes_late(late: set[str]) -> Any:
    """Lanes of these names idle before each piece of work."""
    return mock.patch.object(Lane, "delay_s", property(lambda lane: 0.002 if lane.name in late else 0.0))


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    device=st.sampled_from(["cpu", "cuda"]),
    late=st.sets(st.sampled_from(["input", "transfer"])),
    depth=st.integers(1, 3),
    reuse=st.booleans(),
    transform=st.booleans(),
    switch=st.booleans(),
    stops=st.lists(st.integers(0, BATCHES), min_size=1, max_size=3),
)
def test_late_lanes_change_no_value(
    shape: Any,
    device: str,
    late: set[str],
    depth: int,
    reuse: bool,
    transform: bool,
    switch: bool,
    stops: list[int],
) -> None:
    factor = 2 if transform else 1
    want = [values(batch, factor) for batch in Source(shape)]
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(fake_cuda()) if device == "cuda" else None
        stack.enter_context(lanes_late(late))
        loader = DeviceLoader(
            Source(shape),
            device,
            depth=depth,
            reuse_buffers=reuse,
            transform=doubled if transform else None,
        )
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if machine else []
        held: list[Any] = []
        for stop in stops:
            passing = iter(loader)
            for k in range(stop):
                with torch.cuda.stream(streams[k % 2]) if machine and switch else contextlib.nullcontext():
                    batch = next(passing)
                    assert values(batch) == want[k]
                    held.append((k, batch))
            passing.close()
        if not reuse and not switch:  # then a batch stays what it was
            assert [values(batch) for _, batch in held] == [want[k] for k, _ in held]
        held.clear()
        batch = None
        loader.close()
        del loader, passing
        gc.collect()
        assert machine is None or machine.faults == []


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "late", [{"images"}, {"input", "transfer"}, {"push"}, {"pull"}], ids=lambda late: "+".join(sorted(late))
)
def test_late_lanes_change_no_image(tmp_path: Path, late: set[str], device: str, reuse: bool) -> None:
    """`push` and `pull` hand over to DALI's pipelines, from the one to the other, and from the last to us."""
    pytest.importorskip("nvidia.dali", reason="needs DALI (extra images)")
    write_photos(tmp_path, 9)

    def make() -> Any:
        return train_loader(tmp_path, None, 2, size=8, threads=1, prefetch=2, device="cpu")

    with contextlib.closing(make()) as plain:
        want = [[(values(x), values(y)) for x, y in plain] for _ in range(2)]
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(fake_cuda()) if device == "cuda" else None
        stack.enter_context(lanes_late(late))
        for name in {"push", "pull"} & late:
            stack.enter_context(mock.patch.object(engine._Runs, name, slowly(getattr(engine._Runs, name))))
        images = stack.enter_context(contextlib.closing(make()))
        loader = DeviceLoader(images, device, reuse_buffers=reuse)
        for epoch, stop in ((0, 1), (0, 3), (1, 4)):
            loader.set_epoch(epoch)
            held = []
            for k, (x, y) in enumerate(islice(loader, stop)):
                assert (values(x), values(y)) == want[epoch][k]
                held.append((k, x, y))
            if not reuse:
                assert [(values(x), values(y)) for _, x, y in held] == [want[epoch][k] for k, _, _ in held]
        del held, x, y
        loader.close()
        gc.collect()
        assert machine is None or machine.faults == []


def slowly(run: Any) -> Any:
    def wrapped(*args: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return run(*args, **options)

    return wrapped


@pytest.mark.parametrize("mode", ["drop", "join"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("late", [{"agree", "transfer"}, {"input"}], ids=lambda late: "+".join(sorted(late)))
def test_late_lanes_change_no_value_that_ranks_agree_on(
    mode: Any, device: str, slow_rank: int, late: set[str]
) -> None:
    sizes = [5, 7]

    def run(rank: int) -> None:
        def source() -> Iterator[Any]:
            return ({"x": torch.full((3,), 10 * rank + k), "k": [k]} for k in range(sizes[rank]))

        steps = range(5 if mode == "drop" else 7)
        want = [10 * rank + min(k, sizes[rank] - 1) for k in steps]
        with contextlib.ExitStack() as stack:
            machine = stack.enter_context(fake_cuda()) if device == "cuda" else None
            stack.enter_context(lanes_late(late if rank == slow_rank else set()))
            loader = DeviceLoader(source, device, uneven=mode)
            for stop in (3, 9, 9):
                held = list(islice(told(loader, mode), stop))
                assert [values(batch["x"]) for batch, _ in held] == [[value] * 3 for value in want[:stop]]
                assert [filler for _, filler in held] == [k >= sizes[rank] for k in steps][:stop]
                del held
            loader.close()
            gc.collect()
            assert machine is None or machine.faults == []

    run_ranks(2, run)


def told(loader: DeviceLoader, mode: str) -> Iterator[tuple[Any, bool]]:
    with contextlib.ExitStack() as stack:
        if mode == "drop":
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "uneven='drop'")
        for batch in loader:
            yield batch, loader.filler
