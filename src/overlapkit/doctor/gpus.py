"""What the driver says about GPUs: NVML, through nvidia-ml-py where that is installed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from overlapkit.doctor.machine import Unreadable

# nvml.h: reasons for clocks that are lowered; an idle GPU and a power cap under load are as they should be
_SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}

NO_PEERS = "the GPU does not support it"
"""Why two do not reach each other's memory, where no setting changes that."""

_RECOVERY = 1  # NVML_NVLINK_ERROR_DL_RECOVERY


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. None where the driver does not say.

    Attributes:
        address: PCI address as sysfs writes it, 0000:1b:00.0.
        name: Its model.
        memory, used: Bytes in all, and in use.
        others: Processes that compute on it.
        uncorrected: Memory errors since the driver was loaded that ECC could not mend.
        remap_pending, remap_failed: Rows of memory wait for a reset to be replaced; none are left to replace.
        slow: Why its clocks are lowered; empty where they are not.
        idle: Whether it rests, and may have lowered its link to save power.
        persistent: Whether the driver stays loaded between jobs.
        mig: Whether it is cut into instances.
        links: For each NVLink whether it is up; empty where it has none.
        link_errors: How often its links had to be trained anew since the driver was loaded.
    """

    address: str
    name: str
    memory: int | None = None
    used: int | None = None
    others: int | None = None
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slow: tuple[str, ...] | None = None
    idle: bool | None = None
    persistent: bool | None = None
    mig: bool | None = None
    links: tuple[bool, ...] | None = None
    link_errors: int | None = None


class Gpus(Protocol):
    """The GPUs of a machine, in the driver's order."""

    driver: str
    cuda: tuple[int, int] | None
    """The newest CUDA that the driver runs."""

    def read(self) -> Sequence[Gpu]:
        """All of them."""

    def peers(self, one: int, other: int) -> str | None:
        """Empty where two reach each other's memory, why they do not where they do not; None: not said."""


class Nvml:
    """NVIDIA's GPUs.

    Raises:
        Unreadable: nvidia-ml-py is not installed, or there is no driver.
    """

    def __init__(self) -> None:
        from overlapkit.extras import require

        try:
            self._nvml: Any = require("pynvml", "gpu")
        except ImportError as error:
            raise Unreadable(str(error)) from None
        try:
            self._nvml.nvmlInit()
            self.driver = _text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError as error:
            raise Unreadable(f"NVML: {error}") from None
        version = self._try(self._nvml.nvmlSystemGetCudaDriverVersion)
        self.cuda = None if version is None else (version // 1000, version % 1000 // 10)

        self._seen = [self._gpu(handle) for handle in self._handles()]

    def read(self) -> Sequence[Gpu]:
        """All of them, as they were found."""
        return self._seen

    def peers(self, one: int, other: int) -> str | None:
        """Empty where two reach each other's memory, why they do not where they do not; None: not said."""
        nvml, handles = self._nvml, self._handles()
        index = nvml.NVML_P2P_CAPS_INDEX_READ
        index = index[0] if isinstance(index, tuple) else index  # a comma too many in the binding
        status = self._try(lambda: nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], index))
        if status is None or status == nvml.NVML_P2P_STATUS_UNKNOWN:
            return None
        reasons = {
            nvml.NVML_P2P_STATUS_OK: "",
            nvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "the chipset does not support it",
            nvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: NO_PEERS,
            nvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "the PCIe topology does not support it",
            nvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "a setting of the driver disables it",
        }
        return reasons.get(status, "not supported")

    def _handles(self) -> list[Any]:
        nvml = self._nvml
        count = self._try(nvml.nvmlDeviceGetCount) or 0
        return [self._try(partial(nvml.nvmlDeviceGetHandleByIndex, at)) for at in range(count)]

    def _gpu(self, handle: Any) -> Gpu:
        nvml = self._nvml

        def ask(name: str, *more: Any) -> Any:
            return self._try(lambda: getattr(nvml, name)(handle, *more))

        memory, remapped = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetRemappedRows")
        reasons, state = ask("nvmlDeviceGetCurrentClocksEventReasons"), ask("nvmlDeviceGetPerformanceState")
        processes, mig = ask("nvmlDeviceGetComputeRunningProcesses"), ask("nvmlDeviceGetMigMode")
        persistent, pci = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetPciInfo")
        links, errors = self._links(ask)
        return Gpu(
            address="" if pci is None else as_sysfs(_text(pci.busId)),
            name=_text(ask("nvmlDeviceGetName") or "GPU"),
            memory=None if memory is None else int(memory.total),
            used=None if memory is None else int(memory.used),
            others=None if processes is None else len(processes),
            uncorrected=ask(
                "nvmlDeviceGetTotalEccErrors",
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            slow=None if reasons is None else slowdowns(reasons),
            idle=None if state is None else state > 2,  # P0 to P2 are at work
            persistent=None if persistent is None else bool(persistent),
            mig=None if mig is None else bool(mig[0]),
            links=links,
            link_errors=errors,
        )

    def _links(self, ask: Callable[..., Any]) -> tuple[tuple[bool, ...], int | None]:
        states, errors = [], None
        for at in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            state = ask("nvmlDeviceGetNvLinkState", at)
            if state is None:  # it has no such link
                continue
            states.append(bool(state))
            # single replays and CRC errors are mended by the link, and are no news
            seen = ask("nvmlDeviceGetNvLinkErrorCounter", at, _RECOVERY)
            errors = errors if seen is None else (errors or 0) + seen
        return tuple(states), errors

    def _try(self, ask: Callable[[], Any]) -> Any:
        """None where this driver or this GPU does not know the question."""
        try:
            return ask()
        except (self._nvml.NVMLError, AttributeError, TypeError):
            return None


def slowdowns(reasons: int) -> tuple[str, ...]:
    """Names of the reasons that cost speed."""
    return tuple(sorted({name for bit, name in _SLOWDOWNS.items() if reasons & bit}))


def as_sysfs(address: str) -> str:
    """A PCI address as sysfs has it: 00000000:1B:00.0 is 0000:1b:00.0."""
    domain, colon, rest = address.strip("\0 ").lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if colon else address


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
