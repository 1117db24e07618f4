"""A recorder that stands in for CUDA on a machine without it, and finds missing waits.

Device tensors are `CudaTensor`s: they say that they live on cuda:0, compute on the CPU at once, and
note every access under the stream that is current. Streams, events and the host carry vector clocks
(Lamport 1978; Mattern 1989), as a race detector for threads does: two accesses to the same memory, one
of them a write, must be ordered by a chain of launch, record, wait and synchronise. Memory that goes
back to the allocator must be past its last use on every stream but its own, unless `record_stream`
said so. Every breach is collected in `FakeCuda.faults`, whatever values came out.

The host's threads are actors too, and tell each other what they know as `tests/host_threads.py` says. The
clocks hold for every order in which a device may run its streams; what they cannot stand for is the order
in which the host's threads come, and what `query` answers when: with a seed these are drawn, thread by
thread. Memory that was allocated for a stream may still be in use there by its former owner: allocating
counts as a write.
"""

import contextlib
import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from overlapkit.pinned import PinnedRing
from tests.host_threads import Clock, HostThreads, join

CUDA = torch.device("cuda", 0)


@dataclass
class Memory:
    """What is known of one stretch of memory: who wrote it last, and who has read it since."""

    name: str
    home: str
    write: tuple[str, int] | None = None
    reads: dict[str, int] = field(default_factory=dict)
    shared_with: set[str] = field(default_factory=set)


class FakeCuda:
    """The machine: one device, its streams and what they have done.

    Args:
        seed: Draws how long launches and waits take, and how late queries answer; None: no time, the second.

    Attributes:
        faults: One line for each pair of accesses that nothing orders.
        copies: (bytes, non_blocking) of each copy between host and device.
        syncs: Times that the host waited for the device.
    """

    current: ClassVar["FakeCuda | None"] = None

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.threads = HostThreads()
        self.faults: list[str] = []
        self.copies: list[tuple[int, bool]] = []
        self.syncs = 0
        self.pinned: dict[int, int] = {}
        self.lent: dict[int, int] = {}  # where such memory begins, and its key in `memories`
        self.memories: dict[int, Memory] = {}
        self.local = threading.local()
        self.names = itertools.count()
        self.streams: dict[str, FakeStream] = {}
        self.lock = threading.RLock()
        self.default = FakeStream(machine=self)

    @property
    def stream(self) -> "FakeStream":
        """The calling thread's current stream."""
        return getattr(self.local, "stream", self.default)

    @property
    def host(self) -> Clock:
        """What the calling thread knows to be over."""
        return self.threads.clock

    @property
    def chance(self) -> random.Random:
        """The calling thread's own, so that others change nothing of what it draws."""
        if not hasattr(self.local, "chance"):
            self.local.chance = random.Random(f"{self.seed} {self.threads.name}")
        return self.local.chance  # type: ignore[no-any-return]

    def dawdle(self) -> None:
        """Let other threads go first, or not."""
        if self.seed is not None and self.chance.random() < 0.2:
            time.sleep(self.chance.choice((0.0, 1e-4, 1e-3)))

    def patience(self) -> int:
        """How many times an event is asked for until it is over."""
        return 2 if self.seed is None else self.chance.randrange(1, 5)

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """The record of a tensor's storage; made at first sight."""
        on_device = isinstance(tensor, CudaTensor)
        key = (tensor.raw if on_device else tensor).untyped_storage()._cdata
        if key not in self.memories:
            home = self.stream.name if on_device else "host"
            self.memories[key] = Memory(f"{home} memory {next(self.names)}", home)
            if not on_device and key not in self.lent.values():  # torch's allocator guards what is freed
                weakref.finalize(tensor.untyped_storage(), self.memories.pop, key, None)
        return self.memories[key]

    def access(self, actor: str, clock: Clock, memory: Memory, *, write: bool) -> None:
        """Note an access at the actor's present time, and whatever does not come before it."""
        with self.lock:
            earlier = dict(memory.reads) if write else {}
            if memory.write is not None:
                earlier[memory.write[0]] = max(earlier.get(memory.write[0], 0), memory.write[1])
            for who, when in earlier.items():
                if who != actor and clock.get(who, 0) < when:
                    verb = "written" if write else "read"
                    self.faults.append(
                        f"{memory.name}: {verb} on {actor}, not ordered after its use on {who}"
                    )
            if write:
                memory.write, memory.reads = (actor, clock[actor]), {}
            else:
                memory.reads[actor] = clock[actor]

    def free(self, key: int) -> None:
        """Memory goes back to where it came from: everyone else must be done with it."""
        with self.lock:
            memory = self.memories.pop(key, None)
            if memory is None or FakeCuda.current is not self:
                return  # the machine is gone
            clock = dict(self.host)  # what this thread has waited for is over for all that it launches later
            if memory.home != "host":
                join(clock, self.streams[memory.home].clock)
            uses = dict(memory.reads)
            if memory.write is not None:
                uses[memory.write[0]] = max(uses.get(memory.write[0], 0), memory.write[1])
            for who, when in uses.items():
                if (
                    who != memory.home
                    and not who.startswith("host")
                    and who not in memory.shared_with
                    and clock.get(who, 0) < when
                ):
                    self.faults.append(f"{memory.name}: freed while {who} may still use it")

    def host_waits(self, clock: Clock) -> None:
        clock = dict(clock)
        self.dawdle()
        with self.lock:
            self.syncs += 1
            join(self.host, clock)


class FakeStream:
    """torch.cuda.Stream: an actor with a clock, and the time up to which it is busy (`torch.cuda._sleep`)."""

    def __init__(self, device: Any = None, priority: int = 0, *, machine: FakeCuda | None = None) -> None:
        self.machine = machine or FakeCuda.current
        self.device = CUDA
        self.name = f"stream {len(self.machine.streams)}"
        self.clock: Clock = {self.name: 0}
        self.busy_until = 0.0
        self.machine.streams[self.name] = self  # as in CUDA, where streams come from a pool and stay

    def launch(self) -> Clock:
        """The host gives the stream something to do."""
        self.machine.dawdle()
        with self.machine.lock:
            join(self.clock, self.machine.host)
            self.clock[self.name] += 1
            self.busy_until = max(self.busy_until, time.perf_counter() * 1e3)
            return self.clock

    def wait_event(self, event: "FakeEvent") -> None:
        self.launch()
        if event.clock is not None:
            join(self.clock, event.clock)
            self.busy_until = max(self.busy_until, event.at)

    def wait_stream(self, other: "FakeStream") -> None:
        self.launch()
        join(self.clock, other.clock)
        self.busy_until = max(self.busy_until, other.busy_until)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.host_waits(self.clock)

    def query(self) -> bool:
        return _over(self.clock, self.machine.host)


class FakeEvent:
    """torch.cuda.Event: a moment of a stream. `query` answers late, as a busy device does."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = enable_timing
        self.clock: Clock | None = None
        self.at = 0.0
        self.device = CUDA
        self.machine = FakeCuda.current
        self.patience = self.machine.patience()

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.machine.stream
        self.clock = dict(stream.launch())
        self.at, self.patience = stream.busy_until, self.machine.patience()

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.machine.stream).wait_event(self)

    def synchronize(self) -> None:
        if self.clock is not None:
            self.machine.host_waits(self.clock)

    def query(self) -> bool:
        if self.clock is None:
            return True
        self.patience -= 1
        if self.patience > 0:
            return False
        join(self.machine.host, self.clock)
        return True

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self.enable_timing
        assert other.enable_timing
        if not all(event.clock and _over(event.clock, self.machine.host) for event in (self, other)):
            raise RuntimeError("CUDA error: device not ready: an event is timed that has not been asked for")
        return other.at - self.at


def _over(clock: Clock, host: Clock) -> bool:
    return all(host.get(who, 0) >= when for who, when in list(clock.items()) if who.startswith("stream"))


class CudaTensor(torch.Tensor):
    """A tensor that says it is on cuda:0 and holds its values on the CPU."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> "CudaTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=raw.device,  # what C++ sees: it would look for a CUDA build
            requires_grad=requires_grad,
        )

    def __init__(self, raw: torch.Tensor, requires_grad: bool = False) -> None:
        self.raw = raw

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self) -> str:
        return f"CudaTensor({self.raw!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def record_stream(self, stream: FakeStream) -> None:
        machine = FakeCuda.current
        assert machine is not None
        machine.memory_of(self).shared_with.add(stream.name)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that some device tensor takes part in: on the current stream."""
    machine = FakeCuda.current
    assert machine is not None
    if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
        return _to(args[0], kwargs)
    clock = machine.stream.launch()
    non_blocking = bool(kwargs.get("non_blocking", False)) or (len(args) > 2 and args[2] is True)
    for tensor, written in _tensors_of(func, args, kwargs):
        on_host = not isinstance(tensor, CudaTensor)
        if on_host and tensor.dim() == 0:
            continue  # a number, passed by value
        machine.access(machine.stream.name, clock, machine.memory_of(tensor), write=written)
        if on_host:
            machine.copies.append((tensor.nbytes, non_blocking))
            if not non_blocking or _pageable(machine, tensor):
                machine.host_waits(clock)  # CUDA is done with pageable memory when it returns
    plain = tree_map(lambda x: x.raw if isinstance(x, CudaTensor) else x, (args, kwargs))
    plain[1].pop("device", None)
    plain[1].pop("pin_memory", None)
    out = func(*plain[0], **plain[1])
    inputs = {id(x.raw): x for x in _flat(args, kwargs) if isinstance(x, CudaTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in inputs:
            return inputs[id(value)]
        if any(value is x for x in _flat(args, kwargs)):
            return value  # a host tensor that was written, e.g. by copy_
        return on_device(value, note=not func.is_view)

    return tree_map(wrap, out)


def on_device(raw: torch.Tensor, *, note: bool = True, requires_grad: bool = False) -> CudaTensor:
    """Put a CPU tensor on the device; with `note`, as written by the current stream now."""
    machine = FakeCuda.current
    assert machine is not None
    tensor = CudaTensor(raw, requires_grad)
    storage = raw.untyped_storage()
    if storage._cdata not in machine.memories:
        machine.memory_of(tensor)
        weakref.finalize(storage, machine.free, storage._cdata)
    if note:
        stream = machine.stream
        machine.access(stream.name, stream.launch(), machine.memory_of(tensor), write=True)
    return tensor


def module_on_device(module: torch.nn.Module) -> torch.nn.Module:
    """Put parameters and buffers on the device, in place; `Module.to` would look for CUDA itself."""
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                part._parameters[name] = torch.nn.Parameter(on_device(param.detach()), param.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_device(buffer)
    return module


def _to(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device = torch.device(kwargs["device"])
    fresh = torch.empty_like(
        tensor.raw if isinstance(tensor, CudaTensor) else tensor, dtype=kwargs.get("dtype") or tensor.dtype
    )
    target = on_device(fresh) if device.type == "cuda" else fresh
    with torch.no_grad():
        target.copy_(tensor.detach(), non_blocking=bool(kwargs.get("non_blocking", False)))
    return target


def _tensors_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """The operator's tensors, and whether it writes them. A view touches no memory."""
    if func.is_view or func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, torch.Tensor) and item.numel():
                yield item, written


def _flat(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    return torch.utils._pytree.tree_leaves((args, kwargs))


def _pageable(machine: FakeCuda, tensor: torch.Tensor) -> bool:
    start = tensor.untyped_storage().data_ptr()
    return not any(at <= start < at + size for at, size in machine.pinned.items())


@contextlib.contextmanager
def fake_cuda(seed: int | None = None) -> Iterator[FakeCuda]:
    """Give torch a CUDA device for the body. The faults are left in what is yielded."""
    machine = FakeCuda(seed)

    @contextlib.contextmanager
    def use(stream: FakeStream | None) -> Iterator[None]:
        before = machine.stream
        machine.local.stream = stream or before
        try:
            yield
        finally:
            machine.local.stream = before

    def factory(make: Any) -> Any:
        def build(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            pinned = kwargs.pop("pin_memory", None)
            if device is None or torch.device(device).type != "cuda":
                made = make(*args, device=device, **kwargs)
                if pinned:
                    machine.pinned[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
                return made
            return on_device(make(*args, **kwargs))

        return build

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        there = isinstance(tensor, CudaTensor)
        if device is None or (device.type == "cuda") == there:
            return tensor if dtype in (None, tensor.dtype) else plain_to(tensor, dtype)
        return _to(tensor, {"device": device, "dtype": dtype, "non_blocking": non_blocking})

    def register(pointer: int, nbytes: int, flags: int) -> int:
        machine.pinned[pointer] = nbytes
        return 0

    def sleep(cycles: int) -> None:
        """Work of so many cycles at a GHz: it takes no time here, but events come later."""
        machine.stream.launch()
        machine.stream.busy_until += cycles / 1e6

    def unregister(pointer: int) -> int:
        """The memory goes back to the system, which may hand it out at once: as if the host wrote it."""
        del machine.pinned[pointer]
        memory = machine.memories.pop(machine.lent.pop(pointer, 0), None)
        if memory is not None and FakeCuda.current is machine:
            machine.access(machine.threads.name, machine.host, memory, write=True)
        return 0

    def take(ring: PinnedRing, nbytes: int, **options: Any) -> Any:
        buffer = plain_take(ring, nbytes, **options)
        whole = buffer.bytes(1)
        machine.lent[whole.data_ptr()] = whole.untyped_storage()._cdata
        machine.access(machine.threads.name, machine.host, machine.memory_of(whole), write=True)
        return buffer  # which its borrower may write at once

    plain_to = torch.Tensor.to
    replaced = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": use,
        "current_stream": lambda device=None: machine.stream,
        "default_stream": lambda device=None: machine.default,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: [machine.host_waits(s.clock) for s in machine.streams.values()],
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "NVIDIA A100-SXM4-80GB",
        "get_device_capability": lambda device=None: (8, 0),
        "_sleep": sleep,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine.threads.followed())
        plain_take = PinnedRing.take
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for make in ("empty", "zeros", "ones", "full", "arange", "randn"):
            stack.enter_context(mock.patch.object(torch, make, factory(getattr(torch, make))))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", to))
        stack.enter_context(mock.patch.object(PinnedRing, "take", take))
        stack.enter_context(mock.patch.object(FakeCuda, "current", machine))
        yield machine
