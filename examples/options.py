"""The command line of train_gpt.py."""

import argparse
import os
from pathlib import Path

import torch

from overlapkit.device import as_device


def positive(text: str) -> int:
    """An int of at least 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def arguments() -> argparse.Namespace:
    """Parse and check the options, before anything else is done."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the Python standard library.")
    parser.add_argument("--baseline", action="store_true", help="plain PyTorch parts")
    parser.add_argument("--ddp", action="store_true", help="replicate instead of shard, under torchrun")
    parser.add_argument("--tied", action="store_true", help="the head shares the embedding's weight")
    parser.add_argument("--steps", type=positive, default=300, help="length of the schedule (300)")
    parser.add_argument("--stop-at", type=positive, help="leave at this step, as if interrupted")
    parser.add_argument("--batch", type=positive, default=16, help="windows a step over all ranks (16)")
    parser.add_argument("--window", type=positive, default=256, help="bytes a window (256)")
    parser.add_argument("--width", type=positive, default=128, help="a multiple of 8 (128)")
    parser.add_argument("--bytes", type=positive, help="train on the first so many bytes only")
    parser.add_argument("--layers", type=positive, default=4, help="blocks (4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (3e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=positive, default=33, help="steps between checkpoints (33)")
    parser.add_argument("--eval-batches", type=int, default=20, help="0 leaves the evaluation out (20)")
    parser.add_argument("--device", help="cpu or cuda; by default the GPU where there is one")
    parser.add_argument("--out", type=Path, help="default runs/gpt, with what is special about the run")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ddp and "RANK" not in os.environ:
        parser.error("--ddp needs ranks: torchrun --nproc-per-node 2 examples/train_gpt.py --ddp")
    if args.batch % world:
        parser.error(f"--batch {args.batch}: give a multiple of the {world} ranks")
    if args.width % 8:
        parser.error(f"--width {args.width}: give a multiple of 8, for four heads of even width")
    if args.device in (None, "cuda") and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"  # named before anything is made on the first GPU
    try:
        args.device = as_device(args.device, "--device")
    except ValueError as error:
        parser.error(str(error))
    kind = [] if world == 1 else [str(world), "ddp" if args.ddp else "fsdp"]
    args.out = args.out or Path("runs") / "-".join(["gpt", *kind, *(["baseline"] if args.baseline else [])])
    return args
