"""overlapkit's parts in Lightning's loop: loader, kernels, sharding, optimizer, checkpoint and meter.

    python examples/lightning_module.py --out runs/lightning                          # CPU or one GPU
    torchrun --nproc-per-node 2 examples/lightning_module.py --out runs/lightning-2   # FSDP2 by ok.shard

Run it again and it goes on where it stopped, bit for bit. What to set, and why, stands beside it.
"""

import os
import signal
from typing import Any

import lightning as L
import task
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import overlapkit as ok


class Language(L.LightningModule):
    """The model; automatic optimization."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self.model = task.model(args)

    def configure_model(self) -> None:
        """Shard, where there are ranks; Lightning calls it before the optimizer is made."""
        if self.trainer.world_size > 1 and not isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            self.model = ok.shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """Clipping is the optimizer's: leave the Trainer's gradient_clip_val alone.

        In fp16 Lightning refuses to clip for an optimizer that unscales by itself, which ours does.
        """
        opt = ok.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1, max_norm=1.0)
        sched = CosineAnnealingLR(opt, self.args.steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def train_dataloader(self) -> ok.DeviceLoader:
        """Made here, where the process group is. It shards by itself, and Lightning leaves it as it is."""
        return task.loader(self.args, self.trainer.strategy.root_device)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss."""
        return self.model(*batch)


class Overlapkit(L.Callback):
    """Checkpoints beside the step, and the meter around it, in place of Lightning's own."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.losses: list[Tensor] = []

    def on_fit_start(self, trainer: L.Trainer, module: Language) -> None:
        """Restore: everything is on its device, sharded, and nothing has run yet.

        Lightning's progress holds the loader's position, too: it asks the loader for its state.
        """
        self.ckpt = ok.Checkpointer(self.args.out, every=self.args.save_every, keep=2)
        self.state = {
            "model": module.model,
            "optimizer": trainer.optimizers[0],
            "scheduler": trainer.lr_scheduler_configs[0].scheduler,
            "progress": trainer.fit_loop,
        }
        self.first = self.ckpt.restore(self.state)

    def on_train_start(self, trainer: L.Trainer, module: Language) -> None:
        """Listen to SIGTERM, and begin to measure."""
        # Lightning's own handler calls a collective from inside the signal: on one rank only, it hangs.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.ckpt.on_signal(signal.SIGTERM, deadline=25)
        loader, opt = trainer.train_dataloader, trainer.optimizers[0]
        self.meter = ok.StepMeter(module.model, opt, loader, self.ckpt)

    def on_train_batch_start(self, trainer: L.Trainer, module: Language, batch: Any, number: int) -> None:
        """A step of the meter; the wait for the batch before it counts, too."""
        self.step = self.meter.step(tokens=batch[0].numel())
        self.step.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Language, outputs: Any, batch: Any, number: int
    ) -> None:
        """`save` is called at each step, so that a signal is heard; `every` says which ones are kept."""
        self.step.__exit__(None, None, None)
        self.losses.append(outputs["loss"].detach())
        self.ckpt.save(trainer.global_step, self.state)

    def teardown(self, trainer: L.Trainer, module: Language, stage: str) -> None:
        """Close while the process group is there: also after an error."""
        for part in ("ckpt", "meter"):
            if part in self.__dict__:
                getattr(self, part).close()


def main() -> None:
    """One training run."""
    args = task.arguments(__doc__.splitlines()[0])
    L.seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ours = Overlapkit(args)
    trainer = L.Trainer(
        max_steps=args.last,
        devices=here,
        num_nodes=ranks // here,
        # Of Lightning's strategies the one that leaves the sharding to configure_model.
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        if ranks > 1
        else "auto",
        callbacks=[ours],
        enable_checkpointing=False,  # ModelCheckpoint would save again, and while the step waits
        enable_progress_bar=False,
        logger=False,
        use_distributed_sampler=False,  # ElasticSampler shards
        default_root_dir=args.out,
    )
    trainer.fit(Language(args))
    if not ours.losses:
        print(f"there was nothing left to do: delete {args.out} to begin again, or raise --steps")
    elif trainer.is_global_zero:
        print(ours.meter.report())
        print("losses", *(f"{loss:.6f}" for loss in torch.stack(ours.losses).tolist()))


if __name__ == "__main__":
    main()
