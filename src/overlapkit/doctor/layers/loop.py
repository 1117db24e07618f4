"""The loop's surroundings: cores for workers, shared and pinned memory, the CPUs that a rank may run on."""

from collections.abc import Callable, Iterator

from overlapkit.counted import counted
from overlapkit.doctor import limits, pci
from overlapkit.doctor.check import Check
from overlapkit.doctor.layers import ports
from overlapkit.doctor.layers.host import LOOP, governor, huge_pages, swap
from overlapkit.doctor.layers.job import gpu_of
from overlapkit.doctor.line import Line, gib, spans
from overlapkit.doctor.machine import Machine, numbers
from overlapkit.doctor.mounts import mount_of
from overlapkit.doctor.subject import Subject

_SHM = 1 << 30  # bytes: 256 photographs of 3 x 224 x 224 float32 are 147 MiB, and a few batches are in flight
_FILES = (
    64  # a worker: two batches in flight of up to 16 tensors, a descriptor each, its pipes; and as much again
)
_USUAL = 16  # workers of a rank, where the user did not say
_BESIDE = 3  # threads of a rank on a GPU beside the loop's: autograd, pinning, NCCL's proxy
_BIND = "bind ranks to the NUMA node of their GPU: torchrun --numa-binding=node"


def workers(count: int | None) -> Callable[[Subject], Iterator[Line]]:
    """The check of cores for so many workers a rank; None where the user did not say."""

    def cores(subject: Subject) -> Iterator[Line]:
        each = limits.cores(subject.machine, subject.place.local_world)
        saw = f"{each:g} cores a rank ({subject.place.local_world} on this machine)"
        if count is not None and count + 1 > each:
            yield LOOP.weak(
                "cores",
                f"{saw}, and {counted(count, 'worker')} beside the loop",
                "workers take the loop's core: it launches late, and batches come no faster",
                f"num_workers={max(0, int(each) - 1)}, or give each rank more cores",
            )
        elif subject.on_gpus and each < _BESIDE:
            yield LOOP.weak(
                "cores",
                saw,
                "the loop, autograd, pinning and NCCL's threads wait for each other",
                "give each rank at least 4 cores: a larger CPU request, or fewer ranks on this machine",
            )
        else:
            yield LOOP.ok("cores", f"{saw}: room for {counted(max(0, int(each) - 1), 'worker')} a rank")

    return cores


def quota(subject: Subject) -> Iterator[Line]:
    """What the control group grants of the CPUs."""
    granted, allowed = limits.cpu_quota(subject.machine), len(limits.allowed_cpus(subject.machine))
    if granted is None or granted >= allowed:
        yield LOOP.ok("cpu quota", f"{allowed} CPUs, no quota below that")
        return
    threads = subject.machine.environ.get("OMP_NUM_THREADS", "")
    saw = f"the control group grants {granted:g} of {allowed} CPUs"
    if threads.isdigit() and int(threads) * subject.place.local_world <= granted:
        yield LOOP.ok("cpu quota", f"{saw}, and OMP_NUM_THREADS={threads}")
    else:
        yield LOOP.weak(
            "cpu quota",
            saw,
            f"libraries start {allowed} threads, which the kernel stops for the rest of each 100 ms",
            f"OMP_NUM_THREADS={max(1, int(granted / subject.place.local_world))}, or ask for more CPU",
        )


def memory(subject: Subject) -> Iterator[Line]:
    """How much is left of what this process may use."""
    granted = limits.memory_limit(subject.machine)
    whole, free = (subject.machine.memory(name) for name in ("MemTotal", "MemAvailable"))
    if granted is not None and granted[0] < whole:
        saw = f"{gib(granted[0])} granted by the control group, {gib(granted[1])} of it in use"
        tight = granted[1] > 0.9 * granted[0]
    else:
        saw, tight = f"{gib(free)} of {gib(whole)} available", free < 0.1 * whole
    if tight:
        yield LOOP.weak(
            "memory",
            saw,
            "the kernel throws out cached data, then ends a process of the job",
            "ask for more, fewer workers, or end what else runs here",
        )
    else:
        yield LOOP.ok("memory", saw)


def shared_memory(subject: Subject) -> Iterator[Line]:
    """The size of /dev/shm, through which workers hand over batches."""
    mount = mount_of(subject.machine, "/dev/shm")
    if not mount.is_memory:
        size = None
    else:
        said = [word[5:] for word in mount.options if word.startswith("size=")]
        size = _bytes(said[-1]) if said else subject.machine.memory("MemTotal") // 2  # the kernel's default
    if size is None:
        yield LOOP.unknown("/dev/shm", f"it lies on {mount}")
    elif size < _SHM:
        yield LOOP.weak(
            "/dev/shm",
            gib(size),
            "workers end with a bus error once batches in flight and NCCL's buffers fill it",
            "docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm",
        )
    else:
        yield LOOP.ok("/dev/shm", gib(size))


def locked(subject: Subject) -> Iterator[Line]:
    """How much memory this process may lock: RDMA needs that; CUDA's pinned memory does not count."""
    soft, _ = limits.limit(subject.machine, "Max locked memory")
    saw = "no limit" if soft == float("inf") else gib(soft)
    if soft < subject.machine.memory("MemTotal") and limits.may_lock_all(subject.machine):
        yield LOOP.ok("locked memory", f"{saw}, which CAP_IPC_LOCK lifts")
    elif soft < subject.machine.memory("MemTotal") and any(
        port.active for nic in ports.adapters(subject.machine) for port in nic.ports
    ):
        yield LOOP.weak(
            "locked memory",
            saw,
            "registering buffers with the adapter fails: NCCL ends with an error, or goes over TCP",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd",
        )
    else:
        yield LOOP.ok("locked memory", f"{saw}{'' if soft == float('inf') else ': enough without RDMA'}")


def files(count: int | None) -> Callable[[Subject], Iterator[Line]]:
    """The check of how many descriptors a process may have: workers pass tensors as such."""

    def open_files(subject: Subject) -> Iterator[Line]:
        soft, hard = limits.limit(subject.machine, "Max open files")
        if soft < _FILES * (_USUAL if count is None else count):
            yield LOOP.weak(
                "open files",
                f"{soft:g} (at most {hard:g})",
                "with many workers: 'Too many open files', or batches that are handed over through files",
                f"ulimit -n {min(hard, 65536):g}",
            )
        else:
            yield LOOP.ok("open files", f"{soft:g}")

    return open_files


def affinity(subject: Subject) -> Iterator[Line]:
    """Whether a rank stays near its memory and its GPU."""
    machine, place = subject.machine, subject.place
    allowed, where = limits.allowed_cpus(machine), _cpus_by_node(machine)
    on = [node for node, cpus in where.items() if cpus & allowed]
    if len(where) < 2:
        yield LOOP.ok("affinity", f"CPU {spans(allowed)}: one NUMA node")
        return
    saw = f"CPU {spans(allowed)}, on NUMA node {spans(on)}"
    home = _node_of_gpu(subject)
    if home is not None and home not in on:
        yield LOOP.weak(
            "affinity",
            f"{saw}; its GPU is on node {home}",
            "copies, launches and pinned buffers cross the sockets",
            _BIND,
        )
    elif len(on) > 1 and subject.on_gpus and place.world == 1:
        yield LOOP.unknown(
            "affinity", f"{saw}: this process is bound to none; look again as the job is started", _BIND
        )
    elif len(on) > 1 and (subject.on_gpus or place.local_world > 1):
        yield LOOP.weak(
            "affinity",
            f"{saw}: it moves between them",
            "memory is on another node than the thread that reads it, now and then: steps vary",
            _BIND if subject.on_gpus else "bind each rank to a NUMA node: numactl --cpunodebind --membind",
        )
    else:
        yield LOOP.ok("affinity", saw if home is None else f"{saw}, as its GPU")


def threads(subject: Subject) -> Iterator[Line]:
    """OMP_NUM_THREADS beside the cores."""
    text = subject.machine.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    ranks, started = subject.place.local_world, len(limits.allowed_cpus(subject.machine))
    each = limits.cores(subject.machine, ranks)
    fit = max(1, int(each))
    if text and not (text.isdigit() and int(text) > 0):
        yield LOOP.weak(
            "threads", f"OMP_NUM_THREADS={text!r}", "it has no effect", "give it a number, or unset it"
        )
    elif not text and started > each and ranks > 1:
        yield LOOP.weak(
            "threads",
            f"OMP_NUM_THREADS is not set: {started} threads a rank, and {each:g} cores for them",
            "operations on the CPU take turns on the cores",
            f"OMP_NUM_THREADS={fit}",
        )
    elif text and int(text) > max(1.0, each):
        yield LOOP.weak(
            "threads",
            f"OMP_NUM_THREADS={text}, and {each:g} cores a rank",
            "operations on the CPU take turns on the cores",
            f"OMP_NUM_THREADS={fit}",
        )
    elif text == "1" and each >= 2 and not subject.on_gpus:
        yield LOOP.weak(
            "threads",
            f"OMP_NUM_THREADS=1 (torchrun's default), and {each:g} cores a rank",
            "compute on the CPU uses one core of them",
            f"OMP_NUM_THREADS={fit}",
        )
    else:
        yield LOOP.ok(
            "threads", f"OMP_NUM_THREADS={text}" if text else f"not set: {counted(started, 'thread')}"
        )


def _cpus_by_node(machine: Machine) -> dict[int, set[int]]:
    top = "/sys/devices/system/node"
    found = {node: numbers(machine.maybe(f"{top}/node{node}/cpulist") or "") for node in pci.nodes(machine)}
    return {node: cpus for node, cpus in found.items() if cpus}  # a node may hold memory only


def _node_of_gpu(subject: Subject) -> int | None:
    """Of the GPU that this rank takes by its local rank."""
    address = gpu_of(subject)
    return pci.numa_node(subject.machine, address) if address else None


def _bytes(text: str) -> int | None:
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower(), 1)
    digits = text if text.isdigit() else text[:-1]
    return int(digits) * unit if digits.isdigit() else None


def checks(count: int | None) -> tuple[Check, ...]:
    """All checks of this layer, for so many workers a rank."""
    return (
        Check(LOOP, "cores", workers(count), shared=False, needs="/proc"),
        Check(LOOP, "cpu quota", quota, shared=False, needs="/proc"),
        Check(LOOP, "memory", memory, needs="/proc"),
        Check(LOOP, "/dev/shm", shared_memory, needs="/proc"),
        Check(LOOP, "locked memory", locked, shared=False, needs="/proc"),
        Check(LOOP, "open files", files(count), shared=False, needs="/proc"),
        Check(LOOP, "affinity", affinity, shared=False, needs="/proc"),
        Check(LOOP, "threads", threads, shared=False, needs="/proc"),
        Check(LOOP, "huge pages", huge_pages, needs="/sys"),
        Check(LOOP, "governor", governor, needs="/sys"),
        Check(LOOP, "swap", swap, needs="/proc"),
    )
