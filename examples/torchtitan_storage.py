"""overlapkit's files in torchtitan's way to checkpoint: dcp.async_save of an application's Stateful parts.

    python examples/torchtitan_storage.py --out runs/titan                          # CPU or one GPU
    torchrun --nproc-per-node 2 examples/torchtitan_storage.py --out runs/titan-2   # FSDP2

Where torchtitan is installed, its own CheckpointManager does it, with its two calls of dcp replaced
(titan_manager.py). Run it again, at any number of ranks, and it goes on where it stopped.
"""

import os
from importlib.util import find_spec
from typing import Any

import task
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import overlapkit as ok
from overlapkit.checkpoint import (
    SafetensorsLoadPlanner,
    SafetensorsReader,
    SafetensorsSavePlanner,
    SafetensorsWriter,
    list_checkpoints,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class TrainState(Stateful):
    """How far training has come."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """A plain number: the planner writes it as JSON."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.step = state["step"]


class Model(Stateful):
    """The parameters, by name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """DTensors, where the model is sharded."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
        set_model_state_dict(self.model, state)


class Optimizers(Stateful):
    """The optimizer's state by parameter name, so that it can be resharded."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Flattened, as torchtitan keeps it."""
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class Manager:
    """What is left of torchtitan's CheckpointManager where it is not installed."""

    def __init__(self, folder: str, interval: int, states: dict[str, Any]) -> None:
        self.folder, self.interval, self.states = folder, interval, states
        self.group = dist.new_group(backend="gloo")  # the ranks agree on the CPU, beside NCCL's training
        self.planner = SafetensorsSavePlanner(enable_plan_caching=True)
        self.saving: Any = None

    def save(self, step: int, last_step: bool = False) -> None:
        """Save beside the steps that follow; one at a time."""
        if not (last_step or step % self.interval == 0):
            return
        self.wait()
        self.saving = dcp.async_save(
            self.states,
            checkpoint_id=os.path.join(self.folder, f"step-{step}"),
            storage_writer=SafetensorsWriter(),
            planner=self.planner,
            process_group=self.group,
        )

    def wait(self) -> None:
        """Raise what made the last save fail: async_save itself has said nothing."""
        if self.saving is not None:
            self.saving.result()

    def load(self) -> bool:
        """Load the latest; False where there is none."""
        found = list_checkpoints(self.folder) if os.path.isdir(self.folder) else []
        sound = [one for one in found if one.damage is None]
        if not sound:
            return False
        reader = SafetensorsReader(sound[-1].folder)
        dcp.load(self.states, storage_reader=reader, planner=SafetensorsLoadPlanner())
        return True

    def close(self) -> None:
        """Finish the last save."""
        self.wait()


def main() -> None:
    """One training run."""
    args = task.arguments(__doc__.splitlines()[0])
    device = torch.device(
        "cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", 0))
    )
    if "RANK" in os.environ:
        # both: dcp.async_save reports over the CPU's group
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    train(args, device)
    dist.destroy_process_group()


def train(args: Any, device: torch.device) -> None:
    """The loop."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    model = task.model(args).to(device)
    if ranks > 1:
        model = ok.shard(model, init_device_mesh(device.type, (ranks,)))
    loader = task.loader(args, device)
    reached = TrainState()
    if find_spec("torchtitan"):
        from titan_manager import titan

        opt, sched, manager = titan(args, model, loader, reached)
    else:
        opt = ok.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, max_norm=1.0)
        sched = LambdaLR(opt, lambda step: 1 - step / (args.steps + 1))
        states = {
            "model": Model(model),
            "optimizer": Optimizers(model, opt),
            "lr_scheduler": sched,
            "dataloader": loader,
            "train_state": reached,
        }
        manager = Manager(str(args.out), args.save_every, states)
    manager.load()
    first, losses = reached.step, []
    if dist.get_rank() == 0:
        print(f"training on {ranks} rank(s) from step {first}", flush=True)
    meter = ok.StepMeter(model, opt, loader)
    while reached.step < args.last:
        loader.set_epoch(loader.next_epoch)
        for tokens, targets in loader:
            with meter.step(tokens=tokens.numel()):
                loss = model(tokens, targets)
                loss.backward()
                opt.step()
                sched.step()
                opt.zero_grad()
            losses.append(loss.detach())
            reached.step += 1
            manager.save(reached.step, last_step=reached.step == args.last)
            if reached.step == args.last:
                break
    manager.close()
    meter.close()
    if reached.step == first:
        print(f"there was nothing left to do: delete {args.out} to begin again, or raise --steps")
    elif dist.get_rank() == 0:
        print(meter.report())
        print(f"checkpoints by {type(manager).__name__}")
        print("losses", *(f"{loss:.6f}" for loss in torch.stack(losses).tolist()))


if __name__ == "__main__":
    main()
