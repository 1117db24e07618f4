"""The job: are all ranks there, does each have a GPU, and do they run the same versions and settings."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from overlapkit.doctor.check import Check
from overlapkit.doctor.layers import nccl_names
from overlapkit.doctor.layers.configured import settings
from overlapkit.doctor.line import Layer, Line, joined, spans
from overlapkit.doctor.subject import Subject

JOB = Layer("job")
Facts = Mapping[str, str]
_OWN = "NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE"  # each machine has its own


def launch(subject: Subject) -> Iterator[Line]:
    """How this process was started."""
    place, gpus = subject.place, len(subject.torch.devices)
    if place.world == 1:
        yield JOB.absent("ranks", "one process: start the doctor under torchrun to look at a whole job")
    elif gpus > 1 and place.local_world > gpus or gpus == 1 < place.local_world and not alone(subject):
        yield JOB.weak(
            "ranks",
            f"{place.local_world} ranks on this machine, and {gpus} GPU(s)",
            "NCCL refuses two ranks on one GPU; with gloo they take turns",
            f"--nproc-per-node={gpus}",
        )


def alone(subject: Subject) -> bool:
    """Whether the launcher may have shown this rank one GPU of several, its own."""
    return len(subject.torch.devices) == 1 and "CUDA_VISIBLE_DEVICES" in subject.machine.environ


def gpu_of(subject: Subject) -> str:
    """The PCI address of the GPU that this rank takes, or empty."""
    at, addresses = 0 if alone(subject) else subject.place.local_rank, subject.torch.addresses
    return addresses[at] if at < len(addresses) else ""


def one_each(hosts: Sequence[str | None], gpus: Sequence[str]) -> Iterator[Line]:
    """Ranks that take the same GPU.

    Args:
        hosts: Of each rank, None for one that is absent.
        gpus: Of `gpu_of`.
    """
    owners: dict[tuple[str | None, str], list[int]] = defaultdict(list)
    for rank, owner in enumerate(zip(hosts, gpus, strict=True)):
        owners[owner].append(rank)
    for (host, gpu), ranks in owners.items():
        if gpu and len(ranks) > 1:
            yield JOB.weak(
                "GPUs",
                f"ranks {spans(ranks)} on {host} take the same GPU {gpu}",
                "NCCL refuses two ranks on one GPU; with gloo they take turns",
                "show each rank its own: CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1",
            )


def facts(subject: Subject) -> dict[str, str]:
    """What has to be the same on every rank."""
    import overlapkit

    torch = subject.torch
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "overlapkit": overlapkit.__version__,
        "torch": torch.version,
        "CUDA": torch.cuda or torch.hip or "none",
        "NCCL": ".".join(map(str, torch.nccl or ())) or "none",
        "triton": torch.triton or "none",
        "GPUs": ", ".join(f"{a}.{b}" for a, b in sorted(set(torch.devices))) or "none",
        "driver": getattr(subject.gpus, "driver", "") or "unknown",
        "OMP_NUM_THREADS": subject.machine.environ.get("OMP_NUM_THREADS", "unset"),
    }
    env = settings(subject)
    return found | {name: env[name] for name in env if nccl_names.is_one(name) and name not in _OWN}


def presence(hosts: Sequence[str | None], timeout: float) -> Iterator[Line]:
    """Who is there.

    Args:
        hosts: Of each rank, None for one that is absent.
        timeout: Seconds that were waited.
    """
    absent = [rank for rank, host in enumerate(hosts) if host is None]
    machines = sorted({host for host in hosts if host is not None})
    if absent:
        yield JOB.weak(
            "ranks",
            f"rank {spans(absent)} of {len(hosts)} is absent: nothing from it within {timeout:g} s; "
            f"there are {joined(machines)}",
            "the job waits for it at its first collective",
            "look at that machine's own output; --timeout gives slow ones longer",
        )
    else:
        yield JOB.ok("ranks", f"{len(hosts)} ranks on {len(machines)} machine(s): {joined(machines)}")


def agreement(found: Sequence[Facts | None]) -> Iterator[Line]:
    """Where ranks differ that must not.

    Args:
        found: Of each rank, None for one that is absent.
    """
    there = {rank: one for rank, one in enumerate(found) if one is not None}
    names = sorted({name for one in there.values() for name in one})
    bad = False
    for name in names:
        values = {rank: one.get(name, "unset") for rank, one in there.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        strange = {rank: value for rank, value in values.items() if value != usual}
        for value in dict.fromkeys(strange.values()):
            bad = True
            ranks = [rank for rank, one in strange.items() if one == value]
            yield JOB.weak(
                "agreement",
                f"rank {spans(ranks)} has {name} {value}, the others {usual}",
                "results that differ, collectives that do not match, or one slow rank",
                "start every rank from one image and one environment",
            )
    if not bad:
        yield JOB.ok("agreement", "all ranks have the same versions and settings")


CHECKS = (Check(JOB, "ranks", launch),)
