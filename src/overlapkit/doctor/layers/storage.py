"""Storage: what lies under the folders of checkpoints and data, how full it is, and how fast."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from overlapkit.doctor import disk_trial
from overlapkit.doctor.check import Check
from overlapkit.doctor.line import Layer, Line, gib, spans
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.mounts import mount_of
from overlapkit.doctor.subject import Subject

STORAGE = Layer("storage")
_SLOW_WRITE = 200e6  # bytes a second: one hard disk's, and 10 GiB a rank take nearly a minute
_SLOW_READ = 100e6  # likewise: a thousand photographs of 100 KiB, fewer than one GPU takes of a ResNet-50
_SLOW_SYNC = 0.05  # seconds: a hard disk turns some times in these, SSDs and servers take a tenth
_FULL = 0.05  # many file systems keep so much for root
_BEHIND = 0.5  # of the median of all machines: what they share of a server differs by less

Figures = dict[str, Any]
"""What this rank measured, for the comparison: rates in bytes per second by "checkpoints" and "data"."""


class Folders(NamedTuple):
    """Where checkpoints and data lie; None where the user did not say."""

    checkpoints: Path | None
    data: Path | None


class Trials(NamedTuple):
    """What measures; tests put others in their place."""

    write: Callable[[Path], disk_trial.Written] = disk_trial.write
    read: Callable[[Path, tuple[int, int]], disk_trial.Reading] = disk_trial.read


def checks(folders: Folders, trials: Trials, figures: Figures) -> tuple[Check, ...]:
    """All checks of this layer; what they measure goes into `figures` as well."""

    def checkpoints(subject: Subject) -> Iterator[Line]:
        if folders.checkpoints is None:
            yield STORAGE.unknown("checkpoints", "not measured: no folder was given", "--checkpoints DIR")
            return
        yield from _place(subject, "checkpoints", folders.checkpoints)
        if folders.checkpoints.is_dir():
            yield from _written(folders.checkpoints, trials, figures)

    def data(subject: Subject) -> Iterator[Line]:
        if folders.data is None:
            yield STORAGE.unknown("data", "not measured: no folder was given", "--data DIR")
            return
        yield from _place(subject, "data", folders.data)
        share = subject.place.local_rank, subject.place.local_world
        if folders.data.is_dir():
            yield from _read(folders.data, share, trials, figures)

    return (
        Check(STORAGE, "checkpoints", checkpoints, shared=False, seconds=45.0),
        Check(STORAGE, "data", data, shared=False, seconds=45.0),
    )


def compared(figures: Sequence[Figures | None], hosts: Sequence[str]) -> Iterator[Line]:
    """Machines whose storage is much slower than that of the others. Ranks of one machine share its mount.

    Args:
        figures: Of each rank, or None.
        hosts: Their machines' names.
    """
    for name, verb in (("checkpoints", "writes"), ("data", "reads")):
        best: dict[str, float] = {}
        ranks: dict[str, list[int]] = {}
        for rank, (found, host) in enumerate(zip(figures, hosts, strict=True)):
            if found and name in found:
                best[host] = max(best.get(host, 0.0), found[name])
                ranks.setdefault(host, []).append(rank)
        if len(best) < 2:
            continue
        usual = median_low(sorted(best.values())) if len(best) > 2 else max(best.values())
        slow = [host for host, rate in best.items() if rate < _BEHIND * usual]
        for host in slow:
            yield STORAGE.weak(
                f"{name} of all ranks",
                f"rank {spans(ranks[host])} on {host} {verb} {_rate(best[host])}, the others {_rate(usual)}",
                "every save lasts, or every batch comes, as the slowest machine has it",
                "compare this machine's mount and network with the others': findmnt -T FOLDER",
            )
        if not slow:
            saw = f"{len(best)} machines: {_rate(min(best.values()))} to {_rate(max(best.values()))}"
            yield STORAGE.ok(f"{name} of all ranks", saw)


def _place(subject: Subject, name: str, folder: Path) -> Iterator[Line]:
    """The file system and its free space."""
    try:
        mount = mount_of(subject.machine, os.path.abspath(folder))
    except Unreadable:  # not Linux
        mount = None
    where = folder if mount is None else f"{folder} on {mount}{', a network' if mount.is_network else ''}"
    try:
        usage = os.statvfs(folder)
    except OSError as error:
        yield STORAGE.weak(
            f"{name} place",
            f"{folder}: {error.strerror or error}",
            "this rank has no checkpoints, or no batches, and all others wait for it",
            "mount or make it on this machine, too",
        )
        return
    whole, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    saw = f"{where}: {gib(free)} of {gib(whole)} free"
    if name == "checkpoints" and mount is not None and mount.is_memory:
        yield STORAGE.weak(
            f"{name} place",
            saw,
            "checkpoints are gone when the machine is, and take its memory",
            "write them to a disk or a shared file system",
        )
    elif name == "checkpoints" and whole and free < _FULL * whole:
        yield STORAGE.weak(
            f"{name} place",
            saw,
            "a save fails when it is full",
            "make room, or keep fewer: Checkpointer(keep=)",
        )
    else:
        yield STORAGE.ok(f"{name} place", saw)


def _written(folder: Path, trials: Trials, figures: Figures) -> Iterator[Line]:
    try:
        found = trials.write(folder)
    except OSError as error:
        yield STORAGE.weak(
            "checkpoints",
            f"{folder} cannot be written: {error.strerror or error}",
            "no checkpoint",
            "give the job's user the right to write there, or another folder",
        )
        return
    figures["checkpoints"] = found.rate
    saw = f"writes {_rate(found.rate)} with fsync; 4 KiB are safe after {found.sync_s * 1e3:.1f} ms"
    if found.rate < _SLOW_WRITE:
        yield STORAGE.weak(
            "checkpoints",
            saw,
            f"10 GiB a rank take {10 * 2**30 / found.rate:.0f} s; saves that come faster stall the loop",
            "a faster disk, Checkpointer(local=) on one of this machine, or a larger every=",
        )
    elif found.sync_s > _SLOW_SYNC:
        yield STORAGE.weak(
            "checkpoints",
            saw,
            "a save makes several files safe, one after the other",
            "a disk of this machine with power-loss protection, or Checkpointer(local=)",
        )
    else:
        yield STORAGE.ok("checkpoints", saw)


def _read(folder: Path, share: tuple[int, int], trials: Trials, figures: Figures) -> Iterator[Line]:
    try:
        found = trials.read(folder, share)
    except OSError as error:
        yield STORAGE.weak(
            "data",
            f"{error.filename or folder}: {error.strerror or error}",
            "no batches",
            "mend its permissions",
        )
        return
    if found.nbytes < disk_trial.LEAST and (found.seconds < 1 or not found.nbytes):
        yield STORAGE.unknown("data", f"{folder} holds too little to measure: {gib(found.nbytes)} were read")
        return
    rate = found.nbytes / found.seconds
    figures["data"] = rate
    if rate < _SLOW_READ:
        yield STORAGE.weak(
            "data",
            f"reads {_rate(rate)} a rank, past the page cache",
            f"a batch of 32 photographs of 100 KiB takes {32 * 102400 / rate * 1e3:.0f} ms to read",
            "copy the data to a disk of this machine, or read larger pieces (shards) with more workers",
        )
    else:
        yield STORAGE.ok("data", f"reads {_rate(rate)}, past the page cache")


def _rate(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s"
