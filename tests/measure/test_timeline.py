from overlapkit.measure.record import Segment
from overlapkit.measure.timeline import Timeline, Turn
from tests.fake_clock import FakeClock


def test_segments_are_gapless_and_a_phase_that_is_on_does_not_begin_again():
    clock = FakeClock()
    timeline = Timeline(clock, Turn("outside", 1000, 1000))
    for kind, later in (("inside", 5), ("forward", 10), ("forward", 15), ("backward", 5), ("end", 7)):
        clock.host += later
        timeline.turn(kind)
    assert timeline.resolve() == [
        Segment("outside", 1000, 1005, 1000, 1005),
        Segment("inside", 1005, 1015, 1005, 1015),
        Segment("forward", 1015, 1035, 1015, 1035),
        Segment("backward", 1035, 1042, 1035, 1042),
    ]


def test_it_is_unresolved_until_the_device_has_passed_the_end():
    clock = FakeClock(on_device=True)
    timeline = Timeline(clock, Turn("outside", 1000, clock.mark(1000)))
    clock.host += 1
    timeline.turn("forward")
    clock.queue(50)
    clock.host += 1
    timeline.turn("end")
    clock.seen = 1050
    assert timeline.resolve() is None
    clock.seen = 1051
    assert timeline.resolve() == [
        Segment("outside", 1000, 1001, 1000, 1001),
        Segment("forward", 1001, 1051, 1001, 1002),
    ]


def test_all_marks_but_the_last_are_given_back():
    clock = FakeClock(on_device=True)
    timeline = Timeline(clock, Turn("inside", 1, 1))
    clock.host = 2
    timeline.turn("forward")
    clock.host = 3
    timeline.turn("end")
    timeline.release()
    assert clock.released == [1, 2]
    assert timeline.last == ("end", 3, 3)
