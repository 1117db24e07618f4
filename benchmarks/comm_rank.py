"""One rank of benchmarks/comm.py: it runs every variant's step in turns and prints what they took, as JSON.

The model's compute is sleep: in each block's forward and backward, of a length given, beside products with
one row of input, which make gradients of full size for next to nothing. So two cores carry four ranks, and
what is measured is what communication adds, not what the ranks take from each other.
"""

import json
import resource
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import netlab
import overlapkit as ok
from harness import alternate, returned_seconds

WIDTH, VOCABULARY = 512, 2000
_COUNTERS = Path("/sys/class/net", netlab.INTERFACE, "statistics")
_PROBE_PORT = 29600


class Sleep(torch.autograd.Function):
    """The identity, which takes so many seconds forward and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(Sleep.apply(self.norm(x), self.seconds))))


class Model(nn.Module):
    """Embedding, blocks, norm, head; a step computes (sleeps) so many seconds in all."""

    def __init__(self, depth: int, compute_s: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(compute_s / depth / 3) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain(model: Model, mesh: Any) -> nn.Module:
    """fully_shard on each block and on the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def recipe(model: Model, mesh: Any) -> nn.Module:
    """As large pretraining code does it: blocks, the embedding, [norm, head] kept, explicit prefetch."""
    last = [model.norm, model.head]
    fully_shard(model.embed, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    order: list[Any] = [model.embed, *model.blocks]
    for unit, after in zip(order, [*order[1:], last[0]], strict=True):
        unit.set_modules_to_forward_prefetch([after])
    backwards: list[Any] = [last[1], *reversed(model.blocks)]
    for unit, after in zip(backwards, [*backwards[1:], model.embed], strict=True):
        unit.set_modules_to_backward_prefetch([after])
    return model


VARIANTS: dict[str, Callable[[Model, Any], nn.Module]] = {
    "compute alone": lambda model, mesh: model,
    "fully_shard": plain,
    "fully_shard, recipe": recipe,
    "DDP": lambda model, mesh: nn.parallel.DistributedDataParallel(model),
    "ours, shard": lambda model, mesh: ok.shard(model, mesh),
    "ours, shard, 2 ahead": lambda model, mesh: ok.shard(model, mesh, forward_prefetch=2),
    "ours, replicate": lambda model, mesh: ok.replicate(model),
    "ours, replicate, 8 MiB": lambda model, mesh: ok.replicate(model, bucket_cap_mb=8),
}


class Step:
    """A variant's training step without the optimizer, timed from a barrier on; and what it cost beside."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.forwards: list[float] = []
        self.sent: list[int] = []
        self.cpu: list[float] = []
        self.spans: list[Any] = []
        self.began = 0
        self.tokens = torch.zeros(1, 1, dtype=torch.long)

    def __call__(self) -> float:
        self.model.zero_grad(set_to_none=True)
        dist.barrier()
        sent, cpu = _sent(), _cpu()
        start = time.perf_counter_ns()
        loss = self.model(self.tokens).square().mean()
        self.began = time.perf_counter_ns()
        loss.backward()
        took = (time.perf_counter_ns() - start) / 1e9
        self.forwards.append((self.began - start) / 1e9)
        dist.barrier()
        self.sent.append(_sent() - sent)
        self.cpu.append(_cpu() - cpu)
        if hasattr(self.model, "timings"):
            self.spans = self.model.timings()
        return took


def bandwidth(nbytes: int) -> float:
    """Bytes a second over a plain socket from each rank to the next, all at once, in both directions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with socket.create_server((netlab.address(rank), _PROBE_PORT)) as server:
        dist.barrier()
        sender = threading.Thread(target=_send, args=((rank + 1) % world, nbytes))
        sender.start()
        connection, _ = server.accept()
        with connection:
            left = nbytes - len(connection.recv(1))
            start = time.perf_counter()
            while left:
                left -= len(connection.recv(min(left, 1 << 20))) or _broken()
        took = time.perf_counter() - start
        sender.join()
    return nbytes / took


def _send(rank: int, nbytes: int) -> None:
    with socket.create_connection((netlab.address(rank), _PROBE_PORT)) as connection:
        connection.sendall(bytes(nbytes))


def _broken() -> int:
    raise ConnectionError("the probe's peer is gone")


def _sent() -> int:
    return int((_COUNTERS / "tx_bytes").read_text())


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(depth: int, compute_s: float, rounds: int, probe: int) -> dict[str, Any]:
    """This rank's numbers, by variant."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps: dict[str, Step] = {}
    for name, build in VARIANTS.items():
        torch.manual_seed(0)
        steps[name] = Step(build(Model(depth, compute_s), mesh))
    rates: list[float] = []

    def probed() -> float:
        rates.append(bandwidth(probe))
        return probe / rates[-1]

    took = alternate({**steps, "probe": probed}, rounds=rounds, timer=returned_seconds)
    spans = {name: step.spans for name, step in steps.items()}
    alone, replicas = steps["compute alone"], steps["ours, replicate, 8 MiB"]
    ready = [span.ready or span.start for span in spans["ours, replicate, 8 MiB"]]
    return {
        "steps": {name: took[name].samples for name in steps},
        "forward": alone.forwards[1:],
        "rates": rates[1:],
        "first_ready": (min(ready) - replicas.began) / 1e9,
        "gathered": _carried(spans["ours, shard"], "all_gather"),
        "reduced": _carried(spans["ours, shard"], "reduce_scatter"),
        "parameters": sum(p.numel() * p.element_size() for p in alone.model.parameters()),
        "sent": {name: step.sent[1:] for name, step in steps.items()},
        "cpu": {name: step.cpu[1:] for name, step in steps.items()},
    }


def _carried(spans: list[Any], kind: str) -> int:
    return sum(span.bytes or 0 for span in spans if span.name.startswith(kind + " "))


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    depth, rounds, probe = (int(word) for word in sys.argv[1:4])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mine = measured(depth, float(sys.argv[4]), rounds, probe)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        Path(sys.argv[5]).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
