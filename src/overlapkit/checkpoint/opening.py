"""What is checked before anything is done: options, directory, step, metrics."""

import numbers
import operator
import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.codec import encode
from overlapkit.checkpoint.commit import RunLock, sweep
from overlapkit.checkpoint.disk import Disk
from overlapkit.checkpoint.retention import Best

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::\S*)?://")


def check_options(
    directory: object,
    every: object,
    mtbf: object,
    keep: object,
    keep_every: object,
    in_flight: object,
    stage: object,
    timeout: object,
    local: object = None,
) -> None:
    """Raise where an argument of Checkpointer is wrong."""
    check_place("directory", directory)
    if local is not None:
        check_path(
            "local", local, "it is the directory of this machine before the store, such as '/nvme/run'"
        )
    if (every == "auto") != (mtbf is not None):
        raise ValueError(
            f"every={every!r}, mtbf={mtbf!r}: 'auto', and nothing else, takes the mean time between failures "
            "of the job, in seconds"
        )
    if mtbf is not None:
        _check_seconds("mtbf", mtbf)
    for name, value in (
        ("every", None if every == "auto" else every),
        ("keep", keep),
        ("keep_every", keep_every),
        ("in_flight", in_flight),
    ):
        else_ = {"in_flight": "", "every": ", None or 'auto'"}.get(name, ", or None")
        if value is None and else_:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1{else_}")
    if keep_every is not None and keep is None:
        raise ValueError(
            f"keep_every={keep_every!r} without keep=: nothing is ever deleted then; give keep=, too"
        )
    if stage not in ("late", "now"):
        raise ValueError(f"stage={stage!r}: give 'late' or 'now'")
    _check_seconds("timeout", timeout)


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r}: give a number of seconds above 0")


def check_alike(given: list[dict[str, Any]]) -> None:
    """Raise where a rank was given other arguments than rank 0.

    Args:
        given: Arguments by name, for each rank.

    Raises:
        ValueError: It was; the message names the rank.
    """
    for rank, arguments in enumerate(given):
        for name, value in arguments.items():
            if value != given[0][name]:
                raise ValueError(
                    f"{name}={value!r} on rank {rank}, {given[0][name]!r} on rank 0: give all ranks the same "
                    "(a directory named after the time: let rank 0 name it, and broadcast)"
                )


def check_best(best: object) -> Best | None:
    """What `best=` says.

    Raises:
        TypeError: It is neither a name nor a pair.
        ValueError: It does not say which way is better.
    """
    if best is None:
        return None
    if isinstance(best, str):
        if "loss" not in best.lower():
            raise ValueError(
                f"best={best!r} does not say which way is better: give ({best!r}, 'max') or ({best!r}, 'min')"
            )
        return Best(best, largest=False)
    if not isinstance(best, tuple | list) or len(best) != 2 or not isinstance(best[0], str):
        raise TypeError(f"best={best!r}: give a pair such as ('val_acc', 'max'), or the name of a loss")
    if best[1] not in ("min", "max"):
        raise ValueError(f"best={best!r}: the second is 'min' or 'max'")
    return Best(best[0], largest=best[1] == "max")


def is_url(where: object) -> bool:
    """Whether this is a URL, and no path."""
    return isinstance(where, str) and _URL.match(where) is not None


def check_path(argument: str, path: object, instead: str = "give a local path") -> None:
    """Raise where an argument is no path of this machine; `instead` says what to give for a URL."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument}={path!r}: give a path, such as 'runs/a'")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValueError(f"{argument}={text!r} is no path: give one, such as 'runs/a'")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):  # also what a Path makes of a URL: one slash of two
        raise NotImplementedError(f"{argument}={path!r}: object stores cannot be used here: {instead}")


def check_place(argument: str, where: object) -> None:
    """Raise where an argument is neither a URL nor a path of this machine."""
    if not is_url(where):
        check_path(argument, where, "a URL has two slashes; give it as text, for a Path loses one of them")


def check_step(step: object) -> int:
    """A step as an int.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is negative.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"step={step!r}: give a whole number (restore also takes 'latest' and 'best')"
        ) from None
    if number < 0:
        raise ValueError(f"step={step!r}: give 0 or more")
    return number


def check_which(step: object, best: Best | None) -> None:
    """Raise where a restore cannot know which checkpoint is meant."""
    if step == "best":
        if best is None:
            raise ValueError("which one is best? Give the Checkpointer best=, such as best='val_loss'")
    elif step != "latest":
        check_step(step)


def check_metrics(metrics: Mapping[str, float] | None, best: Best | None = None) -> dict[str, Any]:
    """Metrics as typed JSON.

    Raises:
        TypeError: They are not numbers by name.
        ValueError: There are some, but not the one by which the best is found.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics={metrics!r}: give numbers by name, such as {{'val_loss': 1.5}}")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise TypeError(
                f"metrics has {name!r}: {value!r}: give numbers by name (a tensor's is its .item())"
            )
    if best is not None and metrics and best.metric not in metrics:
        raise ValueError(
            f"metrics has {list(metrics)}, and not {best.metric!r}, which best= compares: give it, too "
            "(nan where it is not known), or no metrics at all"
        )
    encoded: dict[str, Any] = encode(
        {k: float(v) for k, v in (metrics or {}).items()}, "metrics", lambda n, t: n
    )
    return encoded


def check_only(only: object, state: Mapping[str, Any]) -> None:
    """Raise where `only` names no keys of a state."""
    if only is None:
        return
    if not isinstance(only, tuple | list | set) or not all(isinstance(key, str) for key in only):
        raise TypeError(f"only={only!r}: give a tuple of keys, such as ('model',)")
    if absent := [key for key in only if key not in state]:
        raise ValueError(f"only={only!r}: the state has no {', '.join(map(repr, absent))}, but {list(state)}")


def check_signal(signum: object, deadline: object, exit_code: object) -> int:
    """The exit status after a save for a signal.

    Raises:
        RuntimeError: This is not the main thread.
        ValueError: An argument is out of range.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("on_signal() belongs into the main thread: Python runs signal handlers only there")
    if not isinstance(signum, int) or signum not in signal.valid_signals():
        raise ValueError(f"signum={signum!r}: give a signal, such as signal.SIGTERM")
    _check_seconds("deadline", deadline)
    if exit_code is None:
        return 128 + signum
    if not isinstance(exit_code, int) or not 0 <= exit_code < 256 or exit_code == os.EX_TEMPFAIL:
        raise ValueError(
            f"exit_code={exit_code!r}: give 0 to 255, but not {os.EX_TEMPFAIL}, which means not saved"
        )
    return exit_code


def open_run(disk: Disk, root: Path) -> RunLock:
    """Remove what crashed runs left behind, and begin one. Called by rank 0 only.

    Raises:
        PermissionError: The directory cannot be written to.
    """
    try:
        sweep(disk, root)
        return RunLock(root)
    except OSError as error:
        raise PermissionError(f"directory={str(root)!r} cannot be written to: {error}") from error


def open_directory(root: Path) -> None:
    """Make sure that the directory is there and can be written to.

    Raises:
        ValueError: It, or one that it lies in, is a file.
        PermissionError: It cannot be made or written to.
    """
    if os.path.islink(root) and not root.exists():
        raise ValueError(f"directory={str(root)!r} is a link to {os.readlink(root)!r}, which does not exist")
    try:
        missing = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_parent(made)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"directory={str(root)!r}: it, or a part of it, is a file; give a folder") from error
    except OSError as error:
        raise PermissionError(f"directory={str(root)!r} cannot be made: {error}") from error
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(
            f"directory={str(root)!r} cannot be read and written to: give another one, or chmod it"
        )


def sync_parent(path: Path) -> None:
    """Wait until it is on the disk that a folder has this entry."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
