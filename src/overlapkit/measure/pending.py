"""Published spans that wait for the period in which they end to be recorded."""

from operator import itemgetter

from overlapkit.measure.record import Segment
from overlapkit.span import Span

_AHEAD = 8192  # spans that may end after the step: a component with another clock must not fill memory
_start, _end = itemgetter(Span._fields.index("start")), itemgetter(Span._fields.index("end"))


class Pending:
    """Hands each span to the period in which it ends, and each wait to all those that it reaches into.

    Periods are asked for in order; what ended before the first of them is forgotten.
    """

    def __init__(self) -> None:
        self._beside: list[Span] = []  # by end
        self._waits: list[Span] = []

    def add(self, spans: list[Span]) -> None:
        """They were published."""
        self._waits = [*self._waits, *(span for span in spans if span.exposed)][-_AHEAD:]
        self._beside = [*self._beside, *(span for span in spans if not span.exposed)][-_AHEAD:]
        self._beside.sort(key=_end)

    def take(self, segments: list[Segment], *, on_device: bool) -> tuple[list[Span], list[Span]]:
        """The spans that ended in a period, by start; and the waits that reach into it.

        Args:
            segments: The period.
            on_device: They were timed by a device: a host span belongs where the host was.
        """
        first, last = segments[0], segments[-1]
        device, host = (first.start, last.end), (first.host_start, last.host_end)
        ended: list[Span] = []
        waits: list[Span] = []
        later: list[Span] = []
        for span in self._waits:
            begin, end = host if on_device and not span.device else device
            if span.end > end:
                later.append(span)
            elif span.end > begin:
                ended.append(span)
            if span.start < end and span.end > begin:
                waits.append(span)
        self._waits = later
        horizon, taken = max(device[1], host[1]) if on_device else device[1], 0
        rest: list[Span] = []
        for span in self._beside:
            if span.end > horizon:
                break
            taken += 1
            begin, end = host if on_device and not span.device else device
            if span.end > end:
                rest.append(span)
            elif span.end > begin:
                ended.append(span)
        self._beside[:taken] = rest
        ended.sort(key=_start)
        return ended, waits
