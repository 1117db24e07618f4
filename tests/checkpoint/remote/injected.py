"""An fsspec file system in memory that fails, or is slow, at a chosen call."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

URL = "inject://bucket/run"


class Fault:
    """Counts the calls; from number `at` on, or at it alone, they fail.

    Args:
        at: Which call; None for none.
        how: "before" it has an effect, "half" (a write leaves half of its bytes) or "after" it had.
        once: Only this call fails.
        error: What it raises.
        only: Only calls whose name and path this accepts are counted.
    """

    def __init__(self, at=None, how="before", *, once=False, error=None, only=None):
        self.at, self.how, self.once = at, how, once
        self.error = error or OSError(5, "the store is away")
        self.only = only or (lambda call, path: True)
        self.calls: list[tuple[str, str]] = []
        self.delay_s = 0.0
        self.gate: threading.Semaphore | None = None
        self._lock = threading.Lock()

    def due(self, call: str, path: str) -> bool:
        if not self.only(call, path):
            return False
        with self._lock:
            self.calls.append((call, path))
            number = len(self.calls) - 1
        if self.gate is not None:
            assert self.gate.acquire(timeout=30)
        time.sleep(self.delay_s)
        return self.at is not None and (number == self.at or (number > self.at and not self.once))


class Injected(MemoryFileSystem):
    protocol = ("inject",)
    store: dict = {}
    pseudo_dirs = [""]
    fault = Fault()
    _inside = threading.local()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("inject://", "memory://"))

    def _call(self, call: str, path: str, real: Callable, half: Callable | None = None):
        if getattr(self._inside, "at", False):
            return real()  # a part of another call
        self._inside.at = True
        try:
            fault = Injected.fault
            if not fault.due(call, path):
                return real()
            if fault.how == "half" and half is not None:
                half()
            if fault.how == "after":
                real()
            raise fault.error
        finally:
            self._inside.at = False

    def _leave(self, path, data):
        path = self._strip_protocol(path)
        self.store[path] = MemoryFile(self, path, data)

    def pipe_file(self, path, value, **kwargs):  # a small object is there whole or not at all
        return self._call("put", path, lambda: super(Injected, self).pipe_file(path, value, **kwargs))

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as file:
            data = file.read()
        real = super().put_file
        return self._call(
            "put_file",
            rpath,
            lambda: real(lpath, rpath, **kwargs),
            lambda: self._leave(rpath, data[: len(data) // 2]),
        )

    def _open(self, path, mode="rb", **kwargs):
        real = super()._open
        return self._call(
            "open", path, lambda: real(path, mode=mode, **kwargs), lambda: self._leave(path, b"half")
        )

    def cat_file(self, path, start=None, end=None, **kwargs):
        real = super().cat_file
        return self._call("get", path, lambda: real(path, start=start, end=end))

    def info(self, path, **kwargs):
        real = super().info
        return self._call("info", path, lambda: real(path))

    def ls(self, path, detail=True, **kwargs):
        real = super().ls
        return self._call("list", path, lambda: real(path, detail=detail))

    def find(self, path, **kwargs):
        real = super().find
        return self._call("find", path, lambda: real(path, **kwargs))

    def isdir(self, path):
        real = super().isdir
        return self._call("isdir", path, lambda: real(path))

    def rm_file(self, path):
        real = super().rm_file
        return self._call("delete", path, lambda: real(path))

    def rm(self, path, **kwargs):
        first = [path] if isinstance(path, str) else path
        real = super().rm
        return self._call("delete", first[0], lambda: real(path, **kwargs), lambda: real(first[:1]))


class OnDisk(LocalFileSystem):
    """A store that several processes see, and that is no file:// to us: its objects are files."""

    protocol = ("disk",)

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("disk://"))


fsspec.register_implementation("inject", Injected, clobber=True)
fsspec.register_implementation("disk", OnDisk, clobber=True)


@contextmanager
def faulty(fault: Fault) -> Iterator[Fault]:
    """Let the store have this fault for the length of the block."""
    Injected.fault = fault
    try:
        yield fault
    finally:
        Injected.fault = Fault()


def objects() -> dict[str, bytes]:
    """All that is in the store."""
    return {name: file.getvalue() for name, file in Injected.store.items()}


def put_back(there: dict[str, bytes]) -> None:
    """Make the store hold this, and nothing else."""
    Injected.store.clear()
    Injected.pseudo_dirs[:] = [""]
    filesystem = fsspec.filesystem("inject")
    for name, data in there.items():
        Injected.store[name] = MemoryFile(filesystem, name, data)


def names(*, folder: str = "/bucket/run/") -> list[str]:
    """The objects of the run, with the saves' own names left out, sorted."""
    kept = [name.removeprefix(folder).split("/") for name in Injected.store]
    return sorted("/".join([parts[0], parts[-1]]) for parts in kept)


__all__ = ["URL", "Fault", "Injected", "OnDisk", "faulty", "names", "objects", "put_back"]
