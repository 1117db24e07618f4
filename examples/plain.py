"""What `train_gpt.py --baseline` uses in place of overlapkit: the parts that PyTorch brings itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Batches:
    """A DataLoader whose batches are moved and transformed when they are asked for."""

    def __init__(self, loader: DataLoader, device: torch.device, transform: Callable[[Any], Any]) -> None:
        self.loader, self.device, self.transform = loader, device, transform
        self.epoch = self.taken = self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        """One epoch; after a restore the batches that were taken before are loaded and dropped."""
        skip, self.skip, self.taken = self.skip, 0, 0
        for batch in self.loader:
            self.taken += 1
            if self.taken > skip:
                yield self.transform(batch.to(self.device))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler."""
        self.epoch = epoch
        self.loader.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the loop stands."""
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.set_epoch(state["epoch"])
        self.skip = self.taken = state["taken"] % len(self)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over the blocks, as its tutorial does it."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicate(model: nn.Module) -> nn.Module:
    """DDP with its defaults."""
    on_gpu = next(model.parameters()).device.index
    return DistributedDataParallel(model, device_ids=None if on_gpu is None else [on_gpu])


class Checkpointer:
    """torch.save of the full state by rank 0, while all ranks wait."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path, self.rank = directory / "baseline.pt", rank

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Gather, then write."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
        others = {key: state[key].state_dict() for key in ("scheduler", "loader")}
        if self.rank == 0:
            kept = {"model": model, "optimizer": optimizer, "losses": state["losses"], **others}
            torch.save({"step": step, **kept}, self.path)

    def restore(self, state: dict[str, Any]) -> int:
        """Load what there is; 0 where there is nothing."""
        if not self.path.exists():
            return 0
        saved = torch.load(self.path, weights_only=True)
        set_state_dict(
            state["model"],
            state["optimizer"],
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        for key in ("scheduler", "loader"):
            state[key].load_state_dict(saved[key])
        state["losses"] = saved["losses"]
        return saved["step"]

    def close(self) -> None:
        """Nothing is left to do."""
