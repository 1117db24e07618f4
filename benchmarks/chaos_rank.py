"""One rank of benchmarks/chaos.py: it trains a small GPT on real text, and writes down all that it does.

    torchrun --nproc-per-node 2 benchmarks/chaos_rank.py SPEC.json

The loop is that of the README. What is added is the log (a line of JSON a record, one write each, so that a
kill leaves no half), a file layer that is slow while a file says so, a source that raises or stalls once
where a file says so, and steps that take as long as a file says.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it; here once, and not in each forked rank
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import overlapkit as ok
from overlapkit.checkpoint import CheckpointError, DamagedCheckpoint, verify
from overlapkit.checkpoint.disk import Disk
from overlapkit.input import inputs_and_targets

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 32, 2, 4
PLANTED = "planted by the test: this source cannot be read"


@dataclass(frozen=True)
class Spec:
    """What all ranks of one start are told.

    Attributes:
        store: The directory of checkpoints.
        data: The token shards.
        logs: Where records go.
        control: Where files say what to do wrong.
        life: Number of this start.
        steps: After how many the run is over.
        window: Tokens of a sample.
        batch: Samples of a step, over all ranks.
        wrap: "shard" or "replicate".
        every: Steps between saves.
        keep: Checkpoints that stay.
        stop: Whether a failed save ends the job.
        deadline: Seconds from SIGTERM to the end.
        patience: Seconds that ranks wait for each other, in whatever.
        hang: Seconds without progress that are a hang.
    """

    store: str
    data: str
    logs: str
    control: str
    life: int
    steps: int
    window: int
    batch: int
    wrap: str
    every: int
    keep: int
    stop: bool
    deadline: float
    patience: float
    hang: float


class Log:
    """The records of one rank, one a line."""

    def __init__(self, spec: Spec, rank: int) -> None:
        start = f"{spec.life:04d}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(Path(spec.logs, f"{start}-{rank}.jsonl"), flags, 0o644)
        stacks = open(Path(spec.logs, f"{start}-{rank}.stacks"), "w")  # noqa: SIM115 # as long as the process
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable()

    def __call__(self, kind: str, **about: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, "t": time.time(), **about}) + "\n").encode())


class SwitchedDisk(Disk):
    """The file system, slow for as long as the file `slow` says how many seconds a write and a sync take."""

    def __init__(self, control: str) -> None:
        self._switch = Path(control, "slow")

    def write_at(self, fd: int, view: memoryview, offset: int) -> None:
        self._wait()
        super().write_at(fd, view, offset)

    def sync(self, fd: int) -> None:
        self._wait()
        super().sync(fd)

    def _wait(self) -> None:
        if text := _read(self._switch):
            time.sleep(float(text))


class Source(ok.TokenShards):
    """Token shards that raise or stall once where the file `source-RANK` says so."""

    switch: Path

    def __iter__(self) -> Iterator[Any]:
        return self._watched(super().__iter__())

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if text := _read(self.switch):
                self.switch.unlink()
                if text == "raise":
                    raise OSError(PLANTED)
                time.sleep(float(text))
            yield batch


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


class Saves:
    """Calls `save`, and notes when the loop learns that one is committed, or failed."""

    def __init__(self, checkpointer: ok.Checkpointer, log: Log, stop: bool) -> None:
        self._checkpointer, self._log, self._stop = checkpointer, log, stop
        self._open: list[Any] = []

    def __call__(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._open.append(self._checkpointer.save(step, state))
        except SystemExit as left:
            if left.code == 128 + signal.SIGTERM:  # which says that it is saved
                self._log("committed", step=step)
            raise
        except (OSError, CheckpointError) as error:
            self._log("save failed", type=type(error).__name__, text=str(error))
            if self._stop:
                raise
        self.look()

    def look(self) -> None:
        for save in [save for save in self._open if save.committed.done()]:
            self._open.remove(save)
            if save.due and save.committed.error is None:
                self._log("committed", step=save.step)


def digests(x: Tensor, y: Tensor) -> list[str]:
    """What tells the samples of a batch apart: their tokens."""
    rows = torch.cat((x, y[:, -1:]), 1).to(torch.uint8).numpy()
    return [blake2b(row.tobytes(), digest_size=6).hexdigest() for row in rows]


def usage() -> dict[str, int]:
    """This process's memory (KiB), descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def found(store: str) -> dict[str, str]:
    """The checkpoints that are there, and what is wrong with each."""
    there = {}
    for path in Path(store).glob("step-*"):
        try:
            verify(path)
            there[path.name.split("-")[1]] = ""
        except DamagedCheckpoint as damage:
            there[path.name.split("-")[1]] = str(damage)
    return there


def train(spec: Spec, log: Log) -> None:
    """The loop."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    if rank == 0:
        log("found", steps=found(spec.store))
    source = Source(spec.data, spec.window, spec.batch // world)
    source.switch = Path(spec.control, f"source-{rank}")
    loader = ok.DeviceLoader(source, "cpu", transform=inputs_and_targets)
    model: Any = GPT(VOCABULARY, WIDTH, LAYERS, HEADS, spec.window)
    ok.kernels.swap(model)
    if spec.wrap == "shard":
        model = ok.shard(model, init_device_mesh("cpu", (world,)))
    else:
        model = ok.replicate(model)
    opt = ok.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=spec.steps)
    ok.Checkpointer._disk = SwitchedDisk(spec.control)
    ckpt = ok.Checkpointer(spec.store, every=spec.every, keep=spec.keep, timeout=spec.patience)
    ckpt.on_signal(signal.SIGTERM, deadline=spec.deadline)
    meter = ok.StepMeter(model, opt, loader, ckpt, hang_timeout=spec.hang)
    state = {"model": model, "optimizer": opt, "scheduler": sched, "loader": loader}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = ckpt.restore(state)
    said = [str(one.message) for one in warned]
    log("start", step=step, warned=said, names=sorted(os.listdir(spec.store)), epoch=len(loader))
    save, pace = Saves(ckpt, log, spec.stop), Path(spec.control, "pace")
    while step < spec.steps:
        loader.set_epoch(step // len(loader))
        for x, y in loader:
            with meter.step():
                loss = model(x, y)
                loss.backward()
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
            step += 1
            more = usage() if step % 20 == 0 else {}
            log("step", step=step, loss=loss.item().hex(), samples=digests(x, y), **more)
            save(step, state)
            time.sleep(float(_read(pace) or 0))
            if step == spec.steps:
                break
    ckpt.wait()
    save.look()
    ckpt.close()
    meter.close()
    loader.close()


def threads_left() -> list[str]:
    """Our threads, when all was closed and let go of; those of a wrapped model end a moment after it."""
    deadline = time.monotonic() + 5.0
    while gc.collect() >= 0 and (left := _our_threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _our_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("overlapkit-")]


def main(path: str) -> None:
    """The life of a rank; the log says how it ended."""
    spec = Spec(**json.loads(Path(path).read_text()))
    log = Log(spec, int(os.environ["RANK"]))
    log("born", pid=os.getpid(), world=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=spec.patience))
        train(spec, log)
        dist.destroy_process_group()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else None
        log("error", type=type(error).__name__, text=str(error), code=code)
        raise
    log("over", left=threads_left(), **usage())


if __name__ == "__main__":
    main(sys.argv[1])
