"""What NCCL was told: its configuration files and variables, and the adapters that these leave it."""

from overlapkit.doctor.layers import ports
from overlapkit.doctor.subject import Subject


def settings(subject: Subject) -> dict[str, str]:
    """NCCL's configuration files, and the environment, which goes before them."""
    machine = subject.machine
    home = machine.environ.get("HOME", "")
    own = machine.environ.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    found: dict[str, str] = {}
    for path in filter(None, ("/etc/nccl.conf", own)):
        for line in (machine.maybe(path) or "").splitlines():
            name, sign, value = line.partition("=")
            if sign and not name.lstrip().startswith("#"):
                found[name.strip()] = value.strip()
    return {**found, **machine.environ}


def adapters(subject: Subject) -> list[ports.Adapter]:
    """The RDMA adapters that NCCL_IB_HCA leaves: it begins names; =: whole ones; ^: not these."""
    value = settings(subject).get("NCCL_IB_HCA", "").strip()
    left, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]

    def named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    found = ports.adapters(subject.machine)
    return [nic for nic in found if not words or named(nic.name) != left]
