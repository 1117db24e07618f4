"""The command lines of the examples: what they share, and all that train_gpt.py takes."""

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


def common(
    description: str, *, steps: int, batch: int, lr: float, save_every: int
) -> argparse.ArgumentParser:
    """A parser with the options that every example has; the numbers are their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=positive, default=steps, help=f"length of the schedule ({steps})")
    parser.add_argument("--stop-at", type=positive, help="leave at this step, as if interrupted")
    parser.add_argument("--batch", type=positive, default=batch, help=f"samples of all ranks ({batch})")
    parser.add_argument("--lr", type=float, default=lr, help=f"peak learning rate ({lr:g})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save-every", type=positive, default=save_every, help=f"steps between checkpoints ({save_every})"
    )
    parser.add_argument("--device", help="cpu or cuda; by default the GPU where there is one")
    parser.add_argument("--out", type=Path, help="where to write; by default a folder in runs")
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse; one line says what is wrong, before anything is done. The device is this rank's then."""
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch % world:
        parser.error(f"--batch {args.batch}: give a multiple of the {world} ranks")
    if args.device in (None, "cuda") and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"  # named before anything is made on the first GPU
    try:
        args.device = as_device(args.device, "--device")
    except ValueError as error:
        parser.error(str(error))
    return args


def run_folder(*parts: str | None) -> Path:
    """A folder in runs for this kind of run, so that no two kinds go on with each other's checkpoints."""
    return Path("runs") / "-".join(part for part in parts if part)


def arguments() -> argparse.Namespace:
    """What train_gpt.py was given."""
    parser = common(
        "Train a small GPT on the Python standard library.", steps=300, batch=16, lr=3e-3, save_every=33
    )
    parser.add_argument("--baseline", action="store_true", help="plain PyTorch parts")
    parser.add_argument("--ddp", action="store_true", help="replicate instead of shard, under torchrun")
    parser.add_argument("--tied", action="store_true", help="the head shares the embedding's weight")
    parser.add_argument("--window", type=positive, default=256, help="bytes a window (256)")
    parser.add_argument("--width", type=positive, default=128, help="a multiple of 8 (128)")
    parser.add_argument("--bytes", type=positive, help="train on the first so many bytes only")
    parser.add_argument("--layers", type=positive, default=4, help="blocks (4)")
    parser.add_argument("--eval-batches", type=int, default=20, help="0 leaves the evaluation out (20)")
    args = checked(parser)
    if args.ddp and "RANK" not in os.environ:
        parser.error("--ddp needs ranks: torchrun --nproc-per-node 2 examples/train_gpt.py --ddp")
    if args.width % 8:
        parser.error(f"--width {args.width}: give a multiple of 8, for four heads of even width")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    kind = [] if world == 1 else [str(world), "ddp" if args.ddp else "fsdp"]
    args.out = args.out or run_folder("gpt", *kind, "baseline" if args.baseline else None)
    return args
