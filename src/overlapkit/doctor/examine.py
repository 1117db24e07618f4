"""Runs every check on this rank, puts the ranks of a job together, and measures links where asked to."""

import contextlib
import dataclasses
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapkit.doctor.bounded import Late, bounded
from overlapkit.doctor.check import Check
from overlapkit.doctor.diagnosis import Diagnosis
from overlapkit.doctor.gpus import Gpus, Nvml
from overlapkit.doctor.job import Job
from overlapkit.doctor.layers import fabric, framework, gpu, job, kernels, loop, nccl, path, storage
from overlapkit.doctor.line import Line, merged
from overlapkit.doctor.link.group import group
from overlapkit.doctor.link.judge import judge
from overlapkit.doctor.link.local import measure_locally
from overlapkit.doctor.link.measure import Figures, measure, quorum_of
from overlapkit.doctor.link.measures import Measures, Plan, Wire
from overlapkit.doctor.machine import Machine, Unreadable
from overlapkit.doctor.subject import Place, Subject, Torch
from overlapkit.doctor.watch import Watch
from overlapkit.quorum import RankFailed

Progress = Callable[[int, int, str], None]
_FOLDER_S = 5.0
_DRIVER_S = 60.0  # a GPU that wakes up, or eight of them, take seconds


@dataclass(frozen=True)
class Instruments:
    """What looks and measures; tests put others in their place."""

    subject: Callable[[], Subject] = lambda: this_process()
    host: Callable[[], str] = socket.gethostname
    trials: storage.Trials = storage.Trials()
    wire: Callable[[str, float], Measures] = Wire
    plan: Callable[[bool], Plan] = Plan.usual
    checks: Callable[[tuple[Check, ...]], tuple[Check, ...]] = lambda checks: checks


def examine(
    *,
    checkpoints: str | Path | None = None,
    data: str | Path | None = None,
    workers: int | None = None,
    link: bool = False,
    ranks: int | None = None,
    seconds: float = 2.0,
    timeout: float = 120.0,
    progress: Progress | None = None,
    instruments: Instruments | None = None,
) -> Diagnosis:
    """Look at this machine, and in a job at all of its ranks: every rank calls this.

    Takes some seconds, and never longer than its bounds: whatever does not answer is a line that says so.

    Args:
        checkpoints: The folder that checkpoints will be written to: its speed and its room are measured.
        data: The folder that data is read from, likewise.
        workers: `num_workers` of each rank's loader, to compare with the cores.
        link: Measure collectives and pairs: in a job among its ranks, else among processes started for it.
        ranks: How many of those; by default one a GPU, and at least 2.
        seconds: How long counters of ports are watched.
        timeout: Seconds to wait for other ranks.
        progress: Called with (steps done, of how many, what comes now).
        instruments: For tests.

    Returns:
        On rank 0 the lines of all ranks, on others their own.

    Raises:
        ValueError: A folder is none, a number is out of its range, or torchrun's variables make no sense.
    """
    _check_numbers(workers=workers, ranks=ranks, seconds=seconds, timeout=timeout)
    tools = instruments or Instruments()
    subject = tools.subject()
    folders = storage.Folders(*(None if one is None else Path(one) for one in (checkpoints, data)))
    _check_in_place(subject.place, folders, ranks, link)
    watch = Watch(subject.machine)
    figures: storage.Figures = {}
    checks = tools.checks(all_checks(folders, tools.trials, figures, watch, seconds, workers))
    lines = _own_lines(subject, checks, progress)
    if subject.place.world > 1:
        return _among_ranks(subject, lines, figures, link, timeout, tools, progress)
    found: dict[str, Any] = {"storage": figures}
    if link:
        count = ranks or max(2, len(subject.torch.devices))
        try:
            found["link"] = measure_locally(count, timeout, subject.machine.environ, progress)
            lines += judge(found["link"], lines, [tools.host()] * count)
        except Unreadable as error:
            lines.append(_no_links(str(error)))
    return Diagnosis(tuple(merged(lines)), figures=found)


def this_process() -> Subject:
    """What can be seen from here.

    Raises:
        ValueError: torchrun's variables make no sense.
    """
    machine = Machine()
    place = Place.launched(machine.environ)
    gpus: Gpus | str
    try:
        gpus = bounded(Nvml, _DRIVER_S, "NVML")
    except Unreadable as error:
        gpus = str(error)
    except Late as error:
        gpus = f"NVML: {error}"
    try:
        torch = bounded(Torch.imported, _DRIVER_S, "torch.cuda")
    except Late as error:
        torch = Torch.imported(trouble=f"torch.cuda: {error}")
    return Subject(machine, torch, place, gpus)


def all_checks(
    folders: storage.Folders,
    trials: storage.Trials,
    figures: storage.Figures,
    watch: Watch,
    seconds: float,
    workers: int | None,
) -> tuple[Check, ...]:
    """All of them, those last that others leave time to."""
    return (
        fabric.begin(watch),
        *gpu.CHECKS,
        *path.CHECKS,
        *nccl.CHECKS,
        *kernels.CHECKS,
        *framework.CHECKS,
        *loop.checks(workers),
        *storage.checks(folders, trials, figures),
        *job.CHECKS,
        *fabric.checks(watch, seconds),
    )


def _own_lines(subject: Subject, checks: tuple[Check, ...], progress: Progress | None) -> list[Line]:
    due = [check for check in checks if subject.place.local_rank == 0 or not check.shared]
    lines: list[Line] = []
    for at, check in enumerate(due):
        if progress is not None:
            progress(at, len(due), f"{check.layer.name}: {check.name}")
        place = subject.place
        seen_by = range(place.rank, place.rank + place.local_world) if check.shared else (place.rank,)
        ranks = tuple(seen_by) if place.world > 1 else ()
        lines += [dataclasses.replace(line, ranks=ranks) for line in check.run(subject)]
    return lines


def _among_ranks(
    subject: Subject,
    lines: list[Line],
    figures: storage.Figures,
    link: bool,
    timeout: float,
    tools: Instruments,
    progress: Progress | None,
) -> Diagnosis:
    place, host = subject.place, tools.host()
    lines = [dataclasses.replace(line, host=host) for line in lines]
    try:
        all_ranks = Job.join(place, subject.machine.environ, timeout)
    except Unreadable as error:
        lines.append(job.JOB.weak("ranks", str(error), "the job cannot start", _LOOK_AT_0))
        return Diagnosis(tuple(merged(lines)), place.rank, place.world, {"storage": figures}, str(error))
    report = {
        "lines": [line.to_dict() for line in lines],
        "host": host,
        "figures": figures,
        "facts": job.facts(subject),
        "gpu": job.gpu_of(subject),
    }
    found: dict[str, Any] = {"storage": figures}
    alone = ""
    try:
        reports = all_ranks.gather("lines", report)
        if place.rank == 0:
            lines, found = _put_together(reports, timeout)
        there = all_ranks.told("there", sum(one is not None for one in reports))
        if link and there == place.world:
            hosts = [one["host"] for one in reports if one is not None]
            lines += _links(subject, all_ranks, timeout, tools, progress, found, lines, hosts)
        elif link:
            lines.append(_no_links(f"{there} of {place.world} ranks are there"))
        all_ranks.leave([rank for rank, one in enumerate(reports) if one is not None])
    except Unreadable as error:
        alone = str(error)
        lines.append(job.JOB.weak("ranks", alone, "the job cannot start", _LOOK_AT_0))
    return Diagnosis(tuple(merged(lines)), place.rank, place.world, found, alone)


_LOOK_AT_0 = "look at rank 0's own output and machine: its address, port and firewall"


def _put_together(reports: list[Any], timeout: float) -> tuple[list[Line], dict[str, Any]]:
    """What all ranks have seen, and what only their comparison shows."""
    lines = [Line.from_dict(line) for one in reports if one is not None for line in one["lines"]]
    hosts = [None if one is None else one["host"] for one in reports]
    figures = [None if one is None else one["figures"] for one in reports]
    lines += job.presence(hosts, timeout)
    lines += job.one_each(hosts, ["" if one is None else one["gpu"] for one in reports])
    lines += job.agreement([None if one is None else one["facts"] for one in reports])
    lines += storage.compared(figures, [host or "" for host in hosts])
    return lines, {"storage": figures}


def _links(
    subject: Subject,
    all_ranks: Job,
    timeout: float,
    tools: Instruments,
    progress: Progress | None,
    found: dict[str, Any],
    lines: list[Line],
    hosts: list[str],
) -> list[Line]:
    """The tree on rank 0; what failed on every rank."""
    try:
        with group(subject.place, all_ranks.store_of("group"), timeout) as device:
            quorum = quorum_of(subject.place.rank, timeout)
            figures: Figures = measure(
                quorum, tools.wire(device, timeout), tools.plan(device == "cuda"), progress
            )
            quorum.leave()
    except (RankFailed, RuntimeError) as error:
        return [_no_links(str(error))]
    found["link"] = figures
    return judge(figures, lines, hosts) if subject.place.rank == 0 else []


def _no_links(why: str) -> Line:
    return job.JOB.weak(
        "links",
        f"not measured: {why}",
        "nobody knows what the job's collectives cost",
        "look at the rank that is named; once it is there, measure again",
    )


def _check_in_place(place: Place, folders: storage.Folders, ranks: int | None, link: bool) -> None:
    """What is wrong in one process, or in a job."""
    if ranks is not None and (not link or place.world > 1):
        raise ValueError(
            f"ranks={ranks}: it belongs to link=True outside of a job; torchrun sets the job's ranks"
        )
    if place.world > 1:  # a rank whose mount is missing has to say so with the others
        return
    for argument, folder in folders._asdict().items():
        with contextlib.suppress(Late, OSError):  # its own check will say so
            if folder is not None and not bounded(folder.is_dir, _FOLDER_S, argument):
                raise ValueError(f"{argument}={str(folder)!r} is no folder here: give one that is there")


def _check_numbers(workers: int | None, ranks: int | None, seconds: float, timeout: float) -> None:
    if workers is not None and workers < 0:
        raise ValueError(f"workers={workers}: give the loader's num_workers, 0 or more")
    if ranks is not None and ranks < 2:
        raise ValueError(f"ranks={ranks}: a link has two ends; give 2 or more")
    if not 0 <= seconds <= 600:
        raise ValueError(f"seconds={seconds}: give 0 to 600")
    if not 0 < timeout <= 86400:
        raise ValueError(f"timeout={timeout}: give seconds above 0, at most 86400")
