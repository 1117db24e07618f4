"""What counts as progress of a rank, by an injected clock; nothing here waits for time to pass."""

import threading

import pytest

from overlapkit.measure.across import stacks
from overlapkit.measure.across.stacks import StackActivity, all_stacks, innermost
from overlapkit.measure.across.where import AwakeClock, Progress
from overlapkit.measure.sources import Tap
from overlapkit.span import Span
from tests.fake_clock import FakeComponent
from tests.measure.across.steps import fake_phases


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Blocked:
    """A thread that trains, and is stuck where it was told to."""

    def __init__(self, *through):
        self.go, ready = threading.Event(), threading.Event()

        def stuck():
            ready.set()
            self.go.wait(30)

        for wrap in through:
            stuck = wrap(stuck)
        self.thread = threading.Thread(target=stuck)
        self.thread.start()
        ready.wait(30)

    def __enter__(self):
        return self.thread.ident

    def __exit__(self, *_):
        self.go.set()
        self.thread.join()


@pytest.fixture
def clock():
    return Clock()


def still(progress, clock, *, after=10.0):
    """How long it seems to stand still, `after` seconds later."""
    clock.now += after
    return progress.look().still_s


def settled(progress, clock):
    """It has been seen standing where it stands."""
    for _ in range(50):
        if still(progress, clock):
            return
    raise AssertionError("never seen at the same place twice")


def test_steps_and_phases_are_progress_and_nothing_is_none(clock):
    phases = fake_phases("inside", 1)
    progress = Progress(phases, [], clock)
    with Blocked() as thread:
        progress.enter(3)
        progress.thread = thread
        assert still(progress, clock) == 0
        settled(progress, clock)
        assert still(progress, clock) == 20
        phases.timeline.kind, phases.timeline.turns = "forward", 2
        assert still(progress, clock) == 0
        settled(progress, clock)
        progress.leave(3, whole=True)
        where = progress.look()
        assert (where.still_s, where.step, where.inside) == (0, 4, False)
        settled(progress, clock)
        progress.enter(4)
        progress.thread = thread
        assert still(progress, clock) == 0


def test_a_step_that_was_left_by_an_exception_comes_again(clock):
    progress = Progress(fake_phases(), [], clock)
    progress.enter(3)
    progress.leave(3, whole=False)
    assert progress.look().step == 3


def test_a_pause_is_progress_all_along(clock):
    phases = fake_phases()
    progress = Progress(phases, [], clock)
    with Blocked() as progress.thread:
        phases.pauses = 1
        assert [still(progress, clock) for _ in range(5)] == [0] * 5
        assert progress.look().phase == "paused"
        phases.pauses = 0
        settled(progress, clock)


def test_whatever_a_lane_ends_is_progress_and_stays_for_the_meter(clock):
    component = FakeComponent()
    tap = Tap(component, "checkpointer")
    progress = Progress(fake_phases(), [tap], clock)
    with Blocked() as progress.thread:
        settled(progress, clock)
        written = Span("checkpoint", "write", 0, 5, bytes=8)
        component.publish(written)
        assert still(progress, clock) == 0
        settled(progress, clock)
        gathered = Span("communication", "all_gather blocks.3", 0, 9, bytes=8)
        component.publish(gathered, Span("communication", "wait all_gather blocks.3", 0, 9, exposed=True))
        assert still(progress, clock) == 0
        assert progress.look().done == "all_gather blocks.3"
        assert tap.take()[:2] == [written, gathered]


def test_new_places_in_the_code_are_progress_and_a_loop_is_not(clock):
    """One that compiles, loads or tokenises moves about; one that polls for ever does not."""
    turn, looked = threading.Semaphore(0), threading.Semaphore(0)
    at = {"place": 0}

    def somewhere(depth):
        if depth:
            return somewhere(depth - 1)
        looked.release()
        return turn.acquire()

    def run():
        while at["place"] is not None:
            somewhere(at["place"])

    thread = threading.Thread(target=run)
    thread.start()
    progress = Progress(fake_phases(), [], clock)
    progress.thread = thread.ident
    looked.acquire()
    try:
        settled(progress, clock)
        for place in range(1, 6):
            at["place"] = place
            turn.release()
            looked.acquire()
            settled_before = still(progress, clock)
            assert settled_before == 0  # deeper than ever
            settled(progress, clock)
        for place in (3, 1, 5, 2):
            at["place"] = place
            turn.release()
            looked.acquire()
            assert still(progress, clock) > 0  # it has been everywhere
    finally:
        at["place"] = None
        turn.release()
        thread.join()


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("/venv/torch/_dynamo/convert_frame.py", True),
        ("/venv/torch/_inductor/async_compile.py", True),
        ("/venv/torch/_dynamo/eval_frame.py", False),  # is there when compiled code runs, too
        ("/venv/overlapkit/checkpoint/saver.py", True),
        ("/venv/overlapkit/input/loader.py", False),
    ],
)
def test_compiling_and_our_checkpointer_are_progress_wherever_they_wait(file, counts):
    def through(stuck):
        names = {"stuck": stuck}
        exec(compile("def call(): stuck()", file, "exec"), names)
        return names["call"]

    activity = StackActivity()
    with Blocked(through) as thread:
        seen = [activity.moved(thread) for _ in range(50)]
        assert seen[-1] == counts


def test_who_was_stopped_has_not_seen_others_stand_still(clock):
    awake = AwakeClock(2.0, clock)
    times = []
    for clock.now in (1.0, 2.5, 100.0, 101.0):
        times.append(awake())
    assert times == [1.0, 2.5, 4.5, 5.5]


def test_a_thread_that_is_gone_makes_no_progress():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert not StackActivity().moved(thread.ident)
    assert not StackActivity().moved(None)


def test_a_meter_that_was_forgotten_has_left(clock):
    progress = Progress(fake_phases(), [], clock)
    assert progress.look().left


def test_the_training_threads_stack_comes_first_and_ours_are_left_out(monkeypatch):
    with Blocked() as thread:
        text = all_stacks(thread)
        first = text.split("Thread ")[1]
        assert "(trains)" in first
        assert "in stuck" in first
        assert "Thread MainThread" in text
        assert 'threading.py"' in innermost(text)
        monkeypatch.setattr(stacks, "_OURS", ("MainThread",))
        assert "Thread MainThread" not in all_stacks(thread)
        monkeypatch.setattr(stacks, "_LONG", 100)
        assert len(all_stacks(thread)) == 100
