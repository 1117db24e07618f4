from hypothesis import given
from hypothesis import strategies as st

from overlapkit.measure.pending import Pending
from overlapkit.measure.record import Segment
from overlapkit.span import Span

spans = st.lists(
    st.builds(
        lambda start, long, exposed, device: Span(
            "input", "w", start, start + long, exposed=exposed, device=device
        ),
        st.integers(0, 60),
        st.integers(0, 30),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)
periods = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6)


def segments_of(lengths):
    """Periods that follow each other: on the device's clock, and on that of a host that runs ahead."""
    device = host = 5
    for on_device, on_host in lengths:
        yield [Segment("inside", device, device + on_device, host, host + on_host)]
        device, host = device + on_device, host + on_host


@given(spans, periods, st.booleans(), st.integers(0, 12))
def test_each_span_ends_in_one_period_and_each_wait_reaches_into_all_that_it_crosses(
    published, lengths, on_device, early
):
    pending = Pending()
    pending.add(published[:early])
    pending.add(published[early:])
    for (segment,) in segments_of(lengths):
        ended, waits = pending.take([segment], on_device=on_device)

        def period(span, segment=segment):
            by_host = on_device and not span.device
            return (segment.host_start, segment.host_end) if by_host else (segment.start, segment.end)

        assert sorted(ended) == sorted(s for s in published if period(s)[0] < s.end <= period(s)[1])
        assert sorted(waits) == sorted(
            s for s in published if s.exposed and s.start < period(s)[1] and s.end > period(s)[0]
        )
        assert [s.start for s in ended] == sorted(s.start for s in ended)


def test_a_component_with_another_clock_does_not_fill_memory():
    pending = Pending()
    for exposed in (True, False):
        for first in (0, 6_000):
            pending.add(
                [Span("input", "w", 0, 10**15 + n, exposed=exposed) for n in range(first, first + 6_000)]
            )
    assert len(pending._waits) <= 8192
    assert len(pending._beside) <= 8192
