"""What is checked before anything is done: options, directory, step, metrics."""

import numbers
import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlapkit.checkpoint.codec import encode

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::\S*)?://")


def check_options(
    directory: object,
    every: object,
    keep: object,
    keep_every: object,
    best: object,
    in_flight: object,
    stage: object,
    timeout: object,
    local: object = None,
) -> None:
    """Raise where an argument of Checkpointer is wrong, or not there yet."""
    if not is_url(directory):
        check_path("directory", directory)
    if local is not None:
        check_path("local", local)
    if every == "auto":
        raise NotImplementedError("every='auto' is not there yet: give a number of steps")
    if best is not None:
        raise NotImplementedError(f"best={best!r} is not there yet: use keep= and keep_every=")
    for name, value in (
        ("every", every),
        ("keep", keep),
        ("keep_every", keep_every),
        ("in_flight", in_flight),
    ):
        optional = name != "in_flight"
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{name}={value!r}: give a whole number of at least 1{', or None' if optional else ''}"
            )
    if keep_every is not None and keep is None:
        raise ValueError(
            f"keep_every={keep_every!r} without keep=: nothing is ever deleted then; give keep=, too"
        )
    if stage not in ("late", "now"):
        raise ValueError(f"stage={stage!r}: give 'late' or 'now'")
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0")


def is_url(where: object) -> bool:
    """Whether this is a URL, and no path."""
    return isinstance(where, str) and _URL.match(where) is not None


def check_path(argument: str, path: object) -> None:
    """Raise where an argument is no path of this machine."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument}={path!r}: give a path, such as 'runs/a'")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValueError(f"{argument}={text!r} is no path: give one, such as 'runs/a'")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):  # also what a Path makes of a URL: one slash of two
        raise NotImplementedError(
            f"{argument}={path!r}: object stores are not there yet here; give a local path (where a URL is "
            "allowed, give it as text: a Path loses one of its slashes)"
        )


def check_step(step: object) -> int:
    """A step as an int.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is negative.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step={step!r}: give a whole number (restore also takes 'latest')") from None
    if number < 0:
        raise ValueError(f"step={step!r}: give 0 or more")
    return number


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Metrics as typed JSON.

    Raises:
        TypeError: They are not numbers by name.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics={metrics!r}: give numbers by name, such as {{'val_loss': 1.5}}")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise TypeError(
                f"metrics has {name!r}: {value!r}: give numbers by name (a tensor's is its .item())"
            )
    encoded: dict[str, Any] = encode(
        {k: float(v) for k, v in (metrics or {}).items()}, "metrics", lambda n, t: n
    )
    return encoded


def open_directory(root: Path) -> None:
    """Make sure that the directory is there and can be written to.

    Raises:
        ValueError: It, or one that it lies in, is a file.
        PermissionError: It cannot be made or written to.
    """
    if root.is_symlink() and not root.exists():
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
