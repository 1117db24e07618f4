"""Files that the pages name and readers have: each is made when a block names it and it is not there."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overlapkit as ok
import overlapkit.measure.tensorboard
from tests.docs.stage import STAGE
from tests.measure.traces.hand import HandTrace


def _trace(path: Path, rank: int = 0) -> None:
    """Two steps of a rank that computes, reduces and copies."""
    trace = HandTrace(rank, world=2)
    for number in range(2):
        start = 1000.0 * number
        trace.step(number, start, start + 900)
        trace.copy(start + 10, start + 60, launch=start + 5)
        trace.work("gemm", start + 60, start + 500, launch=start + 20)
        trace.collective(start + 400 + 50 * rank, start + 700, launch=start + 30)
    trace.write(path)


def _traces() -> None:
    Path("traces").mkdir()
    for rank in range(2):
        _trace(Path(f"traces/rank{rank}.json.gz"), rank)


def _report(path: str) -> None:
    names: dict[str, Any] = {}

    def get(name: str) -> Any:
        return names.setdefault(name, STAGE[name](get))

    meter = ok.StepMeter(get("model"), get("opt"))
    for x, y in get("loader"):
        with meter.step():
            get("train")(x, y)
    meter.report().save(path)
    meter.close()


FILES: dict[str, Callable[[], None]] = {
    "after.json": lambda: _report("after.json"),
    "before.json": lambda: _report("before.json"),
    "ckpt": lambda: Path("ckpt").mkdir(exist_ok=True),  # by both ranks of a block
    "rank0.json.gz": lambda: _trace(Path("rank0.json.gz")),
    "trace.json.gz": lambda: _trace(Path("trace.json.gz")),
    "traces/": _traces,
}


def make(text: str) -> None:
    """Make what a block names."""
    for name, maker in FILES.items():
        if name in text and not os.path.exists(name):
            maker()


class _Writer:
    """What is left of tensorboard's SummaryWriter where the extra is not installed."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, float | int), tag

    def flush(self) -> None: ...

    def close(self) -> None: ...


def stand_in_for_tensorboard() -> None:
    """The tests' environment has no tensorboard: pages that use it get a writer that only looks."""
    if importlib.util.find_spec("tensorboard") is None:
        overlapkit.measure.tensorboard._summary_writer = lambda directory: _Writer()
