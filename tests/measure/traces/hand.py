"""Traces written by hand, event by event, so that their answers are known."""

import gzip
import json
from pathlib import Path
from typing import Any

HOST = 100
"""The thread that trains; autograd's is HOST + 1."""


class HandTrace:
    """What one rank recorded. Times are microseconds."""

    def __init__(self, rank: int | None = 0, world: int = 1, base_ns: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {"schemaVersion": 1}
        if rank is not None:
            self.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.foot = {"traceName": "by hand", "baseTimeNanoseconds": base_ns}
        self._correlation = 10

    def add(self, cat: str, name: str, ts: float, dur: float, tid: Any = HOST, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        self.events.append(event | ({"args": args} if args else {}))

    def step(self, number: int, start: float, end: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, end - start)

    def work(
        self,
        name: str,
        start: float,
        end: float,
        launch: float | None = None,
        *,
        cat: str = "kernel",
        stream: Any = 7,
        thread: int = HOST,
        runtime: str = "cudaLaunchKernel",
        **args: Any,
    ) -> None:
        """Device work, and the call that launched it where `launch` says when."""
        self._correlation += 1
        if launch is not None:
            self.add("cuda_runtime", runtime, launch, 1, thread, correlation=self._correlation)
        args |= {"correlation": self._correlation, "stream": stream, "device": 0}
        self.add(cat, name, start, end - start, stream, **args)

    def collective(self, start: float, end: float, launch: float | None = None, **options: Any) -> None:
        name = options.pop("name", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")
        self.work(name, start, end, launch, stream=options.pop("stream", 20), **options)

    def copy(
        self, start: float, end: float, launch: float | None = None, name: str = "", **options: Any
    ) -> None:
        name = name or "Memcpy HtoD (Pageable -> Device)"
        self.work(name, start, end, launch, cat="gpu_memcpy", **options)

    def backward(self, start: float, end: float, thread: int = HOST + 1) -> None:
        self.add("cpu_op", "autograd::engine::evaluate_function: MulBackward0", start, end - start, thread)

    def text(self) -> str:
        return json.dumps(self.head | {"traceEvents": self.events} | self.foot)

    def write(self, path: Path) -> Path:
        raw = self.text().encode()
        path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)
        return path
