"""Training with one fault in it, planted: what must the report say? Used by the tests and by faults.py.

A small model trains for real, on ranks that exist already (a process group over gloo). Its compute is a
sleep, so that two cores hold four ranks, and so is every fault: how much it costs a step is known beforehand.
"""

import contextlib
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlapkit as ok
from overlapkit.checkpoint import job
from overlapkit.input.packing import Packing
from overlapkit.parallel import ring

BLOCKS = 8
FORWARD_S, BACKWARD_S = 0.015, 0.030  # of a block
COMPUTE_S = BLOCKS * (FORWARD_S + BACKWARD_S)
STEPS = 7
MIB = 2**20


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x + weight.view(-1)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.backward_s)
        return gradient, torch.full_like(weight, 1e-6), None, None


class Block(nn.Module):
    """64 KiB that take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(128, 128))

    def forward(self, x: Tensor, more: tuple[float, float]) -> Tensor:
        return _Sleep.apply(x, self.weight, FORWARD_S + more[0] / BLOCKS, BACKWARD_S + more[1] / BLOCKS)


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, more: tuple[float, float] = (0.0, 0.0)) -> Tensor:
        x = x.sum().requires_grad_()
        for block in self.blocks:
            x = block(x, more)
        return x


@dataclass
class Run:
    """What a fault may change.

    Attributes:
        rank: Of this process.
        world: Number of ranks.
        seconds: How much the fault costs a step.
        source: Batches.
        done: Released after each step.
        asked: Released before each save, and before the end.
        wrap: shard or replicate.
        more: Seconds more in forward and in backward, by step.
        in_step: Called between forward and backward.
        in_optimizer: Called at the beginning of the optimizer's step.
        around: Entered around the training.
        every: Steps between two saves, or None.
        loader_options: Of DeviceLoader.
    """

    rank: int
    world: int
    seconds: float
    source: Callable[[], Iterator[Tensor]]
    done: threading.Semaphore
    asked: threading.Semaphore
    wrap: Callable[[nn.Module], nn.Module] = partial(ok.replicate, bucket_cap_mb=0.05)
    more: Callable[[int], tuple[float, float]] = lambda step: (0.0, 0.0)
    in_step: Callable[[], object] = lambda: None
    in_optimizer: Callable[[], object] = lambda: None
    around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    every: int | None = None
    loader_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        name: Of it.
        lane: That the report must name; None for a healthy run.
        component: What its one finding must say to change.
        setting: Words of how.
        plant: Changes the run.
        answer: For what is no finding: the index of the answer that must tell, and its verdict.
        times: How many times as much of it there must be, to be what it is.
    """

    name: str
    lane: str | None
    component: str
    setting: str
    plant: Callable[[Run], None]
    answer: tuple[int, str] | None = None
    times: float = 1.0


def train(rank: int, world: int, fault: Fault, seconds: float) -> dict[str, Any]:
    """Train with a fault that costs each step so many seconds; return what the report says."""
    run = Run(rank, world, seconds * fault.times, _batches, threading.Semaphore(), threading.Semaphore(0))
    fault.plant(run)
    with run.around, tempfile.TemporaryDirectory() as folder:
        model = run.wrap(Model())
        optimizer = ok.AdamW(model.parameters(), lr=1e-3)
        loader = ok.DeviceLoader(run.source, "cpu", **(run.loader_options or {}))
        shared = [folder]
        dist.broadcast_object_list(shared)
        checkpointer = ok.Checkpointer(Path(shared[0], "run"), every=run.every, keep=2) if run.every else None
        meter = ok.StepMeter(model, optimizer, loader, checkpointer)
        optimizer.register_step_pre_hook(lambda *_: run.in_optimizer())  # inside what the meter has opened
        for step, batch in enumerate(loader):
            with meter.step():
                loss = model(batch, run.more(step))
                run.in_step()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            run.done.release()
            run.asked.release()
            if checkpointer is not None:
                checkpointer.save(step + 1, {"model": model, "optimizer": optimizer})
        run.asked.release()
        if checkpointer is not None:
            checkpointer.close()
        meter.close()
        dist.barrier()  # rank 0's folder is everybody's
    report = meter.report()
    return {
        "findings": [(one.lane, one.component, one.setting, one.exposed_ms) for one in report.findings],
        "answers": [(one.value, one.verdict, one.evidence) for one in report.answers],
        "text": str(report),
    }


def _batches() -> Iterator[Tensor]:
    for _ in range(STEPS):
        yield torch.ones(1024)


def slow_source(run: Run) -> None:
    """Each batch takes longer than the step."""

    def batches() -> Iterator[Tensor]:
        for batch in _batches():
            run.done.acquire()  # however far ahead it is read
            time.sleep(run.seconds)
            yield batch

    run.source = batches


def slow_copy(run: Run) -> None:
    """Copying a batch to where the step reads it takes long, and the step waits for it."""
    plain = Packing.fill_there

    def fill(packing: Packing, packed: Tensor) -> None:
        time.sleep(run.seconds)
        plain(packing, packed)

    run.loader_options = {"reuse_buffers": True}
    run.around = mock.patch.object(Packing, "fill_there", fill)


def host_work(run: Run) -> None:
    """The host does something else between forward and backward."""
    run.in_step = partial(time.sleep, run.seconds)


def late_bucket(run: Run) -> None:
    """The last bucket takes long, when backward has nothing left to hide it."""
    run.around, run.in_step = _link(lambda number: run.seconds if number == BLOCKS - 1 else 0.0)


def slow_link(run: Run) -> None:
    """Every bucket takes longer than the backward of its block: all but the first queue."""
    each = (run.seconds + (BLOCKS - 1) * BACKWARD_S) / BLOCKS
    run.around, run.in_step = _link(lambda number: each)


def slow_forward(run: Run) -> None:
    """The last rank computes longer in forward."""
    if run.rank == run.world - 1:
        run.more = lambda step: (run.seconds, 0.0)


def slow_backward(run: Run) -> None:
    """The last rank computes longer in backward."""
    if run.rank == run.world - 1:
        run.more = lambda step: (0.0, run.seconds)


def rotating(run: Run) -> None:
    """One rank computes longer in backward, in each step another."""
    run.more = lambda step: (0.0, run.seconds if step % run.world == run.rank else 0.0)


def slow_optimizer(run: Run) -> None:
    """The optimizer's step takes long."""
    run.in_optimizer = partial(time.sleep, run.seconds)


def optimizer_peak(run: Run) -> None:
    """The optimizer's first step needs memory that nothing else does."""
    left = [1]

    def allocate() -> None:
        if left:
            left.pop()
            torch.ones(round(run.seconds * 1000) * MIB // 4)

    run.in_optimizer = allocate


def slow_storage(run: Run) -> None:
    """A save takes longer than the steps until the next one, which waits for it."""
    plain = job.write_share

    def write(*arguments: Any) -> Any:
        run.asked.acquire()
        run.asked.acquire()  # by the next save, too
        run.asked.release()
        time.sleep(run.seconds)
        return plain(*arguments)

    run.every = 1
    run.around = mock.patch.object(job, "write_share", write)


HEALTHY = Fault("healthy", None, "", "", lambda run: None)
FAULTS = (
    Fault("slow source", "input", "the loader's source", "raise num_workers=", slow_source),
    Fault("slow copy", "transfer", "DeviceLoader", "raise depth=", slow_copy),
    Fault("host work", "other", "the loop", "host work inside the step", host_work),
    Fault("late bucket", "communication", "replicate", "smaller bucket_cap_mb=", late_bucket),
    Fault("slow link", "communication", "the batch", "too small to hide", slow_link, times=2.0),
    Fault("slow rank, forward", "communication", "rank {last}", "longer in forward", slow_forward),
    Fault("slow rank, backward", "communication", "rank {last}", "longer in backward", slow_backward),
    Fault("rotating rank", "communication", "ranks ", "late in turn, in backward", rotating),
    Fault("slow optimizer", "optimizer", "the loop", "step less often", slow_optimizer),
    Fault("optimizer peak", None, "", "", optimizer_peak, answer=(6, "optimizer")),
    Fault("slow storage", "checkpoint", "Checkpointer", "raise every= or in_flight=", slow_storage),
)


def _link(
    seconds: Callable[[int], float],
) -> tuple[contextlib.AbstractContextManager[Any], Callable[[], None]]:
    """Let each all-reduce of a bucket take so long more, one after the other.

    Args:
        seconds: Of a step's n-th bucket.

    Returns:
        What is entered around the training, and what is called before each backward.
    """
    plain, begun = ring.all_reduce, [0]

    def all_reduce(*arguments: Any) -> None:  # the wrapper calls it in a thread of its own
        plain(*arguments)
        time.sleep(seconds(begun[0]))
        begun[0] += 1

    return mock.patch.object(ring, "all_reduce", all_reduce), lambda: begun.__setitem__(0, 0)


def mistakes(fault: Fault, seconds: float, world: int, answers: list[dict[str, Any]]) -> list[str]:
    """What the reports of all ranks say that they should not, and do not say that they should.

    Found must be exactly one thing, on every rank: the planted one, with its number within 15 %.
    """
    wrong, planted = [], seconds * fault.times * 1e3
    for rank, answer in enumerate(answers):
        findings = answer["findings"]
        if fault.answer is not None:
            index, verdict = fault.answer
            growth = float(re.search(r"\+([\d.]+) MiB", answer["answers"][index][2])[1])
            if answer["answers"][index][1] != verdict or not math.isclose(growth, planted, rel_tol=0.15):
                wrong.append(f"rank {rank}: answer {index + 1} is {answer['answers'][index]}")
        expected = 0 if fault.lane is None else 1
        if len(findings) != expected:
            wrong.append(f"rank {rank}: {len(findings)} findings, {expected} planted: {findings}")
        elif expected:
            lane, component, setting, exposed_ms = findings[0]
            named = fault.component.format(last=world - 1)
            if lane != fault.lane or not component.startswith(named) or fault.setting not in setting:
                wrong.append(f"rank {rank}: {fault.lane} {named} {fault.setting} planted: {findings[0]}")
            elif not math.isclose(exposed_ms, planted, rel_tol=0.15):
                wrong.append(f"rank {rank}: {exposed_ms:.1f} ms found, {planted:.1f} planted")
    return wrong
