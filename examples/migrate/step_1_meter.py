"""Step 1: measure. The meter says what of a step is exposed, and takes losses without waiting for them."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dataset import StandardLibrary
from model import LanguageModel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import overlapkit as ok


def main() -> None:
    """Train, and leave the losses and the time in a file."""
    parser = argparse.ArgumentParser(description="Train a small language model on Python's standard library.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/migrate"))
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        dist.init_process_group()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    data = StandardLibrary()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler, drop_last=True, pin_memory=on_gpu)
    model = LanguageModel().to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses: list[float] = []
    step, path = 0, args.out / "last.pt"
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    meter = ok.StepMeter(model, optimizer, loader, on_log=[lambda _, log: losses.append(log["loss"])])
    start, first = time.perf_counter(), step
    while step < args.steps:
        sampler.set_epoch(step // len(loader))
        for x, y in meter.steps(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            meter.log(loss=loss)
            step += 1
            if step % 10 == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path)
            if step == args.steps:
                break

    ms = (time.perf_counter() - start) * 1e3 / max(1, step - first)
    meter.close()
    if rank == 0:
        print(meter.report())
        meter.report().save(args.out / "report.json")
        print(f"{step - first} steps, {ms:.1f} ms each")
        (args.out / "result.json").write_text(json.dumps({"losses": losses, "ms": ms}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
