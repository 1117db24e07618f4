"""What the loops of other frameworks train here: train_gpt.py's model on its text, smaller."""

import argparse
from pathlib import Path

from gpt import GPT
from text import Windows, inputs_and_targets, standard_library
from torch.utils.data import DataLoader

import overlapkit as ok


def arguments(what: str) -> argparse.Namespace:
    """The options that these examples share."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (100)")
    parser.add_argument("--stop-at", type=int, help="leave at this step, as if interrupted")
    parser.add_argument("--batch", type=int, default=8, help="windows a step and rank (8)")
    parser.add_argument("--window", type=int, default=128, help="bytes a window (128)")
    parser.add_argument("--bytes", type=int, help="train on the first so many bytes only")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 8 (128)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (2)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints (20)")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints and report go")
    args = parser.parse_args()
    for name in ("steps", "batch", "window", "layers", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1")
    if args.width < 8 or args.width % 8:
        parser.error(f"--width {args.width}: give a multiple of 8, for four heads of even width")
    args.last = min(args.steps, args.stop_at or args.steps)
    return args


def model(args: argparse.Namespace) -> GPT:
    """A small GPT whose norms, loss and gate run fused."""
    made = GPT(256, args.width, args.layers, heads=4, window=args.window, swiglu=ok.kernels.swiglu)
    ok.kernels.swap(made)
    return made


def loader(args: argparse.Namespace, device: object) -> ok.DeviceLoader:
    """This rank's batches, ready on the device; made once there is a process group, where there is one."""
    windows = Windows(standard_library()[0][: args.bytes], args.window)
    batches = DataLoader(windows, args.batch, sampler=ok.ElasticSampler(windows), drop_last=True)
    if len(batches) == 0:  # a loop over nothing would begin again for ever
        raise SystemExit(f"--batch {args.batch}: {len(windows):,} windows make no batch for each rank")
    return ok.DeviceLoader(batches, device, transform=inputs_and_targets)
