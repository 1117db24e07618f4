"""Copies into one stretch of memory: every byte is the source's, whoever copied it."""

import signal
import threading
import time

import pytest
import torch

from overlapkit.checkpoint import Checkpointer, copying
from overlapkit.checkpoint.copying import Portion, SharedCopy, portions
from overlapkit.checkpoint.pieces import DTYPES
from overlapkit.lane import Lane
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


@pytest.fixture
def shared():
    with Lane("test", kind="thread") as second:
        yield SharedCopy(second)


def start(shared, begin):
    thread = threading.Thread(target=shared.run, args=(begin,), name="first")
    thread.start()
    return thread


def one_each(count, nbytes=2000):
    """Portions of so many tensors, each with a number of its own."""
    return portions(
        [torch.full((nbytes,), i + 1, dtype=torch.uint8) for i in range(count)],
        [i * nbytes for i in range(count)],
    )


def whole(memory):
    return memory.view(10, 2000).eq(torch.arange(1, 11, dtype=torch.uint8)[:, None]).all()


def test_two_threads_share_a_copy(shared):
    tensors = some_tensors()
    starts, nbytes = laid_out(tensors)
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    thread = start(shared, lambda: (memory, portions(tensors, starts)))
    shared.help()
    thread.join()
    same(memory, tensors, starts)
    shared.help()  # there is nothing left


def test_help_that_comes_before_the_lane_has_begun_waits_and_copies(shared, monkeypatch):
    memory, helped, real, by_second = (
        torch.zeros(20_000, dtype=torch.uint8),
        threading.Event(),
        Portion.copy,
        [],
    )

    def copy(portion, memory):
        if threading.current_thread().name == "first":
            helped.wait(5)
            helped.set()  # once is enough
        else:
            by_second.append(portion.start)
            helped.set()
        real(portion, memory)

    monkeypatch.setattr(Portion, "copy", copy)
    go = threading.Event()
    thread = start(shared, lambda: (go.wait(30), (memory, one_each(10)))[1])
    threading.Timer(0.1, go.set).start()
    shared.help()
    thread.join()
    assert by_second
    assert whole(memory)


def test_the_lane_waits_for_what_the_second_has_taken(shared, monkeypatch):
    memory, real = torch.zeros(20_000, dtype=torch.uint8), Portion.copy
    taken, early, first_is_done = [], [], threading.Event()

    def copy(portion, memory):
        if threading.current_thread().name == "first":
            while not taken:
                time.sleep(0.001)
        else:
            taken.append(portion)
            early.append(first_is_done.wait(0.3))
        real(portion, memory)

    def run():
        shared.run(lambda: (memory, one_each(10)))
        first_is_done.set()

    monkeypatch.setattr(Portion, "copy", copy)
    thread = threading.Thread(target=run, name="first")
    thread.start()
    shared.help()
    thread.join()
    assert early
    assert not any(early), "the lane is done only when this is"
    assert whole(memory)


def test_what_fails_in_the_second_is_copied_by_the_first(shared, monkeypatch):
    memory, failed, real = torch.zeros(20_000, dtype=torch.uint8), threading.Event(), Portion.copy

    def copy(portion, memory):
        if threading.current_thread().name != "first":
            failed.set()
            raise Told
        failed.wait(30)
        real(portion, memory)

    monkeypatch.setattr(Portion, "copy", copy)
    thread = start(shared, lambda: (memory, one_each(10)))
    shared.help()
    thread.join()
    assert failed.is_set()
    assert whole(memory)


class Told(Exception):
    pass


@pytest.mark.parametrize("where", ["begin", "copy"])
def test_a_copy_that_fails_leaves_nobody_waiting_and_is_told_on_the_lane_alone(shared, monkeypatch, where):
    def fail(*arguments):
        raise Told

    def begin():
        return fail() if where == "begin" else (torch.zeros(20_000, dtype=torch.uint8), one_each(10))

    monkeypatch.setattr(Portion, "copy", fail)
    shared.help()
    with pytest.raises(Told):
        shared.run(begin)


@pytest.fixture
def gates(monkeypatch):
    """Each portion is copied when its event is set, of 2,000 bytes each."""
    found, real = [threading.Event() for _ in range(10)], Portion.copy

    def copy(portion, memory):
        assert found[portion.start // 2000].wait(30)
        real(portion, memory)

    monkeypatch.setattr(Portion, "copy", copy)
    monkeypatch.setattr(copying, "_PART", 2000)
    return found


def reached(shared, stop):
    """Ask for what lies before a place, in a thread; returns the thread and, later, the answer."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(shared.reach(stop)))
    thread.start()
    return thread, answer


def test_what_is_copied_is_reached_before_the_rest_is(shared, gates):
    memory = torch.zeros(20_000, dtype=torch.uint8)
    asked, answer = reached(shared, 3000)  # before it has begun
    thread = start(shared, lambda: (memory, one_each(10)))
    gates[0].set()
    asked.join(0.1)
    assert answer == [], "the second portion is not there"
    gates[1].set()
    asked.join(30)
    assert answer == [True]
    assert memory[:4000].view(2, 2000).eq(torch.tensor([[1], [2]])).all()
    for gate in gates:
        gate.set()
    thread.join()
    assert not shared.reach(20_000), "it is over"
    assert whole(memory)


def test_what_is_copied_behind_a_gap_is_not_reached(shared, gates):
    memory = torch.zeros(20_000, dtype=torch.uint8)
    thread = start(shared, lambda: (memory, one_each(10)))
    shared.help()
    for gate in gates[1:]:
        gate.set()
    asked, answer = reached(shared, 1)
    asked.join(0.3)
    assert answer == [], "one thread has copied all but the first portion, which the other has"
    gates[0].set()
    asked.join(30)
    thread.join()
    assert len(answer) == 1
    assert whole(memory)


@pytest.mark.parametrize("where", ["begin", "copy"])
def test_what_failed_is_over_and_not_reached(shared, monkeypatch, where):
    real, asked = Portion.copy, []

    def copy(portion, memory):
        if portion.start >= 4000:
            asked.append(reached(shared, 6000))
            raise Told
        real(portion, memory)

    def begin():
        if where == "begin":
            raise Told
        return torch.zeros(20_000, dtype=torch.uint8), one_each(10)

    monkeypatch.setattr(Portion, "copy", copy)
    early = reached(shared, 6000)
    with pytest.raises(Told):
        shared.run(begin)
    for thread, answer in [early, *asked]:
        thread.join(30)
        assert answer == [False]
    assert not shared.use_ahead()


@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_there_is_used_once_somebody_waits_for_that(shared, gates, ahead):
    memory, answer = torch.zeros(20_000, dtype=torch.uint8), []
    asked = threading.Thread(target=lambda: answer.append(shared.use_ahead()))
    asked.start()
    thread = start(shared, lambda: (memory, one_each(10)))
    asked.join(0.1)
    assert answer == []
    shared.help(ahead=ahead)  # without it: a step waits, and all cores are to copy
    asked.join(30 if ahead else 0.1)
    assert answer == ([True] if ahead else [])
    for gate in gates:
        gate.set()
    for one in (thread, asked):
        one.join()
    assert answer == [ahead]
    assert whole(memory)


def test_a_signal_handler_waits_for_a_copy_that_its_thread_waits_for(tmp_path):
    """In the optimizer's hook, say: no lock is held there that the handler would need."""
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Lane.delay_s, before = 0.3, signal.getsignal(signal.SIGALRM)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            saves = [checkpointer.save(1, {"model": model, "optimizer": optimizer})]
            signal.signal(signal.SIGALRM, lambda *_: saves[0].wait(30))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            model(torch.randn(1, 2000)).sum().backward()
            optimizer.step()
            saves[0].wait()
    finally:
        Lane.delay_s = 0.0
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_waits_for_no_lane(shared):
    assert in_child(shared.help) == 0  # which its parent has not begun
