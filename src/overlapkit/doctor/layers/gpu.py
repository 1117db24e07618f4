"""GPUs and their memory: are they there, visible to torch, whole, free and at full clocks."""

from collections.abc import Iterator, Sequence

from overlapkit.doctor import pci
from overlapkit.doctor.check import Check
from overlapkit.doctor.gpus import Gpu
from overlapkit.doctor.line import Layer, Line, gib, spans
from overlapkit.doctor.machine import Unreadable
from overlapkit.doctor.subject import Subject

GPU = Layer("gpu")
_USED = 0.05, 1 << 30  # of a GPU's memory, and bytes: more than what the driver and one context take


def devices(subject: Subject) -> Iterator[Line]:
    """What is built in, and whether torch sees it."""
    seen = len(subject.torch.devices)
    try:
        found = known(subject)
    except Unreadable:
        found = []
    there = [gpu.name for gpu in found] or _by_vendor(subject)
    if not there and not seen:
        apple = "; torch's Apple GPU is not used by overlapkit" if subject.torch.mps else ""
        yield GPU.absent("devices", f"no NVIDIA or AMD GPU: everything runs on the CPU{apple}")
        return
    counted = ", ".join(f"{there.count(name)} x {name}" for name in dict.fromkeys(there))
    hidden = _hidden_by(subject)
    saw = f"{counted or 'GPUs'}; torch sees {seen}{f' ({hidden})' if hidden else ''}"
    if seen == 0:
        yield GPU.weak("devices", saw, "everything runs on the CPU", _why_unseen(subject, hidden))
    elif seen < len(there) and not hidden:
        yield GPU.weak(
            "devices",
            saw,
            f"{len(there) - seen} GPU(s) do no work",
            "look for what the container or driver leaves out: nvidia-smi -L, docker run --gpus all",
        )
    elif len({gpu.name for _, gpu in used(subject)} if found else set(there)) > 1:
        yield GPU.weak(
            "devices", saw, "each step takes as long as on the slowest", "give a job GPUs of one model"
        )
    else:
        yield GPU.ok("devices", saw)


def memory(subject: Subject) -> Iterator[Line]:
    """How much there is, and what is taken before the job begins."""
    found = [(at, gpu) for at, gpu in used(subject) if gpu.memory]
    if not found:
        yield GPU.unknown("memory", "the driver does not say")
        return
    for at, gpu in found:
        if (gpu.used or 0) > max(_USED[0] * (gpu.memory or 0), _USED[1]):
            whose = f" by {gpu.others} process(es)" if gpu.others else ""
            yield GPU.weak(
                "memory",
                f"GPU {at}: {gib(gpu.used or 0)} of {gib(gpu.memory or 0)} in use{whose}",
                "that much less for the job, and its compute where the other process is not idle",
                "end what runs there (nvidia-smi names it), or leave this GPU out: CUDA_VISIBLE_DEVICES",
            )
    sizes = sorted({gib(gpu.memory or 0) for _, gpu in found})
    yield GPU.ok("memory", f"{', '.join(sizes)} a GPU")


def faults(subject: Subject) -> Iterator[Line]:
    """Errors of memory that no correction mended."""
    found = known(subject)
    if all(gpu.uncorrected is None for gpu in found):
        yield GPU.absent("faults", "these GPUs do not count memory errors, or ECC is off")
        return
    bad = [at for at, gpu in enumerate(found) if gpu.uncorrected]
    if bad:
        yield GPU.weak(
            "faults",
            f"GPU {spans(bad)}: {sum(found[at].uncorrected or 0 for at in bad)} uncorrectable memory errors",
            "steps that crash, or wrong numbers",
            "drain the machine and reset the GPU (nvidia-smi --gpu-reset); replace it where they come again",
        )
    for name, remedy in (
        ("remap_pending", "reset the GPU, so that its spare rows are taken: nvidia-smi --gpu-reset"),
        ("remap_failed", "have the GPU replaced: it has no spare rows left"),
    ):
        if bad_rows := [at for at, gpu in enumerate(found) if getattr(gpu, name)]:
            saw = f"GPU {spans(bad_rows)}: rows of memory are faulty ({name.replace('_', ' ')})"
            yield GPU.weak("faults", saw, "a crash at the next error there", remedy)
            bad += bad_rows
    if not bad:
        yield GPU.ok("faults", "no uncorrectable memory error since the driver was loaded")


def clocks(subject: Subject) -> Iterator[Line]:
    """Whether something holds the clocks down."""
    found = dict(used(subject))
    if all(gpu.slow is None for gpu in found.values()):
        yield GPU.unknown("clocks", "the driver does not say what holds clocks down")
        return
    for reason in sorted({reason for gpu in found.values() for reason in gpu.slow or ()}):
        bad = [at for at, gpu in found.items() if reason in (gpu.slow or ())]
        yield GPU.weak(
            "clocks",
            f"GPU {spans(bad)}: clocks are lowered ({reason})",
            "this rank's kernels take longer, and every other rank waits for it",
            "look at cooling, power supply and power limit: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    if not any(gpu.slow for gpu in found.values()):
        yield GPU.ok("clocks", "nothing lowers them")


def settings(subject: Subject) -> Iterator[Line]:
    """The driver, whether it stays loaded, and whether GPUs are cut up."""
    found, driver = known(subject), getattr(subject.gpus, "driver", "")
    saw = f"driver {driver}" if driver else "driver"
    if off := [at for at, gpu in enumerate(found) if gpu.persistent is False]:
        yield GPU.weak(
            "settings",
            f"{saw}: GPU {spans(off)} without persistence mode",
            "some seconds at each start, and clocks and ECC counts are lost between jobs",
            "as root: nvidia-smi -pm 1, or run nvidia-persistenced",
        )
    if (cut := [at for at, gpu in enumerate(found) if gpu.mig]) and subject.place.world > 1:
        yield GPU.weak(
            "settings",
            f"GPU {spans(cut)}: cut into instances (MIG)",
            "NCCL cannot pass data between instances directly",
            "give a distributed job whole GPUs: as root, nvidia-smi -mig 0",
        )
        off += cut
    if not off:
        yield GPU.ok("settings", saw)


def used(subject: Subject) -> list[tuple[int, Gpu]]:
    """The GPUs that the job may use, by the driver's numbers: others are somebody else's, or for the screen.

    Where each rank sees its own alone, those of the other ranks cannot be told, and all count.

    Raises:
        Unreadable: As `known`.
    """
    found, seen = list(enumerate(known(subject))), subject.torch.addresses
    mine = [(at, gpu) for at, gpu in found if gpu.address in seen]
    return mine if mine and len(seen) >= subject.place.local_world else found


def known(subject: Subject) -> Sequence[Gpu]:
    """The GPUs as the driver describes them; AMD's as sysfs does.

    Raises:
        Unreadable: Neither says anything; the message says what would.
    """
    if not isinstance(subject.gpus, str) and (found := subject.gpus.read()):
        return found
    if amd := [_amd(subject, address) for address in pci.gpus(subject.machine, (pci.AMD,))]:
        return amd
    if isinstance(subject.gpus, str) and _by_vendor(subject):
        raise Unreadable(subject.gpus)
    raise Unreadable("no GPU")


def _amd(subject: Subject, address: str) -> Gpu:
    folder, machine = f"/sys/bus/pci/devices/{address}", subject.machine
    ras = machine.maybe(f"{folder}/ras/umc_err_count") or ""  # "ue: 0" and "ce: 0" on lines of their own
    counts = [line.split()[-1] for line in ras.splitlines() if line.startswith("ue:")]
    busy = machine.count(f"{folder}/gpu_busy_percent")
    return Gpu(
        address=address,
        name=machine.maybe(f"{folder}/product_name") or "AMD GPU",
        memory=machine.count(f"{folder}/mem_info_vram_total"),
        used=machine.count(f"{folder}/mem_info_vram_used"),
        uncorrected=int(counts[0]) if counts and counts[0].isdigit() else None,
        idle=None if busy is None else busy == 0,
    )


def _by_vendor(subject: Subject) -> list[str]:
    """GPUs that only the PCI bus knows of, by the driver's names where it left them in /proc."""
    found = []
    for address, vendor in pci.gpus(subject.machine).items():
        information = f"/proc/driver/nvidia/gpus/{address}/information"
        try:
            model = subject.machine.table(information).get("Model", "")
        except Unreadable:
            model = ""
        found.append(model or ("NVIDIA GPU" if vendor == pci.NVIDIA else "AMD GPU"))
    return found


def _hidden_by(subject: Subject) -> str:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in subject.machine.environ:
            return f"{name}={subject.machine.environ[name]}"
    return ""


def _why_unseen(subject: Subject, hidden: str) -> str:
    if subject.torch.trouble:
        return f"torch says: {subject.torch.trouble}"
    if hidden:
        return f"{hidden} hides them: unset it"
    if subject.torch.cuda is None and subject.torch.hip is None:
        return f"torch {subject.torch.version} is built for CPUs: install a CUDA or ROCm build (pytorch.org)"
    return "the driver does not answer: nvidia-smi must work for this user and in this container"


def _only_with_gpus(look: Check) -> Check:
    """No GPU at all is said once, by `devices`."""

    def guarded(subject: Subject) -> Iterator[Line]:
        if not subject.on_gpus and isinstance(subject.gpus, str) and not _by_vendor(subject):
            return
        yield from look.look(subject)

    return look._replace(look=guarded)


CHECKS = (
    Check(GPU, "devices", devices),
    *(
        _only_with_gpus(Check(GPU, name, look))
        for name, look in (
            ("memory", memory),
            ("faults", faults),
            ("clocks", clocks),
            ("settings", settings),
        )
    ),
)
