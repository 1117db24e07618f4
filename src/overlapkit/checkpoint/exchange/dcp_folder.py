"""Reading a folder that torch.distributed.checkpoint has written, without running what is in its pickles.

`.metadata` is a pickle. It is read by an unpickler that knows the few names that DCP writes and makes inert
records of them: no class or function of torch, or of anyone else, is looked up or called. The items in the
data files were written by torch.save, and are read with weights_only=True.
"""

import io
import math
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overlapkit.checkpoint.box import Box
from overlapkit.checkpoint.errors import CheckpointError, DamagedCheckpoint
from overlapkit.checkpoint.exchange.torch_file import cut, load
from overlapkit.checkpoint.manifest import size_of
from overlapkit.checkpoint.remote.place import StorePath

METADATA = ".metadata"
_LIMIT = 1 << 30  # bytes of metadata that are read: far beyond any job's


class _Record:
    """Stands for an object of a class that is not looked up: keeps what it was made of, and does nothing."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]

    def get(self, field: str) -> Any:
        """A field, None where it was not written."""
        return self.state.get(field)


class _TensorRecord(_Record):
    """TensorStorageMetadata; whatever else describes an item of bytes."""


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Record,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): _Record,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _TensorRecord,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Record,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "WindowsPath"): _Record,
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (known := _KNOWN.get((module, name))) is not None:
            return known
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, for which DCP has no use there")


class _Item(NamedTuple):
    """Where the bytes of one item lie."""

    path: Path
    offset: int
    length: int


class DcpFolder:
    """A folder that DCP's FileSystemWriter has written.

    Raises:
        DamagedCheckpoint: Its metadata cannot be read, contradicts itself, or points out of the folder.
    """

    text_keys = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._meta = _metadata(folder / METADATA)
        self._sizes = folder.store.sizes(folder.key) if isinstance(folder, StorePath) else None
        self._shards: dict[int, dict[Box, _Item]] = {}
        self._last: tuple[Any, torch.Tensor] | None = None  # a shard, and whose
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets one's id
        try:
            paths = self._meta.get("planner_data") or {}
            self._paths = {name: _path(name, paths) for name in self._meta["state_dict_metadata"]}
            self._items: dict[str, dict[Any, Any]] = {}
            for index, info in self._meta["storage_data"].items():
                self._items.setdefault(index["fqn"], {})[index.get("offset")] = info
        except (LookupError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{folder / METADATA}: not DCP's metadata ({error!r})") from error

    def keys(self) -> list[str]:
        """See `foreign.Source`."""
        return list(dict.fromkeys(path[0] for path in self._paths.values()))

    def state(self, keys: Collection[str]) -> dict[str, Any]:
        """See `foreign.Source`. What is no tensor is read here."""
        tree: dict[Any, Any] = {}
        for name, path in self._paths.items():
            if path[0] in keys:
                _put(tree, path, self._leaf(name, "/".join(map(str, path))), self._folder)
        return {key: _with_lists(tree[key], self._folder) for key in keys}

    def sharded(self, tensor: torch.Tensor) -> bool:
        """See `foreign.Source`."""
        return len(self._shards.get(id(tensor), ())) > 1

    def read(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """See `foreign.Source`."""
        shards = self._shards.get(id(tensor))
        if shards is None:
            return cut(tensor, box)  # it came inside an item that is no tensor itself
        if box in shards:
            return _load_shard(shards[box], tensor, box)
        made = torch.empty(box.shape, dtype=tensor.dtype, device="cpu")
        for shard, item in shards.items():
            if (both := shard.meet(box)) is not None:
                made[both.inside(box)] = self._whole(item, tensor, shard)[both.inside(shard)]
        return made

    def _whole(self, item: _Item, tensor: torch.Tensor, shard: Box) -> torch.Tensor:
        """A shard; it is read once where parts of it are wanted one after the other."""
        key = id(tensor), shard
        if self._last is None or self._last[0] != key:
            self._last = None  # so that there are never two in memory
            self._last = key, _load_shard(item, tensor, shard)
        return self._last[1]

    def _leaf(self, name: str, path: str) -> Any:
        about, items = self._meta["state_dict_metadata"][name], self._items.get(name, {})
        try:
            if isinstance(about, _TensorRecord):
                return self._tensor(about, items)
            item = self._item(items[None])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise DamagedCheckpoint(
                f"{self._folder / METADATA}: the entry of {path!r} contradicts itself ({error})"
            ) from error
        return load(_read(item), f"{item.path}: {path!r}")

    def _tensor(self, about: _Record, items: dict[Any, Any]) -> torch.Tensor:
        """A tensor without data, whose shards are known to lie inside it, in files that are there."""
        shape, dtype = tuple(about["size"]), about["properties"].state[0]
        shards: dict[Box, _Item] = {}
        for chunk in about["chunks"]:
            box = Box(tuple(chunk["offsets"]), tuple(chunk["sizes"]))
            item = self._item(items[box.offset])
            if len(box.offset) != len(shape) or len(box.shape) != len(shape):
                raise ValueError("a shard has other dimensions")
            edges = zip(box.offset, box.shape, shape, strict=True)
            if any(min(at, n) < 0 or at + n > whole for at, n, whole in edges):
                raise ValueError("a shard lies outside of its tensor")
            if box.numel * dtype.itemsize > item.length:
                raise ValueError("a shard is longer than its bytes")
            shards[box] = item
        if sum(box.numel for box in shards) != math.prod(shape) or _overlap(list(shards)):
            raise ValueError("its shards do not make up the tensor")
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._alive.append(tensor)
        self._shards[id(tensor)] = shards
        return tensor

    def _item(self, info: _Record) -> _Item:
        name, offset, length = info["relative_path"], info["offset"], info["length"]
        if info.get("transform_descriptors"):
            raise ValueError(f"its bytes are transformed by {info['transform_descriptors']}")
        path = self._folder / name
        size = size_of(path) if self._sizes is None else self._sizes.get(name)
        if Path(name).name != name or size is None:
            raise ValueError(f"{name!r} is no file of this folder")
        if min(offset, length) < 0 or offset + length > size:
            raise ValueError(f"{name!r} ends before its bytes do")
        return _Item(path, offset, length)


def _metadata(path: Path) -> _Record:
    try:
        size = path.store.size(path.key) if isinstance(path, StorePath) else path.stat().st_size
        if (size or 0) > _LIMIT:
            raise DamagedCheckpoint(f"{path}: longer than the {_LIMIT} bytes that are read")
        data = path.store.read(path.key) if isinstance(path, StorePath) else path.read_bytes()
        found = _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises whatever it happens to run into
        raise DamagedCheckpoint(f"{path}: not DCP's metadata ({error})") from error
    if not isinstance(found, _Record):
        raise DamagedCheckpoint(f"{path}: not DCP's metadata (a {type(found).__name__})")
    return found


def _path(name: str, paths: dict[str, Any]) -> tuple[Any, ...]:
    """The keys that lead to an item; DCP knows them where its planner has flattened the state."""
    path = tuple(paths.get(name, (name,)))
    if not path or type(path[0]) is not str or any(type(key) not in (str, int) for key in path):
        raise TypeError(f"the path of {name!r} is {path!r}")
    return path


def _put(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any, folder: Path) -> None:
    """Put a leaf into nested dicts; `_Node` tells them from a dict that is a leaf."""
    for key in path[:-1]:
        tree = tree.setdefault(key, _Node())
        if not isinstance(tree, _Node):
            raise DamagedCheckpoint(f"{folder / METADATA}: {path!r} leads through another item")
    if tree.setdefault(path[-1], leaf) is not leaf:
        raise DamagedCheckpoint(f"{folder / METADATA}: two items are at {path!r}")


def _overlap(boxes: list[Box]) -> bool:
    """Whether two of them cover the same element."""
    dims = range(len(boxes[0].shape)) if len(boxes) > 1 else ()
    if not dims:
        return False
    along = max(dims, key=lambda dim: len({box.offset[dim] for box in boxes}))  # that they are cut along most
    ordered = sorted(boxes, key=lambda box: box.offset[along])
    for number, box in enumerate(ordered, start=1):
        for other in ordered[number:]:
            if other.offset[along] >= box.offset[along] + box.shape[along]:
                break
            if box.meet(other) is not None:
                return True
    return False


class _Node(dict[Any, Any]):
    """A dict or list of the state, by its keys or indices."""


def _with_lists(value: Any, folder: Path) -> Any:
    """Nested dicts, with those made lists that were lists."""
    if not isinstance(value, _Node):
        return value
    made = {key: _with_lists(item, folder) for key, item in value.items()}
    if not any(isinstance(key, int) for key in made):
        return made
    if made.keys() != set(range(len(made))):
        raise DamagedCheckpoint(f"{folder / METADATA}: a list has the members {list(made)}")
    return [made[index] for index in range(len(made))]


def _load_shard(item: _Item, tensor: torch.Tensor, box: Box) -> torch.Tensor:
    where = f"{item.path}, bytes {item.offset} to {item.offset + item.length}"
    found = load(_read(item), where)
    is_it = isinstance(found, torch.Tensor) and (found.dtype, tuple(found.shape)) == (tensor.dtype, box.shape)
    if not is_it:
        raise DamagedCheckpoint(f"{where}: is no tensor of {tensor.dtype} and shape {box.shape}")
    made: torch.Tensor = found.detach()
    return made


def _read(item: _Item) -> bytes:
    if isinstance(item.path, StorePath):
        data = item.path.store.read(item.path.key, item.offset, item.offset + item.length)
    else:
        with open(item.path, "rb") as file:
            file.seek(item.offset)
            data = file.read(item.length)
    if len(data) != item.length:
        raise DamagedCheckpoint(f"{item.path}: ends at byte {item.offset + len(data)}, before its items do")
    return data
