"""Ours and its peers behind one interface, for benchmarks/checkpoint.py.

Each saves the same state to a new folder under `folder`, and is asked for durability: files are synced
wherever the peer can do that or leaves it to its caller (torchsnapshot and torch_checkpointing do not sync).
"""

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overlapkit.checkpoint import Checkpointer

State = dict[str, Any]


class Saver:
    """One way to save. A call order: prepare, then tidy, save, step..., wait, again and again; close."""

    ranks = 1
    """The most ranks that it is measured on."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state
        self.saves = 0

    def prepare(self) -> None:
        """What can be done ahead of the first save."""

    def tidy(self) -> None:
        """Delete all saves but the last: no part of any time."""
        shutil.rmtree(self.folder / f"{type(self).__name__}-{self.saves - 1}", ignore_errors=True)

    def save(self) -> None:
        """Begin; the training goes on when this returns."""
        self.saves += 1

    def step(self) -> None:
        """The optimizer's step, after whatever it must wait for."""
        self.state["optimizer"].step()

    def waited(self) -> float:
        """Seconds for which steps have waited for the last save, beyond its call."""
        return 0.0

    def done(self) -> bool:
        """Whether the save is durable."""
        return True

    def wait(self) -> None:
        """Until it is."""

    def close(self) -> None:
        """Free everything."""

    @property
    def path(self) -> Path:
        """Where the last save went."""
        return self.folder / f"{type(self).__name__}-{self.saves}"

    def dicts(self) -> State:
        return {key: item.state_dict() for key, item in self.state.items()}


class Ours(Saver):
    ranks = 2

    def prepare(self) -> None:
        self.checkpointer = Checkpointer(self.folder / "ours", keep=1)
        self.checkpointer.restore(self.state)

    def tidy(self) -> None:
        self.checkpointer.wait()

    def save(self) -> None:
        super().save()
        start = time.perf_counter()
        self.last = self.checkpointer.save(self.saves, self.state)
        self.call_s = time.perf_counter() - start

    def waited(self) -> float:
        return max(0.0, self.last.stall_s - self.call_s)

    def done(self) -> bool:
        return self.last.committed.done()

    def wait(self) -> None:
        self.last.wait()

    def close(self) -> None:
        self.checkpointer.close()


class DcpSave(Saver):
    ranks = 2

    def save(self) -> None:
        from torch.distributed import checkpoint

        super().save()
        checkpoint.save(self.dicts(), checkpoint_id=self.path)


class DcpThread(Saver):
    ranks = 2
    process = False

    def save(self) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType as Kind

        super().save()
        kind = Kind.PROCESS if self.process else Kind.THREAD
        self.future: Any = checkpoint.async_save(
            self.dicts(), checkpoint_id=self.path, async_checkpointer_type=kind
        )

    def done(self) -> bool:
        return bool(self.future.done())

    def wait(self) -> None:
        self.future.result()


class DcpProcess(DcpThread):
    process = True

    def close(self) -> None:
        for child in multiprocessing.active_children():  # it would outlive the run
            child.terminate()
            child.join()


class DcpStager(DcpThread):
    """dcp.async_save with one DefaultStager: it is used again, its buffers stay, it copies in a thread."""

    def prepare(self) -> None:
        self.stager = self.new_stager()
        self.waited_s = 0.0

    def new_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on_gpu = torch.cuda.is_available()  # pinned and non-blocking need it
        return DefaultStager(StagingOptions(on_gpu, False, True, on_gpu))

    def save(self) -> None:
        from torch.distributed import checkpoint

        inner = getattr(self.stager, "_state_dict_stager", None)
        if self.saves and not getattr(inner, "_deepcopy_dispatch", True):
            self.stager.close()  # torch 2.11's empties itself when it has staged: one for each save
            self.stager = self.new_stager()
        self.saves += 1
        self.waited_s = 0.0
        response: Any = checkpoint.async_save(self.dicts(), checkpoint_id=self.path, async_stager=self.stager)
        self.staged, self.future = response.staging_completion, response.upload_completion

    def step(self) -> None:
        start = time.perf_counter()
        if self.saves:
            self.staged.result()
        self.waited_s += time.perf_counter() - start
        super().step()

    def waited(self) -> float:
        return self.waited_s

    def close(self) -> None:
        self.stager.close()


class Torchsnapshot(Saver):
    def save(self) -> None:
        import torchsnapshot

        super().save()
        self.pending = torchsnapshot.Snapshot.async_take(str(self.path), dict(self.state))

    def done(self) -> bool:
        return bool(self.pending.done())

    def wait(self) -> None:
        self.pending.wait()


class TorchCheckpointing(Saver):
    def prepare(self) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(False)
        )
        self.manager = config.build()
        self.manager.prewarm_staging(self.dicts())

    def save(self) -> None:
        super().save()
        self.future: Any = self.manager.save(str(self.path), self.dicts())

    def step(self) -> None:
        with self.manager.lock():
            super().step()

    def done(self) -> bool:
        return bool(self.future.done())

    def wait(self) -> None:
        self.future.result()

    def close(self) -> None:
        self.manager.close()


class TorchSave(Saver):
    def save(self) -> None:
        super().save()
        with open(self.file(), "wb") as file:
            torch.save(self.dicts(), file)
            file.flush()
            os.fsync(file.fileno())

    def file(self) -> Path:
        path = self.path
        path.mkdir(parents=True)
        return path / "state"


class SaveFile(TorchSave):
    """safetensors.save_file of every tensor, by its path in the state."""

    def save(self) -> None:
        from safetensors.torch import save_file

        self.saves += 1
        path = self.file()
        save_file(dict(_tensors(self.dicts())), path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def _tensors(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in _tensors(item, f"{path}/{key}")]


SAVERS: dict[str, tuple[str | None, Callable[[Path, State], Saver]]] = {
    "ours": (None, Ours),
    "dcp.async_save": (None, DcpThread),
    "dcp.async_save, process": (None, DcpProcess),
    "dcp.async_save, one stager": (None, DcpStager),
    "dcp.save": (None, DcpSave),
    "torchsnapshot": ("torchsnapshot", Torchsnapshot),
    "torch_checkpointing": ("torch_checkpointing", TorchCheckpointing),
    "torch.save": (None, TorchSave),
    "safetensors.save_file": (None, SaveFile),
}
"""Name -> (the package that it needs beside ours, how it is made)."""


def installed(package: str | None) -> bool:
    """Whether a peer's package can be imported."""
    with contextlib.suppress(ImportError):
        if package is not None:
            __import__(package)
        return True
    return False
