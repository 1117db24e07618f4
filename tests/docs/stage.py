"""What the pages' Python blocks find: the names of a training loop, each made when a block uses it.

A block that reads `opt` before it sets it gets the one below, made from whatever `model` is then. So a page
can show the three lines that matter, and they still run.
"""

import builtins
import dis
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import overlapkit as ok
from overlapkit.measure import StepReport

WIDTH, WORDS, ROWS, BATCH = 32, 64, 256, 16


class Block(nn.Module):
    """A norm and a gated layer beside a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts a token from one token: logits (B, V) of x (B), or their loss if targets (B) come with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits if y is None else F.cross_entropy(logits, y)

    def init_weights(self) -> None:
        """As torchtitan's and transformers' models have it: sets every parameter."""
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


Get = Callable[[str], Any]
"""Gives another name of the stage, as the page has it by now."""

STAGE: dict[str, Callable[[Get], Any]] = {
    "F": lambda get: F,
    "Model": lambda get: Model,
    "StepReport": lambda get: StepReport,
    "batch": lambda get: next(iter(get("loader"))),
    "ckpt": lambda get: ok.Checkpointer("runs/a", every=2, keep=3),
    "dataset": lambda get: _dataset(),
    "device": lambda get: torch.device("cpu"),
    "dist": lambda get: dist,
    "epoch": lambda get: 0,
    "evaluate": lambda get: lambda batch: get("model")(*batch).item(),
    "loader": lambda get: StatefulDataLoader(get("dataset"), batch_size=BATCH),
    "mesh": lambda get: _mesh(),
    "meter": lambda get: ok.StepMeter(get("model"), get("opt"), get("loader")),
    "microbatches": lambda get: list(get("loader"))[:4],
    "model": lambda get: Model(),
    "nn": lambda get: nn,
    "ok": lambda get: ok,
    "opt": lambda get: ok.AdamW(get("model").parameters(), lr=1e-2),
    "os": lambda get: os,
    "rank": lambda get: dist.get_rank() if dist.is_initialized() else 0,
    "run": lambda get: _Run(),
    "sched": lambda get: torch.optim.lr_scheduler.StepLR(get("opt"), 100),
    "signal": lambda get: signal,
    "state": lambda get: {"model": get("model"), "optimizer": get("opt")},
    "step": lambda get: 0,
    "time": lambda get: time,
    "torch": lambda get: torch,
    "total_steps": lambda get: ROWS // BATCH,
    "train": lambda get: lambda x, y: _train(get("model"), get("opt"), x, y),
    "validation": lambda get: list(get("loader"))[:2],
    "world_size": lambda get: dist.get_world_size() if dist.is_initialized() else 1,
    "x": lambda get: get("batch")[0],
    "y": lambda get: get("batch")[1],
}


class _Run:
    """Where a page logs to a service of its reader's."""

    def log(self, values: dict[str, Any], step: int) -> None:
        assert all(isinstance(value, float) for value in values.values()), step


def _dataset() -> torch.utils.data.Dataset[Any]:
    tokens = torch.arange(ROWS) % WORDS
    return torch.utils.data.TensorDataset(tokens, (tokens + 1) % WORDS)


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def _train(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    model(x, y).backward()
    opt.step()
    opt.zero_grad(set_to_none=True)


def run_block(text: str, line: int, path: Path, names: dict[str, Any]) -> None:
    """Run one block in `names`; what it needs is added, and a traceback shows the page's own lines."""
    code = compile("\n" * (line - 1) + text, str(path), "exec")

    def get(name: str) -> Any:
        if name not in names:
            names[name] = STAGE[name](get)
        return names[name]

    for name in needed(code):
        if name in STAGE:
            get(name)
    exec(code, names)


def needed(code: CodeType) -> list[str]:
    """Names that a module's code reads before it sets them, in order; then those of its functions."""
    steps = [step for step in dis.get_instructions(code) if isinstance(step.argval, str)]
    stored = {step.argval for step in steps if step.opname == "STORE_NAME"}
    own: list[str] = []
    known: set[str] = set()
    for step in steps:
        if step.opname == "LOAD_NAME" and step.argval not in known:
            own.append(step.argval)
        known.add(step.argval)
    inner = [name for name in _globals_of_functions(code) if name not in stored]
    return [name for name in dict.fromkeys([*own, *inner]) if not hasattr(builtins, name)]


def _globals_of_functions(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for step in dis.get_instructions(constant):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    yield step.argval
            yield from _globals_of_functions(constant)
