"""One sample of benchmarks/checkpoint.py: a training loop in fresh processes that saves a few times.

The ranks are forked from the benchmark, which has imported everything and computed nothing: so a sample
begins in milliseconds, and its memory is its own.
"""

import contextlib
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import alternate, returned_seconds
from overlapkit.checkpoint import Checkpointer
from savers import SAVERS, Saver

PIECE = 16 << 20  # of a raw read or write
TURNS = 5  # of each, of raw writes and of loads


@dataclass(frozen=True)
class Setting:
    """What is saved.

    Attributes:
        kind: "large": 32 parameters under SGD; "small": parameters under AdamW, 4 tensors each.
        nbytes: Of all tensors, over all ranks.
        tensors: How many small ones.
        ranks: 1, or more under FSDP2.
        step_s: Seconds of a step without a save.
        folder: Where to.
        device: Where the tensors are, and where the steps compute.
    """

    kind: str
    nbytes: int
    tensors: int
    ranks: int
    step_s: float
    folder: Path
    device: str


def sample(setting: Setting, name: str) -> dict[str, float]:
    """Measure one way to save; of several ranks, the slowest counts."""
    return _in_ranks(setting, lambda folder: _measure(setting, name, folder))


def raw(setting: Setting) -> dict[str, float]:
    """Seconds of writing and syncing a file of the same size per rank, by plain calls: medians."""
    return _in_ranks(setting, lambda folder: _raw(setting, folder))


def load(setting: Setting) -> dict[str, float]:
    """Seconds of a restore, of dcp.load and of a raw read: medians, with nothing in the page cache."""
    return _in_ranks(setting, lambda folder: _load(setting, folder))


def build(setting: Setting) -> dict[str, Any]:
    """The state, its optimizer with all that it ever has; only one parameter gets a gradient."""
    small = setting.kind == "small"
    count = setting.tensors // 4 if small else 32
    numel = setting.nbytes // 4 // count // (3 if small else 1)
    layers = [nn.Module() for _ in range(count)]
    for place, layer in enumerate(layers):
        value = torch.full((max(setting.ranks, numel),), place + 0.5, device=setting.device)
        layer.weight = nn.Parameter(value)
    model = nn.Sequential(*layers)
    if setting.ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(torch.device(setting.device).type, (setting.ranks,)))
    parameters = list(model.parameters())
    made = partial(torch.optim.AdamW, fused=True) if small else torch.optim.SGD
    optimizer = made(parameters, lr=1e-9)
    if small:
        for parameter in parameters:
            zeros = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(1.0, device=setting.device), **zeros}
    parameters[0].grad = torch.zeros_like(parameters[0])
    return {"model": model, "optimizer": optimizer}


def _measure(setting: Setting, name: str, folder: Path) -> dict[str, float]:
    compute = work(setting)
    build(replace(setting, nbytes=1 << 16, tensors=8))["optimizer"].step()  # what torch loads at first use
    base = _peak(reset=True)
    state = build(setting)
    _peak(reset=True)  # what held the model whole until it was sharded does not count
    saver = SAVERS[name][1](folder, state)
    start = time.perf_counter()
    saver.prepare()
    found = {"prepare": time.perf_counter() - start}
    found["first"], found["first exposed"] = exposed(compute, saver)
    found["stall"], found["exposed"] = exposed(compute, saver)  # what every later save costs
    found["durable"] = _until_durable(saver)
    found["memory"] = float(_peak() - base)
    saver.close()
    return found


def exposed(compute: Callable[[], None], saver: Saver) -> tuple[float, float]:
    """Seconds of a save's stall, and of all that it cost the training; faster steps are no gain of its."""
    saver.tidy()
    usual = median(_timed(compute, saver) for _ in range(6))
    start = time.perf_counter()
    saver.save()
    stall = time.perf_counter() - start
    steps = [_timed(compute, saver)]
    while not saver.done() or len(steps) < 5:
        steps.append(_timed(compute, saver))
    saver.wait()
    return stall + saver.waited(), stall + max(0.0, sum(steps) - usual * len(steps))


def _until_durable(saver: Saver) -> float:
    saver.tidy()
    start = time.perf_counter()
    saver.save()
    saver.wait()
    return time.perf_counter() - start


def work(setting: Setting) -> Callable[[], None]:
    """A piece of compute, on this thread or on the GPU, that takes about as long as a step is to."""
    on_gpu = setting.device != "cpu"
    side = 2048 if on_gpu else 384
    a, b = (torch.full((side, side), 0.5, device=setting.device) for _ in range(2))
    out = torch.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)
        if on_gpu:
            torch.cuda.synchronize()

    multiply(20)
    start = time.perf_counter()
    multiply(50)
    times = max(1, round(50 * setting.step_s / (time.perf_counter() - start)))
    return lambda: multiply(times)


def _timed(compute: Callable[[], None], saver: Saver) -> float:
    start = time.perf_counter()
    compute()
    saver.step()
    return time.perf_counter() - start


def _raw(setting: Setting, folder: Path) -> dict[str, float]:
    size = setting.nbytes // setting.ranks // 4096 * 4096
    pages = mmap.mmap(-1, size)  # direct writes want whole pages
    torch.frombuffer(pages, dtype=torch.uint8).fill_(7)
    memory = memoryview(pages)
    path = folder / f"raw-{os.getpid()}"

    def write(flag: int) -> float:
        path.unlink(missing_ok=True)
        dist.barrier()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o666)
        start = time.perf_counter()
        for at in range(0, size, PIECE):
            os.write(fd, memory[at : at + PIECE])
        os.fsync(fd)
        took = time.perf_counter() - start
        os.close(fd)
        return took

    turns: dict[str, Callable[[], object]] = {
        "write": lambda: write(0),
        "direct": lambda: write(getattr(os, "O_DIRECT", 0)),
    }
    taken = alternate(turns, rounds=TURNS, warmup=0, timer=returned_seconds)
    return {name: one.median for name, one in taken.items()}


def _load(setting: Setting, folder: Path) -> dict[str, float]:
    from torch.distributed import checkpoint

    state = build(setting)
    with Checkpointer(folder / "ours") as checkpointer:
        checkpointer.save(1, state, block=True)
    dicts = {key: item.state_dict() for key, item in state.items()}
    checkpoint.save(dicts, checkpoint_id=folder / "dcp")
    mine = folder / "ours" / "step-1" / f"rank-{dist.get_rank():05d}.safetensors"

    def cold(load: Callable[[], object]) -> float:
        _drop(folder)
        start = time.perf_counter()
        load()
        return time.perf_counter() - start

    def restore(times: int) -> float:
        with Checkpointer(folder / "ours") as checkpointer:  # without memory to read into
            return [cold(partial(checkpointer.restore, state)) for _ in range(times)][-1]

    turns: dict[str, Callable[[], object]] = {
        "read": lambda: cold(lambda: _read(mine)),
        "load": lambda: restore(1),
        "again": lambda: restore(2),
        "dcp": lambda: cold(lambda: checkpoint.load(dicts, checkpoint_id=folder / "dcp")),
    }
    taken = alternate(turns, rounds=TURNS, warmup=0, timer=returned_seconds)
    return {name: one.median for name, one in taken.items()}


def _read(path: Path) -> None:
    """Read a file into new memory, as a load into a new process does."""
    size = path.stat().st_size
    memory = memoryview(torch.empty(size, dtype=torch.uint8).numpy().data)
    fd = os.open(path, os.O_RDONLY)
    for at in range(0, size, PIECE):
        os.preadv(fd, [memory[at : at + PIECE]], at)
    os.close(fd)


def _drop(folder: Path) -> None:
    """Take all files out of the page cache, and wait for the other ranks to have done so."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    dist.barrier()


def _peak(*, reset: bool = False) -> int:
    """Most bytes that this process and its children held, each at its own worst moment."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    pids = [str(os.getpid()), *(str(child.pid) for child in multiprocessing.active_children())]
    return sum(_high_water(pid) for pid in pids)


def _high_water(pid: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc", pid, "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _in_ranks(setting: Setting, measure: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    """Run something on every rank, forked; the worst of each number."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking beside threads, of which there are none that compute
        results, processes, ports = [], [], context.SimpleQueue()
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, setting, Path(folder), ports, measure, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=False)
            process.start()
            theirs.close()
            processes.append(process)
            results.append(ours)
        # A store as torchrun's; after the forks: a lock that its thread holds at one would stay locked there.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in processes:
            ports.put(store.port)
        answers = [_answer(result) for result in results]
        for process in processes:
            process.join()
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


def _answer(result: Connection) -> dict[str, float]:
    try:
        answer = result.recv()
    except EOFError:
        raise SystemExit("a rank ended without a result") from None
    if isinstance(answer, str):
        raise SystemExit(answer)
    return answer


def _rank(
    rank: int,
    setting: Setting,
    folder: Path,
    ports: "SimpleQueue[int]",
    measure: Callable[[Path], dict[str, float]],
    result: Connection,
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", ports.get(), is_master=False)
    _be_quiet()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
    try:
        result.send(measure(folder))
    except BaseException:
        result.send(traceback.format_exc())
    dist.destroy_process_group()
    os._exit(0)  # not the benchmark's own exit


def _be_quiet() -> None:
    """Peers warn and log while they work, in processes of their own, too."""
    warnings.simplefilter("ignore")
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
