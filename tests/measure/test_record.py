from hypothesis import given
from hypothesis import strategies as st

from overlapkit.measure.record import PHASES, STOPS, Segment, StepRecord, share_out
from overlapkit.span import Span

KINDS = (*PHASES, "inside", "outside", "paused")


@st.composite
def periods(draw):
    segments, now = [], draw(st.integers(0, 5))
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8)):
        end = now + draw(st.integers(0, 6))
        segments.append(Segment(kind, now, end, now, end))
        now = end
    return segments


waits = st.lists(
    st.builds(
        lambda lane, start, long, exposed: Span(lane, "w", start, start + long, exposed=exposed),
        st.sampled_from((*STOPS, "compute", "optimizer")),
        st.integers(0, 40),
        st.integers(0, 12),
        st.booleans(),
    ),
    max_size=10,
)


def brute(segments, spans):
    """Point by point: a pause is nothing, then the first lane that waits, then the phase."""
    parts = dict.fromkeys(("period", *STOPS, *PHASES, "other", "outside"), 0)
    for segment in segments:
        for t in range(segment.start, segment.end):
            if segment.kind == "paused":
                continue
            parts["period"] += 1
            waiting = {s.lane for s in spans if s.exposed and s.start <= t < s.end}
            lane = next((lane for lane in STOPS if lane in waiting), None)
            if lane or segment.kind in PHASES:
                parts[lane or segment.kind] += 1
            else:
                parts["other"] += 1
                parts["outside"] += segment.kind == "outside"
    return parts


@given(periods(), waits)
def test_every_moment_goes_to_one_part(segments, spans):
    shares = share_out(segments, spans, on_device=False)
    assert shares.parts == brute(segments, spans)
    whole = sum(shares.parts[name] for name in (*STOPS, *PHASES, "other"))
    assert whole == shares.parts["period"]


@given(periods(), waits)
def test_a_device_that_keeps_up_sees_what_the_host_sees(segments, spans):
    assert share_out(segments, spans, on_device=True) == share_out(segments, spans, on_device=False)


def test_a_wait_that_was_published_twice_counts_once_and_is_clipped():
    segments = [Segment("outside", 100, 120, 0, 0), Segment("forward", 120, 150, 0, 0)]
    spans = [Span("input", "wait", 90, 110, exposed=True), Span("input", "next", 90, 112, exposed=True)]
    parts = share_out(segments, spans, on_device=False).parts
    assert (parts["input"], parts["other"], parts["forward"], parts["period"]) == (12, 8, 30, 50)


def test_communication_inside_backward_is_taken_out_of_it():
    segments = [Segment("backward", 0, 100, 0, 0)]
    spans = [
        Span("communication", "all_reduce", 20, 90),
        Span("communication", "tail", 80, 95, exposed=True),
    ]
    shares = share_out(segments, spans, on_device=False)
    assert shares.parts["backward"] == 85
    assert shares.parts["communication"] == 15
    assert shares.waits["communication"] == [(80, 95)]


def test_a_host_wait_costs_nothing_while_the_device_is_busy():
    # the host waits at 10..30, between the steps; the device comes to that place at 25 and leaves it at 31
    segments = [
        Segment("outside", 25, 31, 8, 31),
        Segment("forward", 31, 60, 31, 33),
    ]
    late = [Span("input", "wait", 10, 30, exposed=True)]
    assert share_out(segments, late, on_device=True).parts["input"] == 5
    ahead = [Segment("outside", 50, 50, 8, 31), Segment("forward", 50, 80, 31, 33)]
    assert share_out(ahead, late, on_device=True).parts["input"] == 0
    assert share_out(ahead, late, on_device=True).parts["forward"] == 30


def test_a_device_wait_counts_where_the_device_was():
    segments = [Segment("outside", 50, 60, 8, 9), Segment("optimizer", 60, 80, 9, 10)]
    spans = [Span("checkpoint", "wait for staging", 62, 70, exposed=True, device=True)]
    parts = share_out(segments, spans, on_device=True).parts
    assert (parts["checkpoint"], parts["optimizer"]) == (8, 12)


def record(**given):
    values = dict.fromkeys(StepRecord.__dataclass_fields__) | {"period": 200, "other": 0, "lane_bytes": {}}
    return StepRecord(**(values | given))


def test_what_is_unknown_stays_unknown():
    blank = record()
    assert blank.compute is None
    assert blank.exposed is None
    assert blank.exposed_share is None
    assert blank.tokens_per_s is None


def test_what_is_known_is_added_up():
    step = record(forward=30, backward=60, input=5, communication=15, tokens=4)
    assert step.compute == 90
    assert step.exposed == 20
    assert step.exposed_share == 0.1
    assert step.tokens_per_s == 4 / 200e-9
    assert record(period=0, input=0, tokens=1).tokens_per_s is None
