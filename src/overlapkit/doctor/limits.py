"""What this process may use: control groups of both versions, its own limits, and the CPUs it may run on."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from overlapkit.doctor.machine import Machine, Unreadable, numbers

_TOP = "/sys/fs/cgroup"
_CAP_IPC_LOCK = 14  # linux/capability.h


def cpu_quota(machine: Machine) -> float | None:
    """Cores' worth of time that the control groups grant; None where they set no limit."""
    quotas = []
    for folder in _folders(machine, "cpu"):
        if text := machine.maybe(f"{folder}/cpu.max"):  # version 2: "400000 100000", or "max 100000"
            quotas.append(_ratio(*text.split()[:2]))
        quota, period = (machine.maybe(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota and period:  # version 1; -1 is no limit
            quotas.append(_ratio(quota, period))
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(machine: Machine) -> tuple[int, int] | None:
    """Bytes that the control groups grant, and those in use but for cached files; None without a limit."""
    found = []
    for folder in _folders(machine, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most = machine.count(f"{folder}/{limit}")  # "max" is no number
            if most is not None and most < 1 << 60:  # version 1 writes "no limit" as a huge number
                taken = (machine.count(f"{folder}/{used}") or 0) - _cached(machine, folder)
                found.append((most, max(0, taken)))
    return min(found, default=None)


def _cached(machine: Machine, folder: str) -> int:
    """Bytes of files that a control group has read or written: given back when memory is asked for."""
    found = dict(
        line.split()[:2]
        for line in (machine.maybe(f"{folder}/memory.stat") or "").splitlines()
        if " " in line
    )
    whole = "total_" if "total_inactive_file" in found else ""  # version 1: with the groups below
    sizes = (found.get(f"{whole}{kind}_file", "") for kind in ("active", "inactive"))
    return sum(int(size) for size in sizes if size.isdigit())


def may_lock_all(machine: Machine) -> bool:
    """Whether this process has CAP_IPC_LOCK: then no limit holds for memory that a driver locks for it."""
    try:
        return bool(int(machine.table("/proc/self/status").get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1)
    except (Unreadable, ValueError):
        return False


def allowed_cpus(machine: Machine) -> set[int]:
    """The CPUs that this process may run on.

    Raises:
        Unreadable: The kernel does not say.
    """
    text = machine.table("/proc/self/status").get("Cpus_allowed_list")
    if not text:
        raise Unreadable("/proc/self/status does not say Cpus_allowed_list")
    return numbers(text)


def cores(machine: Machine, ranks: int = 1) -> float:
    """Cores that each rank of this machine may use at once.

    They share the CPUs of their control group, also where each is bound to some of them; and its quota.

    Args:
        machine: Whose.
        ranks: How many share it.

    Raises:
        Unreadable: The kernel does not say.
    """
    allowed, quota = allowed_cpus(machine), cpu_quota(machine)
    each = min(len(allowed), len(_pool(machine) | allowed) / ranks)
    return each if quota is None else min(each, quota / ranks)


def limit(machine: Machine, name: str) -> tuple[float, float]:
    """A limit of this process, soft and hard; infinity for none.

    Args:
        machine: Whose.
        name: As /proc/self/limits has it: "Max locked memory".

    Raises:
        Unreadable: The kernel does not say.
    """
    for line in machine.text("/proc/self/limits").splitlines():
        words = line.removeprefix(name).split()
        if line.startswith(name) and len(words) >= 2:
            try:
                soft, hard = (float("inf") if word == "unlimited" else float(word) for word in words[:2])
            except ValueError:
                break
            return soft, hard
    raise Unreadable(f"/proc/self/limits does not say {name!r}")


def _folders(machine: Machine, controller: str) -> Iterator[str]:
    """The control group's folder and all above it. In a container its path may not be visible."""
    for line in (machine.maybe("/proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            tops = [_TOP, f"{_TOP}/unified"]
        elif controller in names.split(","):
            tops = [f"{_TOP}/{names}", f"{_TOP}/{controller}"]
        else:
            continue
        group = PurePosixPath("/") / path.lstrip("/")
        for top in dict.fromkeys(tops):
            for one in (group, *group.parents):
                yield f"{top}{one}".rstrip("/")


def _pool(machine: Machine) -> set[int]:
    """The CPUs of the control group, whatever part of them this process was bound to."""
    files = "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"  # version 2; version 1
    for folder in _folders(machine, "cpuset"):
        for name in files:
            if text := machine.maybe(f"{folder}/{name}"):
                return numbers(text)
    return numbers(machine.maybe("/sys/devices/system/cpu/online") or "")


def _ratio(quota: str, period: str = "100000") -> float | None:
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None
