"""Train a small GPT on the Python standard library's own sources, through all six lanes.

    python examples/train_gpt.py                                    # CPU or one GPU
    torchrun --nproc-per-node 2 examples/train_gpt.py               # FSDP2
    torchrun --nproc-per-node 2 examples/train_gpt.py --ddp         # DDP
    python examples/train_gpt.py --baseline                         # the same loop with plain PyTorch parts

Run it again and it goes on where it stopped. Everything is written to --out: checkpoints, the loss
curve, the lanes' timeline and result.json.
"""

import argparse
import json
import math
import os
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import plain
import torch
import torch.distributed as dist
from curve import draw_losses
from gpt import GPT, plain_swiglu
from options import arguments
from rich.console import Console
from text import Windows, entropies, inputs_and_targets, standard_library
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import overlapkit as ok
from overlapkit.measure import ProgressLine


def main() -> None:
    """One training run."""
    args = arguments()
    device = args.device
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The loop, and the swaps."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    out: Path = args.out
    console = Console(quiet=rank > 0)
    torch.manual_seed(args.seed)

    text, held_out = standard_library()
    unigram, bigram = entropies(held_out)
    text = text[: args.bytes]
    console.print(f"{len(text):,} bytes of Python to train on, {len(held_out):,} held out, of which")
    console.print(f"a unigram table explains all but {unigram:.2f} nats a byte, a bigram table {bigram:.2f}")

    def batches(text: Tensor) -> DataLoader:
        windows: Dataset = Windows(text, args.window)
        if len(windows) < args.batch:
            raise SystemExit(
                f"--window {args.window}, --batch {args.batch}: {len(text):,} bytes make no batch"
            )
        sampler = DistributedSampler(windows, world, rank, seed=args.seed, drop_last=True)
        return DataLoader(windows, args.batch // world, sampler=sampler, drop_last=True)

    swiglu = plain_swiglu if args.baseline else ok.kernels.swiglu
    model: Any = GPT(256, args.width, args.layers, 4, args.window, args.tied, swiglu).to(device)

    # Swap 1, input and transfer: batches are read and copied while the step before computes.
    if args.baseline:
        loader: Any = plain.Batches(batches(text), device, inputs_and_targets)
    else:
        loader = ok.DeviceLoader(batches(text), device, transform=inputs_and_targets)
    # Swap 2, compute: fused kernels for the norms and the loss (and swiglu, above).
    if not args.baseline:
        ok.kernels.swap(model)
    # Swap 3, communication: FSDP2 or DDP, tuned, with a name and a time for every collective.
    if dist.is_initialized():
        wrap, mesh = plain if args.baseline else ok, init_device_mesh(device.type, (world,))
        model = wrap.replicate(model) if args.ddp else wrap.shard(model, mesh)
    # Swap 4, the optimizer: clipping inside the step, state from the start.
    settings: dict[str, Any] = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if args.baseline:
        opt: Any = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    else:
        opt = ok.AdamW(model.parameters(), max_norm=1.0, **settings)
    # Swap 5, the checkpoint: written beside the steps that follow.
    ckpt: Any = plain.Checkpointer(out, rank) if args.baseline else ok.Checkpointer(out, keep=2)

    sched = torch.optim.lr_scheduler.LambdaLR(opt, partial(learning_rate, steps=args.steps))
    state = {"model": model, "optimizer": opt, "scheduler": sched, "loader": loader, "losses": []}
    first = step = ckpt.restore(state)
    console.print(f"going on after step {step}" if step else f"starting; everything goes to {out}")
    last = min(args.steps, args.stop_at or args.steps)
    publishers = {} if args.baseline else {"loader": loader, "checkpointer": ckpt}
    line = ProgressLine(args.steps, first_step=step)
    meter = ok.StepMeter(model, opt, **publishers, progress=line)
    unread: list[Tensor] = []

    while step < last:
        loader.set_epoch(step // len(loader))
        for x, y in loader:
            with meter.step(tokens=x.numel()):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = model(x, y)
                loss.backward()
                if args.baseline:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
                meter.log(loss=loss)  # this rank's, for the progress line; reads nothing back yet
            step += 1
            unread.append(loss.detach())
            if step % args.save_every == 0 or step == last:  # rarely: reading losses waits for the device
                state["losses"] = [*state["losses"], *mean_over_ranks(torch.stack(unread)).tolist()]
                unread.clear()
                ckpt.save(step, state)
            if step == last:
                break
    result: dict[str, Any] = {"world": world, "losses": state["losses"], "unigram": unigram, "bigram": bigram}
    if step == args.steps and args.eval_batches:
        model.eval()
        with meter.pause(), torch.no_grad():
            result["validation"] = evaluate(model, islice(batches(held_out), args.eval_batches), device)
        console.print(f"validation loss {result['validation']:.3f} nats a byte")
    ckpt.close()
    meter.close()
    if step == first:
        console.print(f"there was nothing left to do: delete {out} to begin again, or raise --steps")
    elif rank == 0:
        report = meter.report()
        print(report)
        (out / "result.json").write_text(json.dumps({**result, "report": report.to_dict()}, indent=1))
        if find_spec("matplotlib"):
            report.plot(out / "lanes.png")
            draw_losses(result, out / "loss.png")
        else:
            print("no pictures: pip install 'overlapkit[viz]'")
        print("see", *(str(path) for path in sorted(out.iterdir()) if path.is_file()))


def learning_rate(step: int, steps: int) -> float:
    """A short warm-up, then a cosine down to a tenth; relative to --lr."""
    return min((step + 1) / 20, 1.0) * (0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0)))


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of each element over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def evaluate(model: torch.nn.Module, batches: Iterable[Tensor], device: torch.device) -> float:
    """The mean loss over the batches of all ranks."""
    losses = [model(*inputs_and_targets(windows.to(device))).float() for windows in batches]
    return mean_over_ranks(torch.stack(losses).mean()).item()


if __name__ == "__main__":
    main()
