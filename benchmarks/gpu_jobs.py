"""What benchmarks/gpu_step.py trains: one GPT of a size, by PyTorch's parts or ours, compiled or not."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import overlapkit as ok
from machine import ROOT
from marks import mark, seconds_between
from overlapkit.input import inputs_and_targets

sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, plain_swiglu

SETTLE = 5  # steps before those that are timed
SETTINGS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Size:
    """A model, and what it is trained on.

    Attributes:
        whole: torch.compile gets the whole model, not its blocks.
        steps: That are timed in one go.
    """

    name: str
    width: int
    layers: int
    heads: int
    vocab: int
    window: int
    batch: int
    whole: bool
    steps: int

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.window * self.batch

    def flops_per_token(self, parameters: int) -> float:
        """Of forward and backward (PaLM, appendix B), with attention that is causal."""
        return 6 * parameters + 6 * self.layers * self.width * self.window


class Job:
    """One variant at one size, ready to be trained.

    Args:
        size: Of the model.
        ours: The parts of train_gpt.py, else those of train_gpt.py --baseline.
        compiled: Under torch.compile.
        data: What `write_tokens` wrote.
        device: Where it trains.
    """

    def __init__(self, size: Size, ours: bool, compiled: bool, data: Path, device: torch.device) -> None:
        torch.manual_seed(0)
        self.size, self.ours, self.device = size, ours, device
        swiglu = ok.kernels.swiglu if ours else plain_swiglu
        with device:
            model: Any = GPT(size.vocab, size.width, size.layers, size.heads, size.window, True, swiglu)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if ours:
            ok.kernels.swap(model)
            self.optimizer: Any = ok.AdamW(model.parameters(), max_norm=1.0, **SETTINGS)
            self.loader: Any = our_batches(size, data, device)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
            self.loader = PlainBatches(size, data, device)
        self.model: Any = compile_(model, size.whole, ours) if compiled else model
        self.meter: Any = nullcontext()
        self._batches = _forever(self.loader)

    def settle(self) -> None:
        """Compile, fill queues, and allocate what the first steps allocate. Ours is metered from here on."""
        self._train(self._batches, SETTLE)
        self.held = tuple(part.clone() for part in next(self._batches))
        if self.ours:
            per_token = self.size.flops_per_token(self.parameters)
            self.meter = ok.StepMeter(self.model, self.optimizer, self.loader, flops_per_token=per_token)

    def whole(self) -> float:
        """Mean seconds of steps that take their batches from the loader."""
        step = self.meter.step if self.ours else _unmetered
        return self._train(self._batches, self.size.steps, step)

    def compute(self) -> float:
        """Mean seconds of the same steps over a batch that is there, without loader and meter."""
        return self._train(itertools.repeat(self.held), self.size.steps)

    def close(self) -> None:
        """End workers and threads."""
        self._batches.close()
        if self.ours:
            self.meter.close()
            self.loader.close()

    def _train(self, batches: Iterator[Any], steps: int, step: Callable[..., Any] | None = None) -> float:
        start = mark(self.device)
        for _ in range(steps):
            x, y = next(batches)
            with nullcontext() if step is None else step(tokens=x.numel()):
                with torch.autocast(self.device.type, torch.bfloat16):
                    loss = self.model(x, y)
                loss.backward()
                if not self.ours:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        took = seconds_between(start, mark(self.device)) / steps
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss.item()}: what was timed is no training")
        return took


def compile_(model: nn.Module, whole: bool, ours: bool) -> nn.Module:
    """All of it, or part by part: what ours has in place of norm and loss are kernels."""
    if whole:
        return torch.compile(model)  # type: ignore[return-value]
    parts: list[Any] = [*model.blocks, *([] if ours else [model.norm, model.loss])]  # type: ignore[misc]
    for part in parts:
        part.compile()
    return model


def our_batches(size: Size, data: Path, device: torch.device) -> ok.DeviceLoader:
    """Rows go over as they are stored, and become inputs and targets there."""
    shards = ok.TokenShards(data / "shards", size.window, size.batch, seed=0)
    return ok.DeviceLoader(shards, device, transform=inputs_and_targets)


class PlainBatches:
    """DataLoader's, moved when they are asked for."""

    def __init__(self, size: Size, data: Path, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        rows = Rows(data / "tokens.bin", size.window)
        self.loader = DataLoader(
            rows,
            size.batch,
            shuffle=True,
            drop_last=True,
            num_workers=2,
            pin_memory=on_gpu,
            persistent_workers=True,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.loader:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a memory map as int64 inputs and targets: what most training scripts have."""

    def __init__(self, file: Path, window: int) -> None:
        self.tokens, self.window = np.memmap(file, np.uint16, "r"), window

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.window

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.window
        row = torch.from_numpy(self.tokens[start : start + self.window + 1].astype(np.int64))
        return row[:-1], row[1:]


def write_tokens(folder: Path, count: int, vocab: int) -> None:
    """Random tokens as our shards and as one flat file."""
    tokens = np.random.default_rng(0).integers(vocab, size=count, dtype=np.uint16)
    ok.write_token_shards([tokens], folder / "shards", progress=False)
    tokens.tofile(folder / "tokens.bin")


def _forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _unmetered(tokens: int) -> Any:
    return nullcontext()
