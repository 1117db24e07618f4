"""torchtitan's own CheckpointManager with overlapkit's files: its calls of dcp, and how it finds the latest.

Its async_mode is "async" or "disabled"; "async_with_pinned_mem" would need a writer in another process.
"""

import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint

import overlapkit as ok
from overlapkit.checkpoint import (
    SafetensorsLoadPlanner,
    SafetensorsReader,
    SafetensorsSavePlanner,
    SafetensorsWriter,
    list_checkpoints,
)


class SafetensorsManager(CheckpointManager):
    """Writes and reads step-N as a Checkpointer does; when to save and what to keep stay torchtitan's."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | None:
        """With our writer; a thread of this process writes, so async_mode is "disabled" or "async"."""
        if to_hf or async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise ValueError(
                f"async_mode={async_mode!r}, to_hf={to_hf}: give 'disabled' or 'async', and no HF"
            )
        ours: dict[str, Any] = {
            "checkpoint_id": checkpoint_id,
            "storage_writer": SafetensorsWriter(),
            "planner": SafetensorsSavePlanner(),
        }
        if async_mode == AsyncMode.ASYNC:
            return dcp.async_save(state_dict, process_group=self.pg, **ours)
        dcp.save(state_dict, **ours)
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, **unused: bool) -> None:
        """With our reader; then the model is told, as torchtitan does it."""
        reader = SafetensorsReader(checkpoint_id)
        dcp.load(state_dict, storage_reader=reader, planner=SafetensorsLoadPlanner())
        self.states["model"].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest that is whole: torchtitan's own looks for DCP's .metadata."""
        folder = folder or self.folder
        found = list_checkpoints(folder) if os.path.isdir(folder) else []
        return max((one.step for one in found if one.damage is None), default=-1)


def titan(
    args: Any, model: torch.nn.Module, loader: ok.DeviceLoader, reached: Any
) -> tuple[Any, Any, SafetensorsManager]:
    """Torchtitan's containers around our optimizer, and its manager."""
    settings = {"lr": 3e-3, "weight_decay": 0.1, "max_norm": 1.0}
    opt = OptimizersContainer([model], ok.AdamW, settings)
    sched = LRSchedulersContainer(opt, lambda step: 1 - step / (args.steps + 1))
    config = Checkpoint(
        enable=True,
        folder=".",
        interval=args.save_every,
        async_mode="async",
        keep_latest_k=2,
        last_save_model_only=False,
    )
    manager = SafetensorsManager(
        loader, [model], opt, sched, {"train_state": reached}, config, None, base_folder=str(args.out)
    )
    return opt, sched, manager
