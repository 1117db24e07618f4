"""Block sizes measured on this GPU instead of chosen by rule: only when asked, and kept on disk.

A choice changes the order of sums, so results differ in their last bits from those of the rule: ranks that
compute the same values must read the same choices.
"""

import contextlib
import functools
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from overlapkit import launch
from overlapkit.launch import BY_RULE, Choice

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

_CANDIDATES = [BY_RULE, *(Choice(e, w) for e in (0, -1, 1) for w in (0, -1, 1) if e or w)]
_GAIN = 0.98  # what a choice must take of the rule's time to be worth other bits


@dataclass(frozen=True)
class Tuned:
    """What `autotune` found for one kernel at one size.

    Attributes:
        name: The kernel's launcher and the sizes.
        choice: Powers of two on the rule's tile and warps: (0, 0) is the rule's own.
        seconds: The time with it; None where the cache had it already.
        by_rule: The time by the rule; None where the cache had it already.
    """

    name: str
    choice: tuple[int, int]
    seconds: float | None = None
    by_rule: float | None = None


def autotune(step: Callable[[], object], *, directory: str | os.PathLike[str] | None = None) -> list[Tuned]:
    """Call `step` once, and measure block sizes for each kernel and size in it that the cache does not have.

    Call it before training, with training's shapes: `kernels.autotune(lambda: model(x).sum().backward())`.
    From then on this process uses what was found. Others read it where OVERLAPKIT_AUTOTUNE is 1 (or names
    the directory); without it nothing is read, and nothing but this function ever measures.

    Args:
        step: Anything that calls kernels on a GPU, backward included. It runs as ever, with the same results
            up to rounding; in-place kernels get their inputs back between measurements.
        directory: Where choices are kept. None: that of OVERLAPKIT_AUTOTUNE, or overlapkit/autotune in the
            user's cache directory (XDG_CACHE_HOME). Ranks that share it and tune at once take the same.

    Raises:
        RuntimeError: `step` launched no kernel that can be tuned, as on a CPU.
    """
    global _tuning, _cache
    found: list[Tuned] = []
    _cache, before = _Cache(Path(directory) if directory is not None else _directory()), _tuning
    _tuning = found.append
    try:
        step()
    finally:
        _tuning = before
    if not found:
        raise RuntimeError("step launched no kernel that can be tuned: call it with tensors on a GPU")
    return found


def tuned(*, restores: Sequence[str] = ()) -> Callable[[Launcher], Launcher]:
    """Decorate a launcher that takes its block from `launch.tile`.

    Args:
        restores: Arguments that it writes to: they get their values back between measurements.
    """

    def decorate(launcher: Launcher) -> Launcher:
        source = _source(Path(launcher.__code__.co_filename).parent)
        name = f"{launcher.__module__.rpartition('.')[2]}.{launcher.__name__}"
        names = launcher.__code__.co_varnames

        @functools.wraps(launcher)
        def with_choice(*args: Any, **kwargs: Any) -> Any:
            if _cache is None:
                return launcher(*args, **kwargs)
            key = [name, source, *_sizes(args, kwargs)]
            if _tuning is None:
                choice = _cache.read(key) or BY_RULE
            else:
                named = dict(zip(names, args, strict=False)) | kwargs
                with torch.cuda.device_of(args[0]):
                    choice = _tune(
                        key,
                        lambda: launcher(*args, **kwargs),
                        [x for n in restores if (x := named.get(n)) is not None],
                    )
            with launch.choosing(choice):
                return launcher(*args, **kwargs)

        return cast(Launcher, with_choice)

    return decorate


def _tune(key: list[Any], call: Callable[[], object], written: Sequence[Tensor]) -> Choice:
    """The cached choice for a key, or the best of all candidates."""
    assert _cache is not None
    assert _tuning is not None
    title = f"{key[0]} {' '.join(map(str, key[2:]))}"
    if (known := _cache.read(key)) is not None:
        _tuning(Tuned(title, known))
        return known
    took: dict[Choice, float] = {}
    copies = [x.clone() for x in written]
    for choice in _CANDIDATES:
        allowed = () if choice == BY_RULE else _too_large()
        with contextlib.suppress(*allowed), launch.choosing(choice):
            took[choice] = _seconds(call)
        for x, copy in zip(written, copies, strict=True):
            x.copy_(copy)
    best = min(took, key=lambda choice: took[choice])
    if took[best] > _GAIN * took[BY_RULE]:
        best = BY_RULE
    best = _cache.write(key, best)
    _tuning(Tuned(title, best, took.get(best), took[BY_RULE]))
    return best


def _seconds(call: Callable[[], object]) -> float:
    """The median of a launch, the L2 cache flushed before each."""
    from triton.testing import do_bench

    return float(statistics.median(do_bench(call, return_mode="all"))) / 1e3


def _too_large() -> tuple[type[Exception], ...]:
    """A tile that needs more than the processor has is no candidate."""
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """What a choice depends on: the compiler, the GPU, dtypes, widths, rows up to the next power of two."""
    yield _compiler()
    yield _gpu(args[0].device)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            wide = value.shape[-1] if value.dim() else 1
            rows = launch.next_power_of_2(value.numel() // max(wide, 1))
            yield f"{rows}x{wide}:{str(value.dtype).removeprefix('torch.')}"
        elif isinstance(value, tuple):
            yield "".join("+" if one else "-" for one in value)
        else:
            yield str(value) if isinstance(value, str | torch.dtype) else bool(value)


@functools.cache
def _source(folder: Path) -> str:
    """Of all raw kernels there, and of how they are launched."""
    files = [*sorted(folder.glob("*.py")), Path(launch.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@functools.cache
def _compiler() -> str:
    import triton

    return f"triton {triton.__version__}"


@functools.cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class _Cache:
    """One small file for each key, read once a process and made whole: ranks may do so at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, Choice | None] = {}

    def read(self, key: list[Any]) -> Choice | None:
        text = json.dumps(key)
        if text not in self._known:
            self._known[text] = self._on_disk(text)
        return self._known[text]

    def write(self, key: list[Any], choice: Choice) -> Choice:
        """Keep a choice, and return the one that holds: of several ranks the first one's."""
        text = json.dumps(key)
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "choice": choice}, file)
        try:
            os.link(path, self._file(text))  # fails where there is one
        except OSError:
            if (first := self._on_disk(text)) is not None:
                choice = first
            else:  # damaged, or no links in this file system
                os.replace(path, self._file(text))
        Path(path).unlink(missing_ok=True)
        self._known[text] = choice
        return choice

    def _file(self, text: str) -> Path:
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _on_disk(self, text: str) -> Choice | None:
        """None for what is not there, damaged, or of another key: it is measured anew, and replaced."""
        try:
            content = json.loads(self._file(text).read_text())
            choice = Choice(*content["choice"])
            fits = json.dumps(content["key"]) == text and choice in _CANDIDATES
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return choice if fits else None


def _directory() -> Path:
    asked = os.environ.get("OVERLAPKIT_AUTOTUNE", "")
    if asked not in ("", "0", "1"):
        return Path(asked)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "overlapkit" / "autotune"


def _from_environment() -> _Cache | None:
    return None if os.environ.get("OVERLAPKIT_AUTOTUNE", "") in ("", "0") else _Cache(_directory())


_tuning: Callable[[Tuned], None] | None = None
_cache = _from_environment()
