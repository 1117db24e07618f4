"""FSDP2's all-gather and reduce-scatter with spans; on the CPU both run beside the step.

Both are what `set_custom_all_gather` and `set_custom_reduce_scatter` take: `allocate` and a call.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlapkit.one_tensor import all_gather, reduce_scatter
from overlapkit.parallel import exchange
from overlapkit.parallel.traffic import LANE, Label, Pending, Traffic, at_end_of_backward, group_name
from overlapkit.parallel.waits import GatherWaits
from overlapkit.span import Mark, Span

TAIL = "reduce_scatter tail"


class _Collective:
    """What both have in common.

    Args:
        kind: "all_gather" or "reduce_scatter".
        unit: The unit's name.
        parameters: The names of what it carries.
        place: The unit's place among all; with the kind it tells its messages from others'.
        traffic: Shared by all units.
    """

    def __init__(
        self, kind: str, unit: str, parameters: tuple[str, ...], place: int, traffic: Traffic
    ) -> None:
        self.label = Label(f"{kind} {unit}", parameters)
        self._kind, self._tag, self._traffic = kind, place, traffic
        self._log = traffic.log
        self._streams: deque[torch.cuda.Stream] = deque(maxlen=2)  # on which buffers were asked for
        self._group = ""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer for one collective."""
        if device.type == "cuda":
            self._streams.append(torch.cuda.current_stream(device))
        return torch.empty(*size, dtype=dtype, device=device)

    def _on_host(
        self, group: dist.ProcessGroup, nbytes: int, begin: Callable[[], Callable[[], None]]
    ) -> Pending:
        return self._traffic.begin(self._kind, self.label, group, nbytes, begin)

    def _on_stream(self, stream: torch.cuda.Stream, nbytes: int, queue: Callable[[], Any]) -> Any:
        """Queue it and time it. The first stream that asked for a buffer is the one that fills it."""
        ready = self._log.mark(self._streams[0]) if self._streams else None
        self._streams.clear()
        parameters = self.label.parameters
        with self._log.stream(
            LANE,
            self.label.name,
            stream,
            bytes=nbytes,
            ready=ready,
            parameters=parameters,
            group=self._group,
        ):
            return queue()


class AllGather(_Collective):
    """All-gathers one unit.

    FSDP2 asks for a synchronous collective. On CUDA that still runs beside the step, on its own stream;
    on the CPU it would block the training thread, prefetched or not. There the work is started and
    handed back, and FSDP2 waits for it where it needs the parameters.

    Attributes:
        waits: What the compute stream waited for it, on CUDA.
    """

    def __init__(self, unit: str, parameters: tuple[str, ...], place: int, traffic: Traffic) -> None:
        super().__init__("all_gather", unit, parameters, 2 * place, traffic)
        self.waits = GatherWaits(traffic.log, self.label)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` (n,) of each rank into `output_tensor` (n * ranks,)."""
        self._group = group_name(group)

        def queue(async_op: bool = False) -> Any:
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

        if output_tensor.is_cuda:
            stream = torch.cuda.current_stream(output_tensor.device)
            if async_op:
                return self._queued(stream, output_tensor.nbytes, queue(async_op=True))
            self._on_stream(stream, output_tensor.nbytes, queue)
            self.waits.gathered = self._log.mark(stream)
            return None
        if output_tensor.device.type != "cpu":
            work: dist.Work | None = queue(async_op)
            return work

        def begin() -> Callable[[], None]:
            if exchange.direct(group):
                return exchange.gather(output_tensor, input_tensor, group, self._tag)
            return queue(async_op=True).wait  # type: ignore[no-any-return]

        return self._on_host(group, output_tensor.nbytes, begin)

    def _queued(self, stream: torch.cuda.Stream, nbytes: int, work: dist.Work) -> dist.Work:
        """Time what runs on the backend's own stream, by a stream that only waits for it."""
        watch = self._traffic.watch(self._kind, stream.device)
        watch.wait_stream(stream)
        with torch.cuda.stream(watch):
            self._on_stream(watch, nbytes, work.get_future().wait)
        self.waits.gathered = self._log.mark(watch)
        return work


class ReduceScatter(_Collective):
    """Reduce-scatters one unit's gradients.

    FSDP2 makes of the result, at once, what the optimizer will read. Where that only means to name it a
    gradient, on the CPU, backward goes on while it is under way and waits for it at its end; where FSDP2
    itself reads it (adds it to a gradient that is there, converts it, reduces it further, shows it to a hook)
    the training thread waits first.

    Args:
        unit: The unit's name.
        parameters: Name of each parameter, and a call that returns it as its module has it now.
        place: The unit's place among all.
        traffic: Shared by all units.
        mesh: The mesh of the shards and, in a first dimension, of their copies.
    """

    def __init__(
        self,
        unit: str,
        parameters: dict[str, Callable[[], torch.Tensor]],
        place: int,
        traffic: Traffic,
        mesh: Any,
    ) -> None:
        super().__init__("reduce_scatter", unit, (), 2 * place + 1, traffic)
        self._unit = unit
        self._parameters = parameters
        self._mesh = mesh
        self._scattered: int | Mark | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` (n * ranks,) over the ranks, each rank's part into `output_tensor` (n,)."""
        self._group = group_name(group)
        found = {name: find() for name, find in self._parameters.items()}
        _refuse_hooks(found)
        trained = (name for name, parameter in found.items() if parameter.requires_grad)
        self.label = self.label._replace(parameters=tuple(trained))

        def queue(async_op: bool = False) -> Any:
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

        if input_tensor.is_cuda and not async_op:
            stream = torch.cuda.current_stream(input_tensor.device)
            compute = self._streams[0] if self._streams else stream
            work: dist.Work | None = self._on_stream(stream, input_tensor.nbytes, queue)
            self._note_tail(compute)
            if self._mesh.ndim == 2:
                watch = self._traffic.watch("all_reduce", stream.device)
                watch.wait_stream(stream)
                self._scattered = self._log.mark(watch)
            return work
        if input_tensor.device.type != "cpu" or async_op:
            return queue(async_op)  # type: ignore[no-any-return]

        def begin() -> Callable[[], None]:
            if exchange.direct(group) and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                average = op == dist.ReduceOp.AVG
                return exchange.reduce(output_tensor, input_tensor, group, self._tag, average=average)
            return queue(async_op=True).wait  # type: ignore[no-any-return]

        self._traffic.make_room()
        pending = self._on_host(group, input_tensor.nbytes, begin)
        if op == dist.ReduceOp.AVG and self._only_named(output_tensor.dtype):
            self._traffic.wait_late(pending)
        else:
            pending.wait()
        self._scattered = time.perf_counter_ns()
        return pending

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """FSDP2's hook: the all-reduce that followed on a 2-D mesh is done, or queued on this stream."""
        scattered, self._scattered = self._scattered, None
        name, parameters = f"all_reduce {self._unit}", self.label.parameters
        group = group_name(self._mesh.get_group(0))
        if isinstance(scattered, int):
            now = time.perf_counter_ns()
            head = (LANE, name, scattered, now, reduced.nbytes)
            span = Span(*head, exposed=True, ready=scattered, parameters=parameters, group=group)
            self._log.add(span)
        elif scattered is not None:
            watch = self._traffic.watch("all_reduce", reduced.device)
            watch.wait_stream(torch.cuda.current_stream(reduced.device))
            ends = scattered, self._log.mark(watch)
            self._log.between(
                LANE, name, watch, ends, bytes=reduced.nbytes, parameters=parameters, group=group
            )

    def _only_named(self, dtype: torch.dtype) -> bool:
        """Whether FSDP2 will only make new gradients of the result: it reads nothing of it."""
        from torch.distributed.tensor import DTensor

        for parameter in (find() for find in self._parameters.values()):
            if not (
                self._mesh.ndim == 1
                and isinstance(parameter, DTensor)
                and _spans(parameter.device_mesh, self._mesh)  # the sharded one, not a tensor-parallel whole
                and (not parameter.requires_grad or parameter.dtype == dtype == _gradient_dtype(parameter))
                and parameter.grad is None
                and not parameter._post_accumulate_grad_hooks  # FSDP2 calls them itself
            ):
                return False
        return True

    def _note_tail(self, compute: torch.cuda.Stream) -> None:
        """From the last call of a backward on, the compute stream has nothing left but to wait."""
        log, traffic = self._log, self._traffic
        traffic.last = begun = log.mark(compute)

        def ended() -> None:
            if traffic.last is begun:
                traffic.last = None
                log.between(LANE, TAIL, compute, (begun, log.mark(compute)), exposed=True)

        at_end_of_backward(ended)  # behind FSDP2's own, which makes the compute stream wait


def _refuse_hooks(parameters: dict[str, torch.Tensor]) -> None:
    """FSDP2 makes the gradients of shards itself, so that autograd calls no hook of theirs."""
    for name, parameter in parameters.items():
        if parameter._backward_hooks:
            raise RuntimeError(
                f"parameter {name} has a hook of register_hook, which is not called for a sharded parameter: "
                "use register_post_accumulate_grad_hook, which finds the reduced gradient in .grad"
            )


def _spans(whole: Any, mesh: Any) -> bool:
    """Whether a parameter's mesh is, or has a dimension that is, the mesh of the shards."""
    names = mesh.mesh_dim_names
    return bool(whole == mesh or (names and set(names) <= set(whole.mesh_dim_names or ())))


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Newer torch converts a gradient to the dtype that the user asked for."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return dtype
