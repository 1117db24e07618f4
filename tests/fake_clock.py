"""A clock that tests wind by hand, and a component that publishes what it is told."""

from overlapkit.span import Span


class FakeClock:
    """The host's time is `host`; with `on_device`, work queued by `queue` is passed later than marked."""

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.host = 1000
        self.seen = 10**18
        """How far the device has come: marks beyond are not passed yet."""
        self.released: list[int] = []
        self._busy_until = 0

    def now(self) -> int:
        return self.host

    def mark(self, now: int) -> int:
        return max(now, self._busy_until) if self.on_device else now

    def time(self, mark: int) -> int | None:
        return mark if mark <= self.seen else None

    def release(self, mark: int) -> None:
        self.released.append(mark)

    def queue(self, duration: int) -> None:
        """Give the device work."""
        self._busy_until = max(self.host, self._busy_until) + duration


class FakeComponent:
    """Publishes spans, each once, as the protocol has it."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self._clock = clock or FakeClock()
        self._spans: list[Span] = []

    def timings(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def __iter__(self):
        return iter(())

    def publish(self, *spans: Span) -> None:
        self._spans += spans

    def wait(self, lane: str, duration: int, bytes: int | None = None) -> None:
        """Hold the host up for a while."""
        start = self._clock.host
        self._clock.host += duration
        self.publish(Span(lane, "wait", start, self._clock.host, bytes, exposed=True))
