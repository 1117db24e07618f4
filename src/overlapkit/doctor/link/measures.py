"""What is timed, on the wire and on the device. Tests say how long it took; nothing else here knows torch."""

import time
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        sizes: Bytes of the collectives' results.
        pair_bytes: Bytes of the exchange between two ranks.
        each_s: Seconds for one size of one collective, or for one round of pairs.
        rounds_s: Seconds for all rounds of pairs; those that do not fit are left out, and that is said.
    """

    sizes: tuple[int, ...]
    pair_bytes: int
    each_s: float = 0.25
    rounds_s: float = 20.0

    @classmethod
    def usual(cls, on_gpus: bool) -> "Plan":
        """For GPUs up to 256 MiB, for CPUs up to 16."""
        sizes = tuple(1 << power for power in ((10, 14, 18, 22, 25, 28) if on_gpus else (10, 14, 18, 21, 24)))
        return cls(sizes, (64 << 20) if on_gpus else (4 << 20))


class Measures(Protocol):
    """Each does one thing and returns its seconds on this rank; all ranks call the same in the same order."""

    def collective(self, kind: str, nbytes: int) -> float:
        """An "all_reduce" or "all_gather" whose result has so many bytes."""

    def exchange(self, peer: int, nbytes: int) -> float:
        """Send so many bytes to a rank while as many come from it."""

    def work(self) -> float:
        """A fixed piece of compute on this rank alone."""

    def largest(self, value: float) -> float:
        """The largest value of any rank."""


class Wire:
    """torch.distributed's default process group.

    Args:
        device: Where its tensors lie: "cpu", or "cuda" with the current device set.
        timeout: Seconds after which a GPU is given up; the group has its own for the CPU.
    """

    def __init__(self, device: str, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        from overlapkit.one_tensor import all_gather

        self._torch, self._dist = torch, dist
        self._device, self._timeout = device, timeout
        self._world = dist.get_world_size()
        self._kept: dict[Any, Any] = {}
        self._gather = all_gather

    def collective(self, kind: str, nbytes: int) -> float:
        """An "all_reduce" or "all_gather" whose result has so many bytes."""
        part = max(1, nbytes // 4 // self._world)
        whole = self._buffer("whole", part * self._world)
        own = self._buffer("part", part)
        start = time.perf_counter()
        if kind == "all_reduce":
            self._dist.all_reduce(whole, op=self._dist.ReduceOp.MAX)  # a sum would grow without end
        else:
            self._gather(whole, own)
        return self._finished(start)

    def exchange(self, peer: int, nbytes: int) -> float:
        """Send so many bytes to a rank while as many come from it."""
        out, back = (self._buffer(name, nbytes // 4) for name in ("out", "back"))
        operations = [
            self._dist.P2POp(self._dist.isend, out, peer),
            self._dist.P2POp(self._dist.irecv, back, peer),
        ]
        start = time.perf_counter()
        for request in self._dist.batch_isend_irecv(operations):
            request.wait()
        return self._finished(start)

    def work(self) -> float:
        """A fixed piece of compute on this rank alone."""
        torch, side = self._torch, 4096 if self._device == "cuda" else 256
        if "work" not in self._kept:
            dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
            self._kept["work"] = torch.ones(side, side, dtype=dtype, device=self._device)
        start = time.perf_counter()
        for _ in range(4):
            torch.mm(self._kept["work"], self._kept["work"])
        return self._finished(start)

    def largest(self, value: float) -> float:
        """The largest value of any rank."""
        found = self._torch.tensor([value], dtype=self._torch.float64, device=self._device)
        self._dist.all_reduce(found, op=self._dist.ReduceOp.MAX)
        return float(found.item())

    def _buffer(self, name: str, count: int) -> Any:
        key = name, count
        if key not in self._kept:
            for other in [one for one in self._kept if one != "work" and one[0] == name]:
                del self._kept[other]  # of another size
            self._kept[key] = self._torch.zeros(count, device=self._device)
        return self._kept[key]

    def _finished(self, start: float) -> float:
        """Seconds since then, once the device is done. Not for ever: a rank may have died."""
        if self._device == "cuda":
            done, deadline = self._torch.cuda.Event(), time.monotonic() + self._timeout
            done.record()
            while not done.query():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the GPU was not done within {self._timeout:g} s")
        return time.perf_counter() - start
