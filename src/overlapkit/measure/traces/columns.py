"""What is kept of a trace: columns of numbers, 24 to 64 bytes an event, and no event itself."""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overlapkit.measure.traces.parsing import Event, EventReader

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

COMPUTE, COMMUNICATION, TO_DEVICE, TO_DEVICE_PAGEABLE, OTHER_COPY = range(5)
"""Kinds of device work. Setting memory (memset) is no compute, as in HolisticTraceAnalysis."""

_RANGE_US = 4e15  # 126 years; nanoseconds of more do not fit into 64 bits, with those of a base beside them
_BIG = 1 << 62

# NCCL's and RCCL's kernels are both called nccl*; the rest are torch's symmetric memory and others' own.
_COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|(one|two)_shot_all_reduce|multimem_|cross_device_reduce", re.IGNORECASE
)
_NO_COMPUTE = re.compile(
    r"c10d::|gloo:|nccl:|mpi:|record_param_comms|enumerate\(DataLoader\)|Optimizer\.|ProfilerStep"
)
_STEP = re.compile(r"ProfilerStep ?#(\d{1,18})$")


@dataclass
class Table:
    """Columns that grow: `ts` and `dur` in microseconds, and whole numbers beside them."""

    width: int
    times: "array[float]" = field(default_factory=lambda: array("d"))
    numbers: "array[int]" = field(default_factory=lambda: array("q"))

    def starts_ends(self) -> tuple[Ints, Ints]:
        """Nanoseconds, exact where the text had no more than three places and a float can tell them."""
        times = np.frombuffer(self.times, dtype=np.float64).reshape(-1, 2)
        whole = np.floor(times[:, 0])
        starts = whole.astype(np.int64) * 1000 + np.rint((times[:, 0] - whole) * 1e3).astype(np.int64)
        return starts, starts + np.rint(times[:, 1] * 1e3).astype(np.int64)

    def column(self, index: int) -> Ints:
        """One of the whole numbers."""
        return np.frombuffer(self.numbers, dtype=np.int64).reshape(-1, self.width)[:, index]


@dataclass(frozen=True)
class Collective:
    """What a communication kernel says about itself.

    Attributes:
        kind: As "allreduce"; of the kernel's name where there is nothing else.
        group: Of ranks, as text; empty where unknown.
        sequence: Its number among those of its process group, or None.
        bytes: Of its input, or None.
        name: Of the process group, as text: several may have the same ranks.
    """

    kind: str
    group: str
    sequence: int | None
    bytes: int | None
    name: str = ""


class Columns:
    """Everything that is used of one rank's trace."""

    def __init__(self) -> None:
        self.work = Table(5)  # device work: kind, correlation, stream, device, place in `collectives`
        self.launches = Table(2)  # correlation, thread
        self.steps = Table(1)  # number
        self.training: set[int] = set()  # threads that step
        self.backward = Table(1)  # thread
        self.optimizer = Table(1)  # thread
        self.input = Table(1)  # thread
        self.ops = Table(1)  # thread
        self.gloo = Table(2)  # place in `collectives`, thread
        self.memory = Table(3)  # bytes allocated, device type, device
        self.collectives: list[Collective] = []
        self.labels: list[Any] = []  # of threads, streams and devices
        self._ids: dict[Any, int] = {}
        self._kinds: dict[str, int] = {}

    def take(self, events: Iterable[Event], reader: EventReader) -> None:
        """Keep what is used of some events.

        Raises:
            TraceError: An event that is used has no time, or one that cannot be.
        """
        keepers = self._keepers
        for number, event in enumerate(events, reader.count):
            if (keep := keepers.get(event.cat or "")) is None:
                continue
            ts, dur = event.ts, event.dur
            if event.ph == "i":
                dur = 0.0
            elif event.ph != "X":
                continue
            if ts is None or dur is None or not (0 <= dur <= _RANGE_US and -_RANGE_US <= ts <= _RANGE_US):
                what = f"{event.name!r:.80} has ts={ts!r} and dur={dur!r}"
                raise reader.fail(f"{what}: give microseconds, dur of at least 0", number)
            keep(self, event, ts, dur)

    def _device(self, event: Event, ts: float, dur: float) -> None:
        args, name = event.args, event.name or ""
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kind(name, event.cat or "")
        place = -1
        if args is None:
            correlation, stream, device = -1, event.tid, event.pid
        else:
            correlation, stream, device = args.correlation, args.stream, args.device
            if args.collective is not None and event.cat == "kernel":
                kind = COMMUNICATION
        if kind == COMMUNICATION:
            place = len(self.collectives)
            self.collectives.append(_describe(event))
        self.work.times.extend((ts, dur))
        self.work.numbers.extend((kind, _id(correlation), self._number(stream), self._number(device), place))

    def _kind(self, name: str, cat: str) -> int:
        """Of a name; those of kernels come again and again."""
        if cat == "gpu_memset" or name.startswith("__amd_rocclr_fillBuffer"):
            kind = OTHER_COPY
        elif cat == "gpu_memcpy" or name.startswith(("__amd_rocclr_copy", "Memcpy ")):
            to_device = "HtoD" in name or "HostToDevice" in name or "Host -> Device" in name
            kind = OTHER_COPY if not to_device else TO_DEVICE_PAGEABLE if "Pageable" in name else TO_DEVICE
        else:
            kind = COMMUNICATION if _COLLECTIVE.search(name) else COMPUTE
        if len(self._kinds) < 1 << 14 and len(name) < 1 << 12:
            self._kinds[name] = kind
        return kind

    def _launch(self, event: Event, ts: float, dur: float) -> None:
        if event.args is not None and (correlation := _id(event.args.correlation)) > 0:
            self.launches.times.extend((ts, dur))
            self.launches.numbers.extend((correlation, self._number(event.tid)))

    def _host(self, event: Event, ts: float, dur: float) -> None:
        """An operator or an annotation."""
        name = event.name or ""
        table = None
        if event.cat == "cpu_op" and not _NO_COMPUTE.match(name):
            if name.startswith("autograd::engine::evaluate_function"):
                self._add(self.backward, event, ts, dur)
            table = self.ops
        elif name.startswith("ProfilerStep"):
            if step := _STEP.match(name):
                self.steps.times.extend((ts, dur))
                self.steps.numbers.append(int(step[1]))
                self.training.add(self._number(event.tid))
        elif name.startswith("Optimizer.step#"):
            table = self.optimizer
        elif name.startswith("enumerate(DataLoader)"):
            table = self.input
        elif name.startswith("gloo:"):
            self.gloo.times.extend((ts, dur))
            self.gloo.numbers.extend((len(self.collectives), self._number(event.tid)))
            self.collectives.append(_describe(event))
        if table is not None:
            self._add(table, event, ts, dur)

    def _add(self, table: Table, event: Event, ts: float, dur: float) -> None:
        table.times.extend((ts, dur))
        table.numbers.append(self._number(event.tid))

    def _instant(self, event: Event, ts: float, dur: float) -> None:
        if event.name == "[memory]" and (args := event.args) is not None:
            self.memory.times.extend((ts, dur))
            self.memory.numbers.extend((_id(args.allocated), _id(args.device_type), _id(args.device_id)))

    def _number(self, value: Any) -> int:
        """Threads, streams and devices are numbers or words: count them."""
        value = value if type(value) in (int, str) else None
        if (found := self._ids.get(value)) is not None:
            return found
        self._ids[value] = found = len(self.labels)
        self.labels.append(value)
        return found

    _keepers = {
        "cpu_instant_event": _instant,
        "cpu_op": _host,
        "kernel": _device,
        "gpu_memcpy": _device,
        "gpu_memset": _device,
        "cuda_runtime": _launch,  # AMD's runtime comes under this name, too
        "cuda_driver": _launch,
        "hip_runtime": _launch,
        "xpu_runtime": _launch,
        "privateuse1_runtime": _launch,
        "user_annotation": _host,
    }


def _id(value: Any) -> int:
    """A number as it is; -1 for what is none, or is none of ours."""
    return value if type(value) is int and 0 <= value < _BIG else -1


_SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}
_SIZES |= {"uint64": 8, "uint32": 4, "uint16": 2, "byte": 1, "char": 1, "bool": 1}
_SIZES |= {"complexdouble": 16, "complexfloat": 8, "complexhalf": 4}


def _describe(event: Event) -> Collective:
    args, name = event.args, event.name or ""
    if args is None:
        return Collective(_kind_of(name), "", None, None)
    kind = args.collective if isinstance(args.collective, str) else _kind_of(name)
    group = args.ranks if isinstance(args.ranks, str) and "..." not in args.ranks else args.group
    elements = _id(args.elements)
    dtype = args.dtype.lower() if isinstance(args.dtype, str) else ""
    size = 1 if dtype.startswith("float8") else _SIZES.get(dtype)
    nbytes = elements * size if elements >= 0 and size is not None and elements < 1 << 50 else None
    sequence = _id(args.sequence)
    name = args.group if isinstance(args.group, str) else ""
    return Collective(
        kind[:64], str(group or "")[:4096], None if sequence < 0 else sequence, nbytes, name[:256]
    )


def _kind_of(name: str) -> str:
    """Of "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)" it is AllReduce, of "gloo:all_reduce" all_reduce."""
    words = re.split(r"[_:(]", name[:200], maxsplit=2)
    if name.startswith(("gloo:", "nccl:")):
        return name.partition(":")[2]
    return words[1] if name.lower().startswith("nccl") and len(words) > 1 else name
