"""overlapkit's parts in Accelerate's loop: loader, kernels, optimizer, checkpoint and meter.

    python examples/accelerate_loop.py --out runs/accelerate                          # CPU or one GPU
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --out runs/accelerate-2   # DDP by ok.replicate

Run it again and it goes on where it stopped, bit for bit. What to set, and why, stands beside it.
"""

import signal

import task
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import CosineAnnealingLR

import overlapkit as ok


def main() -> None:
    """One training run."""
    args = task.arguments(__doc__.splitlines()[0])
    # First of all: it makes the process group, which loader, optimizer and checkpointer look for.
    # step_scheduler_with_optimizer: else the schedule moves on by one per rank, since batches are not split.
    acc = Accelerator(step_scheduler_with_optimizer=False)
    set_seed(0)
    # prepare() would leave a DeviceLoader as it is: it shards, and moves batches, by itself.
    loader = task.loader(args, acc.device)
    # Not through prepare(), whose DDP says nothing to the meter. Moved before the optimizer, whose state is
    # made at once. For mixed precision put `with acc.autocast():` around the forward, which prepare() does.
    model = ok.replicate(task.model(args).to(acc.device))
    # Clip in the optimizer: acc.clip_grad_norm_ would read the gradients once more. With fp16's scaler it
    # unscales by itself, so acc.unscale_gradients() must not come before.
    opt = ok.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, max_norm=1.0)
    opt, sched = acc.prepare(opt, CosineAnnealingLR(opt, args.steps))
    ckpt = ok.Checkpointer(args.out, every=args.save_every, keep=2)  # in place of acc.save_state
    ckpt.on_signal(signal.SIGTERM, deadline=25)
    # Accelerate's optimizer goes as it is: meter and checkpointer find ours in it.
    meter = ok.StepMeter(model, opt, loader, ckpt)

    state = {"model": model, "optimizer": opt, "scheduler": sched, "loader": loader}
    first = step = ckpt.restore(state)
    losses = []
    while step < args.last:
        loader.set_epoch(loader.next_epoch)
        for tokens, targets in loader:
            with meter.step(tokens=tokens.numel()):
                loss = model(tokens, targets)
                acc.backward(loss)
                opt.step()
                sched.step()
                opt.zero_grad()
            losses.append(loss.detach())
            step += 1
            ckpt.save(step, state)
            if step == args.last:
                break
    ckpt.close()
    meter.close()
    if step == first:
        print(f"there was nothing left to do: delete {args.out} to begin again, or raise --steps")
    elif acc.is_main_process:
        print(meter.report())
        print("losses", *(f"{loss:.6f}" for loss in torch.stack(losses).tolist()))
    acc.end_training()  # after close(): it ends the process group


if __name__ == "__main__":
    main()
