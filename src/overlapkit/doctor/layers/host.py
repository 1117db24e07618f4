"""How the host is set up for every process on it: huge pages, the clock of the CPUs, swap."""

import re
from collections.abc import Iterator

from overlapkit.doctor.line import Layer, Line, gib
from overlapkit.doctor.subject import Subject

LOOP = Layer("loop")


def huge_pages(subject: Subject) -> Iterator[Line]:
    """Transparent huge pages."""
    text = subject.machine.text("/sys/kernel/mm/transparent_hugepage/enabled")
    marked = re.search(r"\[(\w+)\]", text)
    chosen = marked[1] if marked else ""
    if chosen == "never":
        yield LOOP.weak(
            "huge pages",
            "transparent huge pages: never",
            "large buffers (batches, staged checkpoints) are made of 4 KiB pages: slower to touch and to pin",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif chosen:
        yield LOOP.ok("huge pages", f"transparent huge pages: {chosen}")
    else:
        yield LOOP.unknown("huge pages", f"the kernel says {text[:40]!r}")


def governor(subject: Subject) -> Iterator[Line]:
    """What sets the clock of the CPUs."""
    top, found = "/sys/devices/system/cpu", set()
    for name in subject.machine.names(top):
        if name.startswith("cpu") and name[3:].isdigit():
            folder = f"{top}/{name}/cpufreq"
            parts = ("scaling_governor", "scaling_driver", "energy_performance_preference")
            found.add(tuple(subject.machine.maybe(f"{folder}/{part}") or "" for part in parts))
    found.discard(("", "", ""))
    # "powersave" of these two drivers is their name for "as the load asks"; of others it is the lowest clock
    scaled = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}
    slow = [
        one
        for one in found
        if (one[0] == "powersave" and one[1] not in scaled) or (one[1] in scaled and one[2] == "power")
    ]
    if not found:
        yield LOOP.absent("governor", "the kernel does not set the CPUs' clock (a virtual machine, or fixed)")
    elif slow:
        yield LOOP.weak(
            "governor",
            " ".join(filter(None, slow[0])),
            "CPUs stay at low clocks: launches, workers and the optimizer's host part take longer",
            "as root: cpupower frequency-set -g performance",
        )
    else:
        yield LOOP.ok("governor", ", ".join(sorted({one[0] for one in found})))


def swap(subject: Subject) -> Iterator[Line]:
    """Whether memory is on disk that is asked for: while there is room, such memory comes back and stays."""
    names = "SwapTotal", "SwapFree", "MemTotal", "MemAvailable"
    whole, free, memory, room = (subject.machine.memory(name) for name in names)
    if whole - free > 0.02 * memory and room < 0.25 * memory:
        yield LOOP.weak(
            "swap",
            f"{gib(whole - free)} of memory is on disk",
            "a page that is needed again stops its thread for milliseconds",
            "end what takes the memory; as root: swapoff -a, or sysctl vm.swappiness=1",
        )
    else:
        yield LOOP.ok("swap", f"{gib(whole - free)} of {gib(whole)} in use" if whole else "none")
