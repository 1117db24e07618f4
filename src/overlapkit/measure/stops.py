"""What stops Python itself in a step: its garbage collector, and torch.compile. Both tell when they do.

Spans of the lanes "garbage" and "compilation", in the host's time, go to the meter as they happen.
"""

import gc
import sys
import time
import weakref
from collections import deque
from typing import Any

from overlapkit.span import Span

_NOTABLE_NS = (
    20_000  # a collection of the youngest takes less, many times a second, and is left where it falls
)


class GarbageWatch:
    """Times Python's collector, through `gc.callbacks`.

    Args:
        spans: Where its spans go.
    """

    def __init__(self, spans: deque[Span]) -> None:
        begun: list[int] = []  # of this process's collector there is one: it does not nest

        def watch(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                begun[:] = [time.perf_counter_ns()]
            elif begun:
                start, end = begun.pop(), time.perf_counter_ns()
                if end - start >= _NOTABLE_NS:
                    spans.append(
                        Span("garbage", f"generation {info['generation']}", start, end, exposed=True)
                    )

        gc.callbacks.append(watch)
        self.close = weakref.finalize(self, _forget, gc.callbacks, watch)


class CompileWatch:
    """Times torch.compile, through dynamo's callbacks, once something has imported it.

    Args:
        spans: Where its spans go; the name of one is dynamo's number of the compilation: "0/2" is the second
            time that frame 0 was compiled again.

    Attributes:
        seen: Compilations so far.
    """

    def __init__(self, spans: deque[Span]) -> None:
        self.seen = 0
        self._handler: Any = None
        own, begun = weakref.ref(self), list[int]()

        def start(args: Any) -> None:
            begun.append(time.perf_counter_ns())

        def end(args: Any) -> None:
            watch = own()
            if watch is not None:
                watch.seen += 1
            if begun:
                since, now = begun.pop(), time.perf_counter_ns()
                spans.append(Span("compilation", str(args.compile_id), since, now, exposed=True))

        self._start, self._end = start, end
        self.close: Any = lambda: None

    def look(self) -> None:
        """At the beginning of a step: is dynamo there now, and does it know us (its reset forgets)?"""
        handler = self._handler
        if handler is None:
            callback = sys.modules.get("torch._dynamo.callback")
            handler = self._handler = getattr(callback, "callback_handler", None)
            if handler is None:
                return
            self.close = weakref.finalize(self, _leave, handler, self._start, self._end)
        if self._end not in handler.end_callbacks:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)


def _forget(callbacks: list[Any], callback: Any) -> None:
    if callback in callbacks:
        callbacks.remove(callback)


def _leave(handler: Any, start: Any, end: Any) -> None:
    _forget(handler.start_callbacks, start)
    _forget(handler.end_callbacks, end)
