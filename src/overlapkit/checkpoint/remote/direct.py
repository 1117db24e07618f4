"""Saves that go to an object store from memory, with no local file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.hashing import ALGORITHM, checksum
from overlapkit.checkpoint.job import Job
from overlapkit.checkpoint.manifest import step_name
from overlapkit.checkpoint.remote.place import StorePath
from overlapkit.checkpoint.remote.publish import publish_together
from overlapkit.checkpoint.remote.store import Store
from overlapkit.checkpoint.stage import LANE
from overlapkit.checkpoint.writer import Bytes, held, part_bytes, stem_of
from overlapkit.quorum import Report


@dataclass(frozen=True)
class StoreJob(Job):
    """A save into a store."""

    def carry_out(self) -> Path:
        """See Job."""
        run, save = self.run, f"{self.run.name}-{self.number}"
        assert isinstance(run.root, StorePath)
        store, folder = run.root.store, f"{step_name(self.step)}/{save}"
        verdict = publish_together(
            store,
            run.quorum,
            f"save/{self.number}",
            self.step,
            save,
            lambda: self._send(store, folder),
            self._agreed,
            self._about_all(),
            self._verdict,
        )
        return self._after(verdict)

    def _send(self, store: Store, folder: str) -> Report:
        memory = self.staging.memory()
        with self.run.log.host(LANE, "write", bytes=memory.numel()):
            plan, entries = self.share.plan, self.share.entries
            files = send_share(store, folder, plan, entries, held(memory), self._about())
        return self._report(files)


def send_share(
    store: Store, folder: str, plan: FilePlan, entries: dict[str, Any], data: Bytes, about: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Write this rank's objects: what `write_share` writes to a disk, in one stream for each."""
    stem = stem_of(about["rank"])
    files: dict[str, dict[str, Any]] = {}
    sums: list[Any] = []
    if plan.tensors:
        name = f"{stem}.safetensors"
        store.write(f"{folder}/{name}", lambda: _stream(plan, data, sums))
        files[name] = {"bytes": len(plan.header) + plan.nbytes}
    text = part_bytes(plan, entries, about, sums)
    store.put(f"{folder}/{stem}.json", text)
    files[f"{stem}.json"] = {"bytes": len(text), ALGORITHM: checksum(text)}
    return files


def _stream(plan: FilePlan, data: Bytes, sums: list[Any]) -> Iterator[memoryview]:
    """The bytes of the safetensors file; the checksums of its blocks are put into `sums` on the way."""
    sums.clear()
    yield memoryview(plan.header)
    for start, stop, first, last in plan.groups:
        blocks = plan.blocks[first:last]
        view = data(start, max([stop, *(end for _, end in blocks)]))
        sums += [checksum(view[a - start : b - start]) for a, b in blocks]
        yield view[: stop - start]
