"""Run a function on several ranks of one process group; bring back each result, or each whole error.

The ranks are forked from the warm test process (about 0.1 s a case, where a fresh interpreter takes
seconds), or spawned where a fork cannot work: once this process has touched CUDA.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.lock_order import SEEN

GRACE_S = 5.0
"""How long the other ranks may go on once one has failed: enough for their own error, too short to hang."""

if not torch.cuda.is_available():
    # Autograd makes a thread for each device that there is at the process's first backward, and then refuses
    # to run in forks. With no GPU torch's CUDA builds have no device until they trace something; then eight.
    torch.zeros((), requires_grad=True).backward()


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung.

    Attributes:
        errors: For each failed rank its traceback, its exit code, or the stacks it hung in. The rank that
            failed first comes first.
        exceptions: The exception objects themselves, where they could be sent.
    """

    def __init__(self, errors: dict[int, str], exceptions: dict[int, BaseException]) -> None:
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in errors.items()))
        self.errors = errors
        self.exceptions = exceptions


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    start: str | None = None,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call `fn(rank, *args)` in `world` processes that share a process group; return what each returned.

    The default process group is there when `fn` is called and is destroyed after it. Its store is a
    TCPStore that this process serves, so it outlives any rank, as with torchrun.

    Args:
        world: Number of ranks, at least 1.
        fn: Any callable when forked (a closure, too); a module-level function when spawned.
        args: Passed on. Results and, when spawned, arguments must be picklable.
        timeout: Seconds until all ranks must be done; also the group's timeout for collectives.
        backend: The process group's backend.
        start: "fork" or "spawn"; None forks unless CUDA is initialised here.
        may_die: Ranks whose death by a signal is part of the test: their result is their exit code (-9).

    Raises:
        RanksFailed: A rank raised, died or hung.
    """
    assert not dist.is_initialized(), "run_ranks makes its own process group: destroy this one first"
    context = multiprocessing.get_context(start or ("spawn" if torch.cuda.is_initialized() else "fork"))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, contextlib.ExitStack() as stack:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        stack.callback(_end, processes)
        for rank in range(world):
            ours, theirs = context.Pipe()
            job = (rank, world, fn, args, backend, timeout, theirs, f"{folder}/{rank}")
            process = context.Process(target=_rank, args=job, daemon=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: done on purpose
                process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
            stack.callback(ours.close)
        # After the forks: a lock that the server's thread holds at a fork stays locked in the child for ever.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for pipe in pipes:
                with contextlib.suppress(OSError):  # a rank that died already; _collect says so
                    pipe.send(store.port)
            return _collect(processes, pipes, timeout, Path(folder), may_die)
        finally:
            del store  # an error's traceback would keep it, and its thread, for the next test's forks


@contextlib.contextmanager
def one_rank_group() -> Iterator[None]:
    """A process group of this process alone, for the length of the block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collect(
    processes: list[BaseProcess],
    pipes: list[Connection],
    timeout: float,
    folder: Path,
    may_die: tuple[int, ...],
) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    exceptions: dict[int, BaseException] = {}
    deadline = time.monotonic() + timeout + 1.0  # the ranks write down their stacks at `timeout`
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            rank = open_pipes.pop(pipe)
            try:
                fine, value, text = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                fine, value, text = (
                    rank in may_die and code < 0,
                    code,
                    f"ended with exit code {code}, no result",
                )
            if fine:
                results[rank] = value
                continue
            errors[rank] = text
            if isinstance(value, BaseException):
                exceptions[rank] = value
            deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in open_pipes.values():
        stacks = folder / str(rank)
        where = stacks.read_text() if stacks.exists() else ""
        errors[rank] = (
            f"not done in time (limit {timeout} s, or {GRACE_S} s after another rank failed)\n{where}"
        )
    if errors:
        raise RanksFailed(errors, exceptions)
    return [results[rank] for rank in range(len(processes))]


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(timeout=0.5 if process.exitcode is None else None)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _rank(
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    timeout: float,
    pipe: Connection,
    stacks: str,
) -> None:
    """The life of one rank."""
    gc.freeze()  # what the parent left to collect may end threads that exist there only
    torch.set_num_threads(1)  # a forked child must not enter the parent's OpenMP pool: it would hang
    port = pipe.recv()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with open(stacks, "w") as file:
        faulthandler.dump_traceback_later(timeout, file=file)
        try:
            limit = timedelta(seconds=timeout)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
            store.set(f"connected/{rank}", b"")  # a rank that is done at once would cut off one that connects
            store.wait([f"connected/{other}" for other in range(world)], limit)
            message = (True, fn(rank, *args), "")
            assert not (found := SEEN.news()), "\n".join(found)
        except BaseException as error:
            message = (False, error, traceback.format_exc())
        pipe.send_bytes(_pickled(message))
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _pickled(message: tuple[bool, Any, str]) -> bytes:
    fine, value, text = message
    try:
        data = pickle.dumps(message)
        pickle.loads(data)  # an exception with its own __init__ may pickle and not come back
    except Exception as error:
        if fine:
            return pickle.dumps((False, None, f"the result {value!r} cannot be pickled: {error!r}"))
        return pickle.dumps((False, None, text))
    return data
