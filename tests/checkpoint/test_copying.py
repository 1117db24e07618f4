"""Copies into one stretch of memory: every byte is the source's, whoever copied it."""

import threading

import pytest
import torch

from overlapkit.checkpoint import copying
from overlapkit.checkpoint.copying import Portion, SharedCopy, portions
from overlapkit.checkpoint.pieces import DTYPES
from tests.checkpoint.faults import in_child


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(copying, "_AT_ONCE", 1000)
    monkeypatch.setattr(copying, "_PART", 1500)


def some_tensors():
    """Of all dtypes, the widest first, so that each starts aligned; of many sizes and layouts."""
    torch.manual_seed(0)
    found = []
    for dtype in DTYPES:
        for shape in ((), (1,), (3,), (130,), (700,), (40, 2), (5000,), (30, 31)):
            whole = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8)
            if dtype == torch.bool:
                whole = whole & 1
            value = whole.view(dtype).view(shape)
            found += [value, value.t()] if value.dim() == 2 else [value]
        found.append(found[-1][::2, ::3])
    wide = torch.randn(6, 4, 5, 3).to(memory_format=torch.channels_last)
    conjugate = torch.randn(20, dtype=torch.complex64).conj()
    return [wide.double(), torch.arange(8)[::2], conjugate, conjugate.imag, *found]


def laid_out(tensors, gap=0):
    """Where they go, in another order than they are given in, and how many bytes that is."""
    starts, at = [0] * len(tensors), 0
    for place in sorted(range(len(tensors)), key=lambda place: -tensors[place].dtype.itemsize):
        starts[place] = at
        at += tensors[place].nbytes + gap * tensors[place].dtype.itemsize
    return starts, at


def values(memory, tensor, start):
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def same(memory, tensors, starts):
    for tensor, start in zip(tensors, starts, strict=True):
        found = values(memory, tensor, start)
        assert torch.equal(found.contiguous().view(-1).view(torch.uint8), bits(tensor))


def bits(tensor):
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.copy_(tensor).view(-1).view(torch.uint8)


@pytest.mark.parametrize("gap", [0, 8])
def test_all_dtypes_and_layouts(gap):
    tensors = some_tensors()
    starts, nbytes = laid_out(tensors, gap)
    memory = torch.full((nbytes,), 170, dtype=torch.uint8)
    made = portions(tensors, starts)
    for portion in reversed(made):
        portion.copy(memory)
    same(memory, tensors, starts)
    covered = sum(portion.stop - portion.start for portion in made)
    assert covered == sum(tensor.nbytes for tensor in tensors)
    assert (memory == 170).sum() >= nbytes - covered


def test_what_is_short_is_copied_together_and_what_is_long_in_parts():
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (400, 400, 400, 1400, 4000, 7, 7, 7)]
    starts = [0, 400, 800, 1200, 2600, 6600, 6607, 6615]  # a gap before the last
    made = [(p.start, p.stop, len(p.sources)) for p in portions(tensors, starts)]
    assert made == [
        (0, 800, 2),
        (800, 1200, 1),
        (1200, 2600, 1),
        (2600, 4600, 1),
        (4600, 6600, 1),
        (6600, 6614, 2),
        (6615, 6622, 1),
    ]


def start(shared, begin):
    thread = threading.Thread(target=shared.run, args=(begin,))
    thread.start()
    return thread


def test_two_threads_share_a_copy():
    tensors = some_tensors()
    starts, nbytes = laid_out(tensors)
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    shared, go = SharedCopy(), threading.Event()

    def begin():
        go.wait(30)
        return memory, portions(tensors, starts)

    thread = start(shared, begin)
    threading.Timer(0.05, go.set).start()
    shared.help()
    thread.join()
    same(memory, tensors, starts)
    shared.help()  # there is nothing left


def one_each(count, nbytes=2000):
    """Portions of so many tensors, each with a number of its own."""
    return portions(
        [torch.full((nbytes,), i + 1, dtype=torch.uint8) for i in range(count)],
        [i * nbytes for i in range(count)],
    )


def test_who_comes_before_the_lane_has_begun_waits_and_copies(monkeypatch):
    memory = torch.zeros(20_000, dtype=torch.uint8)
    helped, real, by_helper = threading.Event(), Portion.copy, []

    def copy(portion, memory):
        if threading.current_thread() is threading.main_thread():
            by_helper.append(portion.start)
            helped.set()
        else:
            helped.wait(5)
            helped.set()  # once is enough
        real(portion, memory)

    monkeypatch.setattr(Portion, "copy", copy)
    shared, go = SharedCopy(), threading.Event()
    thread = start(shared, lambda: (go.wait(30), (memory, one_each(10)))[1])
    threading.Timer(0.1, go.set).start()
    shared.help()
    thread.join()
    assert by_helper
    assert memory.view(10, 2000).eq(torch.arange(1, 11, dtype=torch.uint8)[:, None]).all()


class Told(Exception):
    pass


def test_an_interrupted_helper_loses_nothing(monkeypatch):
    """It has taken portions, and dies in the middle of one: the lane, which is waiting for it, copies all."""
    memory = torch.zeros(20_000, dtype=torch.uint8)
    helping, lane_waits, real = threading.Event(), threading.Event(), Portion.copy

    def copy(portion, memory):
        if threading.current_thread() is threading.main_thread():
            helping.set()
            lane_waits.wait(30)
            raise KeyboardInterrupt
        helping.wait(30)  # so that the helper has one
        real(portion, memory)
        if portion.stop == 20_000:
            lane_waits.set()

    monkeypatch.setattr(Portion, "copy", copy)
    shared = SharedCopy()
    thread = start(shared, lambda: (memory, one_each(10)))
    with pytest.raises(KeyboardInterrupt):
        shared.help()
    thread.join()
    assert memory.view(10, 2000).eq(torch.arange(1, 11, dtype=torch.uint8)[:, None]).all()


@pytest.mark.parametrize("where", ["begin", "copy"])
def test_a_copy_that_fails_leaves_nobody_waiting_and_is_told_on_the_lane_alone(monkeypatch, where):
    raised = []

    def fail(*arguments):
        raise Told

    def begin():
        return fail() if where == "begin" else (torch.zeros(20_000, dtype=torch.uint8), one_each(10))

    monkeypatch.setattr(Portion, "copy", fail)
    shared = SharedCopy()

    def run():
        try:
            shared.run(begin)
        except Told as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    shared.help()
    thread.join()
    assert len(raised) == 1
    shared.help()


def test_a_forked_child_waits_for_no_lane():
    shared = SharedCopy()  # which its parent has not begun
    assert in_child(shared.help) == 0
