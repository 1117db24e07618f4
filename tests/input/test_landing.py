"""Sources that make their batches in the memory that they are copied from, under the recorder."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import overlapkit as ok
from overlapkit.input import Mixture, TokenShards
from overlapkit.input.landing import Empty, Landing
from overlapkit.pinned import PinnedBuffer, PinnedRing
from tests.cuda_fake import FakeCuda, fake_cuda
from tests.input.token_sets import write_set

Make = Callable[[int, Empty], Any]


class Into:
    """Makes each batch with `make(k, empty)`, in memory that the loader lends where it does."""

    def __init__(self, make: Make, n: int = 8) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return self.iter_into(lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def iter_into(self, empty: Empty) -> Iterator[Any]:
        for k in range(self.n):
            yield self.make(k, empty)


@pytest.fixture
def machine() -> Iterator[FakeCuda]:
    with fake_cuda() as made:
        yield made
        gc.collect()
        torch.cuda.synchronize()
        assert made.faults == []


def filled(empty: Empty, shape: tuple[int, ...], dtype: torch.dtype, value: int) -> torch.Tensor:
    return empty(shape, dtype).fill_(value)


def tokens(k: int, empty: Empty) -> Any:
    return filled(empty, (3, 5), torch.int32, k)


def pair(k: int, empty: Empty) -> Any:
    return {
        "x": filled(empty, (4, 3), torch.float32, k),
        "y": [filled(empty, (700,), torch.uint8, k), k],
        "none": empty((0, 2), torch.int64),
    }


def partly(k: int, empty: Empty) -> Any:
    return [torch.full((5,), k), filled(empty, (2, 2), torch.int16, k), torch.full((2000,), k)]


def growing(k: int, empty: Empty) -> Any:
    return [filled(empty, (1500 * k + 1,), torch.int64, k), filled(empty, (900 * k,), torch.int64, k)]


def parts(k: int, empty: Empty) -> Any:
    """Views of what was lent, overlapping ones too, and what cannot be packed."""
    whole = filled(empty, (6, 4), torch.float32, k)
    return [whole[2:], whole.t(), whole[:, 1], whole.clone().requires_grad_(), whole[3:].requires_grad_()]


def unpackable(k: int, empty: Empty) -> Any:
    return filled(empty, (9,), torch.float32, k).requires_grad_()


def scratch(k: int, empty: Empty) -> Any:
    """Asks for more than it hands out, or for all it needs and then makes it elsewhere."""
    empty((300,), torch.float64).fill_(-1)
    return torch.full((3,), k) if k % 2 else filled(empty, (3,), torch.int64, k)


MAKES = {make.__name__: make for make in (tokens, pair, partly, growing, parts, unpackable, scratch)}


def on_host(batch: Any) -> Any:
    """A batch's values, each read on the current stream."""
    if isinstance(batch, dict):
        return {key: on_host(item) for key, item in batch.items()}
    if isinstance(batch, list):
        return [on_host(item) for item in batch]
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().raw.tolist() if batch.is_cuda else batch.tolist()
    return batch


def packed(loader: ok.DeviceLoader) -> int:
    return sum(span.bytes or 0 for span in loader.timings() if span.name == "pack")


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("name", MAKES)
def test_values_order_and_bound(machine: FakeCuda, name: str, pin: bool, depth: int) -> None:
    source = Into(MAKES[name])
    want = [on_host(batch) for batch in source]
    loader = ok.DeviceLoader(source, "cuda", depth=depth, pin=pin)
    for stop in (3, 8, 8):
        got = [on_host(batch) for _, batch in zip(range(stop), loader, strict=False)]
        assert got == want[:stop]
    (mover,) = loader._feed._idle
    largest = max(nbytes for nbytes, _ in machine.copies)
    assert mover.nbytes <= (depth + 1) * (largest + 4095)
    del mover
    loader.close()


def test_nothing_is_packed_and_one_copy_moves_a_batch(machine: FakeCuda) -> None:
    loader = ok.DeviceLoader(Into(tokens), "cuda")
    list(loader)
    assert packed(loader) == 0
    assert machine.copies == [(512, True)] * 8


def test_the_second_batch_finds_room_for_all_of_it(machine: FakeCuda) -> None:
    """The first asks for 5,000 bytes in two parts, of which one page holds the first only."""

    def two(k: int, empty: Empty) -> Any:
        return filled(empty, (2500,), torch.uint8, k), filled(empty, (2500,), torch.uint8, k)

    loader = ok.DeviceLoader(Into(two), "cuda")
    list(loader)
    assert packed(loader) == 5000
    list(loader)
    assert packed(loader) == 0


def test_what_was_made_elsewhere_is_packed_behind_it(machine: FakeCuda) -> None:
    loader = ok.DeviceLoader(Into(partly), "cuda")
    list(loader)
    loader.timings()
    list(loader)
    assert packed(loader) == 8 * (40 + 16000)
    assert set(machine.copies[8:]) == {(512 + 512 + 16384, True)}


def test_shared_memory_stays_shared_and_strides_survive(machine: FakeCuda) -> None:
    first, *_ = ok.DeviceLoader(Into(parts), "cuda", depth=1)
    rows, turned, column = first[:3]
    assert (rows.stride(), turned.stride(), column.stride()) == ((4, 1), (1, 4), (4,))
    rows[0, 1] = 7
    assert on_host(turned)[1][2] == on_host(column)[2] == 7


def test_transform_comes_after_the_copy(machine: FakeCuda) -> None:
    loader = ok.DeviceLoader(Into(tokens), "cuda", transform=lambda batch: batch * 2)
    assert [on_host(batch)[0][0] for batch in loader] == [2 * k for k in range(8)]


@pytest.mark.parametrize("end", [StopIteration, LookupError])
def test_a_pull_that_comes_to_nothing_gives_its_memory_back(machine: FakeCuda, end: type[Exception]) -> None:
    class Ends(Into):
        def iter_into(self, empty: Empty) -> Iterator[Any]:
            return self

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.n += 1
            batch = filled(empty_of[0], (4,), torch.int64, self.n)
            if self.n % 3 == 0:
                raise end
            return batch

    empty_of: list[Empty] = []

    class Source:
        ends = Ends(tokens, 0)

        def __iter__(self) -> Any:
            raise AssertionError("a GPU's loader reads into its own memory")

        def iter_into(self, empty: Empty) -> Any:
            empty_of[:] = [empty]
            return self.ends

    loader = ok.DeviceLoader(Source(), "cuda", depth=1)
    for epoch in range(6):  # more often than there are buffers
        got = []
        try:
            got += [on_host(batch)[0] for batch in loader]
        except LookupError:
            got += [3 * epoch + 1, 3 * epoch + 2]
        assert got == [3 * epoch + 1, 3 * epoch + 2]
    (mover,) = loader._feed._idle
    assert len(mover._ring._free) == 2
    del mover
    loader.close()


def test_a_batch_that_nobody_wants_any_more_gives_its_memory_back(machine: FakeCuda) -> None:
    def stopping(k: int, empty: Empty) -> Any:
        if k == 2:
            passes[-1]._reader.stopped = True
        return filled(empty, (4,), torch.int64, k)

    loader = ok.DeviceLoader(Into(stopping), "cuda", depth=1)
    passes: list[Any] = []
    for _ in range(4):
        passes.append(iter(loader))
        assert [on_host(next(passes[-1]))[0] for _ in range(2)] == [0, 1]
        passes[-1].close()
    (mover,) = loader._feed._idle
    assert len(mover._ring._free) == 2
    del mover
    loader.close()


def test_memory_asked_for_outside_of_a_pull_is_the_source_s_own() -> None:
    ring = PinnedRing(2, pin=False)
    landing = Landing(ring)
    kept = landing.empty((8,), torch.int64).fill_(3)
    with landing:
        lent = landing.empty((8,), torch.int64).fill_(4)
        packing, buffers = landing.lay_out([lent, kept])
        assert packing.views(buffers[0].bytes(packing.nbytes))[0].data_ptr() == lent.data_ptr()
        buffers[0].give_back()
    assert landing.empty((8,), torch.int64).untyped_storage().nbytes() == 64
    assert ring.nbytes == 4096
    assert kept.tolist() == [3] * 8


def test_on_the_cpu_the_source_keeps_its_own_memory() -> None:
    class Plain(Into):
        def iter_into(self, empty: Empty) -> Iterator[Any]:
            raise AssertionError

        def __iter__(self) -> Iterator[Any]:
            return iter([1, 2])

    assert list(ok.DeviceLoader(Plain(tokens), "cpu")) == [1, 2]


def test_a_stateful_source_reads_into_it_too(machine: FakeCuda) -> None:
    class Stateful(Into):
        at = 0

        def iter_into(self, empty: Empty) -> Iterator[Any]:
            while self.at < self.n:
                self.at += 1
                yield self.make(self.at, empty)
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = ok.DeviceLoader(Stateful(tokens), "cuda")
    for _ in zip(range(3), loader, strict=False):
        pass
    other = ok.DeviceLoader(Stateful(tokens), "cuda")
    other.load_state_dict(loader.state_dict())
    assert [on_host(batch)[0][0] for batch in other] == [4, 5, 6, 7, 8]
    assert packed(other) == 0
    loader.close()


@pytest.mark.parametrize("pack", ["windows", "documents"])
@pytest.mark.parametrize("mixed", [False, True])
def test_token_shards_are_gathered_straight_into_it(
    machine: FakeCuda, tmp_path: Path, pack: Any, mixed: bool
) -> None:
    folders = [write_set(tmp_path / str(k), [30, 50, 41], first=1000 * k) for k in range(2)]

    def make() -> Any:
        parts = {folder.name: TokenShards(folder, 8, 2, seed=3, pack=pack) for folder in folders}
        return Mixture(parts, {"0": 1, "1": 2}) if mixed else parts["0"]

    def rows(batches: Any) -> list[Any]:
        return [on_host(list(batch)) for _, batch in zip(range(7), batches, strict=False)]

    want = rows(make())
    loader = ok.DeviceLoader(make(), "cuda", depth=2)
    assert rows(loader) == want
    assert packed(loader) <= 512 * 3  # at most what did not fit in the first batch
    loader.load_state_dict(loader.state_dict())
    for _ in zip(range(3), loader, strict=False):
        pass
    assert packed(loader) == 0
    assert len(machine.copies) >= 7
    loader.close()


def test_the_recorder_sees_memory_that_is_lent_before_its_copy_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_back = PinnedBuffer.give_back
    monkeypatch.setattr(PinnedBuffer, "give_back", lambda buffer, after=None: give_back(buffer))
    with fake_cuda() as machine:
        list(ok.DeviceLoader(Into(tokens), "cuda", depth=1))
        assert any("host memory" in fault for fault in machine.faults)


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [True, False])
def test_gpu_values_under_load(pin: bool) -> None:
    def large(k: int, empty: Empty) -> Any:
        return filled(empty, (1 << 19,), torch.float32, k), torch.full((1 << 18,), float(k))

    loader = ok.DeviceLoader(Into(large, 40), "cuda", depth=1, pin=pin)
    weight = torch.randn(2048, 2048, device="cuda")
    sums = []
    for lent, other in loader:
        weight = torch.tanh(weight @ weight)
        sums.append((lent.double().sum(), lent.min(), lent.max(), other.double().sum()))
    for k, (total, low, high, rest) in enumerate(sums):
        assert (total.item(), low.item(), high.item(), rest.item()) == (k << 19, k, k, k << 18)
    if pin:
        assert packed(loader) <= (1 << 20) * 40 + (1 << 21)
    loader.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_that_are_dropped_on_the_way_take_no_memory_beside_the_next(
    machine: FakeCuda, depth: int
) -> None:
    def page(k: int, empty: Empty) -> Any:
        return filled(empty, (4096,), torch.uint8, k)

    def build() -> ok.DeviceLoader:
        return ok.DeviceLoader(Into(page, 40), "cuda", depth=depth, drop_through=True)

    first = build()
    for _ in zip(range(30), first, strict=False):
        pass
    loader = build()
    loader.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="30 batches that were taken before"):
        passing = iter(loader)
    assert [on_host(batch)[0] for batch in passing] == list(range(30, 40))
    (mover,) = loader._feed._idle
    assert mover.nbytes <= (depth + 1) * 4096
    assert packed(loader) == 0
    del mover
    first.close()
    loader.close()
