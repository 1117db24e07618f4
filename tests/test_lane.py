"""Lane and Ticket: order, errors, ends and forks, on all three kinds."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch

from overlapkit.lane import Lane, Ticket
from overlapkit.pinned import PinnedRing
from overlapkit.span import SpanLog
from tests.cuda_fake import CUDA, fake_cuda
from tests.on_gpu import spin

HOST_KINDS = ("thread", "inline")


class Odd(Exception):
    """An error with arguments of its own."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(f"{words} {number}")
        self.number, self.words = number, words


def fail() -> None:
    raise Odd(7, "seven")


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("overlapkit-")]


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_work_runs_in_order_and_returns_its_value(kind: str) -> None:
    seen: list[int] = []
    with Lane("x", kind=kind) as lane:
        lane.delay_s = 0.002
        tickets = [lane.submit(lambda i=i: seen.append(i) or i * i) for i in range(20)]
        assert [ticket.wait() for ticket in tickets] == [i * i for i in range(20)]
        assert all(ticket.done() for ticket in tickets)
    assert seen == list(range(20))


def test_a_thread_lane_is_beside_the_caller_and_keeps_order_with_it_only_through_tickets() -> None:
    gate = threading.Event()
    with Lane("x") as lane:
        ticket = lane.submit(gate.wait)
        assert not ticket.done()
        with pytest.raises(TimeoutError, match=r"lane 'x'.*0.01 s"):
            ticket.wait(0.01)
        gate.set()
        assert ticket.order() is True


def test_everyone_who_waits_is_told_though_one_of_them_was_interrupted_or_gave_up() -> None:
    gate, told = threading.Event(), []
    main = threading.get_ident()
    with Lane("x") as lane:
        ticket = lane.submit(gate.wait)
        others = [threading.Thread(target=lambda: told.append(ticket.wait(20))) for _ in range(3)]
        for other in others:
            other.start()
        with pytest.raises(TimeoutError):
            ticket.wait(0.01)
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait(20)
        gate.set()
        assert ticket.wait(20) is True
        for other in (timer, *others):
            other.join(20)
    assert told == [True] * 3


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_errors_reach_the_caller_whole_and_do_not_end_the_lane(kind: str) -> None:
    with Lane("x", kind=kind) as lane:
        ticket = lane.submit(fail)
        for ask in (ticket.wait, ticket.order):
            with pytest.raises(Odd) as caught:
                ask()
            assert (caught.value.number, caught.value.words) == (7, "seven")
            assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert lane.submit(lambda: 3).wait() == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, TimeoutError])
def test_errors_of_every_kind_belong_to_the_ticket(error: type[BaseException]) -> None:
    def work() -> None:
        raise error("mine")

    with Lane("x") as lane:
        ticket = lane.submit(work)
        with pytest.raises(error, match="mine"):
            ticket.wait(5)
        assert lane.submit(lambda: 1).wait() == 1


def test_close_raises_what_nobody_asked_for_once() -> None:
    lane = Lane("x")
    seen = lane.submit(fail)
    with pytest.raises(Odd):
        seen.wait()
    lane.submit(fail)
    with pytest.raises(Odd):
        lane.close()
    lane.close()
    with pytest.raises(RuntimeError, match="lane 'x' is closed"):
        lane.submit(fail)


def test_an_error_of_the_body_comes_before_one_of_the_lane() -> None:
    def body() -> None:
        with Lane("x") as lane:
            lane.submit(fail)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    assert "seven" in caught.value.__notes__[0]


@pytest.mark.parametrize("quiet", ["settle", "fence"])
def test_waiting_quietly_does_not_undo_that_another_thread_has_asked(quiet: str) -> None:
    gate, waiting = threading.Event(), threading.Event()

    def fail() -> None:
        gate.wait(20)
        raise ValueError("broken")

    with Lane("work", kind="thread") as lane, Lane("other", kind="thread") as other:
        ticket = lane.submit(fail)

        def wait_quietly() -> None:
            real = ticket._block

            def block(timeout: float | None) -> None:
                waiting.set()
                real(timeout)
                assert asked.wait(20)  # the other thread has been told meanwhile

            ticket._block = block  # type: ignore[method-assign]
            getattr(ticket, quiet)()

        asked = threading.Event()
        done = other.submit(wait_quietly)
        assert waiting.wait(20)
        del ticket._block
        gate.set()
        with pytest.raises(ValueError, match="broken"):
            ticket.wait()
        asked.set()
        done.wait(20)
        assert ticket.seen


@pytest.mark.parametrize("quiet", ["settle", "fence"])
def test_settling_neither_raises_nor_counts_as_asking(quiet: str) -> None:
    gate = threading.Event()
    lane = Lane("x")
    ticket = lane.submit(lambda: gate.wait(5) and fail())
    assert ticket.error is None
    threading.Timer(0.02, gate.set).start()
    getattr(ticket, quiet)()
    assert isinstance(ticket.error, Odd)
    assert not ticket.seen
    with pytest.raises(Odd):
        lane.close()
    assert ticket.seen


def test_close_finishes_everything_and_joins() -> None:
    done: list[int] = []
    lane = Lane("x")
    lane.delay_s = 0.002
    for i in range(10):
        lane.submit(lambda i=i: done.append(i))
    lane.close()
    assert done == list(range(10))
    assert not names()


def test_close_says_so_when_the_work_does_not_end() -> None:
    gate = threading.Event()
    lane = Lane("slow")
    lane.submit(gate.wait)
    with pytest.raises(TimeoutError, match="lane 'slow': still busy 0.01 s"):
        lane.close(timeout=0.01)
    gate.set()
    lane.close()


def test_no_thread_before_the_first_submit_nor_after_being_dropped() -> None:
    lane = Lane("x")
    assert not names()
    ticket = lane.submit(lambda: 1)
    assert ticket.wait() == 1
    assert names() == ["overlapkit-x"]
    del lane
    gc.collect()
    deadline = time.monotonic() + 5
    while names() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not names()


def test_a_lane_computes_on_one_core_and_leaves_the_others_to_everyone_else() -> None:
    program = """
import threading, torch
from overlapkit.lane import Lane
before = torch.get_num_threads()
with Lane("x") as lane:
    inside = lane.submit(torch.get_num_threads).wait()
later = []
thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
thread.start()
thread.join()
print(inside, later[0] - before, torch.get_num_threads() - before)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert out.stdout.split() == ["1", "0", "0"]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_of_the_callers_thread_reaches_the_caller() -> None:
    with Lane("x", kind="inline") as lane, pytest.raises(KeyboardInterrupt):
        lane.submit(interrupt)
    with fake_cuda():
        lane = Lane("x", CUDA)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(interrupt)
        lane.close()


def test_work_that_exit_cuts_off_is_reported() -> None:
    program = """
import time
from overlapkit import lane
lane.EXIT_PATIENCE_S = 0.1
slow = lane.Lane("slow")
slow.submit(lambda: time.sleep(60))
"""
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "lane 'slow' was still busy 0.1 s after the end" in out.stderr


def test_an_idle_lane_keeps_nothing_alive() -> None:
    class Payload:
        pass

    with Lane("x") as lane:
        payload = Payload()
        lane.submit(lambda p=payload: None).wait()
        deleted = threading.Event()
        weakref.finalize(payload, deleted.set)
        del payload
        assert deleted.wait(5)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_its_own_lane() -> None:
    lane = Lane("x")
    gate = threading.Event()
    ticket = lane.submit(gate.wait)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        code = 1
        try:
            try:
                ticket.wait(5)
            except RuntimeError as error:
                ticket.settle()  # there is nothing to wait for here
                if "before the fork" in str(error) and lane.submit(lambda: 5).wait(5) == 5:
                    lane.close(5)
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    assert ticket.wait(5) is True
    lane.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread's end cannot be seen")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_fork_waits_for_threads_that_still_give_back_what_they_held(forgotten: bool) -> None:
    """As MKL does, under a lock that the child would find held for ever."""
    libc = ctypes.CDLL(None)
    at_end = ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(at_end), libc.usleep) == 0

    def hold() -> int:
        libc.pthread_setspecific(at_end, ctypes.c_void_p(100_000))  # the thread's end takes so many us
        return threading.get_native_id()

    lane = Lane("x")
    number = lane.submit(hold).wait()
    if forgotten:
        del lane
        while "overlapkit-x" in names():
            time.sleep(1e-3)
    else:
        lane.close()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        os._exit(0)
    there = os.path.exists(f"/proc/self/task/{number}")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    libc.pthread_key_delete(at_end)
    assert not there


def test_a_lane_that_nobody_closes_is_finished_at_exit_unless_nothing_of_its_work_lasts() -> None:
    program = """
import time
from overlapkit import lane
lane.EXIT_PATIENCE_S = 1000
lasting, other = lane.Lane("x"), lane.Lane("y", lasting=False)
other.submit(lambda: time.sleep(1000))
lasting.submit(lambda: (time.sleep(0.3), print("finished", flush=True)))
forgotten = lane.Lane("z")
forgotten.submit(lambda: (time.sleep(0.6), print("forgotten, and finished", flush=True)))
del forgotten
"""
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout == "finished\nforgotten, and finished\n"
    assert out.stderr == ""


def test_bad_kinds() -> None:
    with pytest.raises(ValueError, match="kind='fast'"):
        Lane("x", kind="fast")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        Lane("x", torch.device("cpu"), kind="cuda")


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_named_work_leaves_a_span(kind: str) -> None:
    log = SpanLog()
    with Lane("transfer", kind=kind, log=log) as lane:
        lane.submit(lambda: None)
        lane.submit(lambda: None, name="copy", bytes=12).wait()
    (span,) = log.take()
    assert (span.lane, span.name, span.bytes, span.exposed, span.device) == (
        "transfer",
        "copy",
        12,
        False,
        False,
    )


# On a CUDA lane, with the recorder in place of the device.


def add_one_beside(order: Callable[[Ticket], None]) -> list[str]:
    with fake_cuda() as machine:
        x = torch.zeros(4, device=CUDA)
        lane = Lane("x", CUDA)
        ticket = lane.submit(lambda: x.add_(1))
        order(ticket)
        assert x.mul(2).sum().raw.item() == 8
        assert not machine.syncs
        lane.close()
        return machine.faults


def test_a_cuda_lane_runs_after_the_caller_and_order_makes_the_caller_run_after_it() -> None:
    assert add_one_beside(lambda ticket: ticket.order()) == []


def test_without_order_the_recorder_finds_the_race() -> None:
    assert any("read" in fault for fault in add_one_beside(lambda ticket: None))


def test_wait_waits_for_the_device_and_done_asks_it() -> None:
    with fake_cuda() as machine:
        lane = Lane("x", CUDA)
        ticket = lane.submit(lambda: 5)
        assert not ticket.done()
        assert machine.syncs == 0
        assert ticket.wait() == 5
        assert machine.syncs == 1
        assert ticket.done()
        lane.close()


@pytest.mark.parametrize("ask", ["order", "fence"])
def test_work_that_fails_half_way_is_ordered_all_the_same(ask: str) -> None:
    with fake_cuda() as machine:
        x = torch.zeros(4, device=CUDA)
        lane = Lane("x", CUDA)

        def half() -> None:
            x.add_(1)
            fail()

        ticket = lane.submit(half)
        with contextlib.suppress(Odd):
            getattr(ticket, ask)()
        x.add_(1)
        assert machine.faults == []
        ticket.seen = True
        lane.close()


def test_one_stream_for_the_life_of_a_cuda_lane_and_errors_whole() -> None:
    with fake_cuda() as machine:
        lane = Lane("x", CUDA)
        streams = {lane.submit(lambda: torch.cuda.current_stream()).wait().name for _ in range(5)}
        assert len(streams) == 1
        assert streams != {machine.default.name}
        assert torch.cuda.current_stream() is machine.default
        with pytest.raises(Odd, match="seven 7"):
            lane.submit(fail).order()
        lane.submit(fail)
        with pytest.raises(Odd):
            lane.close()


def test_a_cuda_span_is_resolved_later_and_never_waits() -> None:
    with fake_cuda() as machine:
        log = SpanLog()
        lane = Lane("transfer", CUDA, log=log)
        before = time.perf_counter_ns()
        lane.submit(lambda: time.sleep(0.002), name="copy", bytes=3)
        assert log.take() == []  # the device has not got there
        spans = [span for _ in range(8) for span in log.take()]
        assert machine.syncs == 0
        (span,) = spans
        assert (span.lane, span.name, span.bytes, span.device) == ("transfer", "copy", 3, True)
        assert span.end - span.start >= 2_000_000
        assert before - 1_000_000 <= span.start <= time.perf_counter_ns()
        lane.close()


def test_closing_a_cuda_lane_waits_for_all_that_it_was_given() -> None:
    with fake_cuda() as machine:
        lane, ring = Lane("copy", CUDA), PinnedRing(1, pin=True)
        target = torch.empty(4, dtype=torch.uint8, device=CUDA)
        buffer = ring.take(4)
        lane.submit(lambda: target.copy_(buffer.bytes(4), non_blocking=True))
        buffer.give_back()  # with no ticket: only the lane knows of the copy
        assert machine.syncs == 0
        lane.close()
        ring.take(4).give_back()  # filled again
        assert machine.faults == []
        ring.close()


@pytest.mark.gpu
def test_a_real_cuda_lane_orders_both_ways() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with Lane("x", device) as lane:
        for _ in range(20):
            x = torch.zeros(1 << 20, device=device)
            spin()
            x.fill_(1)
            ticket = lane.submit(lambda x=x: (spin(), x.mul_(3)))
            ticket.order()
            y = x + 1
            assert bool((y == 4).all())


def test_an_interrupt_while_the_thread_is_started_leaves_a_lane_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with Lane("test", kind="thread") as lane:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lane.submit(lambda: 1)
        assert lane.submit(lambda: 2).wait(20) == 2
    lane = Lane("test", kind="thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(lambda: 1)
    lane.close()  # there is no thread to join


def test_who_has_waited_finds_nothing_of_the_work_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    at_the_end: list[Held | None] = []
    settle = Ticket._settle
    monkeypatch.setattr(Ticket, "_settle", lambda *args: (at_the_end.append(gone()), settle(*args)))
    with Lane("test", kind="thread") as lane:
        ticket = lane.submit(lambda held=held: None)  # type: ignore[misc]
        del held
        ticket.wait()
    assert at_the_end == [None]
