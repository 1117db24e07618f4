"""Reading what torch.save has written, with nothing unpickled but tensors and plain values."""

import io
import pickle
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.errors import DamagedCheckpoint
from overlapkit.checkpoint.exchange.whole_file import here


class TorchFile:
    """A file that torch.save has written, mapped into memory where its format allows; of a store, a copy.

    Raises:
        DamagedCheckpoint: It is cut short, a checksum differs, or it is no such file.
        TypeError: It holds more than tensors and plain values.
    """

    text_keys = False

    def __init__(self, path: Path) -> None:
        with here(path) as file:  # what is mapped stays so without its name
            found = load(file, str(path))
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise TypeError(
                f"{path} holds a {type(found).__name__}: what can be imported is a dict with string keys, "
                "such as dict(model=model.state_dict(), optimizer=...) or a state_dict"
            )
        self._state = found

    def keys(self) -> list[str]:
        """See `foreign.Source`."""
        return list(self._state)

    def state(self, keys: Collection[str]) -> dict[str, Any]:
        """See `foreign.Source`."""
        return {key: self._state[key] for key in keys}

    def sharded(self, tensor: torch.Tensor) -> bool:
        """See `foreign.Source`."""
        return False

    def read(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """See `foreign.Source`."""
        return cut(tensor, box)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A part of a tensor that is in memory."""
    return tensor.detach()[box.inside(Box.whole(tuple(tensor.shape)))]


def load(file: Path | bytes, what: str) -> Any:
    """torch.load with weights_only=True, after a look at the checksums, which torch.load leaves alone.

    Args:
        file: A file, or the content of one.
        what: How errors call it.

    Raises:
        DamagedCheckpoint: It is cut short, a checksum differs, or torch.save has not written it.
        TypeError: It holds more than tensors and plain values.
    """
    zipped = _is_sound_zip(_open(file), what)
    try:
        if isinstance(file, Path):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
        return torch.load(io.BytesIO(file), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipped:
            raise DamagedCheckpoint(f"{what}: was not written by torch.save, or is damaged") from error
        reason = next((line for line in str(error).splitlines() if "nsupported" in line), str(error))
        raise TypeError(
            f"{what} holds more than tensors and plain values, which would have to be unpickled (and pickles "
            f"can run anything): {reason.strip()}"
        ) from error
    except (RuntimeError, OSError, EOFError, LookupError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{what}: torch.load cannot read it ({error})") from error


def _open(file: Path | bytes) -> IO[bytes]:
    return io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb")


def _is_sound_zip(file: IO[bytes], what: str) -> bool:
    """Whether torch.save has written its present format, checksums and all; False for that before 1.6."""
    with file:
        if not zipfile.is_zipfile(file):
            return False
        try:
            with zipfile.ZipFile(file) as records:
                damaged = records.testzip()
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
            raise DamagedCheckpoint(f"{what}: is cut short or damaged ({error})") from error
    if damaged is not None:
        raise DamagedCheckpoint(f"{what}: the checksum of its record {damaged!r} differs")
    return True
