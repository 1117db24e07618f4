"""The keys under which torch.distributed.checkpoint finds what a checkpoint holds."""

from collections.abc import Iterator
from typing import Any

import torch

from overlapkit.checkpoint.catalog import Catalog, Saved
from overlapkit.checkpoint.codec import decode
from overlapkit.checkpoint.dcp.flatten import Path, flatten
from overlapkit.checkpoint.manifest import Manifest, making_sense_of
from overlapkit.checkpoint.tree import TREE, StandIns, parameter_key


class Keys:
    """What a checkpoint holds, by DCP's keys.

    Attributes:
        tensors: Key -> tensor.
        values: Key -> value without tensors.
        paths: Key -> path.

    Raises:
        DamagedCheckpoint: A part makes no sense.
    """

    def __init__(self, manifest: Manifest, catalog: Catalog) -> None:
        self.tensors: dict[str, Saved] = {}
        self.values: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self._catalog = catalog
        self._ambiguous: set[str] = set()
        with making_sense_of(manifest.folder, "a state"):
            self._add_entries(catalog.entries)
            if manifest.world > 1 and any(entry["kind"] == TREE for entry in catalog.entries.values()):
                for rank in range(manifest.world):  # what only other ranks had
                    self._add_entries(manifest.part(rank)["state"])
        for key in self._ambiguous:  # never a guess
            self.tensors.pop(key, None)
            self.values.pop(key, None)

    def _add_entries(self, entries: dict[str, Any]) -> None:
        for key, entry in entries.items():
            stand_ins = StandIns()
            value = decode(entry["value"], stand_ins.of)
            if entry["kind"] != "optimizer":
                self._add((), {key: value}, stand_ins)
            else:
                for path, tree in _optimizer_trees(key, value["state"], value["rest"]):
                    self._add(path, tree, stand_ins)

    def _add(self, above: Path, tree: dict[str, Any], stand_ins: StandIns) -> None:
        flat = flatten(tree, above)
        for key, value in flat.values.items():
            path = self.paths.setdefault(key, flat.paths[key])
            if path != flat.paths[key]:
                self._ambiguous.add(key)
            if key in self.tensors or key in self.values:
                continue  # this rank's own come first
            if isinstance(value, torch.Tensor):
                self.tensors[key] = self._catalog.tensors[stand_ins.name(value)]
            else:
                self.values[key] = value


def _optimizer_trees(
    key: str, state: dict[str, Any], rest: dict[str, Any]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What an optimizer's entry is to DCP, in each of the three forms in which torch gives such a state."""
    groups = rest["param_groups"]
    called: dict[str, set[str]] = {}
    for i, name in enumerate(name for group in groups for name in group["params"]):
        for owner in (parameter_key(name), str(i)):
            called.setdefault(owner, set()).add(name)
    owners = {owner: names.pop() for owner, names in called.items() if len(names) == 1}  # never a guess
    moments = {owner: state[name] for owner, name in owners.items() if name in state}
    named = [{**group, "params": [parameter_key(name) for name in group["params"]]} for group in groups]
    if moments:
        yield (key, "state"), moments
        yield (key,), {**rest, "param_groups": named}
    else:  # one value, and a whole
        yield (), {key: {**rest, "state": {}, "param_groups": named}}
    flattened = {
        f"param_groups.{name}.{option}": value
        for group in named
        for name in group["params"]
        for option, value in group.items()
        if option != "params"
    }
    yield (key,), flattened
