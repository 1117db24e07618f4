"""Train a small ResNet on real images: JPEG files in class folders, decoded ahead by DALI.

    python examples/train_images.py                                 # CPU or one GPU
    torchrun --nproc-per-node 2 examples/train_images.py            # DDP

The images are scikit-learn's 1,797 handwritten digits, written as JPEG files once; any folder with a folder
of images per class can take their place. Run it again and it goes on where it stopped, bit for bit: order and
crops are functions of (seed, epoch, file). Needs the extra `examples`.
"""

import argparse
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from options import checked, common, positive, run_folder
from resnet import ResNet
from rich.console import Console

import overlapkit as ok
from overlapkit.input import images
from overlapkit.measure import ProgressLine

# Digits are not photographs: a mirrored 2 is no digit, and half of an 8 is a 3. So nothing is flipped, crops
# keep at least 70 % of the area, and pixels are normalised by these images' own mean and deviation.
LOOK: dict[str, Any] = {"size": 16, "mean": (0.31,) * 3, "std": (0.35,) * 3}
CROP: dict[str, Any] = {"scale": (0.7, 1.0), "ratio": (0.85, 1.18), "flip": 0.0}


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = common(
        "Train a small ResNet on handwritten digits.", steps=420, batch=64, lr=5e-3, save_every=50
    )
    parser.add_argument("--data", type=Path, default=Path("runs/digits"), help="the images (runs/digits)")
    parser.add_argument("--width", type=positive, default=16, help="channels of the first layer (16)")
    args = checked(parser)
    world = os.environ.get("WORLD_SIZE", "1")
    args.out = args.out or run_folder("images", world if world != "1" else None)
    return args


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
    """The loop."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(quiet=rank > 0)
    torch.manual_seed(args.seed)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one of each node, whether nodes share this folder or not
        digits.write_jpegs(args.data)
    if dist.is_initialized():
        dist.barrier()

    # Decoded on the GPU where there is one, else by threads of the CPU; either way ahead of the loop.
    decoded = images.train_loader(
        args.data / "train", None, args.batch // world, seed=args.seed, device=device, **LOOK, **CROP
    )
    loader = ok.DeviceLoader(decoded, device)
    model: Any = ResNet(classes=len(decoded.classes or ()), width=args.width).to(device)
    model = ok.replicate(model)  # as it is, where there is one process
    opt = ok.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, partial(learning_rate, steps=args.steps))
    ckpt = ok.Checkpointer(args.out, keep=2)

    state = {"model": model, "optimizer": opt, "scheduler": sched, "loader": loader}
    first = step = ckpt.restore(state)
    console.print(f"going on after step {step}" if step else f"starting; everything goes to {args.out}")
    last = min(args.steps, args.stop_at or args.steps)
    meter = ok.StepMeter(model, opt, loader, ckpt, progress=ProgressLine(args.steps, first_step=step))

    while step < last:
        loader.set_epoch(step // len(loader))
        for x, y in loader:
            with meter.step():
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
                loss.backward()
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
                meter.log(loss=loss)
            step += 1
            if step % args.save_every == 0 or step == last:
                ckpt.save(step, state)
            if step == last:
                break
    result: dict[str, Any] = {"world": world, "step": step}
    if step == args.steps > first:
        with meter.pause():
            result["accuracy"] = accuracy(model, args, device)
        result["nearest_neighbour"] = digits.nearest_neighbour()
        console.print(f"right about {result['accuracy']:.2%} of the digits that it has not seen; of the same")
        console.print(f"ones a table of nearest neighbours knows {result['nearest_neighbour']:.2%}")
    ckpt.close()
    meter.close()
    decoded.close()
    if step == first:
        console.print(f"there was nothing left to do: delete {args.out} to begin again, or raise --steps")
    elif rank == 0:
        report = meter.report()
        print(report)
        (args.out / "result.json").write_text(json.dumps({**result, "report": report.to_dict()}, indent=1))


def learning_rate(step: int, steps: int) -> float:
    """A warm-up over a tenth of the steps, then a cosine down to 0; relative to --lr."""
    return min((step + 1) / (0.1 * steps), 1.0) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


@torch.no_grad()
def accuracy(model: torch.nn.Module, args: argparse.Namespace, device: torch.device) -> float:
    """The share of held-out images that the model is right about, over all ranks."""
    model.eval()
    loader = images.eval_loader(
        args.data / "held_out", None, args.batch, short_side=LOOK["size"], device=device, **LOOK
    )
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, seen
    for x, y in ok.DeviceLoader(loader, device):
        counts[0] += (model(x).argmax(1) == y).sum()
        counts[1] += (y >= 0).sum()  # -100 fills up, so that all ranks have equally many
    loader.close()
    model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
