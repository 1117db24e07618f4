"""NCCL: its version, the transport that it will choose, and the variables that change what it does."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from overlapkit.doctor.check import Check
from overlapkit.doctor.layers import nccl_names, ports
from overlapkit.doctor.layers.configured import adapters, settings
from overlapkit.doctor.line import Layer, Line, joined
from overlapkit.doctor.subject import Subject

NCCL = Layer("nccl")


class Rule(NamedTuple):
    """A variable that does harm.

    Attributes:
        name: Its name.
        harmful: Whether this value is.
        cost: What it costs.
        remedy: What to do.
    """

    name: str
    harmful: Callable[[str], bool]
    cost: str
    remedy: str = "unset it; it is meant for finding faults"


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y")


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off", "n")


def _any(value: str) -> bool:
    return bool(value.strip())


RULES = (
    Rule("NCCL_P2P_DISABLE", _on, "GPUs of one machine talk through its memory, not over NVLink or PCIe"),
    Rule("NCCL_SHM_DISABLE", _on, "ranks of one machine without direct access talk over the network"),
    Rule("NCCL_IB_DISABLE", _on, "machines talk over TCP: a fraction of the rate of InfiniBand or RoCE"),
    Rule("NCCL_NVLS_ENABLE", _off, "no reductions inside NVSwitch"),
    Rule("NCCL_CUMEM_ENABLE", _off, "no registered buffers, and no reductions inside NVSwitch"),
    Rule("NCCL_DMABUF_ENABLE", _off, "no GPUDirect through dmabuf"),
    Rule("NCCL_NET_GDR_LEVEL", lambda v: v.strip().upper() in ("LOC", "0"), "no GPUDirect at all"),
    Rule("NCCL_P2P_LEVEL", lambda v: v.strip().upper() in ("LOC", "0"), "no direct access between GPUs"),
    Rule(
        "NCCL_NET",
        lambda v: v.strip().lower() == "socket",
        "machines talk over TCP: a fraction of the rate of InfiniBand or RoCE",
    ),
    Rule(
        "NCCL_ALGO",
        _any,
        "NCCL no longer chooses the algorithm by message size and topology",
        "unset it, unless a measurement on this very cluster says otherwise",
    ),
    Rule(
        "NCCL_PROTO",
        _any,
        "NCCL no longer chooses the protocol by message size; LL128 where it is not safe corrupts data",
        "unset it, unless a measurement on this very cluster says otherwise",
    ),
    Rule(
        "NCCL_MAX_NCHANNELS",
        lambda v: v.strip().isdigit() and int(v) < 8,
        "too few channels to fill NVLink or several adapters",
        "unset it",
    ),
    Rule(
        "NCCL_DEBUG", lambda v: v.strip().upper() in ("INFO", "TRACE"), "a log line for much that NCCL does"
    ),
    Rule("NCCL_CHECK_POINTERS", _on, "each call checks its pointers"),
    Rule("NCCL_LAUNCH_MODE", lambda v: v.strip().upper() == "GROUP", "launches wait for each other"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on, "the host waits for each collective: nothing overlaps"),
    Rule("NCCL_BLOCKING_WAIT", _on, "the host waits for each collective: nothing overlaps"),
    Rule("TORCH_NCCL_NAN_CHECK", _on, "each collective first looks for NaN in its input"),
    Rule("TORCH_NCCL_DESYNC_DEBUG", _on, "ranks report each collective to the store"),
    Rule("TORCH_NCCL_ENABLE_TIMING", _on, "two events with timing for each collective"),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda v: v.strip().upper() == "DETAIL",
        "each collective is preceded by one that compares shapes: several times slower",
    ),
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda v: v.strip() == "1",
        "kernels start in the order of their launches: gathers and reductions wait for compute (FSDP)",
        "unset it, unless tensor or context parallelism relies on that order",
    ),
)


def version(subject: Subject) -> Iterator[Line]:
    """Which library does the collectives."""
    nccl = subject.torch.nccl
    if nccl is None:
        if subject.on_gpus:
            yield NCCL.weak(
                "version",
                f"torch {subject.torch.version} has no NCCL",
                "collectives of GPU tensors go through the CPU (gloo), or fail",
                "install an official CUDA or ROCm build of torch",
            )
        else:
            yield NCCL.absent("version", "this torch has no NCCL: ranks on CPUs talk through gloo")
        return
    name = "RCCL" if subject.torch.hip else "NCCL"
    yield NCCL.ok("version", f"{name} {'.'.join(map(str, nccl))}")


def transport(subject: Subject) -> Iterator[Line]:
    """What NCCL will choose inside a machine and between machines."""
    if subject.torch.nccl is None or not subject.on_gpus:
        yield NCCL.absent("transport", "gloo: TCP between ranks, on one machine as well")
        return
    env = settings(subject)
    inside = _inside(subject, env)
    if subject.place.nodes < 2:
        yield NCCL.ok("transport", f"on this machine {inside}")
        return
    nics = [nic for nic in adapters(subject) if any(port.active for port in nic.ports)]
    plugin = _plugin(subject)
    if plugin and not nics:  # it may know a fabric that is no RDMA adapter, as clouds have
        saw = f"on this machine {inside}; between machines plugin {plugin}, and no RDMA adapter is up"
        yield NCCL.unknown("transport", saw, "NCCL_DEBUG=INFO says what it uses: look for NET/")
    elif why := _why_tcp(subject, env, nics, plugin):
        yield NCCL.weak(
            "transport",
            f"on this machine {inside}; between machines TCP sockets: {why}",
            "collectives between machines run at a fraction of RDMA's rate, and take CPU time",
            "InfiniBand, RoCE or EFA: adapters up, --device=/dev/infiniband, no variable that forbids it",
        )
    else:
        kinds = sorted({port.kind for nic in nics for port in nic.ports if port.active})
        how = f"plugin {plugin}" if plugin else f"RDMA over {' and '.join(kinds)}"
        yield NCCL.ok("transport", f"on this machine {inside}; between machines {how} ({len(nics)} adapters)")


def _why_tcp(subject: Subject, env: Mapping[str, str], nics: Sequence[ports.Adapter], plugin: str) -> str:
    """Why NCCL falls back on sockets; empty where it does not."""
    if _on(env.get("NCCL_IB_DISABLE", "")):
        return "NCCL_IB_DISABLE is set"
    if env.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET=Socket is set"
    if not nics:
        return "no RDMA adapter is up"
    if plugin:
        return ""
    if efa := [nic.name for nic in nics if nic.driver == "efa"]:
        return f"{joined(efa)} needs the plugin aws-ofi-nccl, which is not there"
    if not subject.machine.has("/dev/infiniband"):
        return "/dev/infiniband is not there: the container does not see the adapters"
    return ""


def variables(subject: Subject) -> Iterator[Line]:
    """Values that do harm, or contradict each other or the machine."""
    env, bad = settings(subject), False
    for rule in RULES:
        if rule.name in env and rule.harmful(env[rule.name]):
            bad = True
            yield NCCL.weak("variables", f"{rule.name}={env[rule.name]}", rule.cost, rule.remedy)
    for saw, cost, remedy in (*_contradictions(env), *_strangers(subject, env)):
        bad = True
        yield NCCL.weak("variables", saw, cost, remedy)
    if not bad:
        ours = sorted(name for name in env if nccl_names.is_one(name))
        yield NCCL.ok("variables", f"set: {joined(ours)}" if ours else "none is set: NCCL chooses")


def names(subject: Subject) -> Iterator[Line]:
    """Names that nothing reads."""
    env, bad = settings(subject), False
    for name in sorted(filter(nccl_names.is_one, env)):
        former, close = nccl_names.FORMER.get(name), nccl_names.meant(name)
        if former or close:
            bad = True
            yield NCCL.weak(
                "names",
                f"{name} is {'an old name' if former else 'read by nothing'}",
                "the setting that you rely on may have no effect",
                f"the name is {former or close}",
            )
        elif name not in nccl_names.KNOWN:
            bad = True
            yield NCCL.unknown(
                "names", f"{name} is not among the documented names", "look it up, or unset it"
            )
    if not bad:
        yield NCCL.ok("names", "every name is one that NCCL or torch reads")


def _contradictions(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    pairs = (
        ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"),
        ("NCCL_IB_DISABLE", "NCCL_IB_HCA"),
        ("NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX"),
        ("NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL"),
    )
    for switch, setting in pairs:
        if _on(env.get(switch, "")) and env.get(setting):
            saw = f"{switch}={env[switch]} and {setting}={env[setting]}"
            yield saw, "the second has no effect", f"unset {switch}, or both"
    if _off(env.get("NCCL_CUMEM_ENABLE", "")) and _on(env.get("NCCL_NVLS_ENABLE", "")):
        yield "NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_ENABLE=1", "NVLS needs cuMem: it stays off", "unset both"
    low, high = (env.get(f"NCCL_{name}_NCHANNELS", "") for name in ("MIN", "MAX"))
    if low.isdigit() and high.isdigit() and int(low) > int(high):
        saw = f"NCCL_MIN_NCHANNELS={low} is more than NCCL_MAX_NCHANNELS={high}"
        yield saw, "one of them has no effect", "unset both"


def _strangers(subject: Subject, env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variables that name an adapter or interface that is not here."""
    interfaces = [*ports.interfaces(subject.machine), "lo"]
    nics = [nic.name for nic in ports.adapters(subject.machine)]
    for name, there in (
        ("NCCL_SOCKET_IFNAME", interfaces),
        ("GLOO_SOCKET_IFNAME", interfaces),
        ("NCCL_IB_HCA", nics),
    ):
        value = env.get(name, "").strip()
        if not value or value.startswith("^") or not subject.machine.has("/sys"):
            continue
        exact = value.startswith("=") or name.startswith("GLOO")
        wanted = [part.partition(":")[0] for part in value.lstrip("=").split(",")]
        if not any(one == part if exact else one.startswith(part) for one in there for part in wanted):
            yield (
                f"{name}={value}, and here are {joined(there) or 'none'}",
                "NCCL or gloo finds nothing to talk over: an error at the start, or TCP instead of RDMA",
                "name what is there, or unset it",
            )


def _inside(subject: Subject, env: Mapping[str, str]) -> str:
    driver = subject.gpus
    gpus = [] if isinstance(driver, str) else driver.read()
    if len(subject.torch.devices) < 2:
        return "one GPU: nothing to send"
    shared = (
        "not at all: NCCL_SHM_DISABLE" if _on(env.get("NCCL_SHM_DISABLE", "")) else "through shared memory"
    )
    if _on(env.get("NCCL_P2P_DISABLE", "")):
        return f"{shared} (NCCL_P2P_DISABLE)"
    if gpus and all(any(gpu.links or ()) for gpu in gpus):
        return "NVLink"
    if isinstance(driver, str):
        return "NVLink, PCIe or shared memory: the driver does not say"
    refused = any(driver.peers(a, b) for a in range(len(gpus)) for b in range(a))
    return shared if refused else "PCIe between GPUs"


def _plugin(subject: Subject) -> str:
    """A network plugin of NCCL's, where the loader would find one."""
    env = settings(subject)
    given = env.get("NCCL_NET_PLUGIN", "")
    if given:
        return "" if given.lower() == "none" else given
    folders = [*env.get("LD_LIBRARY_PATH", "").split(os.pathsep), "/opt/amazon/ofi-nccl/lib"]
    folders += ["/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib", "/usr/local/lib", "/usr/lib"]
    for folder in filter(None, folders):
        for name in subject.machine.names(folder):
            if name.startswith("libnccl-net"):
                return name
    return ""


CHECKS = (
    Check(NCCL, "version", version),
    Check(NCCL, "transport", transport),
    Check(NCCL, "variables", variables, shared=False),
    Check(NCCL, "names", names, shared=False),
)
